"""What the kernels of block-sparse matrices serve: the reason why a problem is beyond one, or None."""

from __future__ import annotations

from ..plan.cublaslt import beyond_alpha
from ..plan.kernel import align_up
from ..plan.kernel_table import grid_limit_refusal
from ..plan.schedule_choice import constants
from ..vocab import BlockSparseConvOp, BlockSparseOp, BlockSparsePass, ElementKind
from .convolution import BlockSparseConv2dDescriptor
from .descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)
from .kernel_problem import Form, turned_bytes
from .lookup_tables import groups
from .strict_tiles import StrictTiles

_MOST = 2**31
"""A tensor map's coordinates and the kernels' counts are below it."""
_COPIED = 16
"""Bytes that the copy engine's rows are multiples of."""
_LEAST_SCALE, _MOST_SCALE = 2.0**-120, 2.0**120
"""Of a scale that stays a normal number when it is multiplied by log2(e)."""
COUNTER_BYTES = 4
"""Of workspace: a counter that deals a launch's items."""
PASSES = 2
"""Of attention's gradients: over rows of blocks and over columns, each with a counter."""
_STEP_OF_8_BITS = 32
_SMALLEST_TILE = 64
"""Rows and tokens of the smallest tile."""
_TEAM_BYTES = 512
_INTEGER_TERMS = 2**17
"""Products of s8, of at most 2^14, whose sums an int32 doesn't hold."""


def _beyond(counts: dict[str, int]) -> str | None:
    """Why the kernels can't count so many, or None."""
    for what, count in counts.items():
        if count >= _MOST:
            return f"{count} {what} exceed the kernel's limit, {_MOST - 1}"
    return None


def blocks_wgmma(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product."""
    one, limits = problem.layout, constants("blocks_density_limits")
    by_block = limits["few" if problem.n <= limits["few_n"] else "many"]
    by_block = by_block["k_last" if problem.dense_k_last else "n_last"]
    by_block = limits["sdd"] if problem.op is BlockSparseOp.SDD else by_block
    most = by_block.get(str(one.block), 1.0)
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
    return _beyond(coordinates)


def turned(problem: BlockSparseMatmulDescriptor) -> int:
    """Bytes of operands that have to be transposed first."""
    return turned_bytes(Form(problem).turns(problem))


def _of_8_bits(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The instruction takes 32 neighbouring k of either operand at a time."""
    if problem.layout.block < _STEP_OF_8_BITS and problem.op is not BlockSparseOp.SDD:
        return f"serves {problem.element} with blocks of 32 and more, not {problem.layout.block}"
    for one in Form(problem).turns(problem):
        if (reason := grid_limit_refusal(one.matrices.ctas)) is not None:
            return reason
    return _integer_sums(problem)


def _integer_sums(problem: BlockSparseMatmulDescriptor) -> str | None:
    if problem.element is ElementKind.S8 and problem.reduction >= _INTEGER_TERMS:
        return f"sums of s8 may exceed int32 for {_INTEGER_TERMS} products, got {problem.reduction}"
    return None


def blocks_strict(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product of float32."""
    one = problem.layout
    most = constants("blocks_density_limits")["strict"][str(one.block)]
    if one.density > most:
        return f"is preferred for up to {100 * most:g}% of blocks of {one.block}, not {one.density:.1%}"
    return blocks_strict_any(problem)


def blocks_strict_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    return _integer_sums(problem) or grid_limit_refusal(StrictTiles.of(problem, 2**31).blocks(problem))


def attention_wgmma(problem: BlockSparseAttentionDescriptor) -> str | None:
    return _of_attention(problem, BlockSparsePass.FORWARD)


def attention_backward_wgmma(problem: BlockSparseAttentionDescriptor) -> str | None:
    return _of_attention(problem, BlockSparsePass.BACKWARD)


def _of_attention(problem: BlockSparseAttentionDescriptor, op: BlockSparsePass) -> str | None:
    one = problem.layout
    if problem.op is not op:
        return f"serves op {op}, not {problem.op}"
    if one.block < _SMALLEST_TILE:
        return f"serves blocks of 64 and 128, not {one.block}"
    if problem.head_size not in (64, 128):
        return f"serves head_size 64 and 128, not {problem.head_size}"
    if not _LEAST_SCALE <= abs(problem.scale) <= _MOST_SCALE:
        return f"serves scales from 2^-120 to 2^120, got {problem.scale}"
    matrices = problem.batch * one.heads
    items = {"rows of blocks": matrices * one.block_rows}
    if op is BlockSparsePass.BACKWARD:
        items["columns of blocks"] = matrices * one.block_cols
    return _beyond(items)


def rows_of_queries(problem: BlockSparseAttentionDescriptor) -> int:
    """Of Q, in all heads of all batches."""
    return problem.batch * problem.layout.heads * problem.layout.rows


def backward_workspace(problem: BlockSparseAttentionDescriptor) -> int:
    """Bytes: of each row of Q two float32, and the counters behind them."""
    return 8 * rows_of_queries(problem) + PASSES * COUNTER_BYTES


_MOST_CORNER, _MOST_OFFSET, _MOST_STRIDE = 127, 255, 8
"""What the copy engine's im2col mode takes."""
_BEYOND_PIXELS = 1 << 12
"""That tiles may count past the last one."""


def conv_wgmma(problem: BlockSparseConv2dDescriptor) -> str | None:
    one, found = problem.layout, problem.geometry
    if problem.op is BlockSparseConvOp.WGRAD and one.block < _SMALLEST_TILE:
        return f"serves op wgrad with blocks of 64 and 128, not {one.block}"
    for name, axis in (("height", found.h), ("width", found.w)):
        if axis.stride > _MOST_STRIDE:
            return f"serves strides up to {_MOST_STRIDE}, got {axis.stride}"
        if max(axis.most_offset, 2 * abs(axis.lower), 2 * abs(axis.upper)) > _MOST_OFFSET:
            return f"serves kernels of up to {_MOST_OFFSET} pixels, {_MOST_CORNER} beyond the {name}"
    pixels = problem.batch * max(found.pixels * found.phases, problem.height * problem.width)
    parts = filter_parts(problem)[0] if problem.op is BlockSparseConvOp.WGRAD else 1
    coordinates = {"rows of values": parts * one.blocks * one.block}
    coordinates["tiles"] = -(-pixels // _SMALLEST_TILE) * max(one.block_rows, one.block_cols)
    coordinates["pixels"] = pixels + _BEYOND_PIXELS
    return _beyond(coordinates)


_STEP_PIXELS, _LEAST_STEPS, _MOST_PARTS = 64, 8, 32
_H200_SMS = 132
"""Bits depend on the split, so every GPU splits as an H200 does."""


def filter_parts(problem: BlockSparseConv2dDescriptor) -> tuple[int, int]:
    """Parts of the pixels that a filter's gradient sums, and steps of 64 pixels of each: the fastest."""
    one = problem.layout
    steps, items = -(-problem.reduction // _STEP_PIXELS), max(groups(one), 1)
    fit = constants("conv_wgrad_split_k")
    step_us = fit["step"].get(str(one.block), 1.0)

    def us(parts: int) -> float:
        waves = -(-parts * items // _H200_SMS)
        reduce = parts * one.blocks * one.block**2 * 8 / fit["reduce_bandwidth"] if parts > 1 else 0.0
        return float(waves * (-(-steps // parts) * step_us + fit["tile"]) + reduce)

    most = max(1, min(_MOST_PARTS, steps // _LEAST_STEPS))
    parts = min(range(1, most + 1), key=lambda count: (us(count), count))
    each = -(-steps // parts)
    return max(1, -(-steps // max(each, 1))), each


def conv_workspace(problem: BlockSparseConv2dDescriptor) -> int:
    """Bytes of the parts of a filter's gradient, in float32."""
    if problem.op is not BlockSparseConvOp.WGRAD or not problem.reduction:
        return 0
    parts, one = filter_parts(problem)[0], problem.layout
    return 0 if parts == 1 else 4 * parts * one.blocks * one.block**2


def cublas(problem: BlockSparseMatmulDescriptor) -> str | None:
    largest = max(problem.n, problem.layout.rows, problem.layout.cols, problem.batch * problem.layout.heads)
    if largest >= _MOST:
        return f"size {largest} exceeds cuBLAS's limit {_MOST - 1}"
    return beyond_alpha(problem.alpha)


def softmax_teams(problem: BlockSparseSoftmaxDescriptor) -> int:
    """Teams of warps of the kernel: each has the rows of a line that 512 contiguous bytes of a block hold."""
    one = problem.layout
    rows = _TEAM_BYTES // (one.block * problem.element.itemsize)
    return problem.batch * one.heads * one.rows // rows


def softmax(problem: BlockSparseSoftmaxDescriptor) -> str | None:
    return _beyond({"teams of rows": softmax_teams(problem)})


def inflated_regions(problem: BlockSparseMatmulDescriptor) -> tuple[int, int]:
    """Bytes of the sparse matrix as a dense one, and of the float32 accumulators that an epilogue needs."""
    one, sampled = problem.layout, problem.op is BlockSparseOp.SDD
    size = (problem.out_element if sampled else problem.element).itemsize
    dense = problem.batch * one.heads * one.rows * one.cols * size
    width = problem.sides[0 if problem.op is BlockSparseOp.DSD else 1]
    accumulators = problem.batch * one.heads * width * problem.n * 4 if problem.epilogue.has_bias else 0
    return align_up(dense), align_up(accumulators)
