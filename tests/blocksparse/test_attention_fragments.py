"""How attention's kernels move numbers between registers: NumPy models of the instructions' fragments.

The layouts are those of the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": D of m64nNk16 in
float32, and A of m64k16 in 16-bit elements from registers.
"""

from __future__ import annotations

import numpy as np
import pytest

LANES = 128


def accumulators(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each lane's number i, [lanes, columns / 2] each."""
    lane, i = np.arange(LANES)[:, None], np.arange(columns // 2)
    rows = lane // 32 * 16 + lane % 32 // 4 + i // 2 % 2 * 8
    return rows, i // 4 * 8 + lane % 4 * 2 + i % 2


def fragment() -> tuple[np.ndarray, np.ndarray]:
    """Row and k of each lane's element e of A: register e / 2, its lower or upper half, [lanes, 8] each."""
    lane, e = np.arange(LANES)[:, None], np.arange(8)
    rows = lane // 32 * 16 + lane % 32 // 4 + e // 2 % 2 * 8
    return rows, e // 4 * 8 + lane % 4 * 2 + e % 2


@pytest.mark.parametrize("columns", [64, 128])
def test_rounded_accumulators_are_fragments_of_a(columns):
    """``round`` makes register i of numbers 2i and 2i + 1; step s of 16 k takes registers 4s to 4s + 3."""
    rows, cols = accumulators(columns)
    scores = np.random.default_rng(0).standard_normal((64, columns))
    held = scores[rows, cols]
    for step in range(columns // 16):
        a_rows, a_k = fragment()
        assert np.array_equal(held[:, 8 * step : 8 * step + 8], scores[a_rows, 16 * step + a_k])


def turn_quad(words: np.ndarray) -> np.ndarray:
    """The kernel's exchanges on [4 lanes, 4 words]."""
    found = words.copy()
    lanes = np.arange(4)
    for bit in (1, 2):
        for i in range(4):
            if i & bit:
                continue
            upper = (lanes & bit) != 0
            given = np.where(upper, found[:, i], found[:, i | bit])
            other = given[lanes ^ bit]
            found[:, i] = np.where(upper, other, found[:, i])
            found[:, i | bit] = np.where(upper, found[:, i | bit], other)
    return found


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("group", [0, 1, 2, 3])
def test_a_quad_writes_whole_groups_of_8_columns(half, group):
    """``write``: word i of lane t is columns 2t, 2t + 1 of the i-th 8; then lane t has all of the t-th."""
    rows, cols = accumulators(128)
    lanes = np.arange(4) + 36  # a quad of the second warp
    words = np.stack([cols[lanes][:, 16 * group + 4 * i + 2 * half] for i in range(4)], axis=1)
    assert (words % 2 == 0).all()
    assert (rows[lanes][:, 2 * half] == 16 + 1 + 8 * half).all()
    turned = turn_quad(words)
    for t in range(4):
        assert turned[t].tolist() == [32 * group + 8 * t + 2 * word for word in range(4)]
