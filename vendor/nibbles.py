"""Nibbles of 2:4 metadata: bits 1:0 the first kept position of a group of four, bits 3:2 the second.

The common ground of the foreign formats: they differ in how they order the nibbles. Arrays may be NumPy's or
CuPy's. PTX ISA 8.5, section 9.7.14, "Warp-level matrix multiply-accumulate with sparse matrix A".
"""

from __future__ import annotations

from typing import Any


def pack(nibbles: Any) -> Any:
    """Nibbles uint8 [rows, G], G even -> bytes [rows, G/2], the lower nibble first."""
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def unpack(packed: Any, empty: Any) -> Any:
    """The inverse of :func:`pack`: bytes [rows, B] -> nibbles uint8 [rows, 2B]. ``empty`` is the module's."""
    nibbles = empty((packed.shape[0], 2 * packed.shape[1]), packed.dtype)
    nibbles[:, 0::2] = packed & 15
    nibbles[:, 1::2] = packed >> 4
    return nibbles
