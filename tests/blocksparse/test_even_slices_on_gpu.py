"""Every panel is cut into as many slices where few CTAs would leave others idle: results, bits, choices."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure_block_schedules import running
from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    explain,
)
from sparse24_plans.blocksparse import guarantees, limits
from sparse24_plans.blocksparse.schedules import blocks_wgmma as schedules
from sparse24_plans.blocksparse.schedules import blocks_wgmma_cuts as cuts

from ..sample_devices import H200
from ..support import same_bits
from . import products_on_gpu as shared
from .problems import Operands, random_operands
from .products_on_gpu import TRANSPOSITIONS, gpu
from .sample_layouts import random_layout
from .test_products import check

every_block = pytest.mark.parametrize("block", [16, 32, 64, 128])
every_op = pytest.mark.parametrize("op", ["dsd", "dds"])
PARTS = (2, 3, 8)


def plan_of(parts: int, tile: tuple[int, int] = (64, 64), **fields: Any) -> BlockSparseMatmulPlan:
    """A plan that cuts every panel into ``parts`` slices, or none with 1."""
    desc = BlockSparseMatmulDescriptor(**{"n": 72, "batch": 2, "element": "bf16", **fields})
    rows, tokens = max(tile[0], desc.layout.block), tile[1]
    cut = cuts.Cut(cuts.tile_of(rows, tokens), cluster_slices=parts)
    spare = (1 << 33) + 1000 * rows + 10 * tokens + parts  # bytes: plans are cached
    wanted = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": spare}
    with running(cut), mock.patch.object(limits, "dense_wins", return_value=None):
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=wanted)
    assert f"tiles of {rows} rows x {tokens} tokens" in plan.explain().details
    assert (f"every panel is cut, and summed by {parts} CTAs" in plan.explain().details) == (parts > 1)
    return plan


@gpu
@every_op
@every_block
@pytest.mark.parametrize("transposed", TRANSPOSITIONS)
def test_products_are_right(op, block, transposed):
    """Heads, rows that keep nothing, panels of fewer columns than slices, and n round the sizes of tiles."""
    layout = random_layout(block=block)
    for parts, n in zip((*PARTS, *PARTS), (8, 63, 72, 130, 257, 600), strict=True):
        plan = plan_of(parts, op=op, layout=layout, n=n, trans_a=transposed[0], trans_b=transposed[1])
        check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(n)))


TILES = [
    *itertools.product((16, 32), ((64, 128), (64, 256), (128, 128), (128, 256))),
    *itertools.product((64, 128), ((128, 64), (128, 128), (128, 256))),
]
"""Blocks and tiles beside that of 64 x 64."""


@gpu
@every_op
@pytest.mark.parametrize(("block", "tile"), TILES)
def test_products_of_every_tile_are_right(op, block, tile):
    layout = random_layout(block=block)
    for parts, n in zip(PARTS, (300, 77, 256), strict=True):
        plan = plan_of(parts, tile, op=op, layout=layout, n=n)
        check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(n)))


@gpu
@every_op
@every_block
@pytest.mark.parametrize("parts", PARTS)
def test_bits_are_those_of_products_of_slices_in_order(op, block, parts):
    """All rows keep the same columns, so that panels of any width have the same slices."""
    rng = np.random.default_rng(parts)
    columns = np.flatnonzero(rng.random(2048 // block) < 0.4)
    fields = {"op": op, "n": 72, "out_element": "f32"}

    def layout_of(kept: np.ndarray) -> BlockSparseLayout:
        bitmap = np.zeros((1, 256 // block, 2048 // block), np.bool_)
        bitmap[..., kept] = True
        return BlockSparseLayout(bitmap.transpose(0, 2, 1) if op == "dds" else bitmap, block)

    whole = layout_of(columns)
    plan = plan_of(parts, layout=whole, **fields)
    operands = random_operands(plan.descriptor, whole, rng)
    wanted, name = np.float32(0), "a" if op == "dsd" else "b"
    for part in range(parts):
        kept = columns[part * len(columns) // parts : (part + 1) * len(columns) // parts]
        layout = layout_of(kept)
        of_slice = layout.bitmap[whole.bitmap]
        arrays = {**operands.arrays, name: np.ascontiguousarray(operands.arrays[name][:, of_slice])}
        wanted = wanted + check(plan_of(1, layout=layout, **fields), Operands(layout, arrays))
    assert same_bits(check(plan, operands), wanted)


@gpu
@every_block
def test_bits_of_another_run(block):
    """Stages that are overwritten with sums are not read any more, and no CTA reads sums too early."""
    layout = random_layout(block=block)
    shared.further_runs_give_the_same_bits(plan_of(3, op="dsd", layout=layout, n=200), layout, 20)


@gpu
@every_op
@every_block
def test_several_waves_of_clusters_are_right(op, block):
    """A cluster begins when another has ended, with its barriers and its shared memory anew."""
    bitmap = np.random.default_rng(block).random((1, 2560 // block, 1024 // block)) < 0.3
    bitmap[:, 3] = True
    layout = BlockSparseLayout(bitmap.transpose(0, 2, 1) if op == "dds" else bitmap, block)
    for parts in (2, 8):
        plan = plan_of(parts, op=op, layout=layout, n=250)
        cut = cuts.Cut(cuts.tile_of(max(64, block), 64), cluster_slices=parts)
        assert cut.cluster_waves(plan.descriptor) > 1
        check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(parts)))
        shared.further_runs_give_the_same_bits(plan, layout, 5)


@gpu
@every_block
def test_replays_follow_the_mask(block):
    layout = random_layout(block=block)
    shared.captured_launches_follow_the_mask(plan_of(2, op="dsd", layout=layout, batch=1), layout)


@gpu
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("element", ["s8", "fp8_e4m3"])
def test_8_bit_products_are_right(block, element):
    layout = random_layout(block=block)
    for out in ("f32", "bf16"):
        plan = plan_of(3, op="dsd", layout=layout, n=80, element=element, out_element=out, trans_b=True)
        check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(2)))


@gpu
@every_op
@shared.every_epilogue
def test_epilogues_follow_the_last_slice(op, epilogue):
    layout = random_layout(block=64)
    plan = plan_of(2, op=op, layout=layout, n=200, epilogue=epilogue, alpha=0.25)
    check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(3)))


# Selection, without a GPU -------------------------------------------------------------------------

FEW_ROWS = random_layout(heads=1, rows=32, cols=512, block=64, density=0.25)


def details_of(preference: Any = None, **fields: Any) -> str:
    desc = BlockSparseMatmulDescriptor(
        **{"op": "dsd", "layout": FEW_ROWS, "n": 64, "element": "bf16", **fields}
    )
    wanted = {"prefer_backend": "blocks_wgmma", **(preference or {})}
    return explain(desc, preference=wanted, device=H200).details


def test_few_tiles_of_long_panels_are_cut():
    assert "every panel is cut, and summed by" in details_of()


@pytest.mark.parametrize(
    ("fields", "preference"),
    [
        ({"n": 8192}, {}),
        ({"layout": random_layout(heads=1, rows=32, cols=512, block=64, density=0.002)}, {}),
        ({}, {"require": {"batch_invariant": True}}),
        ({"op": "sdd"}, {}),
    ],
    ids=["many tiles", "short panels", "batch invariance", "sdd"],
)
def test_others_are_not(fields, preference):
    assert "every panel is cut" not in details_of(preference, **fields)


def test_clusters_exchange_sums_without_a_workspace():
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=FEW_ROWS, n=64, element="bf16")
    wanted = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": 0}
    found = explain(desc, preference=wanted, device=H200)
    assert "every panel is cut" in found.details
    assert found.workspace_size == 0


@every_block
@pytest.mark.parametrize("batch", [1, 3])
def test_slices_are_all_computed_at_once(block, batch):
    """As many as CTAs that run at once, and no more than a panel has block columns."""
    for rows, cols, n in ((256, 4096, 8), (1152, 512, 200), (8448, 256, 64), (4096, 65536, 1000)):
        shape = BlockSparseShape(
            heads=1, rows=rows, cols=cols, block=block, blocks=rows * cols // block**2 // 9
        )
        desc = BlockSparseMatmulDescriptor(op="dsd", layout=shape, n=n, batch=batch, element="bf16")
        cut = cuts.Cut(schedules.fitting(128, 64, 2, 1))
        for one in cut.evenly(desc):
            assert 2 <= one.cluster_slices <= cols // block
            ctas = H200.multiprocessors * one.schedule.ctas_per_sm
            assert one.cluster_slices * one.schedule.work_tiles(desc) <= ctas


@given(
    block=st.sampled_from([16, 32, 64, 128]),
    panels=st.integers(1, 140),
    across=st.integers(1, 400),
    share=st.floats(0.001, 1),
    n=st.integers(0, 2000),
    batch=st.integers(1, 3),
    is_known=st.booleans(),
    op=st.sampled_from(["dsd", "dds"]),
)
def test_what_is_batch_invariant_is_never_cut(block, panels, across, share, n, batch, is_known, op):
    """For any n and batch, which a guarantee doesn't know."""
    rows, cols = 128 * panels, 128 * across
    sides = {"rows": rows, "cols": cols} if op == "dsd" else {"rows": cols, "cols": rows}
    kept = max(int(share * rows * cols / block**2), 1)
    fields = {"op": op, "layout": BlockSparseShape(heads=1, block=block, blocks=kept, **sides)}
    longest = {"longest_panel": min(max(cols // block // 8, 1), kept)} if is_known else {}
    desc = BlockSparseMatmulDescriptor(**fields, **longest, n=n, batch=batch, element="bf16")
    cut = cuts.as_run(desc, H200.multiprocessors)
    if guarantees.blocks_wgmma(desc).batch_invariant:
        assert cut.cluster_slices == 1
        assert cut.slices in (cuts.NO_SLICES, cuts.LONG_FIRST)
    assert cuts.as_run(desc, H200.multiprocessors, invariant=True).cluster_slices == 1
    assert cuts.as_run(desc, H200.multiprocessors, 0).workspace == 0


@every_block
def test_a_long_panel_may_have_several_waves_of_clusters(block):
    """Four at most. Batch invariance is given up for such layouts, whatever ``n`` is."""
    shape = BlockSparseShape(
        heads=1, rows=5120, cols=16384, block=block, blocks=5120 * 16384 // block**2 // 20
    )
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=shape, n=64, element="bf16")
    for longest in (0, 16384 // block):
        known = desc.model_copy(update={"longest_panel": longest})
        found = [one.cluster_waves(known) for one in cuts.Cut(cuts.NARROW).evenly(known)]
        assert found
        assert (max(found) > 1) == (longest > 0)
        assert max(found) <= 4
        more = known.model_copy(update={"n": 257})
        assert all(one.cluster_waves(more) <= 1 for one in cuts.Cut(cuts.NARROW).evenly(more))
        assert not guarantees.blocks_wgmma(known).batch_invariant


def test_clusters_beyond_those_resident_begin_a_wave():
    """32 clusters of four take longer than as many of three, of which an H200 runs all: 82 us, not 59."""
    shape = BlockSparseShape(heads=1, rows=14336, cols=4096, block=32, blocks=14336 * 4096 // 32**2 // 2)
    desc = BlockSparseMatmulDescriptor(op="dds", layout=shape, n=256, longest_panel=433, element="bf16")
    found = [cuts.Cut(cuts.tile_of(128, 256), cluster_slices=parts) for parts in (3, 4)]
    assert [one.cluster_waves(desc) > 1 for one in found] == [False, True]
    three, four = cuts.cuts_us(desc, found)
    assert four > three


def test_plans_that_give_up_no_batch_invariance_are_never_cut():
    """Whatever n and the batch are: a guarantee names neither."""
    for block_rows in (132, 133):
        shape = BlockSparseShape(heads=1, rows=64 * block_rows, cols=65536, block=64, blocks=128 * 200)
        desc = BlockSparseMatmulDescriptor(op="dsd", layout=shape, n=8, element="bf16")
        assert cuts.may_be_evened(desc) == (block_rows == 132)
        for one in (cuts.NARROW, schedules.fitting(128, 64, 2, 1)):
            assert bool(cuts.Cut(one).evenly(desc)) == (block_rows == 132)
