"""Transposable 2:4 in array code: every 4x4 tile keeps at most two cells of each row and of each column.

A tile's mask is a uint16: bit = column + 4 * row. A matrix of masks is stored as uint8 [M/8, K/8, 8]: 8x8
cells have four masks, for the quadrants top left, top right, bottom left and bottom right, low bytes first.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from ..vocab import ElementKind, TileRule
from . import canonical
from .codes import PAIRS

Array = np.ndarray[Any, Any]

_INFINITE, _NAN = 2.0**200, 2.0**300
"""Weights of Inf and NaN in the optimal rule. Both exceed any sum of finite elements."""


def tile_rows(matrix: Array) -> Array:
    """The cells of every tile [M/4 * K/4, 16], row by row, tiles row by row."""
    m, k = matrix.shape
    return matrix.reshape(m // 4, 4, k // 4, 4).transpose(0, 2, 1, 3).reshape(m * k // 16, 16)


def choose(bits: Array, element: ElementKind, rule: TileRule) -> Array:
    """The masks uint16 [M/4, K/4] of the tiles of ``bits`` [M, K]; M and K are multiples of 4."""
    m, k = bits.shape
    if rule is TileRule.OPTIMAL:
        masks = _optimal(tile_rows(_weights(bits, element)))
    elif rule is TileRule.CAUSAL_1122:
        masks = _causal(tile_rows(canonical.value_keys(bits, element)))
    else:
        by_value = rule is TileRule.GREEDY_VALUE
        keys = (canonical.value_keys if by_value else canonical.magnitude_keys)(bits, element)
        masks = _greedy(tile_rows(keys))
    return masks.reshape(m // 4, k // 4)


def _descending(keys: Array) -> Array:
    """Indices of the keys [tiles, n] from the largest. Ties are in the order of their indices."""
    top = keys.dtype.type(np.iinfo(keys.dtype).max)
    return np.argsort(top - keys, axis=1, kind="stable")


def _greedy(keys: Array) -> Array:
    """Keep cells from the largest on, if their row and their column hold fewer than two."""
    tiles = np.arange(len(keys))
    masks = np.zeros(len(keys), np.uint16)
    rows, columns = np.zeros((2, len(keys), 4), np.uint8)
    for cell in _descending(keys).T:
        row, column = cell >> 2, cell & 3
        room = (rows[tiles, row] < 2) & (columns[tiles, column] < 2)
        rows[tiles, row] += room
        columns[tiles, column] += room
        masks |= room.astype(np.uint16) << cell.astype(np.uint16)
    return masks


def _causal(keys: Array) -> Array:
    """The rows, in order, keep their largest 1, 1, 2 and 2 cells in columns that hold fewer than two."""
    tiles = np.arange(len(keys))
    masks = np.zeros(len(keys), np.uint16)
    columns = np.zeros((len(keys), 4), np.uint8)
    for row, most in enumerate((1, 1, 2, 2)):
        count = np.zeros(len(keys), np.uint8)
        for column in _descending(keys[:, 4 * row : 4 * row + 4]).T:
            room = (columns[tiles, column] < 2) & (count < most)
            columns[tiles, column] += room
            count += room
            masks |= room.astype(np.uint16) << (4 * row + column).astype(np.uint16)
    return masks


PATTERNS = tuple(
    rows
    for rows in product(range(6), repeat=4)
    if all(sum(column in PAIRS[row] for row in rows) == 2 for column in range(4))
)
"""The 90 ways to keep two cells of each row and of each column: an index into PAIRS for each row."""


def _weights(bits: Array, element: ElementKind) -> Array:
    """|value| as float64, with finite stand-ins for Inf and NaN."""
    with np.errstate(invalid="ignore"):
        wide = np.abs(bits.view(element.dtype).astype(np.float64))
    return np.where(np.isnan(wide), _NAN, np.where(np.isinf(wide), _INFINITE, wide))


def _optimal(weights: Array) -> Array:
    """The first pattern with the largest sum, (row 0 + row 1) + (row 2 + row 3) in float64."""
    first, second = np.array(PAIRS).T
    cells = weights.reshape(-1, 4, 4)
    pairs = cells[:, :, first] + cells[:, :, second]
    best = np.full(len(weights), -1.0)
    masks = np.zeros(len(weights), np.uint16)
    for rows in PATTERNS:
        top, upper, lower, bottom = (pairs[:, row, pair] for row, pair in enumerate(rows))
        total = (top + upper) + (lower + bottom)
        better = total > best
        best[better] = total[better]
        masks[better] = mask_of(rows)
    return masks


def mask_of(pattern: tuple[int, ...]) -> int:
    """The mask of one of PATTERNS."""
    cells = (4 * row + column for row, pair in enumerate(pattern) for column in PAIRS[pair])
    return sum(1 << cell for cell in cells)


# Masks --------------------------------------------------------------------------------------------


def kept(masks: Array) -> Array:
    """Tile masks [M/4, K/4] -> booleans [M, K]."""
    rows, columns = masks.shape
    bits = masks[:, :, None] >> np.arange(16, dtype=np.uint16) & 1
    return bits.astype(bool).reshape(rows, columns, 4, 4).transpose(0, 2, 1, 3).reshape(4 * rows, 4 * columns)


def to_bytes(masks: Array) -> Array:
    """Tile masks uint16 [M/4, K/4] -> the stored uint8 [M/8, K/8, 8]."""
    rows, columns = masks.shape
    quadrants = masks.reshape(rows // 2, 2, columns // 2, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(quadrants, "<u2").view(np.uint8).reshape(rows // 2, columns // 2, 8)


def from_bytes(stored: Array) -> Array:
    """The inverse of :func:`to_bytes`."""
    rows, columns, _ = stored.shape
    quadrants = np.ascontiguousarray(stored).view("<u2").reshape(rows, columns, 2, 2)
    return quadrants.transpose(0, 2, 1, 3).reshape(2 * rows, 2 * columns)


def compress(bits: Array, keep: Array) -> tuple[Array, Array]:
    """Values [M, K/2] and codes [groups] of the cells that ``keep`` [M, K] marks, at most two per group.

    Spare slots take the lowest free positions and hold +0.
    """
    weights = np.array([1, 2, 4, 8], np.uint8)
    groups = keep.reshape(keep.shape[0], keep.shape[1] // 4, 4)
    codes = canonical.codes_of_masks((groups * weights).sum(axis=2, dtype=np.uint8))
    return canonical.gather(np.where(keep, bits, bits.dtype.type(0)), codes), codes
