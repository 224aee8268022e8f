"""The expected length of the longest panel, held against layouts: of the kinds that records measure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.random_blocks import Cell
from sparse24_plans import BlockSparseLayout, BlockSparseMatmulDescriptor
from sparse24_plans.blocksparse.panels import MAX_DEVIATIONS, expected_columns
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cost import expected_longest_panel, mean_panel, work
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import has_long_panel

from .sample_layouts import random_layout

BLOCKS = (16, 32, 64, 128)


def cells(pattern: str) -> st.SearchStrategy[Cell]:
    """Products of matrices of 8 to 48 panels each way."""
    sides = st.integers(8, 48).map(lambda panels: 128 * panels)
    made = st.builds(
        Cell,
        op=st.just("dsd"),
        m=sides,
        k=sides,
        n=st.just(64),
        block=st.sampled_from(BLOCKS),
        density=st.floats(0.02, 0.3),
        pattern=st.just(pattern),
        seed=st.integers(0, 2**31),
    )
    return made.filter(lambda cell: bool(cell.bitmap().any()))


def check(cell: Cell, low: float, high: float) -> None:
    """The expected length lies between these shares of the true one, give or take three columns."""
    kept, desc = cell.bitmap(), cell.descriptor(cell.layout())
    for rows in {cell.block, max(64, cell.block), 128}:
        lines = rows // cell.block
        longest = max(kept[at : at + lines].any(axis=0).sum() for at in range(0, len(kept), lines))
        expected = expected_longest_panel(desc, rows)
        assert low * longest - 3 <= expected <= high * longest + 3, rows


def deviations(cell: Cell) -> float:
    """Standard deviations by which the longest panel is longer than the mean of random ones."""
    desc = cell.descriptor(cell.layout())
    mean, deviation = expected_columns(desc.layout, desc.layout.block_cols, 128 // cell.block)
    return (desc.longest_panel - mean) / deviation


@given(cells("uneven"))
def test_a_long_row_makes_every_panel_long_that_has_it(cell):
    assume(deviations(cell) > MAX_DEVIATIONS and has_long_panel(cell.descriptor(cell.layout())))
    check(cell, 0.5, 2)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_one_long_row_shows_in_its_panels_length(block, share):
    kept = random_layout(seed=block, rows=64, cols=200, block=block, density=0.04).bitmap.copy()
    kept[0, 5, : int(200 * share)] = True
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=BlockSparseLayout(kept, block), n=8, element="bf16")
    assert expected_longest_panel(desc, block) == pytest.approx(200 * share, rel=0.1)


@given(cells("random"))
def test_panels_of_random_rows_exceed_the_mean_by_equal_deviations(cell):
    assume(deviations(cell) <= MAX_DEVIATIONS)
    check(cell, 0.5, 2)


@given(cells("banded"))
def test_panels_of_a_band_are_no_longer_than_the_longest(cell):
    check(cell, 1, float("inf"))
    desc = cell.descriptor(cell.layout())
    assert all(expected_longest_panel(desc, rows) <= desc.longest_panel for rows in (cell.block, 128))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [64, 128])
def test_blocks_that_are_kept_close_together_are_less_work(block, rows):
    """A band's panels have fewer columns than those of random blocks: a tenth of it in panels of 128 rows."""
    band = Cell("dsd", 4096, 4096, 256, block, 0.1, "banded")
    desc = band.descriptor(band.layout())
    apart = desc.model_copy(update={"longest_panel": 0})
    steps, steps_apart = (work(one, rows, 128, float("inf"), 132)[0] for one in (desc, apart))
    assert steps <= steps_apart
    if block < 64:
        assert desc.longest_panel < mean_panel(desc) / 2
        assert steps < 0.8 * steps_apart
    scattered = replace(band, pattern="random")
    known = scattered.descriptor(scattered.layout())
    assert work(known, rows, 128, float("inf"), 132)[0] >= steps_apart


def test_a_slice_bounds_the_work_of_a_long_panel():
    cell = Cell("dsd", 4096, 8192, 64, 16, 0.05, "uneven", seed=3)
    desc = cell.descriptor(cell.layout())
    assert has_long_panel(desc)
    whole, cut = (work(desc, 64, 64, most, 264)[0] for most in (float("inf"), 64.0))
    assert cut < whole / 2
