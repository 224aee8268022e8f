"""The packed layout of float32, against a model of wgmma.sp m64nNk32 with A in registers; its round trip.

The model is written lane by lane from the PTX ISA and shares nothing with packing.py: each lane loads 16
bytes of values at a time and the metadata word that it hands to the instruction.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import ElementKind, FormatError, Sparse24Weight, TensorView
from sparse24_plans.weights.packed_layouts import TILES_32BIT
from sparse24_plans.weights.packing import pack, unpack

PAIRS = np.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], np.uint16)
"""Valid codes."""


def hostile_weight(m: int, k: int, seed: int = 0) -> Sparse24Weight:
    """Any bits as values, every valid pair of positions."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, (m, k // 2), np.uint32)
    codes = PAIRS[rng.integers(0, 6, (m, k // 4))]
    return Sparse24Weight(values, codes[:, ::2] | codes[:, 1::2] << 8, element=ElementKind.F32)


def dense_seen_by_wgmma(tile: np.ndarray) -> np.ndarray:
    """The 64 x 64 dense words that the instruction multiplies: two steps of k32 by four warps."""
    dense = np.zeros((64, 64), np.uint32)
    words = tile.view(np.uint32)
    for thread in range(128):
        w, lane = divmod(thread, 32)
        g, t = divmod(lane, 4)
        for step in range(2):
            for register in range(4):  # a pair of kept values each: rows g and g + 8, then 8 columns on
                row = 16 * w + g + 8 * (register % 2)
                for slot in range(2):
                    kept = 8 * (register // 2) + 2 * t + slot  # of the 16 of the step
                    at = ((2 * step + register // 2) * 128 + thread) * 4 + 2 * (register % 2) + slot
                    # The lanes 2 * step and 2 * step + 1 of every quad hold the step's metadata.
                    holder = 32 * w + 4 * g + 2 * step + kept // 8
                    half = int(words[2048 + holder]) >> 16 * (register % 2) & 0xFFFF
                    nibble = half >> 4 * (kept // 2 % 4) & 0xF
                    column = 32 * step + 4 * (kept // 2) + (nibble >> 2 * (kept % 2) & 3)
                    dense[row, column] = words[at]
    return dense


@pytest.mark.parametrize(("m", "k"), [(64, 64), (128, 192), (70, 72), (1, 8)])
def test_the_instruction_sees_the_dense_matrix(m, k):
    weight = hostile_weight(m, k)
    tiles = pack(weight).buffers[0].array()
    assert tiles.shape == (-(-m // 64), -(-k // 64), 8704)
    dense = np.zeros((64 * tiles.shape[0], 64 * tiles.shape[1]), np.uint32)
    for i, j in np.ndindex(tiles.shape[:2]):
        dense[64 * i : 64 * i + 64, 64 * j : 64 * j + 64] = dense_seen_by_wgmma(tiles[i, j])
    expected = np.zeros_like(dense)
    expected[:m, :k] = weight.decompress().view(np.uint32)
    np.testing.assert_array_equal(dense, expected)


@given(m=st.integers(1, 200), k=st.integers(1, 40).map(lambda units: 8 * units), seed=st.integers(0, 99))
def test_round_trip(m, k, seed):
    weight = hostile_weight(m, k, seed)
    packed = pack(weight)
    assert packed.layout_id == TILES_32BIT.layout_id == "tile64x64_32bit_v1"
    back = unpack(packed)
    np.testing.assert_array_equal(back.values.view(np.uint32), weight.values.view(np.uint32))
    np.testing.assert_array_equal(back.metadata, weight.metadata)


def test_invalid_nibbles_are_refused_by_row_and_group():
    weight = hostile_weight(64, 64)
    packed = pack(weight)
    tiles = packed.buffers[0].array().copy()
    tiles[0, 0, 8192] = 0x00  # lane 0: row 0, groups 0 and 1
    bad = type(packed)(packed.layout_id, 64, 64, packed.element, packed.device, (TensorView.of(tiles),))
    with pytest.raises(FormatError, match="row 0, group 0"):
        unpack(bad)
