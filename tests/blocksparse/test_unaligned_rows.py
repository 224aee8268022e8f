"""Which bytes warps store of rows of C that begin anywhere: a model of ``blocksparse/unaligned_rows.cuh``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.kernel_problem import KernelProblem

from ..kernels.index_functions import Table, check_tables

HEADER = "blocksparse/unaligned_rows.cuh"
PIECE, SECTOR, WARP_ROWS, LANE = 16, 32, 16, np.arange(32)
STEP_BYTES = {1: 64, 2: 128, 4: 128}
"""Bytes of a row in a step, by the bytes of a result."""
every_size = pytest.mark.parametrize("size", STEP_BYTES)


def row_of(size: int, index: int, lane: np.ndarray) -> np.ndarray:
    lanes = STEP_BYTES[size] // PIECE
    among, apart = lane // lanes, 4 // size
    other = among // 4 + index * (32 // lanes // 4)
    return among % 4 * apart + other % apart + other // apart * 4 * apart


def head_end(skew: int, end: int) -> int:
    return min(-skew % PIECE, end)


def tail_begin(skew: int, first: bool, end: int) -> int:
    return max((end + skew) // PIECE * PIECE - skew, head_end(skew, end) if first else -skew)


def stores_piece(at: int, first: bool, end: int) -> bool:
    return (not first or at >= 0) and at + PIECE <= end


def stored(size: int, address: int, width: int) -> tuple[np.ndarray, list[int]]:
    """How often each byte of a row of a tile is stored, and where pieces begin. ``address``: of the row."""
    times, begins, step_bytes, skew = np.zeros(width + 64, int), [], STEP_BYTES[size], address % SECTOR
    steps = range(0, width, step_bytes)
    for before in steps:
        first, last, end = before == 0, before == steps[-1], min(width - before, step_bytes)
        pieces = [lane * PIECE - skew for lane in range(step_bytes // PIECE)]
        results = [(0, head_end(skew, end))] if first else []
        if last:
            pieces.append(step_bytes - skew)
            results.append((tail_begin(skew, first, end), end))
        begins += [before + at for at in pieces if stores_piece(at, first, end)]
        for begin, until in results:
            assert until - begin < PIECE
            times[before + begin : before + until] += 1
    for begin in begins:
        times[begin : begin + PIECE] += 1
    return times, begins


@every_size
@given(st.integers(0, 1 << 20), st.integers(1, 256))
def test_every_byte_is_stored_once_by_aligned_pieces(size, place, results):
    times, begins = stored(size, place * size, results * size)
    assert (times == (np.arange(len(times)) < results * size)).all()
    assert all(begin >= 0 and (place * size + begin) % PIECE == 0 for begin in begins)
    assert len(begins) >= (results * size - 2 * (PIECE - size)) // PIECE


@every_size
def test_each_step_but_the_ends_stores_whole_sectors(size):
    step_bytes = STEP_BYTES[size]
    for address in range(0, SECTOR, size):
        _, begins = stored(size, address, 4 * step_bytes)
        middle = [one for one in begins if one >= SECTOR - address % SECTOR and one < 3 * step_bytes - SECTOR]
        assert (np.diff(middle) == PIECE).all()
        assert (address + middle[0]) % SECTOR == 0


@every_size
def test_lanes_have_every_row_and_odd_lengths_different_banks(size):
    lanes, step_bytes = STEP_BYTES[size] // PIECE, STEP_BYTES[size]
    passes, pitch = WARP_ROWS * lanes // 32, SECTOR + STEP_BYTES[size] + PIECE
    rows = np.concatenate([row_of(size, index, LANE) for index in range(passes)])
    assert (np.sort(rows) == np.repeat(np.arange(WARP_ROWS), lanes)).all()
    most = {1: 3, 2: 1, 4: 1}[size]  # how often a bank is read at once
    for results in range(1, 2 * step_bytes, 2):
        for index in range(passes):
            row = row_of(size, index, LANE)
            at = row * pitch + SECTOR + LANE % lanes * PIECE - row * results * size % SECTOR
            words = np.unique(at // 4)
            assert np.bincount(words % 32).max() <= most


@every_size
def test_the_kernel_has_the_models_places(size):
    step_bytes, skews = STEP_BYTES[size], np.arange(0, SECTOR, size)
    rows = f"UnalignedRows<{size}, {step_bytes}>"
    lanes = step_bytes // PIECE
    passes = WARP_ROWS * lanes // 32
    ends = np.arange(size, step_bytes + size, size)
    first = (False, True)
    check_tables(
        HEADER,
        {},
        Table(f"{rows}::row_of(i0, i1)", [row_of(size, index, LANE) for index in range(passes)]),
        Table(f"{rows}::piece_at(i0, i1)", LANE[:, None] % lanes * PIECE - np.arange(SECTOR)),
        Table(f"{rows}::last_piece_at(i0)", step_bytes - np.arange(SECTOR)),
        Table(
            f"{rows}::stores_piece(i0 - 32, i1, (i2 + 1) * {size})",
            [[[stores_piece(at - 32, one, end) for end in ends] for one in first] for at in range(200)],
        ),
        Table(
            f"{rows}::head_end(i0 * {size}, (i1 + 1) * {size})",
            [[head_end(skew, end) for end in ends] for skew in skews],
        ),
        Table(
            f"{rows}::tail_begin(i0 * {size}, i1, (i2 + 1) * {size})",
            [[[tail_begin(skew, one, end) for end in ends] for one in first] for skew in skews],
        ),
    )


@pytest.mark.parametrize(
    ("op", "n", "out", "by_warps"),
    [
        ("dsd", 5, "bf16", True),
        ("dsd", 8, "bf16", False),
        ("dsd", 4, "f32", False),
        ("dsd", 4, "bf16", True),
        ("dds", 5, "bf16", False),
        ("sdd", 5, "bf16", False),
    ],
)
def test_warps_store_rows_that_do_not_begin_at_16_bytes(op, n, out, by_warps):
    shape = BlockSparseShape(heads=1, rows=64, cols=128, block=32, blocks=3)
    desc = BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, element="bf16", out_element=out)
    assert KernelProblem(desc).unaligned_rows == by_warps
