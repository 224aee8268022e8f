"""Slices of row panels: together they are the panels, and their number is bound by the shape."""

from __future__ import annotations

import re
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    BlockSparseTables,
)
from sparse24_plans.blocksparse.backends.blocks_wgmma import defines
from sparse24_plans.blocksparse.panels import SLICE_FIELDS, Slicing
from sparse24_plans.blocksparse.schedules.blocks_wgmma import BlocksWgmmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import LONG_FIRST, Cut

from ..kernels.index_functions import Table, check_tables, ptx_of

Slice = tuple[int, list[int], int, int]
"""The panel, the columns, the index in the panel, and the place in the workspace."""


@st.composite
def long_rows(draw: st.DrawFn) -> BlockSparseLayout:
    """Layouts of which some block rows and columns are much longer than the mean."""
    block = draw(st.sampled_from([16, 32, 64, 128]))
    heads, rows, cols = (draw(st.integers(1, most)) for most in (2, 9, 3000 // block))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = rng.random((heads, rows, cols)) < draw(st.sampled_from([0.0, 0.02, 0.1]))
    share = draw(st.sampled_from([0.0, 0.1, 0.5]))
    kept |= (rng.random((heads, rows, 1)) < share) & (rng.random(kept.shape) < 0.8)
    return BlockSparseLayout(kept.transpose(0, 2, 1) if draw(st.booleans()) else kept, block)


def slices_of(layout: BlockSparseLayout, *, by_columns: bool, rows: int = 128) -> list[Slice]:
    """The slices in the tables, in their order, with the columns that they stand for."""
    lookup, name = BlockSparseTables(layout).lookup, "column" if by_columns else "row"
    width = "" if rows == 128 else "narrow_"
    table = getattr(lookup, f"{name}_{width}slices").reshape(-1, SLICE_FIELDS)
    count = int(getattr(lookup, f"{name}_{width}slice_count")[0])
    assert not table[count:].any()
    columns, found = kept_columns(layout, by_columns=by_columns, rows=rows), []
    for panel, first, length, index, place in table[:count].tolist():
        found.append((panel, columns[panel][first : first + length], index % (1 << 16), place))
        assert len(found[-1][1]) == length
    for panel, _, _, _ in found:  # all of a panel say how many there are, and where they begin
        mine = table[:count][table[:count, 0] == panel]
        assert set(mine[:, 3] >> 16) == {len(mine)}
        assert len(set(mine[:, 4])) == 1
    return found


def kept_columns(layout: BlockSparseLayout, *, by_columns: bool, rows: int) -> list[list[int]]:
    """The columns in which each panel keeps a block."""
    kept = layout.bitmap.transpose(0, 2, 1) if by_columns else layout.bitmap
    size = rows // layout.shape.block
    return [
        np.flatnonzero(kept[head, line : line + size].any(0)).tolist()
        for head in range(kept.shape[0])
        for line in range(0, kept.shape[1], size)
    ]


@given(long_rows(), st.booleans(), st.sampled_from([64, 128]))
def test_slices_of_a_panel_are_its_columns_in_order(layout, by_columns, rows):
    rows = max(rows, layout.shape.block)
    found = slices_of(layout, by_columns=by_columns, rows=rows)
    for panel, columns in enumerate(kept_columns(layout, by_columns=by_columns, rows=rows)):
        mine = [one for one in found if one[0] == panel]
        assert [index for _, _, index, _ in mine] == list(range(len(mine)))
        assert [column for _, part, _, _ in mine for column in part] == columns


@given(long_rows(), st.booleans(), st.sampled_from([64, 128]))
def test_slices_are_bounded_and_nearly_equal(layout, by_columns, rows):
    rows = max(rows, layout.shape.block) if layout.shape.block >= 64 else 128
    slicing = Slicing.of(layout.shape, by_columns=by_columns, rows=rows)
    found = slices_of(layout, by_columns=by_columns, rows=rows)
    panels = [panel for panel, _, _, _ in found]
    lengths = [len(columns) for _, columns, _, _ in found]
    for panel in set(panels):
        mine = [length for one, length in zip(panels, lengths, strict=True) if one == panel]
        assert max(mine) - min(mine) <= 1
        assert max(mine) <= (slicing.longest if len(mine) > 1 else slicing.uncut)
    assert all(before + 1 >= after for before, after in pairwise(lengths))
    lookup, side = BlockSparseTables(layout).lookup, "column" if by_columns else "row"
    counts = [panels.count(panel) for panel in range(slicing.panels)]
    if rows == 128:
        assert getattr(lookup, f"{side}_panel_slices").tolist() == counts
    of_width = f"{side}_{'' if rows == 128 else 'narrow_'}"
    if layout.shape.block >= 64:
        order, long_panels = (getattr(lookup, of_width + name) for name in ("panels", "long_panels"))
        assert [counts[panel] > 1 for panel in order] == [at < long_panels for at in range(len(order))]


@given(long_rows(), st.booleans(), st.sampled_from([64, 128]))
def test_no_layout_has_more_slices_than_its_shape_allows(layout, by_columns, rows):
    """The tables and the workspace have room for so many."""
    rows = max(rows, layout.shape.block)
    slicing, found = (
        Slicing.of(layout.shape, by_columns=by_columns, rows=rows),
        slices_of(layout, by_columns=by_columns, rows=rows),
    )
    panels = [panel for panel, _, _, _ in found]
    assert len(panels) - len(set(panels)) <= slicing.more
    cut = [one for one in found if panels.count(one[0]) > 1]
    places = [place + index for _, _, index, place in cut]
    assert sorted(places) == list(range(len(cut)))
    assert len(cut) <= slicing.cut


def test_narrow_panels_of_blocks_of_64_have_slices_of_their_own():
    """Two long rows of a panel are cut by their own lengths of 43 and 68 columns, and the panel by its 88."""
    kept = np.zeros((1, 8, 128), bool)
    kept[0, 2, ::3], kept[0, 3, 60:] = True, True
    layout = BlockSparseLayout(kept, 64)
    narrow, wide = (
        [(panel, len(columns)) for panel, columns, _, _ in found if columns]
        for found in (slices_of(layout, by_columns=False, rows=rows) for rows in (64, 128))
    )
    assert narrow == [(3, 22), (3, 23), (3, 23), (2, 21), (2, 22)]
    assert wide == [(1, 29), (1, 29), (1, 30)]


@given(long_rows(), st.booleans())
def test_narrow_panels_are_cut_where_their_panel_is(layout, by_columns):
    """A result's bits are therefore the same for both widths."""
    if layout.shape.block > 32:
        return
    wide = slices_of(layout, by_columns=by_columns)
    of_head = -(-(layout.shape.cols if by_columns else layout.shape.rows) // 64)
    for panel, columns, index, _ in slices_of(layout, by_columns=by_columns, rows=64):
        head, line = divmod(panel, of_head)
        whole = head * -(-of_head // 2) + line // 2
        (theirs,) = (part for one, part, at, _ in wide if (one, at) == (whole, index))
        assert set(columns) <= set(theirs)


def test_a_random_layout_has_hardly_any_panel_that_is_cut():
    for block, density in ((16, 0.05), (32, 0.1), (64, 0.1), (128, 0.25)):
        kept = np.random.default_rng(block).random((1, 8192 // block, 8192 // block)) < density
        found = slices_of(BlockSparseLayout(kept, block), by_columns=False)
        assert len(found) <= 64 * 1.2


def places(tiles: int, raster_tiles: int, slices: int, first: int) -> list[tuple[int, int]]:
    """Token tile and slice of each work tile: the first slices with every tile, then group by group."""
    groups = [range(tiles)[at : at + raster_tiles] for at in range(0, tiles, raster_tiles)]
    found = [(tile, slice_) for slice_ in range(first) for tile in range(tiles)]
    return found + [(tile, slice_) for group in groups for slice_ in range(first, slices) for tile in group]


def claiming() -> dict[str, int]:
    """Macros with which clusters claim work tiles."""
    shape = BlockSparseShape(heads=1, rows=4096, cols=4096, block=64, blocks=400)
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=shape, n=4096, element="bf16")
    return defines(desc, Cut(BlocksWgmmaSchedule.of(desc, 132), LONG_FIRST), ())


def test_claim_is_released_by_arrival_that_waits_for_it():
    """The arrival's address depends on the claim, since an arrival waits for no load."""
    text = ptx_of("blocksparse/blocks_wgmma.cu", claiming())
    claims = re.findall(r"shfl\.sync\.idx\.b32\s+(%r\d+)", text)
    found = {to for to, of in re.findall(r"shr\.u32\s+(%r\d+), (%r\d+), 31;", text) if of in claims}
    for to, one, other in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (%r\d+);", text):
        found |= {to} if {one, other} & found else set()
    for to, one in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), \d+;", text):
        found |= {to} if one in found else set()
    assert found & {*re.findall(r"mbarrier\.arrive\S* _, \[(%r\d+)\]", text)}


def test_the_kernel_takes_work_tiles_in_the_models_order():
    tables, sizes = [], [(1, 1), (7, 7), (7, 3), (8, 4), (5, 1), (9, 20)]
    for (tiles, raster_tiles), first in product(sizes, (0, 1, 4, 6)):
        want = places(tiles, raster_tiles, 6, first)
        assert len(set(want)) == len(want) == 6 * tiles
        call = f"TileScheduler::place_of(i0, {tiles}, {raster_tiles}, 6, {first})"
        tables.append(Table(f"{call}.tile", [tile for tile, _ in want]))
        tables.append(Table(f"{call}.position", [position for _, position in want]))
    check_tables("blocksparse/blocks_wgmma/tile_scheduler.cuh", claiming(), *tables)


def test_rows_past_head_read_no_bias_behind_its_last_row():
    """The last panel of small blocks may end within a tile of 64 rows, behind which a bias may end, too."""
    ends, row = np.arange(16, 144, 16), np.arange(72)
    inside = np.minimum(row[:, None], ends - 1)
    tables = [Table(f"bias_index<{block}>(i0, 16 * (i1 + 1))", inside) for block in (16, 32)]
    tables += [Table(f"bias_index<{block}>(i0, 64)", row[:64]) for block in (64, 128)]
    check_tables("blocksparse/tile_epilogue.cuh", {}, *tables)


@pytest.mark.parametrize("density", [0.9, 1.0])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_no_panel_is_cut_where_all_are_nearly_full(block, density):
    side = 4096 // block
    shape = BlockSparseShape(heads=1, rows=4096, cols=4096, block=block, blocks=int(density * side**2))
    for rows in {max(64, block), 128}:
        assert Slicing.of(shape, by_columns=False, rows=rows).more == 0
        assert Slicing.of(shape, by_columns=False, rows=rows).cut == 0
