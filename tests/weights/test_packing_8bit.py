"""The packed layout of 8-bit elements, against a model of wgmma.sp m64nNk64, and its round trip.

The model is written lane by lane from the PTX ISA and shares nothing with packing.py: each lane unpacks the
metadata word that it would hand to the instruction, and takes the values from where the instruction would.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import ElementKind, FormatError, Sparse24Weight, TensorView
from sparse24_plans.weights.packed_layouts import TILES_8BIT
from sparse24_plans.weights.packing import pack, unpack

gpu = pytest.mark.gpu
every_element = pytest.mark.parametrize("element", ["s8", "fp8_e4m3"])


def hostile_weight(m: int, k: int, element: str, seed: int = 0) -> Sparse24Weight:
    """Every byte pattern as a value, every valid pair of positions."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (m, k // 2), np.uint8)
    pairs = np.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], np.uint16)[rng.integers(0, 6, (m, k // 4))]
    metadata = pairs[:, ::2] | pairs[:, 1::2] << 8
    return Sparse24Weight(values, metadata, element=ElementKind(element))


def tiles_of(weight: Sparse24Weight) -> np.ndarray:
    (buffer,) = pack(weight).buffers
    return buffer.array()


def dense_seen_by_wgmma(tile: np.ndarray) -> np.ndarray:
    """The 64 x 256 dense bytes that the instruction multiplies: four steps of k64 by four warps."""
    dense = np.zeros((64, 256), np.uint8)
    for w in range(4):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            at = 8192 + (w * 32 + lane) * 16
            for step in range(4):
                word = int.from_bytes(tile[at + 4 * step : at + 4 * step + 4].tobytes(), "little")
                row = 16 * w + g + 8 * (t & 1)
                for group in range(8):
                    nibble = word >> 4 * group & 0xF
                    column = 64 * step + 32 * (t >> 1) + 4 * group
                    for slot in range(2):
                        compressed = column // 2 + slot  # two kept values a group of four
                        chunk, byte = compressed // 16, compressed % 16
                        value = tile[row * 128 + (chunk ^ row % 8) * 16 + byte]
                        dense[row, column + (nibble >> 2 * slot & 3)] = value
    return dense


@every_element
@pytest.mark.parametrize(("m", "k"), [(64, 256), (128, 512), (70, 264), (1, 8)])
def test_the_instruction_sees_the_dense_matrix(element, m, k):
    weight = hostile_weight(m, k, element)
    tiles = tiles_of(weight)
    down, across, size = TILES_8BIT.packed_shape(m, k)
    assert tiles.shape == (down, across, size) == (-(-m // 64), -(-k // 256), 10240)
    seen = np.block([[dense_seen_by_wgmma(tiles[i, j]) for j in range(across)] for i in range(down)])
    np.testing.assert_array_equal(seen[:m, :k], weight.decompress().view(np.uint8))
    assert not seen[m:].any()
    assert not seen[:, k:].any()


@given(
    m=st.integers(0, 140),
    k=st.integers(0, 70).map(lambda units: 8 * units),
    element=st.sampled_from(["s8", "fp8_e4m3"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(m, k, element, seed):
    weight = hostile_weight(m, k, element, seed)
    back = unpack(pack(weight))
    assert back.element == weight.element
    np.testing.assert_array_equal(back.values_view.bits(), weight.values_view.bits())
    np.testing.assert_array_equal(back.metadata, weight.metadata)


def test_unpack_finds_damaged_metadata():
    packed = pack(hostile_weight(70, 264, "s8"))
    packed.buffers[0].array()[1, 1, 8192:] = 0
    with pytest.raises(FormatError):
        unpack(packed)


@gpu
@every_element
@pytest.mark.parametrize(("m", "k"), [(0, 64), (1, 8), (70, 264), (300, 1000)])
def test_gpu_packs_the_same_bytes(element, m, k):
    weight = hostile_weight(m, k, element)
    packed = pack(weight.to(0))
    np.testing.assert_array_equal(packed.buffers[0].array().get(), tiles_of(weight))
    back = unpack(packed).to("host")
    np.testing.assert_array_equal(TensorView.of(back.values).bits(), weight.values_view.bits())
    np.testing.assert_array_equal(back.metadata, weight.metadata)
