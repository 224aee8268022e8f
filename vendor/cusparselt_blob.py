"""The compressed matrix of cuSPARSELt: one buffer, first the values [M, K/2], row-major, then the metadata.

NVIDIA documents neither part. Two orders of the metadata are known:

sm_80, 16-bit values, which PyTorch's and xFormers' tile packers write (M and K multiples of 128): uint16
words of 16 dense columns. The word of row r and dense column c, of R rows, lies at ``(r/128)*512 +
(c/64)*512*(R/128) + ((c%64)/32)*256 + ((r%128)/32)*64 + (r%8)*8 + ((r%32)/16)*4 + ((c%32)/16)*2 + (r%16)/8``.

sm_90, read off the library's own output (0.8.0 on an H200): nibbles, with M and K padded to multiples of 64.
M and K are multiples of 32, for 8-bit K of 64. The nibble of row r and group g (of four columns) lies at

- 16-bit: ``(r/64)*16*Kp + (g/8)*512 + ((r%64)/16)*128 + (r%8)*16 + ((g/2)%2)*8 + (g%2)*4 + ((g/4)%2)*2 +
  (r%16)/8``
- 8-bit: ``(r/64)*16*Kp + (g/16)*1024 + ((r%64)/16)*256 + (r%8)*32 + ((g/4)%2)*16 + ((g/2)%2)*8 + ((g/8)%2)*4
  + ((r%16)/8)*2 + g%2``
"""

from __future__ import annotations

from typing import Any

PADDED_SM90 = 64
"""Rows and dense columns of the metadata are padded to a multiple of this on sm_90."""

# sm_80: axes of a row are (128s, 32s, 16s, 8s, 8), of a word column (64s, 32s, 2).
_SM80 = (5, 0, 6, 1, 4, 2, 7, 3)
# sm_90: axes of a row are (64s, 16s, 8s, 8), of a group (32s | 64s of columns, [8s,] 4s, 2s, 2).
_SM90_16 = (0, 4, 1, 3, 6, 7, 5, 2)
_SM90_8 = (0, 4, 1, 3, 6, 7, 5, 2, 8)


def _axes_sm80(rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (rows // 128, 4, 2, 2, 8, columns // 4, 2, 2), _SM80


def _axes_sm90(rows: int, groups: int, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if itemsize == 1:
        return (rows // 64, 4, 2, 8, groups // 16, 2, 2, 2, 2), _SM90_8
    return (rows // 64, 4, 2, 8, groups // 8, 2, 2, 2), _SM90_16


def _reordered(array: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    return array.reshape(shape).transpose(order).reshape(-1)


def _restored(stored: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    inverse = tuple(order.index(axis) for axis in range(len(order)))
    return stored.reshape(tuple(shape[axis] for axis in order)).transpose(inverse)


def reorder_sm80(words: Any) -> Any:
    """Words uint16 [R, K/16], R and K multiples of 128 -> the same words, flat, as they are stored."""
    rows, columns = words.shape
    return _reordered(words, *_axes_sm80(rows, columns))


def restore_sm80(stored: Any, rows: int, columns: int) -> Any:
    """The inverse of :func:`reorder_sm80`: words [rows, columns]."""
    return _restored(stored, *_axes_sm80(rows, columns)).reshape(rows, columns)


def reorder_sm90(nibbles: Any, itemsize: int) -> Any:
    """Nibbles [Mp, Kp/4], padded, of values of ``itemsize`` bytes -> the same, flat, as they are stored."""
    rows, groups = nibbles.shape
    return _reordered(nibbles, *_axes_sm90(rows, groups, itemsize))


def restore_sm90(stored: Any, rows: int, groups: int, itemsize: int) -> Any:
    """The inverse of :func:`reorder_sm90`: nibbles [rows, groups], padding included."""
    return _restored(stored, *_axes_sm90(rows, groups, itemsize)).reshape(rows, groups)
