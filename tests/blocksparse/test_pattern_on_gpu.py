"""``blocks_wgmma_sp``: blocks that are 2:4 inside against float64, edges of tiles, bits, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    DeviceProperties,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse.schedules.blocks_wgmma_sp import best_schedule

from ..strategies import results_of
from ..support import same_bits
from .layouts import EDGES, random_layout
from .problems import Operands, case_of, random_operands
from .test_products import check

gpu = pytest.mark.gpu
H200 = DeviceProperties(
    kind="cuda", name="NVIDIA H200", compute_capability=(9, 0), multiprocessors=132, cublaslt="130000"
)
OPS = ("dsd", "dds")
BLOCKS = (64, 128)
TURNS = [(False, False), (False, True), (True, False), (True, True)]
EDGES_OF_TILES = (8, 56, 64, 72, 128, 136, 248, 256, 264, 520, 1040)
"""n: multiples of 8, round the tokens of every tile."""


def plan_of(**fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(
        **{"n": 72, "batch": 2, "element": "bf16", "inner": "sparse24", **fields}
    )
    plan = BlockSparseMatmulPlan.select(desc, device=0)
    assert plan.explain().chosen == "blocks_wgmma_sp"
    return plan


def random_check(layout: BlockSparseLayout, **fields: Any) -> np.ndarray:
    plan = plan_of(layout=layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=1, rows=4096, cols=4096, block=128, blocks=200)


def explained(device: DeviceProperties = H200, **fields: Any) -> Any:
    desc = BlockSparseMatmulDescriptor(
        **{"op": "dsd", "layout": SHAPE, "n": 4096, "element": "bf16", "inner": "sparse24", **fields}
    )
    return explain(desc, device=device)


def test_what_is_chosen():
    assert explained().chosen == "blocks_wgmma_sp"
    assert explained(op="dds", n=4097, element="f16").chosen == "blocks_wgmma_sp"
    assert explained(layout=SHAPE.model_copy(update={"block": 64})).chosen == "blocks_wgmma_sp"
    assert explained(inner="dense").chosen == "blocks_wgmma"
    assert explained(n=4097).chosen is None  # rows that the copy engine can't take
    older = H200.model_copy(update={"compute_capability": (8, 0)})
    assert explained(device=older).chosen is None


def test_why_not():
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=4097, element="bf16", inner="sparse24")
    with pytest.raises(UnsupportedError, match=r"needs rows of b in multiples of 16 bytes, got n = 4097"):
        BlockSparseMatmulPlan.compile(desc, device=H200)
    with pytest.raises(UnsupportedError, match=r"inflate_cublas: does not serve inner sparse24"):
        BlockSparseMatmulPlan.compile(desc, device=H200)


@pytest.mark.parametrize(("rows", "cols", "batch"), [(4096, 4096, 1), (8192, 8192, 1), (4096, 14336, 3)])
def test_bands_are_of_equal_size_and_fit_the_l2_cache(rows, cols, batch):
    """Of X, what the items of a band read."""
    shape = BlockSparseShape(heads=1, rows=rows, cols=cols, block=128, blocks=200)
    desc = BlockSparseMatmulDescriptor(
        op="dsd", layout=shape, n=4096, batch=batch, element="bf16", inner="sparse24"
    )
    schedule = best_schedule(desc, 132)
    band, bands = schedule.bands(desc, 66)
    assert band * bands == batch * schedule.token_clusters(desc)
    assert band * (rows // 128) >= 60  # items, for 66 clusters
    assert band * schedule.tokens * schedule.share * cols * 2 <= (20 << 20 if cols < 10000 else 30 << 20)


# What is computed ---------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_operand_may_be_transposed(op, turned, block, element):
    layout = random_layout(rows=5, cols=4, block=block)
    random_check(layout, op=op, trans_a=turned[0], trans_b=turned[1], element=element)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("sizes", [{}, {"n": 0}, {"batch": 0}, {"n": 8, "batch": 1}])
def test_layouts_and_sizes_at_their_edges(op, name, sizes):
    """Sums over nothing are zeros, and results are written wherever there are any."""
    for block in BLOCKS:
        layout = BlockSparseLayout(EDGES[name].bitmap, block)
        random_check(layout, op=op, **sizes)
        random_check(layout, op=op, trans_a=True, trans_b=True, **sizes)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", EDGES_OF_TILES)
def test_edges_of_tiles(op, n):
    for block in BLOCKS:
        layout = random_layout(seed=n, heads=1, rows=9, cols=7, block=block)
        for turned in (False, True):
            random_check(layout, op=op, n=n, trans_b=turned, batch=1)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("block", BLOCKS)
def test_wide_tiles_and_clusters(op, block):
    """Enough work that tiles are the widest, and that blocks of threads share values; the last one is cut."""
    layout = random_layout(seed=9, heads=1, rows=130 * 64 // block, cols=5, block=block, density=0.4)
    layout = layout if op == "dsd" else layout.transposed()
    for n in (512, 1016):
        random_check(layout, op=op, n=n, batch=2)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("density", [0.03, 0.3, 1.0])
def test_lines_of_many_words(block, density):
    """More columns of blocks than a word of the tables has bits, and lines of very different lengths."""
    layout = random_layout(seed=1, heads=1, rows=11, cols=75, block=block, density=density)
    kept = layout.bitmap.copy()
    kept[:, 3], kept[:, 4, 5:], kept[:, 7] = True, False, False
    for op in OPS:
        random_check(BlockSparseLayout(kept, block), op=op, n=40, batch=1)


@gpu
def test_any_n_for_dds():
    for n in (1, 7, 65, 333):
        random_check(random_layout(block=64), op="dds", n=n)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("epilogue", ["bias", "bias_relu", "bias_gelu", "bias_silu"])
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_epilogues(op, epilogue, element):
    for out in results_of(element):
        layout = random_layout(rows=3, cols=4, block=64)
        random_check(layout, op=op, epilogue=epilogue, element=element, out_element=out, alpha=0.25)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_what_meets_no_kept_cell_is_not_read(op, block):
    """Neither of blocks that aren't kept, nor of kept ones' cells that aren't."""
    layout = BlockSparseLayout([[[1, 0], [1, 0]]], block)
    layout = layout if op == "dsd" else layout.transposed()
    plan = plan_of(layout=layout, op=op, batch=1, n=16)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    operands["metadata"][...] = 0x44  # positions 0 and 1 of every group
    met = np.s_[:, :, block:], np.s_[:, :, 2::4], np.s_[:, :, 3::4]
    for at, worst in zip(met, (np.inf, np.nan, -np.inf), strict=True):
        (operands["b"] if op == "dsd" else operands["a"].swapaxes(-1, -2))[at] = worst
    got = case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype)
    assert np.isfinite(got.astype(np.float32)).all()


@gpu
def test_a_line_without_a_block_beside_one_with_infinities():
    """Lines of blocks of 64 share columns of X: what one keeps must not reach another that lacks it."""
    kept = np.zeros((1, 3, 3), bool)
    kept[0, 0, :2] = True
    layout = BlockSparseLayout(kept, 64)
    plan = plan_of(layout=layout, op="dsd", batch=1, n=64)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    operands["a"][...] = np.inf
    got = case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype).astype(np.float32)
    assert not np.isfinite(got[0, 0, :64]).any()
    assert (got[0, 0, 64:] == 0).all()


# Bits ---------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_what_is_beside(op, block):
    """Batch invariance: a token's results are the same for every n, tile and place, and in a batch of one."""
    layout = random_layout(seed=3, heads=2, rows=10, cols=9, block=block)
    plan = plan_of(layout=layout, op=op, batch=2, n=1040)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    whole = check(plan, operands)
    name, axis = ("b", 3) if op == "dsd" else ("a", 2)
    for n in EDGES_OF_TILES[:-1]:
        few = plan_of(layout=layout, op=op, batch=1, n=n)
        chosen = np.random.default_rng(n).permutation(1040)[:n]
        part = {key: one[1:].copy() for key, one in operands.arrays.items()}
        part[name] = np.ascontiguousarray(np.take(part[name], chosen, axis))
        got = case_of(few, Operands(layout, part)).run()["c"]
        assert np.array_equal(got[0], np.take(whole[1], chosen, axis - 1).view(got.dtype))


@gpu
@pytest.mark.parametrize("op", OPS)
def test_bits_of_another_run(op):
    layout = random_layout(seed=4, heads=2, rows=20, cols=20, block=64, density=0.3)
    plan = plan_of(layout=layout, op=op, n=512)
    case = case_of(plan, random_operands(plan.descriptor, layout, np.random.default_rng(1)))
    first = case.run()["c"].copy()
    for _ in range(5):
        case.poison()
        assert same_bits(case.run()["c"].copy(), first)


# Tables -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
def test_another_mask_reaches_what_was_captured(op):
    import cupy

    first = random_layout(seed=6, heads=2, rows=6, cols=8, block=64, density=0.4)
    other = BlockSparseLayout(first.bitmap[::-1, ::-1, ::-1], 64)
    plan = plan_of(layout=first, op=op, batch=1)
    operands = random_operands(plan.descriptor, other, np.random.default_rng(2))
    wanted = case_of(plan, operands).run()["c"].copy()
    case = case_of(plan, Operands(first, operands.arrays))
    bound = plan.bind(case.args, workspace=case.space)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    bound.launch(stream=stream)
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert not np.array_equal(case.fetch()["c"], wanted)
    case.args.layout.update(other, stream=stream)
    graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(case.fetch()["c"], wanted)
