"""``blocks_mma`` and ``sdd_mma``: small n against float64, edges of tiles, masks, packed operands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
)

from ..strategies import results_of
from ..support import same_bits
from . import products_on_gpu as shared
from .mma_on_gpu import BLOCKS, OPS, plan_of, with_a_long_row
from .problems import case_of, kept_of, random_operands
from .products_on_gpu import gpu, random_check
from .sample_layouts import random_layout
from .test_products import check

TOKENS = (1, 2, 3, 8, 9, 12, 16, 17, 20, 32, 33, 36, 40, 63, 64, 65)
"""n: round the tokens of each tile; with rows that lanes can load in place, or that must be transposed."""


# Results ------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_operand_may_be_transposed(op, transposed, block, element):
    layout = random_layout(rows=5, cols=4, block=block)
    for n in (1, 6, 15, 24, 40, 64):
        fields = {"trans_a": transposed[0], "trans_b": transposed[1], "element": element, "n": n}
        random_check(plan_of, layout, op=op, **fields)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_edge
@shared.every_size
def test_layouts_and_sizes_at_their_edges(op, name, sizes):
    for block in BLOCKS:
        shared.layouts_and_sizes_at_their_edges(plan_of, op, name, block, sizes)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", TOKENS)
def test_edges_of_tiles(op, n):
    for block in BLOCKS:
        shared.edges_of_tiles(plan_of, op, n, block)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@shared.every_density
def test_block_rows_of_many_bit_words(block, density):
    for op in OPS:
        shared.block_rows_of_many_bit_words(plan_of, op, block, density)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
def test_long_and_uneven_block_rows(op, transposed, block):
    """Lines of several rounds of each warp, or of none; 16, eight and four warps; CTAs in many waves."""
    sizes = (3, 12288 // block), (3, 1024 // block), (33600 // block, 9)
    for seed, (lines, across) in enumerate(sizes):
        kept = np.random.default_rng(seed).random((1, lines, across)) < 1 / np.arange(1, lines + 1)[:, None]
        layout = BlockSparseLayout(kept, block)
        layout = layout.transposed() if (op == "dds") != transposed[op == "dds"] else layout
        random_check(plan_of, layout, op=op, n=5, trans_a=transposed[0], trans_b=transposed[1], batch=1)


@gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("block", [16, 64])
def test_tables_may_have_more_long_rows_than_the_plans_layout(block, batch):
    """As many rows as can have slices, then none that is long, by a plan of a layout with one."""
    first = with_a_long_row(block)
    plan = plan_of(layout=first, op="dsd", n=12, batch=batch)
    assert "clusters of 4 for long ones" in plan.explain().details
    blocks, (rows, across) = first.shape.blocks, first.bitmap.shape[1:]
    for length in (130 * min(block, 32) // block, -(-blocks // rows)):
        counts = np.clip(blocks - length * np.arange(rows), 0, length)
        other = BlockSparseLayout((np.arange(across) < counts[:, None])[None], block)
        assert other.shape == first.shape
        check(plan, random_operands(plan.descriptor, other, np.random.default_rng(length)))


@gpu
@pytest.mark.parametrize("op", OPS)
def test_any_n_with_every_result(op):
    shared.any_n_with_every_result(plan_of, op)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_epilogue
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_epilogue_is_right(op, epilogue, element):
    shared.epilogues(plan_of, op, epilogue, element)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_cells_without_a_kept_block_are_not_read(op, block):
    shared.cells_without_a_kept_partner_are_not_read(plan_of, op, block, [(np.s_[block:], np.nan)])


@gpu
def test_an_empty_block_row_next_to_one_with_infinities():
    for block in BLOCKS:
        shared.an_empty_block_row_next_to_one_with_infinities(plan_of, block)


SUMS = (0, 1, 2, 3, 5, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 63, 64)
"""n of ``sdd``: round the k of each mma; rows that lanes can load as 16, eight, four or two bytes."""


@gpu
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_sum_of_sdd(transposed, block, element):
    layout = random_layout(rows=7, cols=5, block=block)
    for n, out in itertools.product(SUMS, results_of(element)):
        fields = {"trans_a": transposed[0], "trans_b": transposed[1], "element": element, "out_element": out}
        random_check(plan_of, layout, op="sdd", n=n, alpha=-0.75, **fields)


@gpu
@shared.every_edge
@shared.every_size
def test_layouts_of_sdd_at_their_edges(name, sizes):
    for block in BLOCKS:
        shared.layouts_and_sizes_at_their_edges(plan_of, "sdd", name, block, sizes)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@shared.every_density
def test_uneven_block_rows_of_sdd(block, density):
    shared.block_rows_of_many_bit_words(plan_of, "sdd", block, density)


@gpu
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 5, 8, 31, 56])
def test_sdd_multiplies_its_own_cells_alone(transposed, block, n):
    """Another row's, column's or head's NaN is neighbour in memory of what a lane loads."""
    layout = random_layout(seed=n, heads=2, rows=4, cols=5, block=block)
    plan = plan_of(layout=layout, op="sdd", n=n, trans_a=transposed[0], trans_b=transposed[1])
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    for name, swaps, line in (
        ("a", transposed[0], np.s_[:, :, 1::2]),
        ("b", not transposed[1], np.s_[:, :, ::3]),
    ):
        (operands[name].swapaxes(-1, -2) if swaps else operands[name])[line] = np.nan
        operands[name][-1, -1] = np.nan
    rows, columns = np.arange(layout.shape.rows) % 2 == 0, np.arange(layout.shape.cols) % 3 > 0
    wanted = np.zeros((2, 2, layout.shape.rows, layout.shape.cols), bool)
    wanted[...] = rows[:, None] & columns
    wanted[-1, -1] = False
    found = np.isfinite(
        case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype).astype("f4")
    )
    assert np.array_equal(found, kept_of(layout, wanted))


# Tables and packed operands -----------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", [*OPS, "sdd"])
def test_another_mask_reaches_what_was_captured(op):
    shared.another_mask_reaches_what_was_captured(plan_of, op)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_what_another_kernel_has_packed_is_multiplied(block):
    import cupy

    layout = random_layout(seed=2, heads=2, rows=6, cols=8, block=block)
    rng = cupy.random.default_rng(3)
    values = rng.standard_normal((1, layout.shape.blocks, block, block)).astype(np.float16)
    x = rng.standard_normal((1, 2, layout.shape.cols, 12)).astype(np.float16)
    plans = [
        BlockSparseMatmulPlan.select(
            BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=n, element="f16", packed=True),
            device=0,
            preference={"prefer_backend": backend},
        )
        for n, backend in ((256, "blocks_wgmma"), (12, "blocks_mma"))
    ]
    results = []
    for plan in plans:
        y = cupy.full((1, 2, layout.shape.rows, 12), np.nan, np.float16)
        args = BlockSparseMatmulArgs(layout=None, a=plan.pack(layout, values), b=x, c=y)
        plans[1].run(args)
        results.append(y.get())
    assert np.isfinite(results[0]).all()
    assert same_bits(*results)
