"""The packed layout, checked against a model of the instructions that read it.

The model is written lane by lane from the PTX ISA (mma.sp m16n8k32, wgmma.sp m64nNk32, ldmatrix, the 128-byte
swizzle) and shares nothing with packing.py: it loads registers from the packed bytes as a kernel does and
multiplies as the instruction would. A wrong byte gives a wrong product.
"""

from __future__ import annotations

import copy
import functools
import pickle
import tracemalloc
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BufferTooSmallError,
    Device,
    ElementKind,
    FormatError,
    InvalidProblemError,
    PackedWeight,
    Sparse24Weight,
    TensorView,
    UnsupportedError,
)
from sparse24_plans.weights.layouts import TILE_M, TILES_16BIT, VALUE_BYTES
from sparse24_plans.weights.packing import pack, unpack

gpu = pytest.mark.gpu
every_element = pytest.mark.parametrize("element", ["f16", "bf16"])
VALID = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)
LANES = [(lane, lane // 4, lane % 4) for lane in range(32)]
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
    words = tiles.view(np.uint32)
    return np.stack([words[..., (8192 + (w * 32 + lane) * 8 + 4 * j) // 4] for lane in range(32)], -1)


def load_b(x: np.ndarray) -> np.ndarray:
    """The B registers for X [..., 8, 32], rows are tokens: [..., 32, 8]."""
    b = np.zeros((*x.shape[:-2], 32, 8))
    for lane, g, t in LANES:
        for i in range(8):
            b[..., lane, i] = x[..., g, 2 * t + (i & 1) + 8 * (i >> 1)]
    return b


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
    for lane, g, t in LANES:
        if t // 2 != selector:
            continue
        for half in range(2):
            for i in range(4):
                group = 4 * (t & 1) + i
                nibbles[..., g + 8 * half, group] = metadata[..., lane] >> (16 * half + 4 * i) & 0xF
    return nibbles


def mma_sp_m16n8k32(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, metadata: np.ndarray, selector: int
) -> np.ndarray:
    """D = A * B + C in registers: a [..., 32, 8], b [..., 32, 8], c and the result [..., 32, 4]."""
    compressed = np.zeros((*a.shape[:-2], 16, 16))
    dense_b = np.zeros((*b.shape[:-2], 32, 8))
    for lane, g, t in LANES:
        for i in range(8):
            row = g + 8 * (i >> 1 & 1)
            compressed[..., row, 2 * t + (i & 1) + 8 * (i >> 2)] = a[..., lane, i]
            dense_b[..., 2 * t + (i & 1) + 8 * (i >> 1), g] = b[..., lane, i]
    product = positions_to_dense(compressed, nibbles_of_block(metadata, selector)) @ dense_b
    d = np.array(np.broadcast_to(c, (*product.shape[:-2], 32, 4)))
    for lane, g, t in LANES:
        for i in range(4):
            d[..., lane, i] += product[..., g + 8 * (i >> 1), 2 * t + (i & 1)]
    return d


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
    table = np.zeros((64, 16), int)
    for row in range(64):
        for column in range(16):
            linear = start + (row // 8) * 1024 + (row % 8) * 128 + 2 * column
            # Swizzle<3,4,3> of the address: bits 4-6 ^= bits 7-9.
            table[row, column] = (linear ^ (linear >> 7 & 7) << 4) // 2
    compressed = tiles.view(np.uint16)[..., table].view(element.dtype).astype(np.float64)
    result = np.array(d)
    for warp in range(4):
        block = compressed[..., 16 * warp : 16 * warp + 16, :]
        nibbles = nibbles_of_block(metadata[..., 32 * warp : 32 * warp + 32], selector)
        product = positions_to_dense(block, nibbles) @ b
        for lane, g, t in LANES:
            for i in range(4):
                row, column = g + 8 * (i >> 1 & 1), 8 * (i // 4) + 2 * t + (i & 1)
                result[..., 32 * warp + lane, i] += product[..., row, column]
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
        for lane, g, t in LANES:
            for i in range(4):
                out[..., 16 * w + g + 8 * (i >> 1), 2 * t + (i & 1)] = c[..., lane, i]
    return out


def wgmma_tiles(tiles: np.ndarray, x: np.ndarray, element: ElementKind) -> np.ndarray:
    """The same with wgmma.sp: the four warps hold the metadata of their blocks, steps are 32 bytes apart."""
    batch = np.broadcast_shapes(tiles.shape[:-1], x.shape[:-2])
    d = np.zeros((*batch, 128, 4))
    for step in range(4):
        words = [load_metadata(tiles, warp, step // 2) for warp in range(4)]
        b = np.swapaxes(x[..., 32 * step : 32 * step + 32], -1, -2)
        d = wgmma_sp_m64n8k32(tiles, 32 * step, b, d, np.concatenate(words, -1), step % 2, element)
    out = np.zeros((*batch, TILE_M, N_TILE))
    for warp in range(4):
        for lane, g, t in LANES:
            for i in range(4):
                out[..., 16 * warp + g + 8 * (i >> 1), 2 * t + (i & 1)] = d[..., 32 * warp + lane, i]
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


# Products -----------------------------------------------------------------------------------------


@every_kernel
@every_element
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(8, 16, 1), (16, 32, 8), (64, 128, 8), (65, 136, 3), (100, 256, 9), (200, 400, 24), (1, 8, 2)],
)
def test_product(kernel, element, m, k, n):
    weight = integer_weight(m, k, element, seed=m + k)
    x = np.random.default_rng(n).integers(-8, 9, (n, k)).astype(np.float64)
    got = model_gemm(pack(weight), x, kernel)
    np.testing.assert_array_equal(got, weight.decompress().astype(np.float64) @ x.T)


@every_kernel
@every_element
def test_product_of_groups_with_few_nonzeros(kernel, element):
    rng = np.random.default_rng(1)
    dense = np.zeros((72, 50, 4))
    counts = rng.integers(0, 3, (72, 50))
    for row, group in zip(*np.nonzero(counts), strict=True):
        count = counts[row, group]
        dense[row, group, rng.choice(4, count, replace=False)] = rng.integers(1, 9, count)
    dense = dense.reshape(72, 200)
    weight = Sparse24Weight.compress(dense.astype(ElementKind(element).dtype))
    x = rng.integers(-8, 9, (8, 200)).astype(np.float64)
    np.testing.assert_array_equal(model_gemm(pack(weight), x, kernel), dense @ x.T)


@every_kernel
def test_product_with_the_identity_is_the_dense_weight(kernel):
    weight = integer_weight(70, 72, "f16")
    got = model_gemm(pack(weight), np.eye(72), kernel)
    np.testing.assert_array_equal(got, weight.decompress().astype(np.float64))


# A wrong byte gives a wrong product ---------------------------------------------------------------


@pytest.fixture(scope="module")
def tile():
    """One packed tile, X, and a function: how many of the given variants of the tile multiply alike."""
    x = np.random.default_rng(7).integers(-1000, 1001, (N_TILE, TILE_K)).astype(np.float64)
    packed = tiles_of(integer_weight(64, 128, "f16", seed=3))[0, 0]
    right = {name: kernel(packed, x, ElementKind.F16) for name, kernel in ROWS.items()}

    def unnoticed(variants: np.ndarray, kernel: str = "mma") -> int:
        products = ROWS[kernel](variants, x, ElementKind.F16)
        return int((products == right[kernel]).all((-1, -2)).sum())

    assert unnoticed(packed[None], "mma") == unnoticed(packed[None], "wgmma") == 1
    return packed, unnoticed


def copies(packed: np.ndarray, count: int) -> np.ndarray:
    return np.repeat(packed[None], count, 0)


def test_every_nibble_matters(tile):
    packed, unnoticed = tile
    rng = np.random.default_rng(5)
    variants = copies(packed, 2048)
    for nibble in range(2048):
        at, shift = VALUE_BYTES + nibble // 2, 4 * (nibble % 2)
        old = int(packed[at]) >> shift & 0xF
        new = int(rng.choice([code for code in VALID if code != old]))
        variants[nibble, at] ^= (old ^ new) << shift
    assert unnoticed(variants) == 0
    assert unnoticed(variants[::29], "wgmma") == 0


def test_invalid_nibbles_are_undefined_in_the_model(tile):
    packed, _ = tile
    variants = copies(packed, 10)
    invalid = [code for code in range(16) if code not in VALID]
    for variant, code in zip(variants, invalid, strict=True):
        variant[VALUE_BYTES] = variant[VALUE_BYTES] & 0xF0 | code
    products = mma_tiles(variants, np.ones((N_TILE, TILE_K)), ElementKind.F16)
    assert np.isnan(products[:, 0]).all()
    assert not np.isnan(products[:, 1:]).any()


@every_kernel
@pytest.mark.parametrize("w", range(4))
def test_every_lane_has_words_of_its_own(tile, kernel, w):
    packed, unnoticed = tile
    pairs = list(combinations(range(32), 2))
    variants = copies(packed, len(pairs))
    words = variants[:, VALUE_BYTES:].reshape(len(pairs), 4, 32, 8)
    for variant, (a, b) in zip(words, pairs, strict=True):
        variant[w, [a, b]] = variant[w, [b, a]]
    variants[:, VALUE_BYTES:] = words.reshape(len(pairs), -1)
    assert unnoticed(variants, kernel) == 0


@every_kernel
@pytest.mark.parametrize("order", ["words", "halves", "bytes", "blocks", "steps"])
def test_order_of_words_halves_and_blocks(tile, kernel, order):
    packed, unnoticed = tile
    # [w, g, step of the word, K half, word, row half, byte]
    parts = packed[VALUE_BYTES:].reshape(4, 8, 2, 2, 2, 2, 2)
    axis = {"blocks": 0, "steps": 2, "words": 4, "halves": 5, "bytes": 6}[order]
    wrong = packed.copy()
    wrong[VALUE_BYTES:] = np.flip(parts, axis).reshape(-1)
    assert unnoticed(wrong[None], kernel) == 0


@every_kernel
def test_swizzle_matters_in_every_row(tile, kernel):
    packed, unnoticed = tile
    rows = [row for row in range(TILE_M) if row % 8]  # rows 0, 8, ... lie as they are
    variants = copies(packed, len(rows) + 1)
    for variant, undone in zip(variants, [*([row] for row in rows), rows], strict=True):
        for row in undone:
            chunks = variant[128 * row : 128 * row + 128].reshape(8, 16)
            chunks[:] = chunks[[chunk ^ (row % 8) for chunk in range(8)]].copy()
    assert unnoticed(variants, kernel) == 0


def test_every_value_matters(tile):
    packed, unnoticed = tile
    values = np.arange(0, VALUE_BYTES // 2, 3)  # every third: each place of each chunk occurs
    variants = copies(packed, len(values))
    variants[np.arange(len(values)), 2 * values + 1] ^= 0x80  # the sign
    assert unnoticed(variants) == 0


# Bytes --------------------------------------------------------------------------------------------


def test_constants():
    assert (TILE_M, TILE_K, VALUE_BYTES, TILE_BYTES) == (64, 128, 8192, 9216)
    assert LAYOUT_ID == "tile64x128_16bit_v1"


def cell_bytes(row: int, column: int) -> int:
    """Where compressed column ``column`` of a tile's row begins, by the layout's description."""
    return 128 * row + 16 * ((column // 8) ^ (row % 8)) + 2 * (column % 8)


def nibble_place(row: int, group: int) -> tuple[int, int]:
    """Byte and shift of the nibble of a tile's row and group."""
    j, rest = divmod(group, 16)
    t, i = divmod(rest, 4)
    lane = 4 * (row % 8) + t
    byte = 8192 + (row // 16 * 32 + lane) * 8 + 4 * j + 2 * (row % 16 // 8) + i // 2
    return byte, 4 * (i % 2)


def test_every_cell_and_all_padding():
    m, k = 70, 136
    weight = raw_weight(m, k, "bf16")
    tiles = tiles_of(weight)
    assert tiles.shape == (2, 2, TILE_BYTES)
    assert tiles.dtype == np.uint8
    values, metadata = weight.values_view.bits(), weight.metadata.view(np.uint8)
    for row in range(128):
        for column in range(128):
            at = cell_bytes(row % 64, column % 64)
            got = int.from_bytes(tiles[row // 64, column // 64, at : at + 2].tobytes(), "little")
            assert got == (values[row, column] if row < m and column < k // 2 else 0)
        for group in range(64):
            at, shift = nibble_place(row % 64, group % 32)
            got = tiles[row // 64, group // 32, at] >> shift & 0xF
            assert got == (metadata[row, group] if row < m and group < k // 4 else 0x4)


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(0, 140),
    eighths=st.integers(0, 40),
    element=st.sampled_from(["f16", "bf16"]),
    seed=st.integers(0),
)
@example(m=0, eighths=0, element="f16", seed=0)
@example(m=5, eighths=0, element="f16", seed=0)
@example(m=0, eighths=5, element="bf16", seed=0)
@example(m=64, eighths=16, element="bf16", seed=0)
@example(m=65, eighths=17, element="f16", seed=0)
def test_round_trip(m, eighths, element, seed):
    weight = raw_weight(m, 8 * eighths, element, seed)
    values, metadata = weight.values_view.bits().copy(), weight.metadata.copy()
    packed = pack(weight)
    (buffer,) = packed.buffers
    assert packed.layout_id == LAYOUT_ID
    assert (packed.m, packed.k, packed.element, packed.device) == (m, 8 * eighths, element, weight.device)
    assert buffer.element is ElementKind.U8
    assert buffer.shape == (-(-m // 64), -(-eighths // 16), 9216)
    assert buffer.is_contiguous
    assert packed.nbytes == buffer.shape[0] * buffer.shape[1] * 9216
    assert_same_weight(unpack(packed), weight)
    np.testing.assert_array_equal(weight.values_view.bits(), values)
    np.testing.assert_array_equal(weight.metadata, metadata)


@every_element
def test_zeros_keep_their_sign_and_nans_their_payload(element):
    bits = np.array([[0x8000, 0x0000, 0x7C01, 0xFFFF], [0x7F81, 0xFE5A, 0x0001, 0x8001]], np.uint16)
    weight = Sparse24Weight(bits, np.full((2, 1), 0x0E04, np.uint16), element=element)
    back = unpack(pack(weight))
    assert back.values_view.bits().tolist() == bits.tolist()


def test_memory_is_nobody_elses():
    weight = raw_weight(64, 128, "f16")
    packed = pack(weight)
    before = packed.buffers[0].array().copy()
    back = unpack(packed)
    weight.values_view.bits()[:] = 0
    back.values_view.bits()[:] = 1
    np.testing.assert_array_equal(packed.buffers[0].array(), before)


def test_read_only_and_odd_addresses():
    """Weights mapped from a file are read-only and aligned to the element alone."""
    weight = raw_weight(70, 72, "f16")
    raw = np.zeros(70 * 72 + 2, np.uint8)
    raw[2:] = weight.values_view.bits().reshape(-1).view(np.uint8)
    raw.flags.writeable = False
    shifted = Sparse24Weight(raw[2:].view(np.uint16).reshape(70, 36), weight.metadata, element="f16")
    np.testing.assert_array_equal(tiles_of(shifted), tiles_of(weight))
    assert_same_weight(unpack(pack(shifted)), weight)


def test_tiles_are_independent():
    """Tile [i, j] holds its own cells alone; so does a weight too large for one step of the packer."""
    m, k = 200, 16520
    weight = raw_weight(m, k, "bf16")
    tiles = tiles_of(weight)
    values, metadata = weight.values_view.bits(), weight.metadata
    for i, j in [(0, 0), (1, 64), (2, 7), (3, 0), (3, 129)]:
        part = Sparse24Weight(
            values[64 * i : 64 * i + 64, 64 * j : 64 * j + 64].copy(),
            metadata[64 * i : 64 * i + 64, 16 * j : 16 * j + 16].copy(),
            element="bf16",
        )
        np.testing.assert_array_equal(tiles_of(part)[0, 0], tiles[i, j])
    assert_same_weight(unpack(pack(weight)), weight)


def test_scratch_memory_is_small():
    weight = raw_weight(4096, 2048, "f16")
    packed = pack(weight)
    for work, result in ((lambda: pack(weight), packed.nbytes), (lambda: unpack(packed), weight.nbytes)):
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < result + (8 << 20)


@gpu
@every_element
@pytest.mark.parametrize(("m", "k"), [(0, 64), (8, 0), (1, 8), (70, 136), (300, 1000)])
def test_gpu_packs_the_same_bytes(element, m, k):
    weight = raw_weight(m, k, element)
    packed = pack(weight.to(0))
    (buffer,) = packed.buffers
    assert str(packed.device) == str(buffer.device) == "cuda:0"
    np.testing.assert_array_equal(buffer.array().get(), tiles_of(weight))
    back = unpack(packed)
    assert str(back.device) == "cuda:0"
    assert_same_weight(back.to("host"), weight)


# Bad input ----------------------------------------------------------------------------------------


TILED = ("f16", "bf16", "s8", "fp8_e4m3")


@pytest.mark.parametrize("element", [kind for kind in ElementKind if kind not in TILED])
def test_other_elements_are_unsupported(element):
    weight = Sparse24Weight.compress(np.zeros((8, 16), element.dtype))
    with pytest.raises(UnsupportedError, match=f"no tile layout holds {element}"):
        pack(weight)
    with pytest.raises(UnsupportedError, match=f"no tile layout holds {element}"):
        unpack(replace(pack(integer_weight(8, 16, "f16")), element=element))


@pytest.mark.parametrize("wrong", [None, 3, "weight", np.zeros((8, 16), np.float16)])
def test_wrong_types(wrong):
    with pytest.raises(InvalidProblemError, match="weight: expected Sparse24Weight, got"):
        pack(wrong)
    with pytest.raises(InvalidProblemError, match="packed: expected PackedWeight, got"):
        unpack(wrong)


def test_packed_and_canonical_are_not_confused():
    weight = integer_weight(8, 16, "f16")
    with pytest.raises(InvalidProblemError, match="got PackedWeight"):
        pack(pack(weight))
    with pytest.raises(InvalidProblemError, match="got Sparse24Weight"):
        unpack(weight)
    with pytest.raises(InvalidProblemError, match="got 'canonical'"):
        unpack(PackedWeight.canonical(weight))


def test_unpack_refuses_other_buffers():
    packed = pack(integer_weight(70, 136, "f16"))
    tiles = packed.buffers[0].array()
    for wrong in (tiles.reshape(-1), tiles.view(np.int8)):
        with pytest.raises(InvalidProblemError, match="contiguous buffer u8"):
            unpack(replace(packed, buffers=(TensorView.of(wrong),)))


def test_a_packed_weight_has_the_buffers_of_its_layout():
    packed = pack(integer_weight(70, 136, "f16"))
    tiles = packed.buffers[0].array()
    for wrong in (tiles[..., :8192], tiles[:, ::-1]):
        with pytest.raises(InvalidProblemError, match="buffers: expected contiguous memory on host"):
            replace(packed, buffers=(TensorView.of(wrong),))
    for buffers in ((), packed.buffers * 2):
        with pytest.raises(InvalidProblemError, match="buffers: expected 1 for layout"):
            replace(packed, buffers=buffers)
    for m, k in ((-1, 136), (70, -8), (70, 132)):
        with pytest.raises(InvalidProblemError, match="multiple of 8"):
            replace(packed, m=m, k=k)
    for change in ({"buffers": (TensorView.of(tiles[:1]),)}, {"k": 264}):
        with pytest.raises(BufferTooSmallError, match="buffers: expected at least") as caught:
            replace(packed, **change)
        assert caught.value.got < caught.value.needed
    with pytest.raises(InvalidProblemError, match="on cuda:7"):
        replace(packed, device=Device("cuda", 7))


@pytest.mark.parametrize("element", ["f16", "s8"])
def test_copies_and_pickles_own_their_memory(element):
    weight = integer_weight(70, 256, element)
    for original in (weight, pack(weight), PackedWeight.canonical(weight)):
        for made in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            for ours, theirs in zip(buffers_of(made), buffers_of(original), strict=True):
                assert ours.address != theirs.address
                np.testing.assert_array_equal(ours.bits(), theirs.bits())


def buffers_of(weight: Sparse24Weight | PackedWeight) -> tuple[TensorView, ...]:
    if isinstance(weight, PackedWeight):
        return weight.buffers
    return weight.values_view, weight.metadata_view


def test_unpack_finds_damaged_metadata():
    packed = pack(integer_weight(70, 136, "f16"))
    at, shift = nibble_place(69 - 64, 33 - 32)
    packed.buffers[0].array()[1, 1, at] &= 0xFF ^ 0xF << shift
    with pytest.raises(FormatError) as caught:
        unpack(packed)
    assert (caught.value.row, caught.value.group) == (69, 33)
