"""The packed layout that the sparse tensor core kernels of 16-bit elements read.

One layout serves ``mma.sp`` m16n8k32 and ``wgmma.sp`` m64nNk32: per 16-row block both hand the metadata to
the lanes in the same way (PTX ISA 9.7.14, "Warp-level matrix multiply-accumulate with sparse matrix A", and
9.7.15, "Asynchronous warpgroup-level multiply-accumulate", ``wgmma.mma_async.sp``).

The weight is one contiguous uint8 buffer [Mt, Kt, 9216]: tiles of 64 rows x 128 dense columns. In a tile:

- Bytes 0 to 8191, the values: 64 rows of 128 bytes (64 compressed columns), under the 128-byte swizzle of
  TMA and wgmma. The 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that a kernel copies the tile to
  shared memory as it is, where ``ldmatrix`` and a wgmma descriptor read it without bank conflicts.
- Bytes 8192 to 9215, the metadata in fragment order: uint32 [block w of 16 rows][lane][word j]. A lane loads
  8 bytes. Word j covers the dense columns 64j to 64j+63, which are two steps of 32: step 2j in the lanes
  t = 0, 1 (sparsity selector 0), step 2j+1 in t = 2, 3 (selector 1), with g = lane / 4, t = lane % 4. The low
  half is row 16w+g, the high half row 16w+g+8. A half is 16 dense columns, 16*(t&1) and up in their step:
  four nibbles, the lowest group in the least significant one. A nibble is the canonical code,
  ``position0 | position1 << 2``.

Rows past M and columns past K are padding: values +0, nibbles 0x4 (positions 0, 1), which are legal to the
hardware. They add ``0 * x`` to the sums, so a kernel must load zeros for the columns of X past K: an Inf or
NaN there would reach Y.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from . import canonical
from .errors import InvalidProblemError, UnsupportedError
from .tensors import HOST, Device, TensorView, import_cupy
from .vocab import TILE64X128_LAYOUT, ElementKind
from .weights import PackedWeight, Sparse24Weight

LAYOUT_ID = TILE64X128_LAYOUT
TILE_M = 64
"""Rows of a tile."""
TILE_K = 128
"""Dense columns of a tile."""
VALUE_BYTES = TILE_M * TILE_K  # half the cells, two bytes each
"""Bytes of a tile's values; its metadata follows."""
TILE_BYTES = VALUE_BYTES + TILE_M * TILE_K // 8
"""Bytes of a tile: 8192 of values and 1024 of metadata."""

_ELEMENTS = (ElementKind.F16, ElementKind.BF16)
_PAD_NIBBLES = 0x44

# Of the 8 x 8 chunks of 8 rows: where chunk c of row r lies. An XOR undoes itself: it serves both directions.
_SWIZZLE = np.array([8 * row + (chunk ^ row) for row in range(8) for chunk in range(8)])


def packed_shape(m: int, k: int) -> tuple[int, int, int]:
    """Shape [Mt, Kt, TILE_BYTES] of the buffer of a weight [m, k]."""
    return -(-m // TILE_M), -(-k // TILE_K), TILE_BYTES


def pack(weight: Sparse24Weight) -> PackedWeight:
    """``weight`` [M, K], f16 or bf16, in this layout: one uint8 buffer [Mt, Kt, 9216] on its device.

    Any M, and any K that the canonical form allows (multiples of 8): tiles are padded. The values keep their
    bits, -0.0 and NaN payloads too. The metadata was validated when the weight was made, and isn't again.
    On a GPU the work is queued on CuPy's current stream. Scratch memory: on the host a few megabytes, or
    three times one row of tiles where that is more; on a GPU three times the result.

    Raises InvalidProblemError for anything but a Sparse24Weight; UnsupportedError for other elements.
    """
    if not isinstance(weight, Sparse24Weight):
        raise InvalidProblemError(f"weight: expected Sparse24Weight, got {type(weight).__name__}")
    _check_element("weight", weight.element)
    mt, kt, _ = packed_shape(weight.m, weight.k)
    with _on(weight.device):
        values, metadata = weight.values_view.bits(), weight.metadata
        tiles = canonical.array_module(values).empty((mt, kt, TILE_BYTES), np.uint8)
        for step, rows in _steps(weight.m, weight.k, weight.device):
            tiles[step, :, :VALUE_BYTES] = _swizzled(values[rows], kt)
            tiles[step, :, VALUE_BYTES:] = _fragments(metadata[rows], kt)
        buffer = TensorView.of(tiles)
    return PackedWeight(LAYOUT_ID, weight.m, weight.k, weight.element, weight.device, (buffer,))


def unpack(packed: PackedWeight) -> Sparse24Weight:
    """The canonical weight that :func:`pack` was given: the same bits, in memory of its own.

    Padding is dropped unread. Raises InvalidProblemError for anything but a PackedWeight of this layout with
    its one buffer uint8 [Mt, Kt, 9216]; UnsupportedError for elements other than f16 and bf16; FormatError,
    with row and group, for invalid nibbles, which on a GPU waits for the device.
    """
    buffer = _check_packed(packed)
    m, k = packed.m, packed.k
    with _on(packed.device):
        tiles = buffer.bits()
        xp = canonical.array_module(tiles)
        values = xp.empty((m, k // 2), np.uint16)
        metadata = xp.empty((m, k // 8), np.uint16)
        for step, rows in _steps(m, k, packed.device):
            count = rows.stop - rows.start
            values[rows] = _plain_values(tiles[step, :, :VALUE_BYTES])[:count, : k // 2]
            metadata[rows] = _plain_metadata(tiles[step, :, VALUE_BYTES:])[:count, : k // 8]
        return Sparse24Weight(values, metadata, element=packed.element)


def _check_element(argument: str, element: ElementKind) -> None:
    if element not in _ELEMENTS:
        raise UnsupportedError(f"{argument}: layout {LAYOUT_ID!r} holds f16 and bf16, got {element}")


def _check_packed(packed: PackedWeight) -> TensorView:
    if not isinstance(packed, PackedWeight):
        raise InvalidProblemError(f"packed: expected PackedWeight, got {type(packed).__name__}")
    if packed.layout_id != LAYOUT_ID:
        raise InvalidProblemError(f"packed: expected layout {LAYOUT_ID!r}, got {packed.layout_id!r}")
    _check_element("packed", packed.element)
    if packed.m < 0 or packed.k < 0 or packed.k % 8:
        raise InvalidProblemError(f"packed: expected K a multiple of 8, got [{packed.m}, {packed.k}]")
    shape = packed_shape(packed.m, packed.k)
    if len(packed.buffers) != 1:
        raise InvalidProblemError(f"packed: expected one buffer, got {len(packed.buffers)}")
    buffer = packed.buffers[0]
    if buffer.element is not ElementKind.U8 or buffer.shape != shape or not buffer.is_contiguous:
        raise InvalidProblemError(f"packed: expected a contiguous buffer u8{list(shape)}, got {buffer!r}")
    if buffer.device != packed.device:
        raise InvalidProblemError(f"packed: expected a buffer on {packed.device}, got {buffer.device}")
    return buffer


def _on(device: Device) -> AbstractContextManager[Any]:
    """CuPy allocates and computes on its current device: make that the operands' own."""
    if device == HOST:
        return nullcontext()
    guard: AbstractContextManager[Any] = import_cupy().cuda.Device(device.ordinal)
    return guard


def _steps(m: int, k: int, device: Device) -> list[tuple[slice, slice]]:
    """Pairs (tile rows, rows of the weight) to work on at a time."""
    mt, kt, _ = packed_shape(m, k)
    steps = canonical.row_steps(mt, TILE_M * TILE_K * kt, device == HOST)
    return [(step, slice(step.start * TILE_M, min(step.stop * TILE_M, m))) for step in steps]


def _tile_rows(rows: int) -> int:
    return -(-rows // TILE_M)


def _swizzled(values: Any, kt: int) -> Any:
    """Values uint16 [rows, K/2] -> their bytes in tiles, uint8 [mt, kt, VALUE_BYTES]."""
    xp = canonical.array_module(values)
    mt = _tile_rows(values.shape[0])
    padded = xp.zeros((mt * TILE_M, kt * TILE_K // 2), np.uint16)
    padded[: values.shape[0], : values.shape[1]] = values
    # [tile row, 8 rows, row % 8, tile column, chunk, the chunk's 16 bytes]
    chunks = padded.view(np.uint64).reshape(mt, 8, 8, kt, 8, 2).transpose(0, 3, 1, 2, 4, 5)
    image = chunks.reshape(mt, kt, 8, 64, 2)[:, :, :, xp.asarray(_SWIZZLE)]
    return xp.ascontiguousarray(image).view(np.uint8).reshape(mt, kt, VALUE_BYTES)


def _plain_values(image: Any) -> Any:
    """The inverse of :func:`_swizzled`: uint16 [64 mt, 64 kt], padding included."""
    xp = canonical.array_module(image)
    mt, kt, _ = image.shape
    chunks = xp.ascontiguousarray(image).view(np.uint64).reshape(mt, kt, 8, 64, 2)
    plain = chunks[:, :, :, xp.asarray(_SWIZZLE)].reshape(mt, kt, 8, 8, 8, 2).transpose(0, 2, 3, 1, 4, 5)
    return xp.ascontiguousarray(plain).view(np.uint16).reshape(mt * TILE_M, kt * TILE_K // 2)


def _fragments(metadata: Any, kt: int) -> Any:
    """Metadata uint16 [rows, K/8] -> the words of the lanes in tiles, uint8 [mt, kt, bytes]."""
    xp = canonical.array_module(metadata)
    mt = _tile_rows(metadata.shape[0])
    nibbles = xp.full((mt * TILE_M, kt * TILE_K // 8), _PAD_NIBBLES, np.uint8)
    low, high = metadata & 0x0F, metadata >> 4 & 0xF0
    nibbles[: metadata.shape[0], : metadata.shape[1]] = (low | high).astype(np.uint8)
    # uint16 of 16 dense columns: [tile row, w, half of the word, g, tile column, j, t]
    quads = nibbles.view(np.uint16).reshape(mt, 4, 2, 8, kt, 2, 4)
    words = xp.ascontiguousarray(quads.transpose(0, 4, 1, 3, 6, 5, 2))  # [mt, kt, w, g, t, j, half]
    return words.view(np.uint8).reshape(mt, kt, TILE_BYTES - VALUE_BYTES)


def _plain_metadata(words: Any) -> Any:
    """The inverse of :func:`_fragments`: uint16 [64 mt, 16 kt], padding included."""
    xp = canonical.array_module(words)
    mt, kt, _ = words.shape
    quads = xp.ascontiguousarray(words).view(np.uint16).reshape(mt, kt, 4, 8, 4, 2, 2)
    plain = xp.ascontiguousarray(quads.transpose(0, 2, 6, 3, 1, 5, 4))
    nibbles = plain.view(np.uint8).reshape(mt * TILE_M, kt * TILE_K // 8).astype(np.uint16)
    return nibbles & 0x0F | (nibbles & 0xF0) << 4
