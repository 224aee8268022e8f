"""``blocks_wgmma_sp``: blocks that are 2:4 inside against float64, edges of tiles, bits, masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    UnsupportedError,
)
from sparse24_plans.blocksparse.schedules.blocks_wgmma_sp import BlocksWgmmaSpSchedule

from ..sample_devices import H200
from . import products_on_gpu as shared
from .products_on_gpu import gpu, random_check
from .sample_layouts import random_layout

OPS = ("dsd", "dds")
BLOCKS = (64, 128)


def plan_of(**fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(
        **{"n": 72, "batch": 2, "element": "bf16", "inner": "sparse24", **fields}
    )
    plan = BlockSparseMatmulPlan.select(desc, device=0)
    assert plan.explain().chosen == "blocks_wgmma_sp"
    return plan


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=1, rows=4096, cols=4096, block=128, blocks=200)
chosen = partial(shared.chosen, layout=SHAPE, inner="sparse24")


def test_what_is_chosen():
    assert chosen() == "blocks_wgmma_sp"
    assert chosen(op="dds", n=4097, element="f16") == "blocks_wgmma_sp"
    assert chosen(layout=SHAPE.model_copy(update={"block": 64})) == "blocks_wgmma_sp"
    assert chosen(inner="dense") == "blocks_wgmma"
    assert chosen(n=4097) == "blocks_wgmma_sp"
    assert chosen(n=4097, preference={"max_workspace_bytes": 1 << 20}) is None
    older = H200.model_copy(update={"compute_capability": (8, 0)})
    assert chosen(device=older) is None


def test_refusals_say_why():
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=4097, element="bf16", inner="sparse24")
    with pytest.raises(UnsupportedError, match=r"blocks_wgmma_sp: needs a workspace of 34078720 bytes"):
        BlockSparseMatmulPlan.compile(desc, device=H200, preference={"max_workspace_bytes": 0})
    with pytest.raises(UnsupportedError, match=r"inflate_cublas.*: does not serve inner sparse24"):
        BlockSparseMatmulPlan.compile(desc, device=H200, preference={"prefer_backend": "inflate_cublas"})


@pytest.mark.parametrize(("rows", "cols", "batch"), [(4096, 4096, 1), (8192, 8192, 1), (4096, 14336, 3)])
def test_raster_groups_are_equal_and_fit_the_l2_cache(rows, cols, batch):
    """The X that the work tiles of a raster group read fits the L2 cache."""
    shape = BlockSparseShape(heads=1, rows=rows, cols=cols, block=128, blocks=200)
    desc = BlockSparseMatmulDescriptor(
        op="dsd", layout=shape, n=4096, batch=batch, element="bf16", inner="sparse24"
    )
    schedule = BlocksWgmmaSpSchedule.of(desc, 132)
    band, bands = schedule.raster_groups(desc, 66)
    assert band * bands == batch * schedule.cluster_tiles(desc)
    assert band * (rows // 128) >= 60  # items, for 66 clusters
    assert band * schedule.tokens * schedule.cluster_n * cols * 2 <= (20 << 20 if cols < 10000 else 30 << 20)


@pytest.mark.parametrize("batch", [10**9 + 7, 2**31 - 1])
def test_raster_groups_of_prime_tile_counts_are_found_at_once(batch):
    """Equal groups then have one tile each. Trying every number of groups would take minutes."""
    shape = BlockSparseShape(heads=1, rows=128 * 200, cols=128, block=128, blocks=200)
    desc = BlockSparseMatmulDescriptor(
        op="dsd", layout=shape, n=1, batch=batch, element="bf16", inner="sparse24"
    )
    schedule = BlocksWgmmaSpSchedule.of(desc, 132)
    band, bands = schedule.raster_groups(desc, 132)
    assert (band, bands) == (1, batch)


def test_empty_results_have_no_raster_groups():
    """No limit of the kernel bounds the token tiles of an empty result: searching divisors takes seconds."""
    shape = BlockSparseShape(heads=1, rows=0, cols=0, block=128, blocks=0)
    desc = BlockSparseMatmulDescriptor(
        op="dsd", layout=shape, n=2**31 - 1, batch=2**31 - 1, element="bf16", inner="sparse24"
    )
    assert BlocksWgmmaSpSchedule.of(desc, 132).raster_groups(desc, 0) == (0, 0)


# Results ------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_operand_may_be_transposed(op, transposed, block, element):
    layout = random_layout(rows=5, cols=4, block=block)
    random_check(plan_of, layout, op=op, trans_a=transposed[0], trans_b=transposed[1], element=element)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_edge
@shared.every_size
def test_layouts_and_sizes_at_their_edges(op, name, sizes):
    for block in BLOCKS:
        shared.layouts_and_sizes_at_their_edges(plan_of, op, name, block, sizes)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_edge_of_tiles
def test_edges_of_tiles(op, n):
    for block in BLOCKS:
        shared.edges_of_tiles(plan_of, op, n, block)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("block", BLOCKS)
def test_wide_tiles_and_clusters(op, block):
    """Enough work that tiles are the widest, and that blocks of threads share values; the last one is cut."""
    layout = random_layout(seed=9, heads=1, rows=130 * 64 // block, cols=5, block=block, density=0.4)
    layout = layout if op == "dsd" else layout.transposed()
    for n in (512, 1016):
        random_check(plan_of, layout, op=op, n=n, batch=2)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@shared.every_density
def test_block_rows_of_many_bit_words(block, density):
    for op in OPS:
        shared.block_rows_of_many_bit_words(plan_of, op, block, density)


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
def test_cells_without_a_kept_cell_are_not_read(op, block):
    """Cells of X are not read for blocks that aren't kept, nor for the pruned cells of kept blocks."""
    worst = [(np.s_[block:], np.inf), (np.s_[2::4], np.nan), (np.s_[3::4], -np.inf)]
    shared.cells_without_a_kept_partner_are_not_read(plan_of, op, block, worst)


@gpu
def test_an_empty_block_row_next_to_one_with_infinities():
    """Lines of blocks of 64 share columns of X."""
    shared.an_empty_block_row_next_to_one_with_infinities(plan_of, 64)


# Bits ---------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_neighbours(op, block):
    shared.bits_do_not_depend_on_neighbours(plan_of, op, block)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_bits_of_another_run(op):
    shared.bits_of_another_run(plan_of, op)


# Tables -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
def test_another_mask_reaches_what_was_captured(op):
    shared.another_mask_reaches_what_was_captured(plan_of, op)
