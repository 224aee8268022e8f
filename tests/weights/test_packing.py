"""The packed layout, checked against a model of the instructions that read it, and byte by byte."""

from __future__ import annotations

import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    Sparse24Weight,
)
from sparse24_plans.weights.packed_layouts import TILE_M, VALUE_BYTES
from sparse24_plans.weights.packing import pack, unpack

from .instructions import (
    LAYOUT_ID,
    N_TILE,
    ROWS,
    TILE_BYTES,
    TILE_K,
    VALID,
    assert_same_weight,
    every_element,
    every_kernel,
    integer_weight,
    mma_tiles,
    model_gemm,
    nibble_place,
    raw_weight,
    tiles_of,
)

gpu = pytest.mark.gpu


# Products -----------------------------------------------------------------------------------------


@every_kernel
@every_element
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(8, 16, 1), (16, 32, 8), (64, 128, 8), (65, 136, 3), (100, 256, 9), (200, 400, 24), (1, 8, 2)],
)
def test_packed_tiles_multiply_as_the_instruction_does(kernel, element, m, k, n):
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


def test_the_layouts_sizes_and_name_are_fixed():
    assert (TILE_M, TILE_K, VALUE_BYTES, TILE_BYTES) == (64, 128, 8192, 9216)
    assert LAYOUT_ID == "tile64x128_16bit_v1"


def cell_bytes(row: int, column: int) -> int:
    """Return the offset of a compressed column of a tile's row, by the layout's description."""
    return 128 * row + 16 * ((column // 8) ^ (row % 8)) + 2 * (column % 8)


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


def test_packed_and_unpacked_weights_share_no_memory():
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
