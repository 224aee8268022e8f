"""A model of the instructions that read the packed layout of 16-bit elements.

Written lane by lane from the PTX ISA (mma.sp m16n8k32, wgmma.sp m64nNk32, ldmatrix, the 128-byte swizzle), it
shares nothing with packing.py: it loads registers from the packed bytes as a kernel does and multiplies as
the instruction would. A wrong byte gives a wrong product.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from sparse24_plans import ElementKind, PackedWeight, Sparse24Weight
from sparse24_plans.weights.packed_layouts import TILE_M, TILES_16BIT
from sparse24_plans.weights.packing import pack

every_element = pytest.mark.parametrize("element", ["f16", "bf16"])
VALID = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)
LANES = [(lane, lane // 4, lane % 4) for lane in range(32)]
LANE = np.arange(32)[:, None]
G, T = LANE // 4, LANE % 4
"""The g and t of :data:`LANES`, for all lanes at once."""
N_TILE = 8
TILE_K, TILE_BYTES, LAYOUT_ID = TILES_16BIT.tile_k, TILES_16BIT.tile_bytes, TILES_16BIT.layout_id


# The kernel's side: registers from bytes ----------------------------------------------------------
# Arrays have leading axes for tiles, [..., 9216] bytes; what a lane holds is at [..., lane, ...].


@functools.cache
def ldmatrix_x4_table(w: int, step: int) -> np.ndarray:
    """Which 16-bit words of a tile the four registers of every lane get: [lane, register, 2].

    The A fragment's four 8x8 matrices: rows 0-7 and 8-15 of the block, then the same 8 columns on.
    """
    address = []
    for lane in range(32):  # the row address that the lane supplies, on the swizzled image
        row, chunk = 16 * w + lane % 16, 2 * step + lane // 16
        address.append(128 * row + 16 * (chunk ^ (row % 8)))
    table = np.zeros((32, 4, 2), int)
    for lane, g, t in LANES:
        for register in range(4):
            start = address[8 * register + g] + 4 * t
            table[lane, register] = start // 2, start // 2 + 1
    return table


def load_a(tiles: np.ndarray, w: int, step: int, element: ElementKind) -> np.ndarray:
    """The A registers a0..a7 of every lane: [..., 32, 8]."""
    halves = tiles.view(np.uint16)[..., ldmatrix_x4_table(w, step)]
    return halves.view(element.dtype).astype(np.float64).reshape(*tiles.shape[:-1], 32, 8)


def load_metadata(tiles: np.ndarray, w: int, j: int) -> np.ndarray:
    """The metadata register of every lane of block w for the steps 2j and 2j+1: [..., 32]."""
    return tiles.view(np.uint32)[..., (8192 + (w * 32 + np.arange(32)) * 8 + 4 * j) // 4]


def load_b(x: np.ndarray) -> np.ndarray:
    """The B registers for X [..., 8, 32], rows are tokens: [..., 32, 8]."""
    i = np.arange(8)
    return x[..., G, 2 * T + (i & 1) + 8 * (i >> 1)]


# The instruction's side: a product from registers -------------------------------------------------


def positions_to_dense(values: np.ndarray, nibbles: np.ndarray) -> np.ndarray:
    """Compressed values [..., 2q] and nibbles [..., q] -> dense [..., 4q].

    A nibble whose positions don't increase is undefined behaviour: the group is NaN.
    """
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    first, second = nibbles & 3, nibbles >> 2
    at = np.arange(4)
    dense = np.where(at == first[..., None], pairs[..., :1], 0.0)
    dense = np.where(at == second[..., None], pairs[..., 1:], dense)
    dense[first >= second] = np.nan
    return dense.reshape(*values.shape[:-1], -1)


def nibbles_of_block(metadata: np.ndarray, selector: int) -> np.ndarray:
    """The nibbles [..., 16, 8] of a 16-row block for one step, from the words of one pair of lanes."""
    nibbles = np.zeros((*metadata.shape[:-1], 16, 8), np.uint32)
    lanes = LANE[selector == T // 2][:, None]
    g, t, i = lanes // 4, lanes % 4, np.arange(4)
    for half in range(2):
        nibbles[..., g + 8 * half, 4 * (t & 1) + i] = metadata[..., lanes] >> (16 * half + 4 * i) & 0xF
    return nibbles


def mma_sp_m16n8k32(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, metadata: np.ndarray, selector: int
) -> np.ndarray:
    """D = A * B + C in registers: a [..., 32, 8], b [..., 32, 8], c and the result [..., 32, 4]."""
    compressed = np.zeros((*a.shape[:-2], 16, 16))
    dense_b = np.zeros((*b.shape[:-2], 32, 8))
    i = np.arange(8)
    compressed[..., G + 8 * (i >> 1 & 1), 2 * T + (i & 1) + 8 * (i >> 2)] = a
    dense_b[..., 2 * T + (i & 1) + 8 * (i >> 1), G] = b
    product = positions_to_dense(compressed, nibbles_of_block(metadata, selector)) @ dense_b
    i = np.arange(4)
    return c + product[..., G + 8 * (i >> 1), 2 * T + (i & 1)]


def wgmma_sp_m64n8k32(
    tiles: np.ndarray,
    start: int,
    b: np.ndarray,
    d: np.ndarray,
    metadata: np.ndarray,
    selector: int,
    element: ElementKind,
) -> np.ndarray:
    """D += A * B. A: descriptor to swizzled shared memory (``start``: its first byte in the 1024-byte-aligned
    tile; 8-row groups 1024 bytes apart). b [..., 32, 8] is B itself, d [..., 128, 4], metadata [..., 128]."""
    row, column = np.arange(64)[:, None], np.arange(16)
    linear = start + (row // 8) * 1024 + (row % 8) * 128 + 2 * column
    table = (linear ^ (linear >> 7 & 7) << 4) // 2  # Swizzle<3,4,3> of the address: bits 4-6 ^= bits 7-9
    compressed = tiles.view(np.uint16)[..., table].view(element.dtype).astype(np.float64)
    result = np.array(d)
    for warp in range(4):
        block = compressed[..., 16 * warp : 16 * warp + 16, :]
        nibbles = nibbles_of_block(metadata[..., 32 * warp : 32 * warp + 32], selector)
        product = positions_to_dense(block, nibbles) @ b
        i = np.arange(4)
        result[..., 32 * warp : 32 * warp + 32, :] += product[
            ..., G + 8 * (i >> 1 & 1), 8 * (i // 4) + 2 * T + (i & 1)
        ]
    return result


# Kernels of the model -----------------------------------------------------------------------------


def mma_tiles(tiles: np.ndarray, x: np.ndarray, element: ElementKind) -> np.ndarray:
    """Products [..., 64, 8] of packed tiles [..., 9216] and X tiles [..., 8, 128] with mma.sp."""
    out = np.zeros((*np.broadcast_shapes(tiles.shape[:-1], x.shape[:-2]), TILE_M, N_TILE))
    for w in range(4):
        c = np.zeros((32, 4))
        for step in range(4):
            b = load_b(x[..., 32 * step : 32 * step + 32])
            a, metadata = load_a(tiles, w, step, element), load_metadata(tiles, w, step // 2)
            c = mma_sp_m16n8k32(a, b, c, metadata, step % 2)
        i = np.arange(4)
        out[..., 16 * w + G + 8 * (i >> 1), 2 * T + (i & 1)] = c
    return out


def wgmma_tiles(tiles: np.ndarray, x: np.ndarray, element: ElementKind) -> np.ndarray:
    """Compute what :func:`mma_tiles` does, by wgmma.sp: each warp holds its block's metadata."""
    batch = np.broadcast_shapes(tiles.shape[:-1], x.shape[:-2])
    d = np.zeros((*batch, 128, 4))
    for step in range(4):
        words = [load_metadata(tiles, warp, step // 2) for warp in range(4)]
        b = np.swapaxes(x[..., 32 * step : 32 * step + 32], -1, -2)
        d = wgmma_sp_m64n8k32(tiles, 32 * step, b, d, np.concatenate(words, -1), step % 2, element)
    out = np.zeros((*batch, TILE_M, N_TILE))
    for warp in range(4):
        i = np.arange(4)
        out[..., 16 * warp + G + 8 * (i >> 1), 2 * T + (i & 1)] = d[..., 32 * warp : 32 * warp + 32, :]
    return out


ROWS = {"mma": mma_tiles, "wgmma": wgmma_tiles}
every_kernel = pytest.mark.parametrize("kernel", ROWS)


def model_gemm(packed: PackedWeight, x: np.ndarray, kernel: str) -> np.ndarray:
    """W @ X^T [M, N] over all tiles. X's tokens and columns are padded with zeros, as a kernel must."""
    tiles = packed.buffers[0].array()
    mt, kt, _ = tiles.shape
    n_tiles = -(-x.shape[0] // N_TILE)
    padded = np.zeros((n_tiles * N_TILE, kt * TILE_K))
    padded[: x.shape[0], : x.shape[1]] = x
    out = np.zeros((mt * TILE_M, n_tiles * N_TILE))
    for n in range(n_tiles):
        rows = slice(n * N_TILE, (n + 1) * N_TILE)
        x_tiles = padded[rows].reshape(N_TILE, kt, TILE_K).swapaxes(0, 1)
        product = ROWS[kernel](tiles, x_tiles, packed.element)
        out[:, rows] = product.sum(1).reshape(mt * TILE_M, N_TILE)
    assert not out[packed.m :].any(), "padding rows of W gave something"
    assert not out[:, x.shape[0] :].any()
    return out[: packed.m, : x.shape[0]]


# Weights ------------------------------------------------------------------------------------------


def raw_weight(m: int, k: int, element: str, seed: int = 0) -> Sparse24Weight:
    """Any bits as values (NaN payloads, infinities, subnormals, zeros of both signs), any valid positions."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 16, (m, k // 2), dtype=np.uint16)
    hostile = np.array([0x8000, 0, 0x7C01, 0xFE5A, 0x7F81, 0xFFAB], np.uint16)
    values = np.where(rng.random(values.shape) < 0.2, rng.choice(hostile, values.shape), values)
    codes = rng.choice(np.array(VALID, np.uint8), (m, k // 4))
    return Sparse24Weight(values, codes.view(np.uint16), element=element)


def integer_weight(m: int, k: int, element: str, seed: int = 0) -> Sparse24Weight:
    """Non-zero integers at all the kept places: sums are exact, and no position can be wrong unnoticed."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 9, (m, k // 2)) * rng.choice([-1, 1], (m, k // 2))
    codes = rng.choice(np.array(VALID, np.uint8), (m, k // 4))
    typed = values.astype(np.float32).astype(ElementKind(element).dtype)
    return Sparse24Weight(typed, codes.view(np.uint16))


def assert_same_weight(a: Sparse24Weight, b: Sparse24Weight) -> None:
    assert (a.m, a.k, a.element, a.device) == (b.m, b.k, b.element, b.device)
    np.testing.assert_array_equal(a.values_view.bits(), b.values_view.bits())
    np.testing.assert_array_equal(a.metadata, b.metadata)


def tiles_of(weight: Sparse24Weight) -> np.ndarray:
    return pack(weight).buffers[0].array()


def nibble_place(row: int, group: int) -> tuple[int, int]:
    """Byte and shift of the nibble of a tile's row and group."""
    j, rest = divmod(group, 16)
    t, i = divmod(rest, 4)
    lane = 4 * (row % 8) + t
    byte = 8192 + (row // 16 * 32 + lane) * 8 + 4 * j + 2 * (row % 16 // 8) + i // 2
    return byte, 4 * (i % 2)
