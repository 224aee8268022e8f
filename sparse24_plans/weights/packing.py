"""The packed layouts that the sparse tensor core kernels read, for 16-bit and 8-bit elements and float32.

A layout serves ``mma.sp`` and ``wgmma.sp`` alike: per 16-row block both hand the metadata to the lanes in the
same way (PTX ISA 9.7.14, "Warp-level matrix multiply-accumulate with sparse matrix A", and 9.7.15,
"Asynchronous warpgroup-level multiply-accumulate", ``wgmma.mma_async.sp``).

The weight is one contiguous uint8 buffer [Mt, Kt, bytes]: tiles of 64 rows x 128 dense columns of 16-bit
elements (``tile64x128_16bit_v1``, 9216 bytes), x 256 of 8-bit ones (``tile64x256_8bit_v1``, 10240), or x 64
of float32 (``tile64x64_32bit_v1``, 8704). In a tile:

- Bytes 0 to 8191, the values: 64 rows of 128 bytes (64 or 128 compressed columns), under the 128-byte
  swizzle of TMA and wgmma. The 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that a kernel copies
  the tile to shared memory as it is, where ``ldmatrix`` and a wgmma descriptor read it without bank
  conflicts. float32 values are in fragment order instead, because a thread loads them to registers and splits
  them: [step of 32 dense columns][kept columns 0-7, 8-15][block w of 16 rows][lane][row 16w+g, 16w+g+8][pair
  of kept columns 2t, 2t+1], 16 bytes a lane.
  float32 presplit into two bf16 terms (``tile64x64_2xbf16_v1``, for three products; bf16_terms.py) has 128
  bytes a row: the high terms of its 32 kept values, then their low terms, under the swizzle. Such a weight
  can't be unpacked.
- Then the metadata in fragment order: uint32 [block w of 16 rows][lane][word j], two words of 16-bit
  elements, four of 8-bit ones, one of float32; g = lane / 4, t = lane % 4. A nibble is the canonical code,
  ``position0 | position1 << 2``, the lowest group in the least significant one.
  16 and 32 bits: word j covers the dense columns 64j to 64j+63, in steps of 32: step 2j is in the lanes
  t = 0, 1 (sparsity selector 0), step 2j+1 in t = 2, 3 (selector 1). The low half is row 16w+g, the high half
  row 16w+g+8. A half is 16 dense columns, 16*(t&1) and up in their step.
  8 bits: word j is the step of 64 dense columns from 64j; it has 32 columns from 32*(t>>1) of row
  16w+g+8*(t&1).

Rows past M and columns past K are padding: values +0, nibbles 0x4 (positions 0, 1), which are legal to the
hardware. They add ``0 * x`` to the sums, so a kernel must load zeros for the columns of X past K: an Inf or
NaN there would reach Y.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device.devices import current_on
from ..device.tensors import HOST, Device, TensorView
from ..errors import InvalidProblemError, check_type
from ..vocab import ElementKind
from . import bf16_terms, canonical, device_code, threads
from .packed_layouts import ROW_BYTES, TILE_M, TILES_IN_PARTS, VALUE_BYTES, TileLayout, layout_of
from .weight import PackedWeight, Sparse24Weight

_PAD_NIBBLES = 0x44

# Places of the 8 x 8 chunks of 8 rows. The XOR undoes itself, so the table serves both directions.
_SWIZZLE = np.array([8 * row + (chunk ^ row) for row in range(8) for chunk in range(8)])


def pack(weight: Sparse24Weight, layout: TileLayout | None = None) -> PackedWeight:
    """``weight`` [M, K] in ``layout``, by default its element's: one uint8 buffer [Mt, Kt, tile_bytes].

    M is arbitrary, K a multiple of 8: tiles are padded. Values keep their bits, -0.0 and NaN payloads too.
    The metadata isn't validated again. On a GPU the work is queued on CuPy's current stream. On the host each
    thread needs a few megabytes of scratch memory, or three times one row of tiles if that is more.

    Raises InvalidProblemError for anything but a Sparse24Weight; UnsupportedError for other elements.
    """
    check_type("weight", weight, Sparse24Weight, "Sparse24Weight")
    own = layout_of(weight.element)
    layout = layout or own
    shape = layout.packed_shape(weight.m, weight.k)
    with current_on(weight.device):
        if weight.device != HOST and layout is own and (packed := device_code.short_forms().pack(weight)):
            return packed  # type: ignore[no-any-return]
        values, metadata = weight.values_view.bits(), weight.metadata
        tiles = canonical.array_module(values).empty(shape, np.uint8)

        def fill(step: tuple[slice, slice]) -> None:
            there, rows = step
            image = bf16_terms.in_rows(values[rows], shape[1]) if layout is TILES_IN_PARTS else values[rows]
            tiles[there, :, :VALUE_BYTES] = _tiled(image, shape[1])
            tiles[there, :, VALUE_BYTES:] = metadata_fragments(metadata[rows], shape[1], layout)

        threads.for_each(fill, _steps(layout, weight.m, weight.k, weight.device))
        buffer = TensorView.of(tiles)
    return PackedWeight(layout.layout_id, weight.m, weight.k, weight.element, weight.device, (buffer,))


def unpack(packed: PackedWeight) -> Sparse24Weight:
    """The canonical weight that :func:`pack` was given, with the same bits, in memory of its own.

    Padding is dropped unread. Raises InvalidProblemError for anything but a PackedWeight of its element's
    layout with a buffer uint8 [Mt, Kt, tile_bytes]; UnsupportedError for elements without one;
    FormatError, with row and group, for invalid nibbles, which on a GPU waits for the device.
    """
    layout, buffer = _check_packed(packed)
    with current_on(packed.device):
        values, metadata = unpack_tiles(layout, buffer.bits(), packed)
        return Sparse24Weight(values, metadata, element=packed.element)


def unpack_tiles(layout: TileLayout, tiles: Any, packed: PackedWeight) -> tuple[Any, Any]:
    """Values [m, k/2], as bits, and metadata uint16 [m, k/8] of ``tiles``, not validated."""
    m, k, xp = packed.m, packed.k, canonical.array_module(tiles)
    values = xp.empty((m, k // 2), packed.element.bits_dtype)
    metadata = xp.empty((m, k // 8), np.uint16)

    def fill(step: tuple[slice, slice]) -> None:
        there, rows = step
        count = rows.stop - rows.start
        values[rows] = _plain_values(tiles[there, :, :VALUE_BYTES], values.dtype)[:count, : k // 2]
        metadata[rows] = plain_metadata(tiles[there, :, VALUE_BYTES:], layout)[:count, : k // 8]

    threads.for_each(fill, _steps(layout, m, k, packed.device))
    return values, metadata


def _check_packed(packed: PackedWeight) -> tuple[TileLayout, TensorView]:
    check_type("packed", packed, PackedWeight, "PackedWeight")
    layout = layout_of(packed.element, "packed")
    if packed.layout_id != layout.layout_id:
        raise InvalidProblemError(f"packed: expected layout {layout.layout_id!r}, got {packed.layout_id!r}")
    shape = layout.packed_shape(packed.m, packed.k)
    buffer = packed.buffers[0]
    if buffer.element is not ElementKind.U8 or buffer.shape != shape or not buffer.is_contiguous:
        raise InvalidProblemError(f"packed: expected a contiguous buffer u8{list(shape)}, got {buffer!r}")
    return layout, buffer


def _steps(layout: TileLayout, m: int, k: int, device: Device) -> list[tuple[slice, slice]]:
    """Steps of the work: pairs of tile rows and rows of the weight."""
    mt, kt, _ = layout.packed_shape(m, k)
    steps = canonical.row_steps(mt, TILE_M * layout.tile_k * kt, device == HOST)
    return [(step, slice(step.start * TILE_M, min(step.stop * TILE_M, m))) for step in steps]


# Axes of a tile row of float32 values as rows hold them, [mt, w, half, g, kt, step, columns, t, pair], and
# where each comes from in fragment order, [mt, kt, step, columns, w, g, t, half, pair].
_VALUE_AXES = (0, 4, 5, 6, 1, 3, 7, 2, 8)
_VALUE_SHAPE = (4, 2, 8), (2, 2, 4, 2)


def _tiled(values: Any, kt: int) -> Any:
    """Values, unsigned [rows, K/2] -> their bytes in tiles, uint8 [mt, kt, VALUE_BYTES]."""
    xp = canonical.array_module(values)
    mt = -(-values.shape[0] // TILE_M)
    padded = xp.zeros((mt * TILE_M, kt * ROW_BYTES // values.itemsize), values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    if values.itemsize == 4:
        down, across = _VALUE_SHAPE
        image = padded.reshape(mt, *down, kt, *across).transpose(_VALUE_AXES)
        return xp.ascontiguousarray(image).reshape(-1).view(np.uint8).reshape(mt, kt, VALUE_BYTES)
    # [tile row, 8 rows, row % 8, tile column, chunk, the chunk's 16 bytes]
    chunks = padded.view(np.uint64).reshape(mt, 8, 8, kt, 8, 2).transpose(0, 3, 1, 2, 4, 5)
    image = chunks.reshape(mt, kt, 8, 64, 2)[:, :, :, xp.asarray(_SWIZZLE)]
    return xp.ascontiguousarray(image).view(np.uint8).reshape(mt, kt, VALUE_BYTES)


def _plain_values(image: Any, dtype: Any) -> Any:
    """The inverse of :func:`_tiled`: [64 mt, columns of kt tiles] of ``dtype``, padding included."""
    xp = canonical.array_module(image)
    mt, kt, _ = image.shape
    if dtype.itemsize == 4:
        down, across = _VALUE_SHAPE
        shape = (mt, *down, kt, *across)
        fragments = xp.ascontiguousarray(image).view(dtype).reshape([shape[axis] for axis in _VALUE_AXES])
        back = [int(axis) for axis in np.argsort(_VALUE_AXES)]
        return xp.ascontiguousarray(fragments.transpose(back)).reshape(mt * TILE_M, -1)
    chunks = xp.ascontiguousarray(image).view(np.uint64).reshape(mt, kt, 8, 64, 2)
    plain = chunks[:, :, :, xp.asarray(_SWIZZLE)].reshape(mt, kt, 8, 8, 8, 2).transpose(0, 2, 3, 1, 4, 5)
    return xp.ascontiguousarray(plain).view(dtype).reshape(mt * TILE_M, -1)


# Axes of a tile row's metadata as rows hold it, and where each comes from in fragment order.
# 16 and 32 bits: uint16 [mt, w, half, g, kt, j, t] <-> [mt, kt, w, g, t, j, half]
# 8 bits: uint32 [mt, w, t & 1, g, kt, j, t >> 1] <-> [mt, kt, w, g, t >> 1, t & 1, j]
_FRAGMENT_AXES = {4: (0, 4, 1, 3, 6, 5, 2), 2: (0, 4, 1, 3, 6, 5, 2), 1: (0, 4, 1, 3, 6, 2, 5)}


def _row_axes(layout: TileLayout, mt: int, kt: int) -> tuple[type[np.unsignedinteger[Any]], tuple[int, ...]]:
    """Unit and shape of a tile row's metadata as rows hold it."""
    if layout.itemsize > 1:
        return np.uint16, (mt, 4, 2, 8, kt, layout.tile_k // 64, 4)
    return np.uint32, (mt, 4, 2, 8, kt, 4, 2)


def metadata_fragments(metadata: Any, kt: int, layout: TileLayout) -> Any:
    """Metadata uint16 [rows, K/8] -> the words of the lanes in tiles, uint8 [mt, kt, bytes]."""
    xp = canonical.array_module(metadata)
    mt = -(-metadata.shape[0] // TILE_M)
    nibbles = xp.full((mt * TILE_M, kt * layout.tile_k // 8), _PAD_NIBBLES, np.uint8)
    low, high = metadata & 0x0F, metadata >> 4 & 0xF0
    nibbles[: metadata.shape[0], : metadata.shape[1]] = (low | high).astype(np.uint8)
    unit, shape = _row_axes(layout, mt, kt)
    words = xp.ascontiguousarray(nibbles.view(unit).reshape(shape).transpose(_FRAGMENT_AXES[layout.itemsize]))
    return words.view(np.uint8).reshape(mt, kt, layout.tile_bytes - VALUE_BYTES)


def plain_metadata(words: Any, layout: TileLayout) -> Any:
    """The inverse of :func:`metadata_fragments`: uint16 [64 mt, columns of kt tiles], padding included."""
    xp = canonical.array_module(words)
    mt, kt, _ = words.shape
    unit, shape = _row_axes(layout, mt, kt)
    axes = _FRAGMENT_AXES[layout.itemsize]
    fragments = xp.ascontiguousarray(words).view(unit).reshape([shape[axis] for axis in axes])
    plain = xp.ascontiguousarray(fragments.transpose([int(axis) for axis in np.argsort(axes)]))
    nibbles = plain.view(np.uint8).reshape(mt * TILE_M, kt * layout.tile_k // 8).astype(np.uint16)
    return nibbles & 0x0F | (nibbles & 0xF0) << 4
