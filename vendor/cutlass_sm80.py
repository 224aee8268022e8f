"""The order of 2:4 metadata that CUTLASS's kernels for sm_80 read, and PyTorch's CUTLASS backend with them.

A word E[r, c] is the metadata of row r and word column c: four nibbles (int16) for 16-bit values, and for
float32 (1:2 sparse, a nibble for each pair); eight (int32) for 8-bit values. CUTLASS stores E as
``ColumnMajorInterleaved<2>`` with its rows permuted, 2 x 2 blocks transposed:

- int16, rows % 32 == 0: ``(c/2)*2m + (r/32)*64 + (r%8)*8 + ((r%32)/16)*4 + (c%2)*2 + (r%16)/8``
- int32, rows % 16 == 0: ``(c/2)*2m + (r/16)*32 + (r%8)*4 + (c%2)*2 + (r%16)/8``

Both are transpositions of an array of many short axes, which is how they are written here. The number of word
columns is even.
"""

from __future__ import annotations

from typing import Any

# Axes of r are (block, [16s,] 8s, 8), of c (pair, 2). What was E[block, 16s, 8s, 8, pair, 2]:
_TO_16 = (4, 0, 3, 1, 5, 2)
_TO_32 = (3, 0, 2, 4, 1)


def _axes(rows: int, columns: int, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of E split into its axes, and the order in which they are stored."""
    if itemsize == 2:
        return (rows // 32, 2, 2, 8, columns // 2, 2), _TO_16
    return (rows // 16, 2, 8, columns // 2, 2), _TO_32


def reorder(words: Any) -> Any:
    """E [rows, columns], uint16 or uint32, contiguous -> the same words, flat, as they are stored."""
    rows, columns = words.shape
    shape, order = _axes(rows, columns, words.dtype.itemsize)
    return words.reshape(shape).transpose(order).reshape(-1)


def restore(stored: Any, rows: int, columns: int) -> Any:
    """The inverse of :func:`reorder`: E [rows, columns]."""
    shape, order = _axes(rows, columns, stored.dtype.itemsize)
    inverse = tuple(order.index(axis) for axis in range(len(order)))
    return stored.reshape(tuple(shape[axis] for axis in order)).transpose(inverse).reshape(rows, columns)
