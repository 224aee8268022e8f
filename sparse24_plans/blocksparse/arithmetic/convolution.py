"""Convolutions with block-sparse filters in NumPy, one block row at a time.

The pixels that a block row's kept blocks read are gathered side by side. This makes one product of two dense
matrices, whose sums run over kept blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..convolution import Axis, Geometry
from ..lookup_tables import LookUp
from ..shape import BlockSparseShape
from .products import Multiply, in_blocks, side_by_side

Array = np.ndarray[Any, Any]


class FilterRow(NamedTuple):
    """The kept blocks that the results of some channels and one phase sum over, in the order of the sums."""

    phase: int
    cells: slice
    """Channels of the results."""
    taps: Array
    across: Array
    """Block of the read image's channels, for each kept block."""
    places: Array
    """Place among the values, for each kept block."""


def filter_rows(
    shape: BlockSparseShape, tables: LookUp, geometry: Geometry, gradient: tuple[int, int] | None = None
) -> Iterator[FilterRow]:
    """The filter rows of a convolution, or of its input's gradient [height, width] = ``gradient``.

    Phases without a pixel, which strides beyond the image have, are left out.
    """
    taps, block = geometry.taps, shape.block
    if gradient is None:
        for at in range(shape.block_rows):
            part = slice(tables.row_pointers[at], tables.row_pointers[at + 1])
            across, tap = np.divmod(tables.columns[part], taps)
            places = np.arange(part.start, part.stop)
            yield FilterRow(0, slice(at * block, (at + 1) * block), tap, across, places)
        return
    for at in range(shape.block_cols // taps):
        part = slice(tables.column_pointers[at * taps], tables.column_pointers[(at + 1) * taps])
        columns = np.arange(at * taps, (at + 1) * taps)
        tap = np.repeat(np.arange(taps), np.diff(tables.column_pointers)[columns])
        cells = slice(at * block, (at + 1) * block)
        rows, places = tables.column_rows[part], tables.column_order[part]
        h, w = geometry
        of_rows, of_columns = h.phase_of(tap // w.taps), w.phase_of(tap % w.taps)
        for row, column in product(*map(range, map(min, (h.divide, w.divide), gradient))):
            read = (of_rows == row) & (of_columns == column)
            yield FilterRow(row * w.divide + column, cells, tap[read], rows[read], places[read])


class Pixels:
    """Images, which are zero outside, and the pixels that results read."""

    def __init__(self, images: Array, geometry: Geometry) -> None:
        """``images`` [N, height, width, channels], float32."""
        self._images, self._geometry = images, geometry

    def gathered(self, row: FilterRow, block: int) -> Array:
        """Gather the pixels that a filter row reads: [1, pixels, blocks of the filter row * block]."""
        found = [
            self._at(row.phase, int(tap), slice(at * block, (at + 1) * block))
            for tap, at in zip(row.taps, row.across, strict=True)
        ]
        pixels = len(self._images) * self._geometry.pixels
        return np.concatenate([np.empty((pixels, 0), np.float32), *found], axis=1)[None]

    def _at(self, phase: int, tap: int, channels: slice) -> Array:
        offsets = self._geometry.offsets(phase, tap)
        assert offsets is not None
        (h, rows), (w, columns) = map(_inside, self._geometry, offsets)
        sides = len(self._images), self._geometry.h.results, self._geometry.w.results
        found = np.zeros((*sides, channels.stop - channels.start), np.float32)
        found[:, h, w] = self._images[:, rows, columns, channels]
        return found.reshape(-1, found.shape[-1])


def _inside(axis: Axis, offset: int) -> tuple[slice, slice]:
    """The results that read pixels of the image at an offset, and these pixels."""
    at, stride = axis.lower + offset, axis.stride
    first = max(0, -(at // stride))
    end = max(first, min(axis.results, -((at - axis.size) // stride)))
    return slice(first, end), slice(at + stride * first, at + stride * end, stride)


def of_results(
    row: FilterRow, values: Array, pixels: Pixels, multiply: Multiply, *, transposed: bool
) -> Array:
    """Return the sums [pixels, block] of a filter row of ``values`` [blocks, block, block]."""
    tiles = values[None, row.places]
    joined = side_by_side(tiles.swapaxes(2, 3) if transposed else tiles)
    sums: Array = multiply(joined, pixels.gathered(row, tiles.shape[2]).swapaxes(1, 2))[0].T
    return sums


def of_filter(row: FilterRow, dy: Array, pixels: Pixels, multiply: Multiply) -> Array:
    """Return a row's blocks [blocks, block, block] of the filter's gradient from ``dy`` [pixels, K]."""
    found = dy[:, row.cells]
    blocks: Array = in_blocks(multiply(found.T[None], pixels.gathered(row, found.shape[1])))[0]
    return blocks
