"""What the kernels of block-sparse matrices serve: the reason why a problem is beyond one, or None."""

from __future__ import annotations

from ..plan.kernel import align_up
from ..plan.table import beyond_grid
from ..vocab import BlockSparseOp, BlockSparsePass, ElementKind
from .descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)
from .form import Form, turned_bytes
from .shape import BLOCK_SIZES
from .strict_tiles import StrictTiles
from .turn import turn_blocks

_MOST = 2**31
"""A tensor map's coordinates and the kernels' counts are below it."""
_COPIED = 16
"""Bytes that the copy engine's rows are multiples of."""
_FEW = 512
"""Columns of a product up to which inflating takes as much time as the product."""
_MOST_DENSITY_OF_FEW: dict[bool, dict[int, float]] = {False: {}, True: {16: 0.3}}
_MOST_DENSITY: dict[bool, dict[int, float]] = {False: {16: 0.45, 32: 0.6}, True: {16: 0.25, 32: 0.45}}
"""Beyond which inflating takes less time; by whether rows of the dense matrix are summed: that is slower."""
_MOST_DENSITY_OF_SDD = {16: 0.13, 32: 0.25}
_LEAST_SCALE, _MOST_SCALE = 2.0**-120, 2.0**120
"""Of a scale that stays a normal number when it is multiplied by log2(e)."""
COUNTER_BYTES = 4
"""Of workspace: a counter that deals a launch's items."""
_STEP_OF_8_BITS = 32
_SMALLEST_TILE = 64
"""Rows and tokens of the smallest tile."""
_TEAM_BYTES = 512
_INTEGER_TERMS = 2**17
"""Products of s8, of at most 2^14, whose sums an int32 doesn't hold."""
_STRICT_DENSITY = 0.6
_STRICT_DENSITY_OF_16 = 0.3
"""Beyond which a dense product of float32 takes less time; the second for blocks of 16."""


def blocks_wgmma(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product, on an H200."""
    one = problem.layout
    sampled = problem.op is BlockSparseOp.SDD
    by_block = (_MOST_DENSITY_OF_FEW if problem.n <= _FEW else _MOST_DENSITY)[problem.dense_k_last]
    by_block = _MOST_DENSITY_OF_SDD if sampled else by_block
    most = by_block.get(one.block, 1.0)
    if problem.element.itemsize > 1 and one.density > most:
        return f"is preferred for up to {100 * most:g}% of blocks of {one.block} here, not {one.density:.1%}"
    return blocks_wgmma_any(problem)


def blocks_wgmma_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    one = problem.layout
    if problem.element.itemsize == 1 and (reason := _of_8_bits(problem)) is not None:
        return reason
    turned = [one.name for one in Form(problem).turns(problem)]
    for operand in problem.operands():
        width = operand.shape[-2 if operand.name in turned else -1]
        if operand.name in ("a", "b", "c") and width * operand.element.itemsize % _COPIED:
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


def turned(problem: BlockSparseMatmulDescriptor) -> int:
    """Bytes of operands that have to be transposed first."""
    return turned_bytes(Form(problem).turns(problem))


def _of_8_bits(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The instruction takes 32 neighbouring k of either operand at a time."""
    if problem.layout.block < _STEP_OF_8_BITS and problem.op is not BlockSparseOp.SDD:
        return f"serves {problem.element} with blocks of 32 and more, not {problem.layout.block}"
    for one in Form(problem).turns(problem):
        if (reason := beyond_grid(turn_blocks(one.shape, problem.element.itemsize))) is not None:
            return reason
    return _integer_sums(problem)


def _integer_sums(problem: BlockSparseMatmulDescriptor) -> str | None:
    if problem.element is ElementKind.S8 and problem.reduction >= _INTEGER_TERMS:
        return f"sums of s8 may exceed int32 for {_INTEGER_TERMS} products, got {problem.reduction}"
    return None


def blocks_strict(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product, on an H200."""
    one = problem.layout
    most = _STRICT_DENSITY_OF_16 if one.block == min(BLOCK_SIZES) else _STRICT_DENSITY
    if one.density > most:
        return f"is preferred for up to {100 * most:g}% of blocks of {one.block}, not {one.density:.1%}"
    return blocks_strict_any(problem)


def blocks_strict_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    return _integer_sums(problem) or beyond_grid(StrictTiles.of(problem, 2**31).blocks(problem))


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
