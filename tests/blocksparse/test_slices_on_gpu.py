"""Long row panels are summed in slices: results, and bits that depend on the layout alone."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.measure_block_schedules import running
from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    BlockSparseTables,
    Explanation,
    explain,
)
from sparse24_plans.blocksparse.guarantees import blocks_wgmma
from sparse24_plans.blocksparse.kernel_problem import COUNTER_BYTES, KernelProblem, slice_bytes
from sparse24_plans.blocksparse.panels import SLICE_FIELDS, Slicing
from sparse24_plans.blocksparse.schedules import blocks_wgmma as schedules
from sparse24_plans.blocksparse.schedules import blocks_wgmma_cuts as cuts
from sparse24_plans.plan.kernel import align_up

from ..sample_devices import H200
from ..support import same_bits
from . import products_on_gpu as shared
from .problems import Operands, case_of, random_operands
from .products_on_gpu import TRANSPOSITIONS, gpu
from .test_products import check

BLOCKS = (16, 32, 64, 128)
INVARIANT = {"require": {"batch_invariant": True}}
SEQUENTIAL = {"max_workspace_bytes": 0, **INVARIANT}
every_block = pytest.mark.parametrize("block", BLOCKS)
every_op = pytest.mark.parametrize("op", ["dsd", "dds"])


@pytest.fixture(autouse=True)
def cuts_of_long_panels_alone(monkeypatch):
    """Of few tokens, other cuts would be tried too, and be faster."""
    monkeypatch.setattr(cuts, "others", lambda *_: [])


def uneven(
    op: str, block: int, *, transposed: bool = False, heads: int = 1, seed: int = 0
) -> BlockSparseLayout:
    """4,096 k and 1,280 rows of op(S). Two rows keep most columns, the others few."""
    rng = np.random.default_rng(seed)
    lines, across = 1280 // block, 4096 // block
    kept = rng.random((heads, lines, across)) < 0.02
    kept[:, lines // 2], kept[:, lines - 1, 3:] = True, rng.random((heads, across - 3)) < 0.8
    return BlockSparseLayout(kept.transpose(0, 2, 1) if transposed != (op == "dds") else kept, block)


def select(preference: Any = None, **fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 72, "batch": 2, "element": "bf16", **fields})
    wanted = {"prefer_backend": "blocks_wgmma", **(preference or {})}
    return BlockSparseMatmulPlan.select(desc, device=0, preference=wanted)


def plan_of(preference: Any = None, **fields: Any) -> BlockSparseMatmulPlan:
    """A batch-invariant plan that cuts panels, whose slices are summed by several CTAs."""
    with mock.patch.object(cuts, "_evens_out", return_value=False):
        plan = select({**INVARIANT, **(preference or {})}, **fields)
    assert "long panels are cut, and summed by several CTAs" in plan.explain().details
    return plan


def sequential(**fields: Any) -> BlockSparseMatmulPlan:
    """A plan without workspace: a CTA takes the slices of a panel one after the other."""
    plan = select(preference=SEQUENTIAL, **fields)
    assert "long panels are cut, and summed one after the other" in plan.explain().details
    assert plan.workspace_size() == 0
    return plan


def narrow_plan_of(slices: int = cuts.APART, **fields: Any) -> BlockSparseMatmulPlan:
    """A plan with tiles of 64 x 64 that cuts narrow panels of blocks of 64, or takes the long ones first."""
    desc = BlockSparseMatmulDescriptor(**{"n": 72, "batch": 2, "element": "bf16", **fields})
    needed = {
        cuts.APART: slice_bytes(KernelProblem(desc), 64),
        cuts.LONG_FIRST: (align_up(COUNTER_BYTES), 0),
        cuts.NO_SLICES: (0, 0),
    }[slices]
    with running(cuts.Cut(cuts.NARROW, slices, *needed)):
        plan = select({"max_workspace_bytes": (1 << 35) + slices}, **fields)
    assert "tiles of 64 rows x 64 tokens" in plan.explain().details
    assert ("summed by several CTAs" in plan.explain().details) == (slices == cuts.APART)
    assert ("long panels come first" in plan.explain().details) == (slices == cuts.LONG_FIRST)
    return plan


@gpu
@every_op
@every_block
@pytest.mark.parametrize("transposed", TRANSPOSITIONS)
def test_products_of_cut_panels_are_right(op, block, transposed):
    layout = uneven(op, block, transposed=transposed[0 if op == "dsd" else 1], heads=2)
    plan = plan_of(op=op, layout=layout, trans_a=transposed[0], trans_b=transposed[1])
    assert plan.workspace_size() > 0
    check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


@gpu
@every_op
@every_block
@pytest.mark.parametrize("n", [8, 64, 136, 520, 1040])
def test_bits_without_a_workspace_are_those_with_one(op, block, n):
    layout = uneven(op, block)
    operands = random_operands(
        plan_of(op=op, layout=layout, n=n).descriptor, layout, np.random.default_rng(n)
    )
    apart = check(plan_of(op=op, layout=layout, n=n), operands)
    assert same_bits(apart, check(sequential(op=op, layout=layout, n=n), operands))


@gpu
@every_op
@every_block
def test_bits_do_not_depend_on_neighbours(op, block):
    """Bits don't depend on n, the width of panels, or the batch either."""
    layout = uneven(op, block)
    whole = plan_of(op=op, layout=layout, n=1040)
    operands = random_operands(whole.descriptor, layout, np.random.default_rng(1))
    wanted = check(whole, operands)
    name, axis = ("b", 3) if op == "dsd" else ("a", 2)
    for n in shared.EDGES_OF_TILES[:-1]:
        tokens = np.random.default_rng(n).permutation(1040)[:n]
        part = {key: one[1:].copy() for key, one in operands.arrays.items()}
        part[name] = np.ascontiguousarray(np.take(part[name], tokens, axis))
        got = case_of(plan_of(op=op, layout=layout, n=n, batch=1), Operands(layout, part)).run()["c"]
        assert np.array_equal(got[0], np.take(wanted[1], tokens, axis - 1).view(got.dtype))


@gpu
@pytest.mark.parametrize("block", [16, 32])
def test_bits_do_not_depend_on_the_schedule(block, monkeypatch):
    layout, found = uneven("dsd", block), []
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=200, element="bf16")
    monkeypatch.setattr(cuts.Cut, "narrowed", lambda cut, desc: cut)
    for at, one in enumerate([*schedules.schedules_by_density(desc), cuts.NARROW]):
        monkeypatch.setattr(schedules.BlocksWgmmaSchedule, "of", lambda *_, one=one: one)
        plan = plan_of(preference={"max_workspace_bytes": (1 << 30) + at}, op="dsd", layout=layout, n=200)
        assert f"{one.rows} rows x {one.tokens} tokens on" in plan.explain().details
        found.append(check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(block))))
    assert len(found) == len(schedules.SIZES) + 1
    assert all(same_bits(found[0], one) for one in found)


@gpu
@every_block
def test_bits_of_another_run(block):
    """Whichever warpgroup adds the slices."""
    layout = uneven("dsd", block, seed=4)
    shared.further_runs_give_the_same_bits(plan_of(op="dsd", layout=layout, n=512), layout, 20)


@gpu
@every_block
def test_replays_count_again_and_follow_the_mask(block):
    layout = uneven("dsd", block, heads=2)
    shared.captured_launches_follow_the_mask(plan_of(op="dsd", layout=layout, batch=1), layout)


@gpu
@pytest.mark.parametrize("block", [64, 128])
def test_masks_that_a_gpu_makes_are_cut_too(block):
    """With values of 1, results count blocks, which float32 does without an error."""
    import cupy

    first = uneven("dsd", block)
    plan = plan_of(op="dsd", layout=first, n=8, batch=1)
    tables, one = plan.pack(first), first.shape
    other = BlockSparseLayout(first.bitmap[:, ::-1, ::-1], block)
    values = cupy.full((1, one.blocks, block, block), 0x3F80, np.uint16)
    x, y = cupy.full((1, 1, one.cols, 8), 0x3F80, np.uint16), cupy.empty((1, 1, one.rows, 8), np.uint16)
    args = BlockSparseMatmulArgs(layout=tables, a=values, b=x, c=y)
    space = cupy.empty(plan.workspace_size(), np.uint8)
    for layout in (other, first):
        plan.update(tables, cupy.asarray(np.ascontiguousarray(layout.bitmap).view(np.uint8)))
        plan.run(args, workspace=space)
        got = (y.get().astype(np.uint32) << 16).view(np.float32)[0, 0]
        counts = float(block) * layout.bitmap[0].sum(1).repeat(block)
        assert np.array_equal(got, np.broadcast_to(counts[:, None], got.shape).astype(np.float32))


@gpu
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(
    ("element", "make"), [("s8", plan_of), ("fp8_e4m3", plan_of), ("fp8_e4m3", sequential)]
)
def test_8_bit_products_of_cut_panels_are_right(block, element, make):
    """No plan of s8 sums slices one after the other, because no order of its sums changes a bit."""
    layout = uneven("dsd", block)
    for out in ("f32", "bf16"):
        plan = make(op="dsd", layout=layout, n=80, element=element, out_element=out, trans_b=True)
        check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(2)))


@gpu
@every_op
@shared.every_epilogue
@pytest.mark.parametrize("make", [plan_of, narrow_plan_of])
def test_epilogues_follow_the_last_slice(op, epilogue, make):
    layout = uneven(op, 64)
    plan = make(op=op, layout=layout, n=200, epilogue=epilogue, alpha=0.25)
    check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(3)))


@gpu
@every_op
@every_block
def test_plan_that_need_not_be_invariant_cuts_for_little_work(op, block):
    layout = uneven(op, block)
    plan = select(op=op, layout=layout)
    assert "long panels are cut, and summed by several CTAs" in plan.explain().details
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(6))
    assert same_bits(check(plan, operands), check(plan_of(op=op, layout=layout), operands))


def many_panels(op: str, block: int) -> BlockSparseLayout:
    """About 64 row panels: some are much longer than the others, and some keep no block."""
    rng = np.random.default_rng(0)
    lines, across = 8192 // block, 2048 // block
    kept = rng.random((1, lines, across)) < rng.choice([0.0, 0.02, 0.1], (1, lines, 1), p=[0.1, 0.8, 0.1])
    kept[:, :: lines // 5] = True
    return BlockSparseLayout(kept.transpose(0, 2, 1) if op == "dds" else kept, block)


def claiming(slices: int, op: str, block: int, n: int, **fields: Any) -> BlockSparseMatmulPlan:
    """A plan that cuts long panels or takes them first. CTAs claim work tiles, as there are more of these."""
    layout = many_panels(op, block)
    desc = BlockSparseMatmulDescriptor(op=op, layout=layout, n=n, element="bf16", **fields)
    with mock.patch.object(cuts, "_pays_to_cut", return_value=slices == cuts.APART):
        wanted = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": (1 << 34) + slices}
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=wanted)
    tiles, ctas = map(int, re.findall(r"(\d+) tiles.* on (\d+) CTAs", plan.explain().details)[0])
    assert tiles > ctas
    assert ("come first" in plan.explain().details) == (slices == cuts.LONG_FIRST)
    return plan


every_claim = pytest.mark.parametrize("slices", [cuts.APART, cuts.LONG_FIRST])


@gpu
@every_claim
@every_op
@every_block
@pytest.mark.parametrize(("n", "batch"), [(56, 12), (1000, 1), (2056, 1), (4096, 1)])
def test_claimed_work_tiles_are_all_computed(slices, op, block, n, batch):
    """Clusters of one and of two CTAs, whole and partial tiles, and panels without a block."""
    plan, layout = claiming(slices, op, block, n, batch=batch), many_panels(op, block)
    check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(n)))
    shared.further_runs_give_the_same_bits(plan, layout, 5)  # whichever cluster computes a work tile


@gpu
@every_claim
@every_block
def test_replays_claim_work_tiles_again(slices, block):
    shared.captured_launches_follow_the_mask(claiming(slices, "dsd", block, 4096), many_panels("dsd", block))


@gpu
@every_op
@every_block
def test_order_of_panels_changes_no_bit(op, block):
    """Long panels that come first have the bits of a plan without workspace, which takes them as others."""
    plan = claiming(cuts.LONG_FIRST, op, block, 2056)
    without = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": 0}
    static = BlockSparseMatmulPlan.select(plan.descriptor, device=0, preference=without)
    assert "long panels" not in static.explain().details
    operands = random_operands(plan.descriptor, many_panels(op, block), np.random.default_rng(3))
    assert same_bits(check(plan, operands), check(static, operands))


# Slices of narrow panels of blocks of 64 -----------------------------------------------------------


@gpu
@every_op
@pytest.mark.parametrize("transposed", TRANSPOSITIONS)
@pytest.mark.parametrize("n", [8, 72, 333])
def test_products_of_cut_narrow_panels_are_right(op, transposed, n):
    layout = uneven(op, 64, transposed=transposed[0 if op == "dsd" else 1], heads=2)
    plan = narrow_plan_of(op=op, layout=layout, n=n, trans_a=transposed[0], trans_b=transposed[1])
    assert plan.workspace_size() > 0
    check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


@gpu
@every_op
def test_bits_of_narrow_slices_are_those_of_their_products_in_order(op):
    """Each slice is a product of its own, of one row panel without a cut."""
    layout, fields = uneven(op, 64), {"op": op, "out_element": "f32"}
    plan, rng = narrow_plan_of(layout=layout, **fields), np.random.default_rng(7)
    operands, name = random_operands(plan.descriptor, layout, rng), "a" if op == "dsd" else "b"
    got, lookup = check(plan, operands), BlockSparseTables(layout).lookup
    side = "row" if op == "dsd" else "column"
    count = int(getattr(lookup, f"{side}_narrow_slice_count")[0])
    slices = getattr(lookup, f"{side}_narrow_slices").reshape(-1, SLICE_FIELDS)[:count]
    most, wanted = int((slices[:, 3] >> 16).max()), np.float32(0)
    assert most > 4
    across = layout.bitmap.transpose(0, 2, 1) if op == "dds" else layout.bitmap
    for index in range(most):
        kept = np.zeros_like(across)
        for panel, first, length, of_panel, _ in slices.tolist():
            if of_panel % (1 << 16) == index:
                kept[0, panel, np.flatnonzero(across[0, panel])[first : first + length]] = True
        part = BlockSparseLayout(kept.transpose(0, 2, 1) if op == "dds" else kept, 64)
        values = np.ascontiguousarray(operands.arrays[name][:, part.bitmap[layout.bitmap]])
        whole = narrow_plan_of(cuts.NO_SLICES, layout=part, **fields)
        wanted = wanted + check(whole, Operands(part, {**operands.arrays, name: values}))
    assert same_bits(got, wanted)


@gpu
@pytest.mark.parametrize("element", ["s8", "fp8_e4m3"])
def test_8_bit_products_of_cut_narrow_panels_are_right(element):
    """A step has two block columns, and a slice may end with one."""
    layout = uneven("dsd", 64)
    for out in ("f32", "bf16"):
        fields = {"element": element, "out_element": out, "trans_b": True}
        plan = narrow_plan_of(op="dsd", layout=layout, n=80, **fields)
        check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(2)))


@gpu
@every_claim
@every_op
@pytest.mark.parametrize(("n", "batch"), [(56, 12), (1000, 1), (2056, 1)])
def test_claimed_tiles_of_narrow_panels_are_all_computed(slices, op, n, batch):
    """Panels without a block, and whichever CTA computes a tile or adds the slices."""
    layout = many_panels(op, 64)
    plan = narrow_plan_of(slices, op=op, layout=layout, n=n, batch=batch)
    check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(n)))
    shared.further_runs_give_the_same_bits(plan, layout, 5)


@gpu
@pytest.mark.parametrize("slices", [cuts.APART, cuts.LONG_FIRST])
def test_replays_of_narrow_panels_count_again_and_follow_the_mask(slices):
    layout = uneven("dsd", 64, heads=2)
    shared.captured_launches_follow_the_mask(
        narrow_plan_of(slices, op="dsd", layout=layout, n=1040, batch=1), layout
    )


# Selection, without a GPU -------------------------------------------------------------------------


@every_op
@every_block
@pytest.mark.parametrize("n", [8, 64, 1000])
def test_the_workspace_follows_from_the_shape_and_may_be_refused(op, block, n):
    """Four bytes for each sum of a slice, for as many as no layout of the shape exceeds, and the counters."""
    fields = {"op": op, "layout": uneven(op, block), "n": n, "element": "bf16"}
    desc = BlockSparseMatmulDescriptor(**fields)
    slicing = Slicing.of(desc.layout, by_columns=op == "dds")

    def explained(most: int | None) -> Explanation:
        wanted = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": most, **INVARIANT}
        return explain(desc, preference=wanted, device=H200)

    needed = explained(None).workspace_size
    counters = 8 * (1 + slicing.cut * 2 * -(-n // 64))
    assert needed == 4 * slicing.cut * 128 * n + -(-counters // 256) * 256
    assert explained(needed).workspace_size == needed
    assert explained(needed - 1).workspace_size == explained(0).workspace_size == 0
    assert explained(0).chosen == explained(None).chosen


@every_op
def test_only_a_plan_that_may_cut_gives_up_batch_invariance(op):
    def invariant(layout: BlockSparseLayout | BlockSparseShape, **fields: Any) -> bool:
        desc = BlockSparseMatmulDescriptor(
            **{"op": op, "layout": layout, "n": 64, "element": "bf16", **fields}
        )
        return blocks_wgmma(desc).batch_invariant

    assert not invariant(uneven(op, 64))
    assert invariant(uneven(op, 64), element="s8")
    many = BlockSparseLayout(np.ones((1, 134, 134), bool), 64)
    assert invariant(many)  # no row is longer than others
    assert not invariant(BlockSparseLayout(many.bitmap[:, 2:, 2:], 64))  # few tokens would leave CTAs idle
    alike = BlockSparseLayout(np.tile(np.arange(134) < 3, (1, 134, 1)), 64)
    assert not invariant(alike.shape)
    assert invariant(alike.transposed() if op == "dds" else alike)  # so are its rows


def test_an_sdd_has_no_slices():
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=uneven("dsd", 64), n=512, element="bf16")
    found = explain(desc, device=H200)
    assert found.chosen == "blocks_wgmma"
    assert "long panels" not in found.details
    assert found.workspace_size == 0
