"""Softmax over kept cells and its gradient: against float64, at the edges, and to the bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseSoftmaxArgs,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    InvalidProblemError,
)
from sparse24_plans.blocksparse.arithmetic.softmax import exp32, softmax

from ..support import check_each, same_bits
from .problems import Operands, case_of, random_operands, reference
from .sample_layouts import EDGES, layouts, random_layout

FLOATS = ("f32", "f16", "bf16")
MASKS = ("none", "add", "mul")


def plan_of(layout: BlockSparseLayout, **fields) -> BlockSparseSoftmaxPlan:
    desc = BlockSparseSoftmaxDescriptor(**{"layout": layout, "element": "f32", "batch": 2, **fields})
    plan = BlockSparseSoftmaxPlan.select(desc, device="host")
    assert plan.explain().chosen == "host_strict"
    return plan


def check(plan: BlockSparseSoftmaxPlan, operands: Operands) -> np.ndarray:
    case = case_of(plan, operands)
    ((name, bits),) = case.run().items()
    got = bits.view(plan.descriptor.element.dtype)
    exact, allowed = reference(plan, operands)[name]
    assert got.shape == exact.shape
    assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()
    return got


def random_check(layout: BlockSparseLayout, **fields) -> np.ndarray:
    plan = plan_of(layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(4)))


# Results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize(("rpe", "causal"), list(itertools.product([False, True], repeat=2)))
def test_everything_that_is_added_to_scores(element, rpe, causal):
    check_each(
        partial(random_check, random_layout(rows=3, cols=3), element=element, scale=0.125),
        (
            {"rpe": rpe, "key_padding_mask": padding, "attn_mask": attention, "causal": causal}
            for padding, attention in itertools.product(MASKS, repeat=2)
        ),
    )


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)
def test_layouts_at_their_edges(op, element, layout):
    random_check(layout, op=op, element=element)
    random_check(layout, op=op, element=element, batch=0)


@settings(max_examples=15)
@given(
    layout=layouts(4),
    op=st.sampled_from(["forward", "backward"]),
    element=st.sampled_from(FLOATS),
    scale=st.sampled_from([1.0, 0.0, -2.5, 1e-3, 30.0]),
)
def test_any_layout_and_scale(layout, op, element, scale):
    random_check(layout, op=op, element=element, scale=scale)


def test_rows_sum_to_one():
    layout = BlockSparseLayout(np.eye(3, dtype=int), 32)
    got = random_check(layout, batch=1)
    np.testing.assert_allclose(got.sum(axis=-1), 1, rtol=1e-6)


def check_masked_rows(plan: BlockSparseSoftmaxPlan, layout: BlockSparseLayout, by: str, kind: str) -> None:
    """Mask the first five rows, or all by ``key_padding_mask``, and expect zeros there."""
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    mask = np.full(operands[by].shape, 0 if kind == "mul" else -np.inf, np.float32)
    if by == "attn_mask":
        mask[5:] = 1
    got = layout.to_dense(check(plan, operands.with_(**{by: mask})))
    assert (got[:, :, : 5 if by == "attn_mask" else 32] == 0).all()
    assert not np.signbit(got).any()


@pytest.mark.parametrize("by", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("kind", ["add", "mul"])
def test_a_row_that_is_masked_as_a_whole_is_zeros(by, kind):
    layout = random_layout(rows=2, cols=2, density=1.0)
    check_masked_rows(plan_of(layout, **{by: kind}), layout, by, kind)


def test_mask_of_zeros_and_ones_drops_cells_and_leaves_others():
    layout = random_layout(rows=1, cols=2, density=1.0, heads=1)
    plan = plan_of(layout, attn_mask="mul", batch=1)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    mask = np.full((16, 32), 7.0, np.float32)  # whatever isn't 0
    mask[:, 20:] = 0
    got = layout.to_dense(check(plan, operands.with_(attn_mask=mask)))
    assert (got[..., 20:] == 0).all()
    alone = plan_of(layout, batch=1)
    x = layout.to_dense(operands["x"])
    x[..., 20:] = -np.inf
    want = case_of(alone, Operands(layout, {"x": layout.values_of(x)})).run()["y"]
    assert same_bits(layout.values_of(got).view(np.uint32), want)


def test_large_scores_do_not_overflow():
    layout = random_layout(rows=1, cols=3, heads=1, density=1.0)
    x = np.zeros((1, 3, 16, 16), np.float32)
    x[0, 1, :, 4] = 3e38
    got = case_of(plan_of(layout, batch=1), Operands(layout, {"x": x})).run()["y"].view(np.float32)
    assert (got[0, 1, :, 4] == 1).all()
    assert got.sum() == 16


def test_nan_and_infinity_stay_in_their_row():
    layout = random_layout(rows=2, cols=2, heads=1, density=1.0)
    x = np.zeros((1, 4, 16, 16), np.float32)
    x[0, 0, 2, 2], x[0, 2, 3, 3] = np.nan, np.inf
    got = layout.to_dense(
        case_of(plan_of(layout, batch=1), Operands(layout, {"x": x})).run()["y"].view(np.float32)
    )
    bad = np.isnan(got).all(axis=-1)[0, 0]
    assert np.flatnonzero(bad).tolist() == [2, 19]
    assert np.isfinite(got[0, 0, ~bad]).all()


def test_the_gradient_is_that_of_the_function():
    """Gradients agree with differences, in float64, of what ``forward`` computes."""
    layout = random_layout(rows=2, cols=2, heads=1, seed=7)
    rng, step = np.random.default_rng(0), 1e-2
    plan, back = plan_of(layout, scale=0.7, batch=1), plan_of(layout, scale=0.7, batch=1, op="backward")
    x, dy, moved = (random_operands(plan.descriptor, layout, rng)["x"] for _ in range(3))

    def forward(values: np.ndarray) -> np.ndarray:
        return case_of(plan, Operands(layout, {"x": values})).run()["y"].view(np.float32).astype(np.float64)

    up, down = forward(x + np.float32(step) * moved), forward(x - np.float32(step) * moved)
    y = forward(x).astype(np.float32)
    dx = case_of(back, Operands(layout, {"y": y, "dy": dy})).run()["dx"].view(np.float32)
    assert (dx * moved).sum() == pytest.approx(((up - down) / (2 * step) * dy).sum(), rel=1e-3, abs=1e-3)


# Bits ---------------------------------------------------------------------------------------------


def test_sums_are_in_increasing_columns():
    layout = random_layout(rows=1, cols=4, heads=1, density=1.0)
    plan = plan_of(layout, op="backward", batch=1)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    got = layout.to_dense(case_of(plan, operands).run()["dx"].view(np.float32))[0, 0]
    y, dy = (layout.to_dense(operands[name])[0, 0] for name in ("y", "dy"))
    for row in range(16):
        total = np.float32(0)
        for column in range(64):
            total = np.float32(total + np.float32(y[row, column] * dy[row, column]))
        assert same_bits(got[row], y[row] * (dy[row] - total))


def test_logarithms_and_exponentials_are_right_to_the_last_bit():
    for count in (1, 2, 3, 7, 100, 4095, 4096):
        assert softmax(np.zeros(count, np.float32)).logsumexp[0] == np.float32(math.log(count))
    few = np.linspace(-119, 0, 5000, dtype=np.float32)
    assert same_bits(exp32(few), np.exp(few.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_in_place_and_alone_give_the_same_bits(op):
    layout = random_layout()
    plan = plan_of(layout, op=op, batch=3, element="bf16")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    case = case_of(plan, operands)
    ((result, bits),) = case.run().items()
    want = bits.copy()
    other = "x" if op == "forward" else "dy"
    plan.run(replace(case.args, **{result: getattr(case.args, other)}))
    assert np.array_equal(getattr(case.args, other).bits(), want)
    alone = plan_of(layout, op=op, batch=1, element="bf16")
    assert np.array_equal(case_of(alone, operands.batch(plan.descriptor)).run()[result][0], want[-1])


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"element": "s8"}, "element: expected f32 or f16 or bf16, got s8"),
        ({"scale": float("inf")}, "scale: "),
        ({"scale": 1e39}, "scale: expected a value finite in float32"),
        ({"attn_mask": "times"}, "attn_mask: "),
        ({"op": "backward", "causal": True}, "causal: expected none for op backward, got True"),
        ({"op": "backward", "attn_mask": "add"}, "attn_mask: expected none for op backward, got add"),
        ({"op": "dgrad"}, "op: "),
    ],
)
def test_wrong_fields(change, words):
    good = {"layout": random_layout(), "element": "f32"}
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseSoftmaxDescriptor(**{**good, **change})


def test_masks_that_were_not_asked_for_or_do_not_fit():
    layout = random_layout()
    plan = plan_of(layout)
    x = np.zeros((2, layout.shape.blocks, 16, 16), np.float32)
    args = BlockSparseSoftmaxArgs(layout=plan.pack(layout), x=x, y=x.copy())
    plan.run(args)
    with pytest.raises(InvalidProblemError, match="rpe: expected None for this descriptor"):
        plan.run(replace(args, rpe=np.zeros((2, 48, 64), np.float32)))
    masked = plan_of(layout, key_padding_mask="add")
    with pytest.raises(
        InvalidProblemError, match=r"key_padding_mask: expected shape \[2, 64\], got \[2, 48\]"
    ):
        masked.run(replace(args, key_padding_mask=np.zeros((2, 48), np.float32)))
