"""The packed layouts of quantized weights, checked against a model of the registers that kernels load."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BufferTooSmallError,
    ElementKind,
    FormatError,
    InvalidProblemError,
    PackedWeight,
    Sparse24QuantizedWeight,
    Sparse24Weight,
)
from sparse24_plans.weights.packing import pack
from sparse24_plans.weights.packing_quantized import pack_quantized, unpack_quantized

from .instructions import LANE, N_TILE, TILE_K, VALID, G, T, load_b, mma_sp_m16n8k32

STORED = ("s4", "s8", "fp8_e4m3")


def any_weight(
    seed: int,
    m: int,
    k: int,
    stored: str = "s4",
    group: int = 128,
    element: str = "bf16",
    scales: str = "f32",
) -> Sparse24QuantizedWeight:
    """Any stored bits but fp8's NaNs, any valid positions, any scales."""
    rng = np.random.default_rng(seed)
    width = k // 4 if stored == "s4" else k // 2
    values = rng.integers(0, 256, (m, width)).astype(np.uint8)
    if stored == "fp8_e4m3":
        values[values & 0x7F == 0x7F] = 0
    codes = rng.choice(np.array(VALID, np.uint8), (m, k // 4))
    kind = ElementKind(scales)
    factors = rng.uniform(0.5, 2, (m, -(-k // group) if group else 1)).astype(kind.dtype)
    return Sparse24QuantizedWeight(
        *(values, codes.view(np.uint16).reshape(m, k // 8), factors),
        element=element,
        stored=stored,
        group=group,
        scale_element=scales,
    )


def registers(tile: np.ndarray, w: int, step: int, stored: str) -> np.ndarray:
    """The stored values of a lane's four registers: float64 [32, 4, 2], by one mask for each register."""
    words, r = tile.view(np.uint32).astype(np.int64), np.arange(4)
    if stored == "s4":
        pair = words[(w * 32 + LANE) * 4 + step] >> 4 * r & 0x000F000F
    else:
        half, inside = divmod(step, 2)
        pair = words[((half * 4 + w) * 32 + LANE) * 4 + 2 * inside + (r >> 1)] >> 8 * (r & 1) & 0x00FF00FF
    halves = np.stack([pair & 0xFFFF, pair >> 16], -1)
    if stored == "fp8_e4m3":
        return halves.astype(np.uint8).view(ElementKind.FP8_E4M3.dtype).astype(float)
    return halves - (8.0 if stored == "s4" else 128.0)


def scales_of_lane(tile: np.ndarray, weight: Sparse24QuantizedWeight, w: int, step: int) -> np.ndarray:
    """The scales of each lane's rows g and g + 8 in a step: float32 [32, 2]."""
    by = weight.quantization
    scales = tile.view(by.scale_element.dtype).astype(np.float32)
    group = 32 * step // (by.group or 128)
    return scales[(group * 4 + w) * 16 + 2 * G + np.arange(2)]


def model_product(weight: Sparse24QuantizedWeight, x: np.ndarray) -> np.ndarray:
    """W @ X^T [M, 8] by mma.sp, from the packed bytes, with values made in registers as kernels make them."""
    packed, by = pack_quantized(weight), weight.quantization
    tiles = packed.buffers[0].array()
    mt, kt, _ = tiles.shape
    value_bytes = 64 * 64 * (4 if by.element == "s4" else 8) // 8
    padded = np.zeros((N_TILE, kt * TILE_K))
    padded[:, : x.shape[1]] = x
    out = np.zeros((mt * 64, N_TILE))
    for down in range(mt):
        for w in range(4):
            d = np.zeros((32, 4))
            for across in range(kt):
                tile = tiles[down, across]
                metadata = tile[value_bytes : value_bytes + 1024].view(np.uint32).reshape(4, 32, 2)[w]
                for step in range(4):
                    stored = registers(tile[:value_bytes], w, step, by.element).astype(np.float32)
                    scale = scales_of_lane(tile[value_bytes + 1024 :], weight, w, step)
                    values = stored * scale[:, [0, 1, 0, 1], None]
                    a = values.astype(weight.element.dtype).astype(np.float64).reshape(32, 8)
                    at = across * TILE_K + 32 * step
                    b = load_b(padded[:, at : at + 32])
                    d = mma_sp_m16n8k32(a, b, d, metadata[:, step // 2], step % 2)
            i = np.arange(4)
            out[down * 64 + 16 * w + G + 8 * (i >> 1), 2 * T + (i & 1)] = d
    assert not out[weight.m :].any(), "padding rows of W gave something"
    return out[: weight.m]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize(("m", "k"), [(64, 128), (70, 200), (3, 264)])
def test_registers_give_the_product_of_the_dequantized_weight(stored, group, m, k):
    weight = any_weight(m + k, m, k, stored, group, "f16", "f16" if group == 64 else "f32")
    x = np.random.default_rng(1).integers(-8, 9, (N_TILE, k)).astype(np.float64)
    dense = weight.dequantize().decompress().astype(np.float64)
    np.testing.assert_allclose(model_product(weight, x), dense @ x.T, rtol=1e-12, atol=1e-9)


@given(
    stored=st.sampled_from(STORED),
    group=st.sampled_from([0, 32, 64, 128]),
    m=st.integers(0, 140),
    k=st.integers(0, 60).map(lambda eights: 8 * eights),
    seed=st.integers(0, 2**32 - 1),
    element=st.sampled_from(["f16", "bf16"]),
    wide=st.booleans(),
)
def test_packing_and_unpacking_keep_every_bit(stored, group, m, k, seed, element, wide):
    weight = any_weight(seed, m, k, stored, group, element, "f32" if wide else element)
    packed = pack_quantized(weight)
    assert packed.layout_id == f"tile64x128_{stored.partition('_')[0]}_v1"
    assert packed.quantization == weight.quantization
    back = unpack_quantized(packed)
    assert (back.m, back.k, back.element, back.quantization) == (m, k, element, weight.quantization)
    for one, other in zip(back.views, weight.views, strict=True):
        assert np.array_equal(one.bits(), other.bits()) or not k  # no columns, no tiles for scales


def test_positions_lie_as_in_the_tiles_of_16_bits():
    weight = any_weight(5, 130, 392)
    plain = Sparse24Weight(np.zeros((130, 196), np.float16), weight.metadata)
    found, wanted = (one.buffers[0].array() for one in (pack_quantized(weight), pack(plain)))
    assert np.array_equal(found[:, :, 2048 : 2048 + 1024], wanted[:, :, 8192:])


@pytest.mark.parametrize(
    ("stored", "group", "nbytes"), [("s4", 128, 3200), ("s4", 32, 3584), ("s8", 0, 5248)]
)
def test_a_tile_has_the_bytes_that_it_says(stored, group, nbytes):
    packed = pack_quantized(any_weight(0, 128, 256, stored, group, "bf16", "bf16"))
    assert packed.nbytes == 4 * nbytes


def test_copies_and_pickles_unpack_alike():
    weight = any_weight(1, 64, 136, "s8", 64)
    packed = pack_quantized(weight)
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert np.array_equal(unpack_quantized(again).scales, weight.scales)


def test_what_is_not_packed_so_is_refused():
    weight = any_weight(0, 64, 128)
    packed = pack_quantized(weight)
    with pytest.raises(InvalidProblemError, match="weight: expected Sparse24QuantizedWeight"):
        pack_quantized(weight.dequantize())
    with pytest.raises(InvalidProblemError, match="packed: expected layout"):
        unpack_quantized(PackedWeight.canonical(weight))
    with pytest.raises(InvalidProblemError, match="packed: expected layout"):
        unpack_quantized(pack(weight.dequantize()))
    with pytest.raises(InvalidProblemError, match="packed: expected PackedWeight"):
        unpack_quantized(weight)
    fields = (packed.layout_id, 64, 256, packed.element, packed.device, packed.buffers, packed.quantization)
    with pytest.raises(BufferTooSmallError):
        PackedWeight(*fields)


def test_bad_positions_are_named_when_they_are_unpacked():
    packed = pack_quantized(any_weight(0, 64, 128))
    packed.buffers[0].array()[0, 0, 2048:3072] = 0x55
    with pytest.raises(FormatError):
        unpack_quantized(packed)
