"""Which cells the lanes of ``blocks_mma`` and ``sdd_mma`` load and multiply: a NumPy model of both and mma.

The fragments are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". The
fragments of m16n8k8 are the same with the first two registers of A and the first of B alone.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.schedules.blocks_mma import SLOTS, BlocksMmaSchedule, unit_depth
from sparse24_plans.blocksparse.schedules.sdd_mma import SddMmaSchedule

from ..kernels.index_functions import Table, check_tables
from ..support import check_each

LANE = np.arange(32)
GROUP, QUAD = LANE // 4, LANE % 4
BOTH = (False, True)
WARPS = (4, 8, 16)
HEADER = "blocksparse/blocks_mma/fragments.cuh"


def row_of(along_k: bool, m16_tiles: int, group: np.ndarray, m16_tile: int, half: int) -> np.ndarray:
    return 16 * m16_tile + 8 * half + group if along_k else 2 * (m16_tiles * group + m16_tile) + half


def token_of(along_k: bool, tiles: int, column: np.ndarray, tile: int) -> np.ndarray:
    return 8 * tile + column if along_k else tiles * column + tile


def loaded_left(s: np.ndarray, along_k: bool, m16_tiles: int, depth: int) -> np.ndarray:
    """[lanes, words, 2 values]: what each lane loads of a unit S [rows, k], in pieces of neighbours."""
    found = []
    for i in range(2 * m16_tiles if along_k else depth // 4):
        k = QUAD[:, None] * (depth // 4) + np.arange(depth // 4)
        rows = 2 * m16_tiles * GROUP[:, None] + np.arange(2 * m16_tiles)
        piece = s[(8 * i + GROUP)[:, None], k] if along_k else s[rows, k[:, i : i + 1]]
        found.append(piece.reshape(32, -1, 2))
    return np.concatenate(found, axis=1)


def loaded_right(x: np.ndarray, along_k: bool, tiles: int, depth: int) -> np.ndarray:
    """[lanes, words, 2 values]: what each lane loads of a unit X [k, tokens]."""
    found = []
    for i in range(tiles if along_k else depth // 4):
        k = QUAD[:, None] * (depth // 4) + np.arange(depth // 4)
        tokens = tiles * GROUP[:, None] + np.arange(tiles)
        piece = x[k, (8 * i + GROUP)[:, None]] if along_k else x[k[:, i : i + 1], tokens]
        piece = piece if piece.shape[1] > 1 else np.pad(piece, ((0, 0), (0, 1)))  # one half of a word
        found.append(piece.reshape(32, -1, 2))
    return np.concatenate(found, axis=1)


def left_word(along_k: bool, m16_tiles: int, depth: int, m16_tile: int, half: int, step: int, i: int) -> int:
    if along_k:
        return (2 * m16_tile + half) * (depth // 8) + 2 * step + i // 2
    return (4 * step + i) * m16_tiles + m16_tile


def right_word(along_k: bool, tiles: int, depth: int, tile: int, step: int, i: int) -> int:
    words = (tiles + 1) // 2
    return tile * (depth // 8) + 2 * step + i // 2 if along_k else (4 * step + i) * words + tile // 2


def pair(words: np.ndarray, along_k: bool, at: int, stride: int, upper: bool) -> np.ndarray:
    """[lanes, 2]: a register of a fragment, of one word or of the halves of two."""
    if along_k:
        return words[:, at]
    return np.stack([words[:, at, int(upper)], words[:, at + stride, int(upper)]], axis=1)


def mma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[lanes, 4]: the sums of each lane, from registers A [lanes, 4, 2] and B [lanes, 2, 2]."""
    wide_a, wide_b = np.zeros((16, 16)), np.zeros((16, 8))
    for i, half in itertools.product(range(4), range(2)):
        wide_a[GROUP + 8 * (i % 2), 2 * QUAD + half + 8 * (i // 2)] = a[:, i, half]
    for i, half in itertools.product(range(2), range(2)):
        wide_b[2 * QUAD + half + 8 * i, GROUP] = b[:, i, half]
    c = wide_a @ wide_b
    return np.stack([c[GROUP + 8 * (i // 2), 2 * QUAD + i % 2] for i in range(4)], axis=1)


@pytest.mark.parametrize("left_along_k", BOTH)
@pytest.mark.parametrize("right_along_k", BOTH)
@pytest.mark.parametrize(("depth", "m16_tiles"), [(16, 1), (32, 1), (32, 2), (32, 4)])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_lanes_multiply_what_they_load(left_along_k, right_along_k, depth, m16_tiles, tiles):
    rng = np.random.default_rng(tiles)
    s, x = rng.standard_normal((16 * m16_tiles, depth)), rng.standard_normal((depth, 8 * tiles))
    left = loaded_left(s, left_along_k, m16_tiles, depth)
    right = loaded_right(x, right_along_k, tiles, depth)
    assert left.shape[1] == m16_tiles * depth // 4
    c = np.full((16 * m16_tiles, 8 * tiles), np.nan)
    for m16_tile, tile in itertools.product(range(m16_tiles), range(tiles)):
        sums = np.zeros((32, 4))
        for step in range(depth // 16):
            a = []
            for i in range(4):
                at = left_word(left_along_k, m16_tiles, depth, m16_tile, i % 2, step, i // 2 * 2)
                a.append(pair(left, left_along_k, at, m16_tiles, i % 2 == 1))
            b = []
            for i in range(2):
                at = right_word(right_along_k, tiles, depth, tile, step, 2 * i)
                b.append(pair(right, right_along_k, at, (tiles + 1) // 2, tile % 2 == 1))
            sums += mma(np.stack(a, axis=1), np.stack(b, axis=1))
        for i in range(4):
            rows = row_of(left_along_k, m16_tiles, GROUP, m16_tile, i // 2)
            c[rows, token_of(right_along_k, tiles, 2 * QUAD + i % 2, tile)] = sums[:, i]
    assert np.allclose(c, s @ x)  # NaN is left where no lane has a result


def column_of(tiles: int, column: np.ndarray, tile: int) -> np.ndarray:
    return 2 * tiles * (column // 2) + 2 * tile + column % 2


@pytest.mark.parametrize("left_along_k", BOTH)
@pytest.mark.parametrize("right_along_k", BOTH)
def test_lanes_of_sdd_store_whole_sectors(left_along_k, right_along_k):
    sizes = itertools.product((1, 2, 4), (2, 4), (1, 2, 3, 8))
    check_each(
        partial(check_sectors, left_along_k, right_along_k),
        ({"m16_tiles": m16_tiles, "tiles": tiles, "words": words} for m16_tiles, tiles, words in sizes),
    )


def check_sectors(left_along_k: bool, right_along_k: bool, m16_tiles: int, tiles: int, words: int) -> None:
    """A piece of C, whose lanes load neighbours of op(A) and op(B) and store neighbours of C."""
    rng = np.random.default_rng(words)
    a, b = rng.standard_normal((16 * m16_tiles, 8 * words)), rng.standard_normal((8 * words, 8 * tiles))
    k = 2 * words * QUAD[:, None] + np.arange(2 * words)
    c = np.full((16 * m16_tiles, 8 * tiles), np.nan)
    for m16_tile, tile in itertools.product(range(m16_tiles), range(tiles)):
        rows = [row_of(left_along_k, m16_tiles, GROUP, m16_tile, half) for half in range(2)]
        left = np.stack([a[row[:, None], k].reshape(32, words, 2) for row in rows], axis=1)
        if right_along_k:
            right = b[k, column_of(tiles, GROUP, tile)[:, None]]
        else:  # a lane has the columns of two groups, and takes its own
            pair = b[k[..., None], (2 * tiles * (GROUP // 2))[:, None, None] + 2 * tile + np.arange(2)]
            right = np.take_along_axis(pair, GROUP[:, None, None] % 2, 2)[..., 0]
        right, sums = right.reshape(32, words, 2), np.zeros((32, 4))
        for i in range(0, words, 2):  # a last word alone is an m16n8k8, whose other registers count as zeros
            more = np.zeros((32, 4, 2)), np.zeros((32, 2, 2))
            many = min(words - i, 2)
            more[0][:, : 2 * many] = left[:, :, i : i + many].swapaxes(1, 2).reshape(32, 2 * many, 2)
            more[1][:, :many] = right[:, i : i + many]
            sums += mma(*more)
        for i in range(4):
            c[rows[i // 2], column_of(tiles, 2 * QUAD + i % 2, tile)] = sums[:, i]
    assert np.allclose(c, a @ b)
    stored = np.concatenate(
        [column_of(tiles, 2 * QUAD[:4] + i, tile) for tile in range(tiles) for i in range(2)]
    )
    assert (np.sort(stored.reshape(2 * tiles, 4).T) == np.arange(8 * tiles).reshape(4, 2 * tiles)).all()


def test_the_kernel_has_the_models_places():
    tables = [
        Table(f"sampled_column<{tiles}>(i0, i1)", column_of(tiles, *np.ogrid[:8, :tiles])) for tiles in (2, 4)
    ]
    for along_k, width in itertools.product(BOTH, (1, 2, 4, 8)):
        word = str(along_k).lower()
        group, m16_tile, half = np.ogrid[:8, :width, :2]
        if width < 8:
            values = row_of(along_k, width, group, m16_tile, half)
            tables.append(Table(f"fragment_row<{word}, {width}>(i0, i1, i2)", values + 0 * m16_tile))
        values = token_of(along_k, width, *np.ogrid[:8, :width])
        tables.append(Table(f"fragment_token<{word}, {width}>(i0, i1)", values))
        for depth in (16, 32):
            m16_tile, half, step, i = np.ogrid[:width, :2, : depth // 16, :4]
            values = left_word(along_k, width, depth, m16_tile, half, step, i) + 0 * half
            tables.append(Table(f"left_word<{word}, {width}, {depth}>(i0, i1, i2, i3)", values))
            tile, step, i = np.ogrid[:width, : depth // 16, :4]
            values = right_word(along_k, width, depth, tile, step, i)
            tables.append(Table(f"right_word<{word}, {width}, {depth}>(i0, i1, i2)", values + 0 * tile))
    for depth in (16, 32):
        quad, step, i = np.ogrid[:4, : depth // 16, :4]
        tables.append(Table(f"fragment_k<{depth}>(i0, i1, i2)", depth // 4 * quad + 4 * step + i))
    check_tables(HEADER, {}, *tables)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("k_last", BOTH)
def test_schedules_fit(block, op, k_last):
    """Registers hold what is in flight, shared memory the sums, and units of a round keep their registers."""
    transposed = {"trans_b" if op == "dsd" else "trans_a": k_last == (op == "dsd")}
    tokens, sms, longest = (1, 7, 8, 9, 24, 33, 64, 4096), (1, 132), (0, 640)
    warps, densities = set(), {1: (0.0, 1.0), 40: (0.05,), 640: (0.0, 0.05, 1.0)}
    for rows, cols, density in ((m, n, p) for m in densities for n in (1, 640) for p in densities[m]):
        blocks = int(rows * cols * density)
        shape = BlockSparseShape(heads=1, rows=rows * block, cols=cols * block, block=block, blocks=blocks)
        desc = BlockSparseMatmulDescriptor(
            op=op, layout=shape, n=1, element="bf16", packed=True, **transposed
        )
        for n, many, panel in itertools.product(tokens, sms, longest):
            desc = desc.model_copy(update={"n": n, "longest_panel": min(panel, blocks)})
            chosen, tried = BlocksMmaSchedule.of(desc, many), BlocksMmaSchedule.candidates(desc)
            assert chosen in tried
            warps.add(chosen.warps)
            assert {one.warps for one in tried} == set(WARPS)
            for one in tried:
                assert one.depth == unit_depth(block)
                assert block % one.rows == 0
                assert one.warps % (block // one.depth) == 0
                assert one.m16_tiles * one.depth // 4 * one.units <= 32
                assert 32 % one.units == one.units % one.x_units == 0
                assert 1 <= one.x_units <= one.units
                assert one.shared_bytes(desc) <= 98 << 10
                assert one.resident_warps % 4 == 0
                assert one.resident_warps >= one.warps
                if not one.x_along_k:
                    copies = one.prepared(desc)
                    assert (copies[0].sides[1] if copies else n) % one.n8_tiles == 0
    assert warps == set(WARPS)


@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_slots_of_sums_have_the_kernels_size(op):
    """Tokens of C are contiguous with dsd, its rows with dds."""
    tables = {}
    for block, n in itertools.product((16, 64), (1, 8, 12, 24, 64)):
        shape = BlockSparseShape(heads=1, rows=8 * block, cols=8 * block, block=block, blocks=8)
        desc = BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, element="bf16")
        order = "true" if op == "dsd" else "false"
        for one in BlocksMmaSchedule.candidates(desc):
            buffer = f"{SLOTS} * ReduceBuffer<{one.rows}, {one.tokens}, {order}>::kBytes"
            tables[buffer] = Table(buffer, [one.shared_bytes(desc)])
    check_tables("gemm/split_k.cuh", {}, *tables.values())


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_schedules_of_sdd_have_every_block_once(block):
    for blocks, n, sms in itertools.product((0, 1, 33, 4096), (0, 1, 5, 8, 24, 63, 64), (1, 132)):
        shape = BlockSparseShape(heads=1, rows=64 * block, cols=64 * block, block=block, blocks=blocks)
        desc = BlockSparseMatmulDescriptor(op="sdd", layout=shape, n=n, batch=3, element="bf16")
        one = SddMmaSchedule.of(desc, sms)
        assert block % (16 * one.m16_tiles) == 0
        assert 2 * one.m16_tiles * one.words <= 24
        assert 8 * one.words >= n
        assert n % one.vector == 2 * one.words % one.vector == 0
        assert 1 <= one.run_blocks <= 32
        assert one.warps(desc) * 16 * one.m16_tiles == 3 * one.runs(desc) * block
        assert 0 <= one.runs(desc) * one.run_blocks - blocks < one.run_blocks
