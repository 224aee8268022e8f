"""Bits of ``blocks_mma`` and ``sdd_mma`` do not depend on schedules, transpositions, neighbours or runs."""

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
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.sdd_mma import SddMmaSchedule

from ..support import same_bits
from . import products_on_gpu as shared
from .mma_on_gpu import BLOCKS, FORCED, OPS, plan_of
from .problems import Operands, random_operands
from .products_on_gpu import gpu
from .sample_layouts import random_layout
from .test_products import check


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 5, 16, 24, 40, 63])
def test_bits_of_sdd_do_not_depend_on_schedule_or_transposition(block, n, monkeypatch):
    """One product in runs of any length, with each number of m16 tiles, with A and B stored either way."""
    layout = random_layout(seed=block, heads=2, rows=9, cols=768 // block, block=block)
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=layout, n=n, element="bf16", batch=3)
    plain, chosen_one = random_operands(desc, layout, np.random.default_rng(n)), SddMmaSchedule.of(desc, 1)
    found = []
    m16_tiles = [one for one in (1, 2, 4) if one <= chosen_one.m16_tiles]
    for number, (one, run, a_transposed, b_transposed) in enumerate(
        itertools.product(m16_tiles, (1, 3, 32), (False, True), (False, True))
    ):
        schedule = chosen_one._replace(m16_tiles=one, run_blocks=run)
        monkeypatch.setattr(SddMmaSchedule, "of", lambda *_, schedule=schedule: schedule)
        transposed = {"a": a_transposed, "b": b_transposed}
        stored = {
            name: plain[name].swapaxes(-1, -2) if swaps else plain[name] for name, swaps in transposed.items()
        }
        plan = BlockSparseMatmulPlan.select(
            desc.model_copy(update={"trans_a": a_transposed, "trans_b": b_transposed}),
            device=0,
            preference={**FORCED, "max_workspace_bytes": number},  # of its own: plans are cached
        )
        operands = plain.with_(**{name: np.ascontiguousarray(cells) for name, cells in stored.items()})
        assert f"{16 * one} rows of up to {run} blocks" in plan.explain().details
        found.append(check(plan, operands))
    assert all(same_bits(found[0], one) for one in found)
    alone = plan_of(layout=layout, op="sdd", n=n, batch=1)
    assert same_bits(check(alone, plain.batch(desc)), found[0][-1:])


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_neighbours(op, block):
    shared.bits_do_not_depend_on_neighbours(plan_of, op, block)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_bits_of_another_run(op):
    shared.bits_of_another_run(plan_of, op)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 8, 12, 36, 63])
def test_bits_do_not_depend_on_m16_tiles_or_transposition(op, block, n, monkeypatch):
    """One product with the most m16 tiles and with one, and with either operand stored either way."""
    layout = random_layout(seed=block, heads=2, rows=768 // block, cols=1280 // block, block=block)
    sparse, dense = ("a", "b") if op == "dsd" else ("b", "a")
    fields = {"op": op, "n": n, "element": "bf16"}
    plain = random_operands(
        BlockSparseMatmulDescriptor(layout=layout, **fields), layout, np.random.default_rng(n)
    )
    found, m16_tiles = [], []
    for most, s_transposed, x_transposed in itertools.product((True, False), (False, True), (False, True)):
        operands = _transposed(plain, sparse) if s_transposed else plain
        if x_transposed:
            operands = operands.with_(**{dense: np.ascontiguousarray(operands[dense].swapaxes(-1, -2))})
        transposed = {f"trans_{sparse}": s_transposed, f"trans_{dense}": x_transposed}
        desc = BlockSparseMatmulDescriptor(layout=operands.layout, **fields, **transposed)
        tried = [one for one in BlocksMmaSchedule.candidates(desc) if one.warps == 8]
        schedule = tried[0 if most else -1]
        monkeypatch.setattr(BlocksMmaSchedule, "of", lambda *_, schedule=schedule, **__: schedule)
        spare = {**FORCED, "max_workspace_bytes": (1 << 30) + most}  # of its own: plans are cached
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=spare)
        m16_tiles.append(schedule.m16_tiles)
        found.append(check(plan, operands))
    assert (len(set(m16_tiles)) > 1) == (block > 16)
    assert all(same_bits(found[0], one) for one in found)


def of_lengths(block: int, seed: int, *, transposed: bool) -> BlockSparseLayout:
    """Block rows of op(S) with lengths round those at which the number of shares changes, and a long one."""
    lengths = (0, 1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 127, 128, 129, 257, 600)
    rng = np.random.default_rng(seed)
    kept = np.zeros((1, len(lengths), 10240 // block + 8), bool)
    for row, length in enumerate(lengths):
        kept[0, row, rng.permutation(kept.shape[2])[: max(length * 16 // block, min(length, 1))]] = True
    return BlockSparseLayout(kept.transpose(0, 2, 1) if transposed else kept, block)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize(
    ("n", "row_slices"), [(1, 1), (1, 4), (12, 1), (12, 4), (28, 1), (28, 4), (64, 1), (64, 4)]
)
def test_bits_do_not_depend_on_the_number_of_warps(op, block, transposed, n, row_slices, monkeypatch):
    layout = of_lengths(block, n, transposed=transposed[op == "dds"] != (op == "dds"))
    desc = BlockSparseMatmulDescriptor(
        op=op, layout=layout, n=n, trans_a=transposed[0], trans_b=transposed[1], element="bf16", batch=2
    )
    operands = random_operands(desc, layout, np.random.default_rng(block))
    chosen_one, found = BlocksMmaSchedule.of(desc, 132), []
    for number, warps in enumerate((4, 8, 16)):
        schedule = chosen_one._replace(warps=warps, row_slices=row_slices)
        monkeypatch.setattr(BlocksMmaSchedule, "of", lambda *_, schedule=schedule, **__: schedule)
        spare = {**FORCED, "max_workspace_bytes": (1 << 31) + 8 * row_slices + number}  # plans are cached
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=spare)
        assert f"{warps} warps a block row" in plan.explain().details
        assert ("clusters of 4" in plan.explain().details) == (row_slices == 4)
        found.append(check(plan, operands))
    assert all(same_bits(found[0], one) for one in found)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_bits_of_a_row_depend_on_its_own_blocks_alone(block):
    """The other rows change how many warps share it."""
    kept = np.random.default_rng(block).random((1, 9, 2048 // block)) < 0.4
    results = []
    for density in (0.0, 0.05, 1.0):
        kept[0, 1:] = np.random.default_rng(1).random(kept[0, 1:].shape) < density
        layout = BlockSparseLayout(kept.copy(), block)
        plan = plan_of(op="dsd", layout=layout, n=24, batch=1)
        first = random_operands(
            plan.descriptor.model_copy(update={"layout": layout.shape}), layout, np.random.default_rng(2)
        )
        values, x = first["a"].copy(), np.random.default_rng(3).standard_normal(first["b"].shape)
        own = np.count_nonzero(kept[0, 0])
        values[0, :own] = np.random.default_rng(4).standard_normal(values[0, :own].shape).astype(values.dtype)
        operands = first.with_(a=values, b=x.astype(first["b"].dtype))
        results.append(check(plan, operands)[..., :block, :].copy())
    assert all(same_bits(results[0], one) for one in results)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_more_warps_share_rows_of_an_operand_with_a_long_one(block):
    """All other rows have the bits of a plan that knows of no long one, which has slices."""
    import cupy

    kept = np.random.default_rng(block).random((1, 600, 16384 // block)) < 0.01
    kept[0, 7] = True
    layout, results = BlockSparseLayout(kept, block), []
    rng = cupy.random.default_rng(3)
    values = rng.standard_normal((1, layout.shape.blocks, block, block)).astype(np.float16)
    x = rng.standard_normal((1, 1, layout.shape.cols, 16)).astype(np.float16)
    for packed in (False, True):
        known = layout if packed else layout.shape
        plan = plan_of(op="dsd", layout=known, n=16, batch=1, element="f16", packed=packed)
        assert (" 4 warps a block row" in plan.explain().details) == (not packed)
        assert ("clusters of 4 for long ones" in plan.explain().details) == (packed and block < 128)
        y = cupy.full((1, 1, layout.shape.rows, 16), np.nan, np.float16)
        own = (
            {"layout": None, "a": plan.pack(layout, values)}
            if packed
            else {"layout": plan.pack(layout), "a": values}
        )
        args = BlockSparseMatmulArgs(b=x, c=y, **own)
        space = cupy.empty(max(plan.workspace_size(), 1), np.uint8)
        plan.run(args, workspace=space)
        results.append(y.get())
    assert np.isfinite(results[0]).all()
    long = np.s_[7 * block : 8 * block]
    assert same_bits(*(np.delete(one, long, axis=2) for one in results))
    np.testing.assert_allclose(*(one[:, :, long].astype(np.float64) for one in results), 2**-9, 0.01)


def _transposed(operands: Operands, sparse: str) -> Operands:
    """The operands with the sparse one stored transposed."""
    layout = operands.layout
    places = np.full(layout.bitmap.shape, -1)
    places[layout.bitmap] = np.arange(layout.shape.blocks)
    order = places.transpose(0, 2, 1)[layout.bitmap.transpose(0, 2, 1)]
    values = np.ascontiguousarray(operands[sparse][:, order].swapaxes(-1, -2))
    return Operands(layout.transposed(), {**operands.arrays, sparse: values})
