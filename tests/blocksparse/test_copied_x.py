"""Products behind a pre-pass that copies X: they read tables and values while it copies, and no earlier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseMatmulPlan, BlockSparseShape
from sparse24_plans.device.devices import absent_gpu

from ..support import same_bits
from .problems import case_of, random_operands, recorded_launches
from .products_on_gpu import gpu
from .sample_layouts import random_layout


@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize(("backend", "block", "n"), [("blocks_mma", 16, 33), ("blocks_wgmma", 64, 391)])
@pytest.mark.parametrize("sums", [0, 1024], ids=["empty X", "whole X"])
def test_only_products_behind_a_launched_pre_pass_begin_without_waiting(op, backend, block, n, sums):
    """An empty X needs no copy. Nothing then has waited for the kernels before the product."""
    sides = {"rows": 2048, "cols": sums} if op == "dsd" else {"rows": sums, "cols": 2048}
    shape = BlockSparseShape(heads=2, block=block, blocks=sums // block, **sides)
    desc = BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, element="bf16", trans_a=op == "dds")
    wish = {"prefer_backend": backend}
    plan = BlockSparseMatmulPlan.select(desc, preference=wish, device=absent_gpu("h200"))
    assert plan.sku.backend == backend
    *copies, product = recorded_launches(plan)
    assert len(copies) == (sums > 0)
    assert dict(product.code.defines)["X_COPIED"] == len(copies)
    assert plan.parts.choice.entry.kernel.sized(plan.parts.choice).launches == 1 + len(copies)
    assert (" first" in plan.explain().details) == (sums > 0)


@gpu
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize(
    ("backend", "block", "n"),
    [
        ("blocks_mma", 16, 9),
        ("blocks_mma", 64, 63),
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
