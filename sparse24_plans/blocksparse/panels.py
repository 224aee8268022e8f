"""Row panels: the block rows that kernels multiply together, and the slices of a panel that is long.

A panel is as long as the number of block columns in which it keeps a block. ``blocks_wgmma`` cuts a panel
that is longer than those of a random layout into slices of its kept columns, which are summed apart and then
added in order. How many there are follows from the layout alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .shape import BlockSparseShape

Array = np.ndarray[Any, np.dtype[np.int32]]
PANEL_ROWS = 128
"""Rows of cells of a row panel, whose blocks kernels multiply together."""
NARROW_PANEL_ROWS = 64
"""Rows of a narrow panel, for ``sdd``, and for small blocks if narrow panels are less work."""
FEW_BLOCK_ROWS = 2
"""Most block rows of a panel for which kernels read the bits of each."""
# The three numbers below say where sums are cut: they define bits, as a format does, and no fit moves them.
_MIN_SLICE_CELLS = 512
"""Cells of k that a slice may always have: an exchange of its sums takes as long as multiplying hundreds."""
_UNCUT_CELLS = 640
"""Cells of k by which a panel may be longer than a slice without being cut, for the same reason."""
MAX_DEVIATIONS = 3.0
"""Standard deviations beyond the mean of random panels up to which no panel is cut."""
SLICE_FIELDS = 5
"""Integers of a slice in the tables: the panel; the first of its kept columns, and how many; the slice's
index in the panel + (the panel's slices << 16); the number of slices of earlier panels that have several."""
MAX_SLICES = 1 << 15
"""Bound of the slices of a panel."""


def head_panels(cells: int, size: int = PANEL_ROWS) -> int:
    """Number of panels of ``size`` cells that cover a head's rows or columns."""
    return -(-cells // size)


def panel_block_rows(shape: BlockSparseShape) -> int:
    """Block rows of a panel."""
    return PANEL_ROWS // shape.block


def narrow_panel_rows(block: int) -> int:
    """Rows of cells of a narrow panel."""
    return max(NARROW_PANEL_ROWS, block)


def narrow_panel_block_rows(shape: BlockSparseShape) -> int:
    """Block rows of a narrow panel."""
    return narrow_panel_rows(shape.block) // shape.block


def has_narrow_slices(shape: BlockSparseShape) -> bool:
    """Whether narrow panels have slices. With blocks of 128 they are the panels themselves."""
    return narrow_panel_rows(shape.block) < PANEL_ROWS


def is_small(shape: BlockSparseShape) -> bool:
    """Whether blocks are so small that the columns of a panel's block rows are looked up together."""
    return panel_block_rows(shape) > FEW_BLOCK_ROWS


def expected_occupancy(shape: BlockSparseShape, lines: int) -> float:
    """Expected fraction of columns in which ``lines`` block rows keep any block, if blocks are kept at
    random."""
    return 1 - (1 - shape.density) ** lines


def expected_columns(shape: BlockSparseShape, across: int, lines: int) -> tuple[float, float]:
    """Mean and standard deviation of the columns of a panel of ``lines`` block rows, of ``across``, if blocks
    are kept at random."""
    occupancy = expected_occupancy(shape, lines)
    return across * occupancy, math.sqrt(across * occupancy * (1 - occupancy))


def _longest(shape: BlockSparseShape, across: int, rows: int) -> int:
    """The most columns that are expected of a panel of ``rows`` rows, if blocks are kept at random."""
    mean, deviation = expected_columns(shape, across, max(rows // shape.block, 1))
    expected = math.ceil(round(mean + MAX_DEVIATIONS * deviation, 6))
    return max(_MIN_SLICE_CELLS // shape.block, expected, -(-across // (MAX_SLICES - 1)))


def slices_of(lengths: Array, longest: int, uncut: int) -> Array:
    """Number of slices of panels of these lengths.

    A panel of up to ``uncut`` columns is one slice. Longer ones have the fewest slices within ``longest``.
    """
    return np.where(lengths <= uncut, 1, -(-lengths // longest))


class Slicing(NamedTuple):
    """How the row panels of a shape are cut that have 128 or 64 rows; its column panels with ``by_columns``.

    With blocks of 16 and 32 a panel has as many slices as either of its narrow panels or itself asks for, and
    its narrow panels have as many. With blocks of 64 each width has slices of its own.
    """

    longest: int
    """Maximum columns of a slice. The slices of one panel have nearly equal lengths."""
    uncut: int
    """Maximum columns of a panel that asks for no cut."""
    panels: int
    """Panels of all heads."""
    more: int
    """Maximum number of slices beyond the first of each panel."""

    @classmethod
    @lru_cache(maxsize=2048)
    def of(cls, shape: BlockSparseShape, *, by_columns: bool, rows: int = PANEL_ROWS) -> Slicing:
        lines, across = shape.block_rows, shape.block_cols
        if by_columns:
            lines, across = across, lines
        wide, narrow = (_longest(shape, across, one) for one in (PANEL_ROWS, NARROW_PANEL_ROWS))
        longest = {PANEL_ROWS: wide, NARROW_PANEL_ROWS: min(wide, narrow)}
        panels = {one: shape.heads * head_panels(lines * shape.block, one) for one in longest}
        asking, cut = (NARROW_PANEL_ROWS, PANEL_ROWS) if is_small(shape) else (rows, rows)
        kept = min(shape.blocks, panels[asking] * across)  # columns of all panels that ask for slices
        beyond = _UNCUT_CELLS // shape.block
        most = -(-across // longest[asking]) - 1 if across > longest[asking] + beyond else 0
        more = min(kept // longest[asking], panels[cut] * most) * (cut // rows)
        return cls(longest[rows], longest[rows] + beyond, panels[rows], more)

    @property
    def cut(self) -> int:
        """The most slices of panels that have several."""
        return min(2 * self.more, self.panels + self.more)

    @property
    def room(self) -> int:
        """The most slices of all panels."""
        return self.panels + self.more


def fill_slices(table: Array, lengths: Array, slices: Array, order: Array) -> int:
    """Fill ``table`` [room, SLICE_FIELDS] with the slices of panels, and return their number.

    ``order`` has the panels, the longest first.
    """
    if slices.max(initial=1) == 1:  # quick, because most layouts have no panel that is cut
        return _write(table, len(order), (order, 0, lengths[order], 1 << 16, 0))
    panel, at, of = _walk(slices)
    first, end = (_start(lengths[panel], of, one) for one in (at, at + 1))
    return _put(table, slices, first, end - first)


class KeptColumns(NamedTuple):
    """The columns in which panels of one width keep blocks, as the tables have them."""

    pointers: Array
    columns: Array


def fill_narrow_slices(
    table: Array, slices: Array, across: int, wide: KeptColumns, narrow: KeptColumns, panel_of: Array
) -> int:
    """Fill ``table`` [.., SLICE_FIELDS] with the slices of narrow panels, and return their number.

    ``panel_of`` names the panel that each is a half of, and ``slices`` the number of a panel's slices. Slices
    of both begin and end at the same columns, so a result's bits do not depend on the width.
    """
    lengths, keys = np.diff(wide.pointers), np.arange(len(panel_of)) * (across + 1)
    panel, at, of = _walk(slices[panel_of])
    places = np.repeat(keys, np.diff(narrow.pointers))
    places += narrow.columns[: len(places)]
    whole, bounds = panel_of[panel], []
    for one in (at, at + 1):
        index = wide.pointers[whole] + _start(lengths[whole], of, one)
        column = np.append(wide.columns, 0)[index].astype(np.int64)
        column[one == of] = across
        bounds.append(np.searchsorted(places, keys[panel] + column) - narrow.pointers[panel])
    return _put(table, slices[panel_of], bounds[0], bounds[1] - bounds[0])


def _start(lengths: Array, slices: Array, at: Array) -> Array:
    """The kept column with which slice ``at`` of panels of these lengths begins."""
    found: Array = at.astype(np.int64) * lengths // slices
    return found


def _walk(slices: Array) -> tuple[Array, Array, Array]:
    """For each slice: its panel, its index in the panel, and the panel's number of slices."""
    ends = np.cumsum(slices)
    at = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - slices, slices)
    return np.repeat(np.arange(len(slices)), slices), at, np.repeat(slices, slices)


def _put(table: Array, slices: Array, first: Array, count: Array) -> int:
    """Write slices, given panel by panel. Panels with the longest slices come first."""
    panel, at, of = _walk(slices)
    longest = np.maximum.reduceat(count, np.cumsum(slices) - slices) if len(slices) else slices
    order = np.argsort(-longest[panel], kind="stable")
    in_cut = np.where(slices > 1, slices, 0)
    fields = (panel, first, count, at | of << 16, (np.cumsum(in_cut) - in_cut)[panel])
    return _write(table, len(panel), tuple(one[order] for one in fields))


def _write(table: Array, count: int, fields: tuple[Array | int, ...]) -> int:
    for column, values in enumerate(fields):
        table[:count, column] = values
    table[count:] = 0
    return count
