"""CUTLASS's weights for sm_90, for mainloops with any tile K."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from .._vendor import cutlass_sm90, nibbles
from ..weights import canonical
from .base import (
    ALL_ELEMENTS,
    ForeignFormat,
    Incoming,
    Layout,
    Outgoing,
    Parts,
    WeightShape,
    integer_option,
    row_major,
)
from .positions import PAD_NIBBLES, codes_in, nibbles_out, unpacked_nibbles

DEFAULT_TILE_K = 128
"""Tile K of torchao's and xFormers' fp8 kernels."""


def _sizes(shape: WeightShape) -> tuple[int, int, int]:
    """Padded rows; bytes of a padded row; bytes of a tile."""
    tile_k: int = shape.options["tile_k"]
    per_byte = cutlass_sm90.dense_columns_per_byte(shape.element.itemsize)
    rows = -(-shape.m // cutlass_sm90.ROWS) * cutlass_sm90.ROWS
    padded_k = -(-shape.k // tile_k) * tile_k
    return rows, padded_k // per_byte, tile_k // per_byte


class CutlassSm90(ForeignFormat):
    name = "cutlass_sm90"
    origin = "CUTLASS's StructuredSparseCompressor for sm_90; fp8 in torchao and xFormers"
    elements = ALL_ELEMENTS
    parts = ("packed", "meta")
    constraint = "K a multiple of 16 and tile_k of 32 (f32: 8 and 16; 8-bit: 32 and 8)"
    options = MappingProxyType(
        {
            "tile_k": integer_option(
                DEFAULT_TILE_K, "a positive number of columns", lambda columns: 0 < columns <= 1 << 20
            )
        }
    )

    def fits(self, shape: WeightShape) -> bool:
        size = shape.element.itemsize
        aligned = shape.k % cutlass_sm90.values_multiple(size) == 0
        return aligned and shape.options["tile_k"] % cutlass_sm90.tile_multiple(size) == 0

    def layout(self, shape: WeightShape) -> Layout:
        return {"packed": row_major(shape), "meta": ("uint8", _sizes(shape)[:2])}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        shape = found.shape
        rows, columns, tile = _sizes(shape)
        stored, values = found.words("meta"), found.values()
        plain = cutlass_sm90.restore(stored, rows, columns, tile, shape.element.itemsize)
        read = unpacked_nibbles(plain[: shape.m, : shape.nibbles // 2], shape.m, shape.nibbles)
        return values, codes_in(read, values, shape)

    def encode(self, out: Outgoing) -> Parts:
        values, found = nibbles_out(out)
        rows, columns, tile = _sizes(out.shape)
        xp = canonical.array_module(found)
        padded = xp.full((rows, columns), PAD_NIBBLES, np.uint8)
        padded[: out.shape.m, : out.shape.nibbles // 2] = nibbles.pack(found)
        stored = cutlass_sm90.reorder(padded, tile, out.shape.element.itemsize)
        return {"packed": out.typed(values), "meta": stored.reshape(rows, columns)}
