"""Products behind a pre-pass that copies X: they read tables and values while it copies, and no earlier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseMatmulPlan

from ..support import same_bits
from .problems import case_of, random_operands
from .products_on_gpu import gpu
from .sample_layouts import random_layout


@gpu
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize(
    ("backend", "block", "n"),
    [
        ("blocks_mma", 16, 9),
        ("blocks_mma", 64, 33),
        ("blocks_wgmma", 16, 391),
        ("blocks_wgmma", 64, 391),
        ("blocks_wgmma", 128, 65),
    ],
)
def test_values_are_those_of_the_product_before(op, backend, block, n):
    """An ``sdd`` writes the values of S, and S is multiplied at once. Before, the values are NaN."""
    layout = random_layout(seed=n, rows=1536 // block, cols=1536 // block, block=block)
    rng = np.random.default_rng(block)
    sdd = BlockSparseMatmulDescriptor(op="sdd", layout=layout, n=4096, element="bf16")
    product = BlockSparseMatmulDescriptor(op=op, layout=layout, n=n, element="bf16", trans_a=op == "dds")
    sampled = case_of(BlockSparseMatmulPlan.select(sdd, device=0), random_operands(sdd, layout, rng))
    plan = BlockSparseMatmulPlan.select(product, device=0, preference={"prefer_backend": backend})
    assert plan.sku.backend == backend
    assert " first" in plan.explain().details  # X is padded or transposed
    case = case_of(plan, random_operands(product, layout, rng))
    sampled.run()
    name = product.sparse
    case.args = replace(case.args, **{name: sampled.args.c})
    wanted = case.run()["c"].copy()
    first, second = (one.plan.bind(one.args, workspace=one.space) for one in (sampled, case))
    for _ in range(20):
        sampled.poison(), case.poison()
        first.launch(), second.launch()
        assert same_bits(case.fetch()["c"], wanted)
