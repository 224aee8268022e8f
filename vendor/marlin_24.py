"""The tensors of Sparse-Marlin's kernel: ``marlin-24`` of compressed-tensors, ``Layer_2_4`` of Sparse-Marlin.

W [M, K] is 2:4, of integers q of 4 or 8 bits, and stored transposed, in three tensors:

- values, int32 [K/32, M*bits/2]: the kept q + 2^(bits-1), the first in the lowest bits. A tile is 16 of the
  K/2 kept values of 64 rows; bits of a row in it are ``tile 2, parity 1, half 1, j 2``, of a value ``high 1,
  lane 2, low 1``, the highest bits first;
- metadata, int16 words of four nibbles, the word E[r, c] for row r and the groups from 4c on. It is CUTLASS's
  order with rows in blocks of 64: row bits 5 to 0 become 1, 5, 4, 3, 0, 2; then the lowest bits of row and
  word column change places; then pairs of word columns are stored column by column. compressed-tensors calls
  the shape [K/32, 2M], Sparse-Marlin [M, K/16];
- scales, f16 [groups, M]. With more groups than one, every eight rows are in the order 0 4 1 5 2 6 3 7.

In groups of 128, compressed-tensors takes half of K for K there, and so leaves the scales of K = 256 in
order, where Sparse-Marlin and the kernel do not.
"""

from __future__ import annotations

from typing import Any

ROWS, COLUMNS = 64, 32
"""M and K are multiples of these."""
GROUP = 128
"""Columns that share a scale, unless the whole row does."""
AMBIGUOUS_K = 2 * GROUP
"""K whose scales in groups the writers store in different orders."""

# A tile's axes: M is (block, tile, parity, half, j), K/2 is (step, high, lane, low).
_TILE = (64, (4, 2, 2, 4)), (16, (2, 4, 2))
_VALUES = {4: (5, 0, 1, 2, 7, 4, 8, 3, 6), 8: (5, 0, 1, 2, 7, 4, 3, 8, 6)}
# Axes of E: r is (block, 8, 2, 2, 2), c is (pair, 2).
_WORDS = (5, 0, 3, 1, 4, 6, 2)


def _tiled(m: int, kept: int) -> tuple[int, ...]:
    (rows, of_rows), (columns, of_columns) = _TILE
    return (m // rows, *of_rows, kept // columns, *of_columns)


def reorder_values(values: Any, bits: int) -> Any:
    """Kept values [M, K/2], one a cell -> the same values, flat, as they are stored."""
    return values.reshape(_tiled(*values.shape)).transpose(_VALUES[bits]).reshape(-1)


def restore_values(stored: Any, m: int, kept: int, bits: int) -> Any:
    """The inverse of :func:`reorder_values`: [M, K/2]."""
    return _untransposed(stored, _tiled(m, kept), _VALUES[bits]).reshape(m, kept)


def reorder_words(words: Any) -> Any:
    """E [M, K/16] -> the same words, flat, as they are stored."""
    return words.reshape(_blocks(*words.shape)).transpose(_WORDS).reshape(-1)


def restore_words(stored: Any, m: int, columns: int) -> Any:
    """The inverse of :func:`reorder_words`: E [M, K/16]."""
    return _untransposed(stored, _blocks(m, columns), _WORDS).reshape(m, columns)


def _blocks(m: int, columns: int) -> tuple[int, ...]:
    return (m // 64, 8, 2, 2, 2, columns // 2, 2)


def reorder_scales(scales: Any) -> Any:
    """Scales [M, groups] -> [groups, M] as they are stored."""
    m, groups = scales.shape
    stored = scales.T
    if groups > 1:
        stored = stored.reshape(groups, m // 8, 2, 4).swapaxes(2, 3).reshape(groups, m)
    return stored


def restore_scales(stored: Any) -> Any:
    """The inverse of :func:`reorder_scales`: [M, groups]."""
    groups, m = stored.shape
    if groups > 1:
        stored = stored.reshape(groups, m // 8, 4, 2).swapaxes(2, 3).reshape(groups, m)
    return stored.T


def _untransposed(stored: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    inverse = tuple(order.index(axis) for axis in range(len(order)))
    return stored.reshape(tuple(shape[axis] for axis in order)).transpose(inverse)
