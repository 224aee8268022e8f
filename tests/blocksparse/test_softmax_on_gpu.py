"""The GPU's softmax over kept cells and its gradient: against float64, at the edges, its bits, its tables."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    DeviceProperties,
    UnsupportedError,
    explain,
)

from ..sample_devices import A100, H200
from ..support import same_bits
from .problems import Operands, captured_launches_follow_the_mask, case_of, kept_cells, random_operands
from .sample_layouts import EDGES, random_layout
from .test_softmax import FLOATS, MASKS, check, check_masked_rows

gpu = pytest.mark.gpu
OPS = ("forward", "backward")
BLOCKS = (16, 32, 64, 128)
COUNTS = (150, 0, 1, 17, 130)
"""Blocks of rows: none, one, and more than a team of the kernel's warps holds at once."""
ADDED = tuple(itertools.product([False, True], MASKS, MASKS, [False, True]))


def plan_of(layout: BlockSparseLayout, **fields: Any) -> BlockSparseSoftmaxPlan:
    desc = BlockSparseSoftmaxDescriptor(**{"layout": layout, "element": "bf16", "batch": 2, **fields})
    plan = BlockSparseSoftmaxPlan.select(desc, device=0)
    assert plan.explain().chosen == "softmax"
    return plan


def random_check(layout: BlockSparseLayout, **fields: Any) -> np.ndarray:
    plan = plan_of(layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


def uneven(block: int, counts: tuple[int, ...] = COUNTS, width: int = 160) -> BlockSparseLayout:
    """A head whose rows keep so many blocks of ``width``, anywhere."""
    rng, kept = np.random.default_rng(9), np.zeros((1, len(counts), width), bool)
    for row, count in enumerate(counts):
        kept[0, row, rng.permutation(width)[:count]] = True
    return BlockSparseLayout(kept, block)


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=16, rows=16384, cols=16384, block=128, blocks=30000)


def explained(device: DeviceProperties = H200, preference: Any = None, **fields: Any) -> str | None:
    desc = BlockSparseSoftmaxDescriptor(**{"layout": SHAPE, "element": "bf16", **fields})
    return explain(desc, preference=preference, device=device).chosen


def test_what_is_chosen():
    for device, op, element in itertools.product((H200, A100), OPS, FLOATS):
        assert explained(device, op=op, element=element) == "softmax"
    assert explained(preference={"require": {"batch_invariant": True, "deterministic": True}}) == "softmax"
    assert explained(preference={"require": {"bit_stable_across_hardware": True}}) is None


def test_more_rows_than_the_kernel_counts():
    empty = BlockSparseShape(heads=1 << 20, rows=1 << 14, cols=16, block=16, blocks=0)
    desc = BlockSparseSoftmaxDescriptor(layout=empty, element="f32", batch=1)
    with pytest.raises(
        UnsupportedError, match=r"softmax: 2147483648 teams of rows exceed the kernel's limit"
    ):
        BlockSparseSoftmaxPlan.compile(desc, device=H200)


# Results ------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize(("rpe", "padding", "attention", "causal"), ADDED)
def test_everything_that_is_added_to_scores(element, rpe, padding, attention, causal):
    layout = random_layout(rows=3, cols=3, block=32)
    added = {"rpe": rpe, "key_padding_mask": padding, "attn_mask": attention, "causal": causal}
    random_check(layout, element=element, scale=0.125, **added)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", EDGES)
def test_layouts_at_their_edges(op, element, block, name):
    layout = BlockSparseLayout(EDGES[name].bitmap, block)
    random_check(layout, op=op, element=element)
    random_check(layout, op=op, element=element, batch=0)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_rows_of_any_length(op, element, block):
    """Some rows are read once, some twice, and some leave most warps without work."""
    random_check(
        uneven(block, COUNTS[: 3 if block == 128 else 5]), op=op, element=element, batch=1, scale=0.3
    )


@gpu
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_everything_is_added_to_long_rows_too(element, causal):
    added = {"rpe": True, "key_padding_mask": "add", "attn_mask": "mul", "causal": causal}
    random_check(uneven(16, (10, *COUNTS)), element=element, **added)


@gpu
@pytest.mark.parametrize("warps", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize("op", OPS)
def test_teams_of_any_size(warps, op):
    for element in ("bf16", "f32"):
        count = max(4 * warps * (2 if element == "f32" and op == "forward" else 1) * 2 // 3, 1)
        random_check(uneven(16, (count, count), max(count, 16) * 2), op=op, element=element)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_a_row_of_thousands_of_blocks(op):
    random_check(uneven(16, (5000, 3), 5003), op=op, batch=1, element="f16")


@gpu
@pytest.mark.parametrize("scale", [0.0, -2.5, 1e-3, 30.0])
def test_any_scale(scale):
    for op, element in itertools.product(OPS, FLOATS):
        random_check(random_layout(rows=3, cols=3, block=32), op=op, element=element, scale=scale)


@gpu
@pytest.mark.parametrize("by", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("kind", ["add", "mul"])
@pytest.mark.parametrize("count", [3, 150])
def test_a_row_that_is_masked_as_a_whole_is_zeros(by, kind, count):
    layout = uneven(16, (count, count))
    check_masked_rows(plan_of(layout, element="f32", **{by: kind}), layout, by, kind)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", [3, 150])
def test_nan_and_infinity_stay_in_their_row(op, count):
    layout = uneven(16, (count, count))
    plan = plan_of(layout, op=op, element="f32", batch=1)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    for x in operands.arrays.values():
        x[0, 0, 2, 2], x[0, count, 3, 3], x[0, 1, 4] = np.nan, np.inf, 3e38
    ((_, bits),) = case_of(plan, operands).run().items()
    got = layout.to_dense(bits.view(np.float32))[0, 0]
    kept = kept_cells(layout)[0]
    bad = (2, 19) if op == "forward" else (2, 4, 19)  # products of 3e38 are infinite
    for row in (2, 19):
        assert not np.isfinite(got[row][kept[row]]).any()
    assert np.isfinite(np.delete(got, bad, axis=0)).all()


@gpu
def test_what_causal_drops_is_not_read():
    layout = random_layout(rows=3, cols=4, block=32, density=1.0)
    plan = plan_of(layout, causal=True, rpe=True, element="f16")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    want = case_of(plan, operands).run()["y"]
    beyond = np.arange(128) > np.arange(96)[:, None]
    x = layout.values_of(np.where(beyond, np.float16(np.nan), layout.to_dense(operands["x"])))
    rpe = np.where(beyond, np.float16(np.inf), operands["rpe"])
    assert np.array_equal(case_of(plan, operands.with_(x=x, rpe=rpe)).run()["y"], want)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_subnormals_are_preserved(op):
    layout = uneven(16, (3, 140))
    plan = plan_of(layout, op=op, element="f32")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    for name, values in operands.arrays.items():
        low, high = (-103, -84) if op == "forward" else (1e-22, 1e-20)
        spread = np.random.default_rng(1).uniform(low, high, values.shape).astype(np.float32)
        operands = operands.with_(**{name: spread})
    if op == "forward":
        operands["x"][:, 1, :, 3] = operands["x"][:, 9, :, 3] = 0
    got = check(plan, operands)
    assert ((got != 0) & (np.abs(got) < np.finfo(np.float32).tiny)).mean() > 0.5


@gpu
def test_a_row_of_nan_is_not_treated_as_masked():
    layout = uneven(16, (2,))
    plan = plan_of(layout, element="f32", batch=1)
    got = case_of(plan, Operands(layout, {"x": np.full((1, 2, 16, 16), np.nan, np.float32)})).run()["y"]
    assert np.isnan(got.view(np.float32)).all()


# Bits ---------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("element", FLOATS)
def test_bits_do_not_depend_on_neighbours(op, element):
    """A second run, a run in place, a batch of one and rows elsewhere in a layout give the same bits."""
    layout = uneven(16, (150, 0, 1, 17, 130, 40))
    plan = plan_of(layout, op=op, batch=3, element=element)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    case = case_of(plan, operands)
    ((result, bits),) = case.run().items()
    want = bits.copy()
    for _ in range(3):
        case.poison()
        assert same_bits(case.run()[result].copy(), want)
    alone = plan_of(layout, op=op, batch=1, element=element)
    assert np.array_equal(case_of(alone, operands.batch(plan.descriptor)).run()[result][0], want[-1])

    order = np.array([3, 5, 0, 4, 1, 2])
    moved = BlockSparseLayout(layout.bitmap[:, order], 16)
    rows = layout.to_coo()[1]
    places = np.concatenate([np.flatnonzero(rows == row) for row in order])
    other = Operands(moved, {name: one[:, places].copy() for name, one in operands.arrays.items()})
    assert np.array_equal(case_of(plan, other).run()[result], want[:, places])

    read = "x" if op == "forward" else "dy"
    plan.run(replace(case.args, **{result: getattr(case.args, read)}))
    assert np.array_equal(getattr(case.args, read).bits().get(), want)


# Tables -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
def test_another_mask_reaches_what_was_captured(op):
    first = random_layout(seed=6, heads=2, rows=6, cols=8, block=32, density=0.4)
    captured_launches_follow_the_mask(plan_of(first, op=op, batch=1), first)


# Places -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
def test_places_beyond_2_to_the_32_bytes(op):
    """The values exceed 2^32 bytes; the last batches are checked, in place."""
    import cupy

    layout = uneven(128, (20, 45), 64)
    batch = (1 << 32) // (layout.shape.blocks * 128 * 128 * 2) + 2
    plan = plan_of(layout, op=op, batch=batch, element="f16")
    few = plan_of(layout, op=op, batch=2, element="f16")
    operands = random_operands(few.descriptor, layout, np.random.default_rng(0))
    want = case_of(few, operands).run()
    ((result, bits),) = want.items()
    given = {}
    for name, one in operands.arrays.items():
        given[name] = cupy.zeros((batch, *one.shape[1:]), cupy.float16)
        given[name][-2:] = cupy.asarray(one)
    place = given["x" if op == "forward" else "dy"]
    plan.run(plan.args_type(plan.descriptor)(layout=plan.pack(layout), **given, **{result: place}))
    assert np.array_equal(place[-2:].get().view(np.uint16), bits)
    assert cupy.isfinite(place).all()
