"""The packed layouts of quantized weights, which kernels unpack to fragments of 16 bits in registers.

Tiles are those of 16-bit elements (packing.py): 64 rows x 128 dense columns, which are 64 kept columns in 4
steps of 16. The buffer is uint8 [Mt, Kt, bytes]. In a tile:

- The values in fragment order. In each step a lane (g = lane / 4, t = lane % 4) of the 16-row block w has
  four registers of two values (PTX ISA, ``mma.sp`` m16n8k32 and ``wgmma.sp`` m64nNk32, matrix A): register r
  has row 16w + g + 8(r & 1) and the kept columns 2t + 8(r >> 1) and one more. 4 bits: uint32 [w][lane][step],
  where register r has the nibbles r and r + 4 of the word, so that one mask takes both. 8 bits: uint32 [half
  of the steps][w][lane][step of the half][r >> 1], where register r has the bytes r & 1 and (r & 1) + 2.
  Signed integers have their sign bit inverted (q + 8, q + 128).
- The metadata, as in the tiles of 16-bit elements.
- The scales [group of columns][w][g][row 16w+g, 16w+g+8] of the tile's columns. A scale of a whole row stands
  in each tile.

Rows past M and columns past K are padding: stored values of 0 with scales of 0, and positions 0, 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device.devices import current_on
from ..device.tensors import HOST, TensorView
from ..errors import InvalidProblemError, check_type
from ..vocab import ElementKind
from . import canonical, threads
from .packed_layouts import (
    QUANTIZED_LAYOUTS,
    TILE_M,
    TILES_16BIT,
    Quantization,
    quantized_parts,
    quantized_tiles,
    scales_of_a_tile_row,
    stored_width,
)
from .packing import metadata_fragments, plain_metadata
from .quantized_weight import Sparse24QuantizedWeight, nibbles_of, signed_nibbles
from .weight import PackedWeight

Array = np.ndarray[Any, Any]

_KEPT = TILES_16BIT.tile_k // 2
"""Kept columns of a tile."""
_SHAPE = (4, 2, 8), (4, 2, 4, 2)
"""A tile's rows [w, r & 1, g], and its kept columns [step, r >> 1, t, column of the pair]."""
_NIBBLE_AXES = (0, 4, 1, 3, 7, 5, 8, 6, 2)
"""Axes of [mt, w, r & 1, g, kt, step, r >> 1, t, pair] as [mt, kt, w, g, t, step, pair, r >> 1, r & 1]."""
_BYTE_SHAPE = (4, 2, 8), (2, 2, 2, 4, 2)
_BYTE_AXES = (0, 4, 5, 1, 3, 8, 6, 7, 9, 2)
"""Axes of [mt, w, r & 1, g, kt, half, step, r >> 1, t, pair] as the words of 8 bits have them."""
_SIGN = {ElementKind.S4: 8, ElementKind.S8: 0x80, ElementKind.FP8_E4M3: 0}


def pack_quantized(weight: Sparse24QuantizedWeight) -> PackedWeight:
    """``weight`` [M, K] in the layout of what it stores: one uint8 buffer [Mt, Kt, bytes] on its device.

    M is arbitrary, K a multiple of 8. On a GPU the work is queued on CuPy's current stream. Raises
    InvalidProblemError for another object.
    """
    check_type("weight", weight, Sparse24QuantizedWeight, "Sparse24QuantizedWeight")
    by = weight.quantization
    values_end, metadata_end, _ = np.cumsum(quantized_parts(by)).tolist()
    with current_on(weight.device):
        values, metadata, scales = (view.bits() for view in weight.views)
        layout = quantized_tiles(by)
        mt, kt, size = layout.packed_shape(weight.m, weight.k)
        tiles = canonical.array_module(values).empty((mt, kt, size), np.uint8)

        def fill(there: slice) -> None:
            rows = slice(there.start * TILE_M, min(there.stop * TILE_M, weight.m))
            tiles[there, :, :values_end] = _tiled_values(values[rows], kt, by)
            tiles[there, :, values_end:metadata_end] = metadata_fragments(metadata[rows], kt, TILES_16BIT)
            tiles[there, :, metadata_end:] = _tiled_scales(scales[rows], kt, by)

        steps = canonical.row_steps(mt, TILE_M * layout.tile_k * kt, weight.device == HOST)
        threads.for_each(fill, steps)
        buffer = TensorView.of(tiles)
    return PackedWeight(layout.layout_id, weight.m, weight.k, weight.element, weight.device, (buffer,), by)


def unpack_quantized(packed: PackedWeight) -> Sparse24QuantizedWeight:
    """The weight that :func:`pack_quantized` was given, with the same bits, in memory of its own.

    Raises InvalidProblemError for anything but a PackedWeight of such a layout on the host; FormatError, with
    row and group of four, for invalid metadata.
    """
    check_type("packed", packed, PackedWeight, "PackedWeight")
    by = packed.quantization
    if by is None or packed.layout_id != QUANTIZED_LAYOUTS[by.element]:
        wanted = " or ".join(map(repr, QUANTIZED_LAYOUTS.values()))
        raise InvalidProblemError(f"packed: expected layout {wanted}, got {packed.layout_id!r}")
    values_end, metadata_end, _ = np.cumsum(quantized_parts(by)).tolist()
    shape = quantized_tiles(by).packed_shape(packed.m, packed.k)
    buffer = packed.buffers[0]
    if buffer.shape != shape or buffer.element is not ElementKind.U8 or packed.device != HOST:
        raise InvalidProblemError(f"packed: expected a buffer u8{list(shape)} on the host, got {buffer!r}")
    with current_on(HOST):
        tiles = buffer.bits()
        values = _plain_values(tiles[:, :, :values_end], by)[: packed.m]
        metadata = plain_metadata(tiles[:, :, values_end:metadata_end], TILES_16BIT)[: packed.m]
        scales = _plain_scales(tiles[:, :, metadata_end:], by)[: packed.m]
    return Sparse24QuantizedWeight(
        np.ascontiguousarray(values[:, : stored_width(packed.k, by)]),
        np.ascontiguousarray(metadata[:, : packed.k // 8]),
        np.ascontiguousarray(scales[:, : by.scales_of_a_row(packed.k)]),
        element=packed.element,
        stored=by.element,
        group=by.group,
        scale_element=by.scale_element,
    )


def _tiled_values(stored: Any, kt: int, by: Quantization) -> Any:
    """Stored values, as a weight holds them -> their bytes in tiles, uint8 [mt, kt, bytes]."""
    xp = canonical.array_module(stored)
    is_nibbles = by.element is ElementKind.S4
    each = signed_nibbles(stored).view(np.uint8) if is_nibbles else stored.view(np.uint8)
    mt = -(-len(stored) // TILE_M)
    padded = xp.zeros((mt * TILE_M, kt * _KEPT), np.uint8)
    padded[: each.shape[0], : each.shape[1]] = each
    padded ^= np.uint8(_SIGN[by.element])
    down, across = _SHAPE if is_nibbles else _BYTE_SHAPE
    image = padded.reshape(mt, *down, kt, *across).transpose(_NIBBLE_AXES if is_nibbles else _BYTE_AXES)
    image = xp.ascontiguousarray(image).reshape(mt * kt, TILE_M * _KEPT)
    found = nibbles_of(image.view(np.int8)) if is_nibbles else image
    return found.reshape(mt, kt, quantized_parts(by)[0])


def _plain_values(image: Array, by: Quantization) -> Array:
    """The inverse of :func:`_tiled_values`, padding included: [64 mt, ...] as a weight holds values."""
    mt, kt, nbytes = image.shape
    is_nibbles = by.element is ElementKind.S4
    flat = np.ascontiguousarray(image).reshape(mt * kt, nbytes)
    each = (signed_nibbles(flat).view(np.uint8) & np.uint8(15)) if is_nibbles else flat
    down, across = _SHAPE if is_nibbles else _BYTE_SHAPE
    axes, shape = _NIBBLE_AXES if is_nibbles else _BYTE_AXES, (mt, *down, kt, *across)
    plain = each.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).tolist())
    rows = np.ascontiguousarray(plain).reshape(mt * TILE_M, kt * _KEPT) ^ np.uint8(_SIGN[by.element])
    return nibbles_of(rows.view(np.int8)) if is_nibbles else rows.view(by.element.dtype)


def _tiled_scales(scales: Any, kt: int, by: Quantization) -> Any:
    """Scales, as bits [rows, groups of a row] -> their bytes in tiles, uint8 [mt, kt, bytes]."""
    xp = canonical.array_module(scales)
    mt, each = -(-len(scales) // TILE_M), scales_of_a_tile_row(by)
    padded = xp.zeros((mt * TILE_M, kt * each), scales.dtype)
    padded[: len(scales), : scales.shape[1] if by.group else None] = scales
    image = padded.reshape(mt, 4, 2, 8, kt, each).transpose(0, 4, 5, 1, 3, 2)
    return xp.ascontiguousarray(image).reshape(mt, kt, TILE_M * each).view(np.uint8)


def _plain_scales(image: Array, by: Quantization) -> Array:
    """The inverse of :func:`_tiled_scales`, padding included: [64 mt, scales of a row or more].

    A weight without columns has no tiles, so its scales are 0.
    """
    mt, kt, nbytes = image.shape
    each = scales_of_a_tile_row(by)
    bits = np.ascontiguousarray(image).reshape(mt * kt, nbytes).view(by.scale_element.bits_dtype)
    plain = bits.reshape(mt, kt, each, 4, 8, 2).transpose(0, 3, 5, 4, 1, 2)
    rows = np.ascontiguousarray(plain).reshape(mt * TILE_M, kt * each)
    if not kt:
        rows = np.zeros((mt * TILE_M, 1), rows.dtype)
    return rows.view(by.scale_element.dtype)
