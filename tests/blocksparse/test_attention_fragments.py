"""How attention's kernels move numbers between registers: NumPy models of the instructions' fragments.

The layouts are those of the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": D of m64nNk16 in
float32, and A of m64k16 in 16-bit elements from registers.
"""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import BlockSparseAttentionDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.backends import attention_wgmma
from sparse24_plans.blocksparse.dropout import drop_bound, dropped, philox

from ..kernels.index_functions import ptx_of

LANES = 128
SEED_OFFSET = np.array([11, 12, 13, 14])


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


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_size", [104, 128])
def test_q_is_released_after_a_product_of_its_fragments(head_size, block):
    """An arrival at a barrier does not wait for loads in flight, and TMA then fills their memory anew."""
    shape = BlockSparseShape(heads=1, rows=1024, cols=1024, block=block, blocks=10)
    desc = BlockSparseAttentionDescriptor(layout=shape, head_size=head_size, element="bf16", scale=0.1)
    text = ptx_of("blocksparse/attention_wgmma.cu", attention_wgmma.defines(desc))
    _, *loads = text.split("ldmatrix")
    assert len(loads) == -(-head_size // 16)
    product, *_ = loads[-1].split("wgmma.wait_group")
    assert "wgmma.mma_async" in product
    assert "mbarrier.arrive" not in "".join(loads[:-1]) + product


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
    transposed = turn_quad(words)
    for t in range(4):
        assert transposed[t].tolist() == [32 * group + 8 * t + 2 * word for word in range(4)]


def cell_words(key: np.ndarray, query: np.ndarray, matrix: int) -> np.ndarray:
    """The four words of each lane's call, [4, lanes]."""
    seed, offset = SEED_OFFSET[:2, None], SEED_OFFSET[2:, None]
    zero = np.zeros(1, np.int64)
    of_cells = philox((offset[0], offset[1], zero, zero), (seed[0], seed[1]))[:2]
    zero = np.zeros(LANES, np.int64)
    return np.stack(philox((key + zero, query + zero, matrix + zero, zero), of_cells))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_thread_drops_the_defined_cells_where_rows_are_queries(p):
    """``of_queries``: word i of a call has cells of bit 3 of the query (i / 2) and of the key (i % 2)."""
    rows, cols = accumulators(64)
    matrix, first, start, bound = 3, 192, 448, drop_bound(p) << 16
    found, lane = np.zeros((LANES, 32), bool), np.arange(LANES)
    query = first + lane // 32 * 16 + lane % 32 // 4
    for of_16 in range(4):
        words = cell_words(start + 16 * of_16 + lane % 4 * 2, query, matrix)
        for i in range(4):
            pair = 8 * of_16 + i % 2 * 4 + i // 2 * 2
            found[:, pair] = (words[i] << 16 & 0xFFFFFFFF) < bound
            found[:, pair + 1] = words[i] < bound
    assert np.array_equal(found, dropped(SEED_OFFSET, p, np.array([matrix]), first + rows, start + cols))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_thread_drops_the_defined_cells_where_rows_are_keys(p):
    """``of_keys``: lanes of an even and an odd key call for the even and the odd query, and swap halves."""
    rows, cols = accumulators(64)
    matrix, first, start, bound = 5, 320, 64, drop_bound(p) << 16
    found, lane = np.zeros((LANES, 32), bool), np.arange(LANES)
    key = first + lane // 32 * 16 + lane % 32 // 4
    odd = key % 2
    for of_16 in range(4):
        words = cell_words(key - odd, start + 16 * of_16 + lane % 4 * 2 + odd, matrix)
        fields = np.empty((2, 2, LANES), np.int64)
        for i in range(2):
            low, high = words[2 * i], words[2 * i + 1]
            even_keys, odd_keys = (low & 0xFFFF) | (high & 0xFFFF) << 16, low >> 16 | high >> 16 << 16
            other = np.where(odd, even_keys, odd_keys)[lane ^ 4]
            fields[0, i], fields[1, i] = np.where(odd, other, even_keys), np.where(odd, odd_keys, other)
        for i in range(4):
            pair = 8 * of_16 + i // 2 * 4 + i % 2
            word = fields[i % 2, i // 2]
            found[:, pair] = (word << 16 & 0xFFFFFFFF) < bound
            found[:, pair + 2] = word < bound
    assert np.array_equal(found, dropped(SEED_OFFSET, p, np.array([matrix]), start + cols, first + rows))
