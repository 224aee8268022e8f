"""The GPU's kernel of convolutions against float64: walks, edges of tiles, split-K, bits, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse24_plans import BlockSparseConv2dPlan, BlockSparseLayout
from sparse24_plans.blocksparse.schedules.conv_wgmma import filter_split_k

from ..strategies import results_of
from ..support import same_bits
from .problems import captured_launches_follow_the_mask, case_of, random_operands
from .test_convolution import OPS, RESULT, WALKS, check, descriptor, every_walk, filter_layout, random_check

pytestmark = pytest.mark.gpu
BLOCKS = (16, 32, 64, 128)
every_op = pytest.mark.parametrize("op", OPS)


def plan_of(layout: BlockSparseLayout, **fields: Any) -> BlockSparseConv2dPlan:
    desc = descriptor(layout, **{"element": "bf16", **fields})
    plan = BlockSparseConv2dPlan.select(desc, device=0)
    assert plan.explain().chosen == "conv_wgmma"
    return plan


def served(op: str, block: int) -> bool:
    return op != "wgrad" or block >= 64


# Results ------------------------------------------------------------------------------------------


@every_op
@every_walk
def test_every_walk(op, walk):
    for block in BLOCKS:
        for element in ("f16", "bf16") if served(op, block) else ():
            layout = filter_layout(walk, block)
            random_check(plan_of(layout, op=op, element=element, **walk), layout)


@pytest.mark.parametrize("stride", [(3, 3), (8, 1), (5, 8)])
def test_wide_strides_forward(stride):
    walk = {"kernel": 3, "stride": stride, "padding": 1}
    layout = filter_layout(walk, 64)
    for op in ("forward", "wgrad"):
        random_check(plan_of(layout, op=op, height=21, width=26, **walk), layout)


@pytest.mark.parametrize("stride", [(4, 1), (2, 2), (3, 5), (12, 1)])
@pytest.mark.parametrize("size", [(4, 5), (9, 8), (11, 7)])
def test_phases_of_a_strided_input(stride, size):
    """Rows and columns that a phase may lack at the end are nobody's."""
    walk = {"kernel": (3, 4), "stride": stride, "padding": (1, 2)}
    for block in BLOCKS:
        layout = filter_layout(walk, block, rows=2, channels=3)
        fields = {"height": size[0], "width": size[1], **walk}
        random_check(plan_of(layout, op="dgrad", **fields), layout)
        random_check(plan_of(layout, op="dgrad", out_element="f32", **fields), layout)


@every_op
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize(
    "bitmap", [np.zeros((1, 2, 18)), np.ones((1, 2, 18)), np.zeros((1, 0, 18)), np.zeros((1, 2, 0))]
)
def test_filters_and_sizes_at_their_edges(op, batch, bitmap):
    for block in BLOCKS:
        for stride in (1, 2) if served(op, block) else ():
            layout = BlockSparseLayout(bitmap.astype(bool), block)
            random_check(plan_of(layout, op=op, batch=batch, kernel=3, padding=1, stride=stride), layout)


@every_op
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (5, 13), (16, 16), (23, 37)])
def test_edges_of_tiles(op, size):
    """Pixels of images that begin and end anywhere in tiles."""
    walk = WALKS["3x3"]
    for block in BLOCKS:
        if served(op, block):
            layout = filter_layout(walk, block, seed=sum(size))
            for batch in (1, 3):
                fields = {"height": size[0], "width": size[1], "batch": batch}
                random_check(plan_of(layout, op=op, **fields, **walk), layout)


@every_op
@pytest.mark.parametrize("block", [16, 64])
def test_block_rows_of_many_bit_words(op, block):
    """More blocks of channels than a word of the tables has bits, and lines of very different lengths."""
    if not served(op, block):
        pytest.skip("not served")
    layout = filter_layout({"kernel": 2}, block, rows=37, channels=35, density=0.1)
    kept = layout.bitmap.copy()
    kept[:, 3], kept[:, 4, 5:], kept[:, 7], kept[:, :, 9:13] = True, False, False, True
    layout = BlockSparseLayout(kept, block)
    random_check(plan_of(layout, op=op, kernel=2, batch=1, height=5, width=6), layout)


@pytest.mark.parametrize("epilogue", ["bias", "bias_relu", "bias_gelu", "bias_silu"])
def test_epilogues(epilogue):
    layout = filter_layout(WALKS["3x3"], 64)
    for element in ("f16", "bf16"):
        for out in results_of(element):
            fields = {"epilogue": epilogue, "element": element, "out_element": out, "alpha": 0.25}
            random_check(plan_of(layout, **fields, **WALKS["3x3"]), layout)


@every_op
def test_large_images(op):
    """Clusters share a filter's blocks, and a filter's gradient is split along its pixels."""
    walk = WALKS["3x3"]
    for block in (64, 128):
        layout = filter_layout(walk, block, rows=4, channels=4, density=0.2)
        fields = {"op": op, "batch": 8, "height": 40, "width": 41, "alpha": 0.5}
        plan = plan_of(layout, **fields, **walk)
        random_check(plan, layout)
        assert (plan.workspace_size() > 0) == (op == "wgrad" and filter_split_k(plan.descriptor)[0] > 1)


def test_cells_without_a_kept_block_are_not_read():
    for block in BLOCKS:
        layout = BlockSparseLayout([[[1, 0]]], block)
        plan = plan_of(layout, kernel=1)
        operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
        operands["x"][..., block:] = np.nan
        got = case_of(plan, operands).run()["y"].view(plan.descriptor.out_element.dtype)
        assert np.isfinite(got.astype(np.float32)).all()


# Bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("walk", ["3x3", "strided"])
def test_bits_do_not_depend_on_the_other_images(op, block, walk):
    layout = filter_layout(WALKS[walk], block, rows=5, channels=4)
    fields = {"op": op, "height": 13, "width": 11, **WALKS[walk]}
    plan = plan_of(layout, batch=40, **fields)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    whole, read = check(plan, operands), "x" if op == "forward" else "dy"
    for images in ([7], [3, 39, 0]):
        few = plan_of(layout, batch=len(images), **fields)
        got = case_of(few, operands.with_(**{read: operands[read][images].copy()})).run()[RESULT[op]]
        assert np.array_equal(got, whole[images].view(got.dtype))


@every_op
@pytest.mark.parametrize("walk", ["3x3", "strided"])
def test_bits_of_another_run(op, walk):
    layout = filter_layout(WALKS[walk], 64, rows=4, channels=4)
    plan = plan_of(layout, op=op, batch=6, height=30, width=31, **WALKS[walk])
    case = case_of(plan, random_operands(plan.descriptor, layout, np.random.default_rng(1)))
    first = case.run()[RESULT[op]].copy()
    for _ in range(5):
        case.poison()
        assert same_bits(case.run()[RESULT[op]].copy(), first)


# Tables -------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("walk", ["3x3", "strided"])
def test_another_mask_reaches_what_was_captured(op, walk):
    first = filter_layout(WALKS[walk], 64, rows=4, channels=3)
    captured_launches_follow_the_mask(plan_of(first, op=op, **WALKS[walk]), first)
