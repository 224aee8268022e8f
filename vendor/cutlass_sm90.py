"""The order of 2:4 metadata ("E") that CUTLASS's sm_90 sparse mainloops read.

E is bytes of two nibbles. Its order depends on the element's size and on T, the tile K of the mainloop
(a multiple of 32 for 16-bit values, 16 for tf32, 8 for 8-bit ones; torchao and xFormers use 128 for fp8).
Rows are padded to Mp, a multiple of 64, and K to a multiple of T. The offset of row m, dense column k:

- 8-bit: ``m*(T/8) + (k%T)/8 + (k/T)*Mp*T/8``
- 16-bit, n = T/32: ``(k%16)/8 + 2*((m/8)%2) + 4*((k/32)%n) + 4n*(m%8) + 32n*((k/16)%2) + 64n*((m/16)%4)
  + 256n*(m/64) + (k/T)*Mp*T/8``
- tf32 (1:2 sparse, a nibble for each pair): the same with a byte for 4 columns, n = T/16.

With byte columns instead of dense ones, both wide forms are one, and all are transpositions of short axes.
"""

from __future__ import annotations

from typing import Any

ROWS = 64
"""Rows are padded to a multiple of this."""

# Axes of a row are (block, warp 4, half 2, row 8), of a byte column (tile, step n, half 2, byte 2).
_WIDE = (4, 0, 1, 6, 3, 5, 2, 7)
_NARROW = (1, 0, 2)


def dense_columns_per_byte(itemsize: int) -> int:
    """Two nibbles: two groups of four, or two pairs of float32."""
    return 4 if itemsize == 4 else 8


def tile_multiple(itemsize: int) -> int:
    """The number that T must be a multiple of."""
    return {1: 8, 2: 32, 4: 16}[itemsize]


def values_multiple(itemsize: int) -> int:
    """The number that K must be a multiple of, so that rows of values are multiples of 16 bytes for TMA."""
    return 32 // itemsize


def _axes(rows: int, columns: int, tile: int, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if itemsize == 1:
        return (rows, columns // tile, tile), _NARROW
    return (rows // ROWS, 4, 2, 8, columns // tile, tile // 4, 2, 2), _WIDE


def reorder(packed: Any, tile: int, itemsize: int) -> Any:
    """Bytes [Mp, Kp / columns per byte], padded -> the same bytes, flat, as they are stored.

    ``tile`` is T in bytes, ``itemsize`` that of the weight's values.
    """
    rows, columns = packed.shape
    shape, order = _axes(rows, columns, tile, itemsize)
    return packed.reshape(shape).transpose(order).reshape(-1)


def restore(stored: Any, rows: int, columns: int, tile: int, itemsize: int) -> Any:
    """The inverse of :func:`reorder`: bytes [rows, columns], padding included."""
    shape, order = _axes(rows, columns, tile, itemsize)
    inverse = tuple(order.index(axis) for axis in range(len(order)))
    return stored.reshape(tuple(shape[axis] for axis in order)).transpose(inverse).reshape(rows, columns)
