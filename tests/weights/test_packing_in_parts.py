"""The packed layout of float32 in two parts of bf16: the parts, and where wgmma.sp finds them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import InvalidProblemError
from sparse24_plans.weights import bf16_terms
from sparse24_plans.weights.packed_layouts import TILES_IN_PARTS
from sparse24_plans.weights.packing import pack, unpack

from .test_packing_32bit import hostile_weight

gpu = pytest.mark.gpu
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def parts_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low, as float64."""
    found = bf16_terms.of(np.asarray(values, np.float32).view(np.uint32))
    high, low = (part.view(ml_dtypes.bfloat16).astype(np.float64) for part in found)
    return high, low


@settings(max_examples=500)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_parts_are_the_nearest_of_bf16(x):
    high, low = (part[0] for part in parts_of([x]))
    nearest = float(np.float32(x).astype(ml_dtypes.bfloat16))
    assert high == (nearest if np.isfinite(nearest) else np.copysign(LARGEST, x))
    assert low == float(np.float32(x - high).astype(ml_dtypes.bfloat16))
    assert abs(x - high - low) <= max(2.0**-17 * abs(x), 2.0**-134)


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan, -np.nan])
def test_what_isnt_finite_is_its_high_part(x):
    """The sum of both terms is therefore the value itself."""
    high, low = (part[0] for part in parts_of([x]))
    assert low == 0
    np.testing.assert_array_equal(high, x)


def test_a_nan_stays_one_whatever_its_payload():
    bits = np.array([0x7F800001, 0xFF800001, 0x7FBFFFFF], np.uint32)
    assert np.isnan(parts_of(bits.view(np.float32))[0]).all()


def seen_by_wgmma(tile: np.ndarray, part: int) -> np.ndarray:
    """The 64 x 64 dense words of a part that two steps of m64nNk32 multiply, A by a descriptor.

    A step reads 32 bytes of each row: kept columns, under the swizzle of the address's bits 7 to 9.
    """
    dense, words = np.zeros((64, 64), np.uint16), tile[8192:].view(np.uint32)
    for row in range(64):
        for step in range(2):
            lane = 32 * (row // 16) + 4 * (row % 8) + 2 * step
            for kept in range(16):
                plain = row * 128 + part * 64 + step * 32 + kept * 2
                at = plain ^ (plain >> 7 & 7) << 4
                half = int(words[lane + kept // 8]) >> 16 * (row // 8 % 2) & 0xFFFF
                nibble = half >> 4 * (kept // 2 % 4) & 0xF
                column = 32 * step + 4 * (kept // 2) + (nibble >> 2 * (kept % 2) & 3)
                dense[row, column] = tile[at : at + 2].view(np.uint16)[0]
    return dense


@pytest.mark.parametrize(("m", "k"), [(64, 64), (130, 200), (1, 8)])
def test_the_instruction_sees_the_parts_of_the_dense_matrix(m, k):
    weight = hostile_weight(m, k)
    packed = pack(weight, TILES_IN_PARTS)
    tiles = packed.buffers[0].array()
    assert packed.layout_id == "tile64x64_2xbf16_v1"
    assert tiles.shape == (-(-m // 64), -(-k // 64), 8704)
    for part, want in enumerate(bf16_terms.of(weight.decompress().view(np.uint32))):
        seen = np.block([[seen_by_wgmma(tile, part) for tile in row] for row in tiles])
        np.testing.assert_array_equal(seen[:m, :k], want)
        assert not seen[m:].any()
        assert not seen[:, k:].any()


def test_parts_arent_unpacked():
    """Two bf16 terms don't hold the weight's bits."""
    with pytest.raises(InvalidProblemError, match="expected layout 'tile64x64_32bit_v1'"):
        unpack(pack(hostile_weight(64, 64), TILES_IN_PARTS))


@gpu
@pytest.mark.parametrize(("m", "k"), [(0, 64), (1, 8), (70, 264), (300, 1000)])
def test_gpu_packs_the_same_bytes(m, k):
    weight = hostile_weight(m, k)
    packed = pack(weight.to(0), TILES_IN_PARTS)
    want = pack(weight, TILES_IN_PARTS).buffers[0].array()
    np.testing.assert_array_equal(packed.buffers[0].array().get(), want)
