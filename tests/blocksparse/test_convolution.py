"""2-D convolution and its gradients against float64: every walk, element and epilogue; bits; refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseConv2dDescriptor,
    BlockSparseConv2dPlan,
    BlockSparseLayout,
    InvalidProblemError,
    UnsupportedError,
    explain,
)
from sparse24_plans.arithmetic.fma32 import fma_f32

from ..sample_devices import H200
from ..strategies import results_of
from ..support import check_each, same_bits
from .problems import Operands, case_of, filter_of, random_operands, reference
from .sample_layouts import random_layout

STRICT = {"require": {"bit_stable_across_hardware": True}}
ROWS = {"host_blas": None, "host_strict": STRICT}
OPS = ("forward", "dgrad", "wgrad")
RESULT = {"forward": "y", "dgrad": "dx", "wgrad": "dfilter"}
every_row = pytest.mark.parametrize("row", ROWS)
every_op = pytest.mark.parametrize("op", OPS)

WALKS: dict[str, dict[str, Any]] = {
    "3x3": {"kernel": 3, "padding": 1},
    "1x1": {"kernel": 1},
    "1x1, strided": {"kernel": 1, "stride": 2},
    "strided": {"kernel": 3, "stride": 2, "padding": 1},
    "strided beyond the kernel": {"kernel": 2, "stride": (3, 4)},
    "dilated": {"kernel": (3, 2), "dilation": (2, 3), "padding": (2, 0)},
    "dilated and strided": {"kernel": 3, "dilation": (1, 2), "stride": (2, 1), "padding": (0, 3)},
    "wide padding": {"kernel": (1, 2), "padding": (3, 4), "stride": (1, 2)},
    "as large as the image": {"kernel": (7, 9)},
    "uneven": {"kernel": (5, 2), "stride": (2, 3), "padding": (1, 0)},
}
every_walk = pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)


def filter_layout(
    walk: dict[str, Any],
    block: int = 16,
    rows: int = 3,
    channels: int = 2,
    seed: int = 0,
    density: float = 0.4,
) -> BlockSparseLayout:
    """``rows`` and ``channels`` in blocks."""
    taps = int(np.prod(np.broadcast_to(walk["kernel"], 2)))
    return random_layout(seed, heads=1, rows=rows, cols=channels * taps, block=block, density=density)


def descriptor(layout: BlockSparseLayout, **fields: Any) -> BlockSparseConv2dDescriptor:
    base = {"batch": 2, "height": 7, "width": 9, "element": "f32"}
    return BlockSparseConv2dDescriptor(**{**base, "layout": layout, **fields})


def plan_of(row: str, layout: BlockSparseLayout, **fields: Any) -> BlockSparseConv2dPlan:
    desc = descriptor(layout, **fields)
    plan = BlockSparseConv2dPlan.select(desc, device="host", preference=ROWS[row])
    assert plan.explain().chosen == row
    return plan


def check(plan: BlockSparseConv2dPlan, operands: Operands) -> np.ndarray:
    """Within the guarantee; poison and guard bytes round every operand."""
    name, desc = RESULT[plan.descriptor.op], plan.descriptor
    got = case_of(plan, operands).run()[name].view(desc.out_element.dtype)
    exact, allowed = reference(plan, operands)[name]
    assert got.shape == exact.shape
    assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()
    return got


def random_check(plan: BlockSparseConv2dPlan, layout: BlockSparseLayout, seed: int = 5) -> np.ndarray:
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(seed)))


# Results ------------------------------------------------------------------------------------------


@every_row
@every_op
@every_walk
def test_every_walk(row, op, walk):
    layout = filter_layout(walk)

    def check_element(element: str) -> None:
        random_check(plan_of(row, layout, op=op, element=element, **walk), layout)

    check_each(check_element, ({"element": element} for element in ("f32", "f16", "bf16")))


@every_row
@every_op
@pytest.mark.parametrize(
    "bitmap", [np.zeros((1, 2, 18)), np.ones((1, 2, 18)), np.zeros((1, 0, 18)), np.zeros((1, 2, 0))]
)
@pytest.mark.parametrize("batch", [0, 1])
def test_filters_and_sizes_at_their_edges(row, op, bitmap, batch):
    """Sums over nothing are zeros, and results are written wherever there are any."""
    layout = BlockSparseLayout(bitmap.astype(bool), 16)
    random_check(plan_of(row, layout, op=op, batch=batch, kernel=3, padding=1, stride=2), layout)


@every_row
@every_op
def test_strides_beyond_the_image(row, op):
    """Phases of the input's gradient that have no pixel take no time, however many there are."""
    walk = {"kernel": (3, 2), "stride": (2**31 - 1, 2**20), "padding": 1}
    layout = filter_layout(walk)
    random_check(plan_of(row, layout, op=op, **walk), layout)


@every_op
@pytest.mark.parametrize(
    ("few", "many"),
    [
        ({"padding": 5, "dilation": 5}, {"padding": 2**28, "dilation": 2**28}),
        ({"padding": 8, "dilation": 4, "stride": 8}, {"padding": 2**29, "dilation": 2**28, "stride": 2**29}),
    ],
)
def test_padding_takes_no_memory(op, few, many):
    """Images with all padded pixels would exceed every memory."""
    layout = filter_layout({"kernel": 3}, density=1.0)
    one, other = (
        plan_of("host_strict", layout, op=op, kernel=3, height=1, width=1, **walk) for walk in (few, many)
    )
    operands = random_operands(one.descriptor, layout, np.random.default_rng(0))
    assert same_bits(case_of(one, operands).run()[RESULT[op]], case_of(other, operands).run()[RESULT[op]])


@every_op
@pytest.mark.parametrize("block", [32, 64, 128])
def test_every_size_of_blocks(op, block):
    layout = filter_layout(WALKS["3x3"], block)
    random_check(plan_of("host_blas", layout, op=op, element="bf16", **WALKS["3x3"]), layout)


@every_row
@pytest.mark.parametrize("epilogue", ["bias", "bias_relu", "bias_gelu", "bias_silu"])
def test_epilogues(row, epilogue):
    layout = filter_layout(WALKS["strided"])
    for element in ("f16", "f32"):
        for out in results_of(element):
            fields = {"epilogue": epilogue, "element": element, "out_element": out, "alpha": 0.1}
            random_check(plan_of(row, layout, **fields, **WALKS["strided"]), layout)


@every_op
def test_alpha_and_other_results(op):
    layout = filter_layout(WALKS["3x3"])
    fields = {"op": op, "element": "bf16", "out_element": "f32", "alpha": -0.3}
    random_check(plan_of("host_blas", layout, **fields, **WALKS["3x3"]), layout)


@settings(max_examples=30)
@given(
    op=st.sampled_from(OPS),
    pairs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=3, max_size=3),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    more=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_walk(op, pairs, padding, more, seed):
    walk = {"kernel": pairs[0], "stride": pairs[1], "dilation": pairs[2], "padding": padding}
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(pairs[0], pairs[2], padding, strict=True)]
    layout = filter_layout(walk, rows=2, channels=1, seed=seed)
    size = {"height": least[0] + more[0], "width": least[1] + more[1]}
    random_check(plan_of("host_blas", layout, op=op, **walk, **size), layout, seed)


@every_row
def test_cells_without_a_kept_block_are_not_read(row):
    layout = BlockSparseLayout([[[1, 0]]], 16)  # the second block of channels meets none
    plan = plan_of(row, layout, kernel=1)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    operands["x"][..., 16:] = np.nan
    assert np.isfinite(case_of(plan, operands).run()["y"].view(np.float32)).all()
    gradient = plan_of(row, layout, op="dgrad", kernel=1)
    operands = random_operands(gradient.descriptor, layout, np.random.default_rng(0))
    got = case_of(gradient, operands).run()["dx"].view(np.float32)
    assert got[..., :16].all()
    assert not got[..., 16:].any()


# Bits ---------------------------------------------------------------------------------------------


def test_strict_sums_by_channels_then_taps():
    """One fma a product that a kept block has, in the order of the layout's columns, from +0."""
    walk = {"kernel": (2, 3), "stride": (2, 1), "padding": 1}
    layout = filter_layout(walk, seed=2)
    plan = plan_of("host_strict", layout, **walk)
    desc = plan.descriptor
    operands = random_operands(desc, layout, np.random.default_rng(1))
    got = case_of(plan, operands).run()["y"].view(np.float32)
    padded = np.pad(operands["x"], ((0, 0), (1, 1), (1, 1), (0, 0)))
    filter = filter_of(desc, layout, operands["filter"]).astype(np.float32)
    acc = np.zeros_like(got)
    for column in range(layout.shape.block_cols):
        channels, (r, s) = column // 6, divmod(column % 6, 3)
        met = padded[:, r : r + 2 * got.shape[1] - 1 : 2, s : s + got.shape[2]]
        kept = np.repeat(layout.bitmap[0, :, column], 16)
        for c in range(channels * 16, channels * 16 + 16):
            added = fma_f32(met[..., c, None], filter[:, r, s, c], acc)
            acc = np.where(kept, added, acc)
    assert same_bits(got.copy(), acc)


@every_op
def test_strict_names_its_arithmetic(op):
    layout = filter_layout(WALKS["3x3"])
    plan = plan_of("host_strict", layout, op=op, **WALKS["3x3"])
    assert plan.guarantee.arithmetic == "fma32_in_order"
    assert plan.guarantee.batch_invariant == (op != "wgrad")


@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_strict_results_depend_on_their_own_image_alone(op):
    layout = filter_layout(WALKS["strided"])
    fields = {"op": op, "element": "bf16", **WALKS["strided"]}
    plan = plan_of("host_strict", layout, batch=3, **fields)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    whole = case_of(plan, operands).run()[RESULT[op]]
    read = "x" if op == "forward" else "dy"
    alone = case_of(
        plan_of("host_strict", layout, batch=1, **fields),
        operands.with_(**{read: operands[read][1:2].copy()}),
    )
    assert np.array_equal(alone.run()[RESULT[op]][0], whole[1])


# Refusals -----------------------------------------------------------------------------------------

LAYOUT = random_layout(heads=1, rows=2, cols=18)
GOOD = {"layout": LAYOUT, "height": 8, "width": 8, "kernel": 3, "element": "bf16"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "backward"}, "op: "),
        ({"height": 0}, "height: "),
        ({"kernel": (3, 0)}, "kernel"),
        ({"kernel": (3, 3, 3)}, "kernel"),
        ({"kernel": 2.5}, "kernel"),
        ({"stride": 0}, "stride"),
        ({"padding": (1, -1)}, "padding"),
        ({"dilation": 0}, "dilation"),
        ({"batch": 2**31}, "batch: "),
        (
            {"kernel": (3, 5)},
            "layout: expected columns of blocks in a multiple of the kernel's 15 taps, got 18",
        ),
        ({"layout": random_layout(heads=2, rows=2, cols=18)}, "layout: expected one head, got 2"),
        ({"width": 2}, "width: expected at least 3 for this kernel and padding, got 2"),
        ({"height": 5, "dilation": (4, 1), "padding": 1}, "height: expected at least 7 .* got 5"),
        ({"element": "s8"}, "element: expected f32 or f16 or bf16, got s8"),
        ({"out_element": "f16"}, "out_element: expected bf16 or f32, got f16"),
        ({"bias_element": "f16"}, "bias_element: expected bf16 or f32, got f16"),
        ({"op": "dgrad", "epilogue": "bias"}, "epilogue: expected identity for op dgrad, got bias"),
        ({"height": 2**31 - 1, "width": 2**31 - 1}, "expected operands of fewer than"),
    ],
)
def test_wrong_fields(change, words):
    BlockSparseConv2dDescriptor(**GOOD)
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseConv2dDescriptor(**{**GOOD, **change})


def test_a_number_stands_for_both_axes():
    desc = BlockSparseConv2dDescriptor(**GOOD, stride=2, padding=[1, 0])
    assert (desc.kernel, desc.stride, desc.padding, desc.dilation) == ((3, 3), (2, 2), (1, 0), (1, 1))
    assert BlockSparseConv2dDescriptor.model_validate_json(desc.model_dump_json()) == desc
    assert BlockSparseConv2dPlan.select(desc, device="host").sku.op == "conv2d_blocksparse_forward"


@every_op
def test_sizes_that_disagree(op):
    """Named before anything is written."""
    layout = filter_layout(WALKS["3x3"])
    plan = plan_of("host_blas", layout, op=op, **WALKS["3x3"])
    args = case_of(plan, random_operands(plan.descriptor, layout, np.random.default_rng(0))).args
    for operand in plan.descriptor.operands():
        if operand.name == "layout":
            continue
        wrong = np.zeros((*operand.shape[:-1], operand.shape[-1] + 16), np.float32)
        with pytest.raises(InvalidProblemError, match=rf"{operand.name}: expected shape \[.*\], got \["):
            plan.run(replace(args, **{operand.name: wrong}))
        strided = np.zeros((*operand.shape[:-1], 2 * operand.shape[-1]), np.float32)[..., ::2]
        with pytest.raises(InvalidProblemError, match=f"{operand.name}: expected contiguous memory"):
            plan.run(replace(args, **{operand.name: strided}))


# Selection of the GPU's kernel, without a GPU -------------------------------------------------------

LARGE = {"layout": random_layout(heads=1, rows=2, cols=18, block=64), "height": 56, "width": 56, "kernel": 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"element": "f32"}, "conv_wgmma: serves elements f16, bf16, not f32"),
        (
            {"op": "wgrad", "layout": random_layout(heads=1, rows=2, cols=18, block=32)},
            "serves op wgrad with blocks of 64 and 128, not 32",
        ),
        ({"stride": 9}, "serves strides up to 8, got 9"),
        ({"stride": 2**30, "op": "dgrad"}, "exceed the kernel's limit, 2147483647"),
        ({"padding": 200}, "serves kernels of up to 255 pixels, 127 beyond the height"),
        ({"batch": 2**20}, "exceed the kernel's limit, 2147483647"),
        ({"batch": 2**31 // 56**2, "op": "wgrad"}, "pixels exceed the kernel's limit"),
    ],
)
def test_why_a_gpu_does_not_serve(change, words):
    served = {"element": "bf16", **LARGE}
    assert explain(BlockSparseConv2dDescriptor(**served), device=H200).chosen == "conv_wgmma"
    desc = BlockSparseConv2dDescriptor(**{**served, **change})
    with pytest.raises(UnsupportedError) as caught:
        BlockSparseConv2dPlan.compile(desc, device=H200)
    assert words in str(caught.value)
