"""What the kernels of block-sparse matrices serve: the reason why a problem is beyond one, or None."""

from __future__ import annotations

from ..plan.kernel import align_up
from ..vocab import BlockSparseOp, BlockSparsePass
from .descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)

_MOST = 2**31
"""A tensor map's coordinates and the kernels' counts are below it."""
_COPIED = 16
"""Bytes that the copy engine's rows are multiples of."""
_MOST_DENSITY = {False: {16: 0.12, 32: 0.55}, True: {16: 0.07, 32: 0.4}}
"""Beyond which inflating takes less time; by whether rows of the dense matrix are summed: that is slower."""
_LEAST_SCALE, _MOST_SCALE = 2.0**-120, 2.0**120
"""Of a scale that stays a normal number when it is multiplied by log2(e)."""
COUNTER_BYTES = 4
"""Of workspace: a counter that deals a launch's items."""
_SMALLEST_TILE = 64
"""Rows and tokens of the smallest tile."""
_TEAM_BYTES = 512


def blocks_wgmma(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product, on an H200."""
    one = problem.layout
    most = _MOST_DENSITY[problem.dense_k_last].get(one.block, 1.0)
    if one.density > most:
        return f"is preferred for up to {100 * most:g}% of blocks of {one.block} here, not {one.density:.1%}"
    return blocks_wgmma_any(problem)


def blocks_wgmma_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    one = problem.layout
    if problem.op is BlockSparseOp.SDD and one.block < _SMALLEST_TILE:
        return f"serves op sdd with blocks of 64 and 128, not {one.block}"
    for operand in problem.operands():
        if operand.name in ("a", "b", "c") and operand.shape[-1] * operand.element.itemsize % _COPIED:
            return f"needs rows of {operand.name} in multiples of {_COPIED} bytes, got n = {problem.n}"
    coordinates = {
        "rows of values": problem.batch * one.blocks * one.block,
        "matrices": problem.batch * one.heads,
        "tiles": one.heads
        * max(one.block_rows, one.block_cols)
        * problem.batch
        * max(-(-problem.n // _SMALLEST_TILE), one.block_cols),
    }
    for what, count in coordinates.items():
        if count >= _MOST:
            return f"{count} {what} exceed the kernel's limit, {_MOST - 1}"
    return None


def attention_wgmma(problem: BlockSparseAttentionDescriptor) -> str | None:
    one = problem.layout
    if problem.op is not BlockSparsePass.FORWARD:
        return f"serves op forward, not {problem.op}"
    if one.block < _SMALLEST_TILE:
        return f"serves blocks of 64 and 128, not {one.block}"
    if problem.head_size not in (64, 128):
        return f"serves head_size 64 and 128, not {problem.head_size}"
    if not _LEAST_SCALE <= abs(problem.scale) <= _MOST_SCALE:
        return f"serves scales from 2^-120 to 2^120, got {problem.scale}"
    if (rows := problem.batch * one.heads * one.block_rows) >= _MOST:
        return f"{rows} rows of blocks exceed the kernel's limit, {_MOST - 1}"
    return None


def cublas(problem: BlockSparseMatmulDescriptor) -> str | None:
    largest = max(problem.n, problem.layout.rows, problem.layout.cols, problem.batch * problem.layout.heads)
    return None if largest < _MOST else f"size {largest} exceeds cuBLAS's limit {_MOST - 1}"


def softmax_teams(problem: BlockSparseSoftmaxDescriptor) -> int:
    """Teams of warps of the kernel: each has the rows of a line that 512 contiguous bytes of a block hold."""
    one = problem.layout
    rows = _TEAM_BYTES // (one.block * problem.element.itemsize)
    return problem.batch * one.heads * one.rows // rows


def softmax(problem: BlockSparseSoftmaxDescriptor) -> str | None:
    teams = softmax_teams(problem)
    return None if teams < _MOST else f"{teams} teams of rows exceed the kernel's limit, {_MOST - 1}"


def inflated_regions(problem: BlockSparseMatmulDescriptor) -> tuple[int, int]:
    """Bytes of the sparse matrix as a dense one, and of the float32 accumulators that an epilogue needs."""
    one, sampled = problem.layout, problem.op is BlockSparseOp.SDD
    size = (problem.out_element if sampled else problem.element).itemsize
    dense = problem.batch * one.heads * one.rows * one.cols * size
    width = problem.sides[0 if problem.op is BlockSparseOp.DSD else 1]
    accumulators = problem.batch * one.heads * width * problem.n * 4 if problem.epilogue.has_bias else 0
    return align_up(dense), align_up(accumulators)
