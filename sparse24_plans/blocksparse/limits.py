"""Limits of the block-sparse kernels: the reason why a problem exceeds one, or None."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan.cublaslt import beyond_alpha
from ..plan.kernel import align_up
from ..plan.kernel_table import grid_limit_refusal
from ..plan.schedule_choice import constants
from ..vocab import INT64_MAX, BlockSparseConvOp, BlockSparseOp, BlockSparsePass, ElementKind
from ..vocab.fields import INT32_MAX
from .convolution import BlockSparseConv2dDescriptor
from .descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)
from .kernel_problem import TMA_BYTES, KernelProblem, Prepared, prepared_bytes
from .schedules.blocks_mma import BlocksMmaSchedule, block_rows
from .schedules.blocks_strict import BlocksStrictSchedule
from .schedules.conv_wgmma import filter_split_k
from .schedules.predicted_times import dense_wins, few_tokens_lose, sampled_loses
from .schedules.sdd_mma import MAX_TERMS, SddMmaSchedule
from .schedules.softmax import softmax_teams

_MIN_SCALE, _MAX_SCALE = 2.0**-120, 2.0**120
"""Range of scales that remain normal numbers when multiplied by log2(e)."""
ATTENTION_COUNTER_BYTES = 4
"""Workspace bytes of the counter of claimed work tiles of one launch of attention."""
MAX_PASSES = 3
"""Most passes of attention's gradients over the kept blocks, each with a counter."""
MIN_STREAMED_ROWS = 32
"""Least rows of a streamed tile of attention's gradients."""
_MAX_HEAD, _HEAD_STEP = 256, 8
"""Largest head size of attention, and what divides head sizes: TMA reads rows in multiples of 16 bytes."""
_STEP_OF_8_BITS = 32
_SMALLEST_TILE = 64
"""Rows and tokens of the smallest tile."""
_SLICES_PER_PANEL = 2
"""Bound of the mean number of slices."""
_INTEGER_TERMS = 2**17
"""Number of s8 products, of at most 2^14 each, whose sum may exceed an int32."""


def _beyond(counts: dict[str, int]) -> str | None:
    """The reason why the kernels cannot count that far, or None."""
    for what, count in counts.items():
        if count > INT32_MAX:  # a tensor map's coordinates and counters are int32
            return f"{count} {what} exceed the kernel's limit, {INT32_MAX}"
    return None


def blocks_mma(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than every other kernel."""
    return blocks_mma_any(problem) or few_tokens_lose(problem, beside_wgmma=True)


def blocks_mma_many(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product."""
    return blocks_mma_any(problem) or few_tokens_lose(problem, beside_wgmma=False)


def blocks_mma_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    tried = BlocksMmaSchedule.candidates(problem)
    copies = [copy for one in tried for copy in one.prepared(problem)]
    counts = {"block rows": block_rows(problem), "tokens": problem.n}
    if (reason := _transposes(copies) or _beyond(counts)) is not None:
        return reason
    return grid_limit_refusal(max(one.ctas(problem) for one in tried))


def sdd_mma(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than every other kernel."""
    most = constants("sdd_mma")["most_terms"][str(problem.layout.block)]
    if not 0 < problem.n <= most:
        return f"is preferred for n up to {most} here, not {problem.n}"
    return sdd_mma_any(problem)


def sdd_mma_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    if problem.n > MAX_TERMS:
        return f"serves sums of up to {MAX_TERMS} products, not {problem.n}"
    # No other schedule has more warps than the one for a device that is never busy.
    return _beyond({"warps": SddMmaSchedule.of(problem, INT32_MAX).warps(problem)})


def blocks_wgmma(problem: BlockSparseMatmulDescriptor) -> str | None:
    """The kernel's limits, and a preference for what it does faster than a dense product."""
    loses = sampled_loses if problem.op is BlockSparseOp.SDD else dense_wins
    return blocks_wgmma_any(problem) or loses(problem)


def blocks_wgmma_any(problem: BlockSparseMatmulDescriptor) -> str | None:
    one = problem.layout
    if problem.element.itemsize == 1 and (reason := _of_8_bits(problem)) is not None:
        return reason
    for copy in KernelProblem(problem).prepared_operands():
        if copy.sides[1] * problem.element.itemsize % TMA_BYTES:  # a transpose pads nothing
            return f"needs rows of {copy.name} in multiples of {TMA_BYTES} bytes, got n = {problem.n}"
    coordinates = {
        "rows of values": problem.batch * one.blocks * one.block,
        "matrices": problem.batch * one.heads,
        "tiles": _SLICES_PER_PANEL
        * one.heads
        * max(one.block_rows, one.block_cols)
        * problem.batch
        * max(-(-problem.n // _SMALLEST_TILE), one.block_cols),
    }
    return _beyond(coordinates)


def prepared_workspace(problem: BlockSparseMatmulDescriptor) -> int:
    """Workspace bytes of operands that must be copied first."""
    return prepared_bytes(KernelProblem(problem).prepared_operands())


def _of_8_bits(problem: BlockSparseMatmulDescriptor) -> str | None:
    """Limits of 8-bit elements: the instruction reads 32 neighbouring k of either operand at a time."""
    if problem.layout.block < _STEP_OF_8_BITS and problem.op is not BlockSparseOp.SDD:
        return f"serves {problem.element} with blocks of 32 and more, not {problem.layout.block}"
    return _transposes(KernelProblem(problem).prepared_operands()) or _integer_sums(problem)


def _transposes(prepared: Iterable[Prepared]) -> str | None:
    """The reason why a pre-pass that transposes exceeds a grid, or None."""
    refusals = (grid_limit_refusal(one.matrices.ctas) for one in prepared if one.transposes)
    return next(filter(None, refusals), None)


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
    return _integer_sums(problem) or grid_limit_refusal(BlocksStrictSchedule.of(problem, 2**31).ctas(problem))


def attention(op: BlockSparsePass, problem: BlockSparseAttentionDescriptor) -> str | None:
    """Limits of a kernel that serves ``op`` alone."""
    one = problem.layout
    if problem.op is not op:
        return f"serves op {op}, not {problem.op}"
    if one.block < _SMALLEST_TILE:
        return f"serves blocks of 64 and 128, not {one.block}"
    if problem.head_size % _HEAD_STEP or problem.head_size > _MAX_HEAD:
        return f"serves head_size up to {_MAX_HEAD} in multiples of {_HEAD_STEP}, not {problem.head_size}"
    if not _MIN_SCALE <= abs(problem.scale) <= _MAX_SCALE:
        return f"serves scales from 2^-120 to 2^120, got {problem.scale}"
    matrices = problem.batch * one.heads
    counts = {"block rows": matrices * one.block_rows}
    if op is BlockSparsePass.BACKWARD:
        counts["block columns"] = matrices * one.block_cols
        counts["tiles of kept blocks"] = one.blocks * one.block // MIN_STREAMED_ROWS
    return _beyond(counts)


def rows_of_queries(problem: BlockSparseAttentionDescriptor) -> int:
    """Rows of Q in all heads of all batch elements."""
    return problem.batch * problem.layout.heads * problem.layout.rows


def backward_workspace(problem: BlockSparseAttentionDescriptor) -> int:
    """Workspace bytes: two float32 for each row of Q, and the counters behind them."""
    return 8 * rows_of_queries(problem) + MAX_PASSES * ATTENTION_COUNTER_BYTES


def score_gradient_bytes(problem: BlockSparseAttentionDescriptor) -> int:
    """Bytes of an element for each score of the kept blocks."""
    one = problem.layout
    return problem.batch * one.blocks * one.block**2 * problem.element.itemsize


_MAX_CORNER, _MAX_OFFSET, _MAX_STRIDE = 127, 255, 8
"""Limits of TMA's im2col mode."""
_BEYOND_PIXELS = 1 << 12
"""Pixels that tiles may count past the last one."""


def conv_wgmma(problem: BlockSparseConv2dDescriptor) -> str | None:
    one, found = problem.layout, problem.geometry
    if problem.op is BlockSparseConvOp.WGRAD and one.block < _SMALLEST_TILE:
        return f"serves op wgrad with blocks of 64 and 128, not {one.block}"
    for name, axis in (("height", found.h), ("width", found.w)):
        if axis.stride > _MAX_STRIDE:
            return f"serves strides up to {_MAX_STRIDE}, got {axis.stride}"
        if max(axis.most_offset, 2 * abs(axis.lower), 2 * abs(axis.upper)) > _MAX_OFFSET:
            return f"serves kernels of up to {_MAX_OFFSET} pixels, {_MAX_CORNER} beyond the {name}"
    pixels = problem.batch * max(found.pixels * found.phases, problem.height * problem.width)
    parts = filter_split_k(problem)[0] if problem.op is BlockSparseConvOp.WGRAD else 1
    coordinates = {"rows of values": parts * one.blocks * one.block}
    coordinates["tiles"] = -(-pixels // _SMALLEST_TILE) * max(one.block_rows, one.block_cols)
    coordinates["pixels"] = pixels + _BEYOND_PIXELS
    return _beyond(coordinates)


def cublas(problem: BlockSparseMatmulDescriptor) -> str | None:
    one, product = problem.layout, KernelProblem(problem)
    largest = max(product.product_tokens, one.rows, one.cols, problem.batch * one.heads)
    if largest > INT32_MAX:
        return f"size {largest} exceeds cuBLAS's limit {INT32_MAX}"
    if (needed := sum(_inflated_bytes(product))) > INT64_MAX:
        return f"a dense matrix and its copies of {needed} bytes exceed every memory"
    return _transposes(product.aligned_operands) or beyond_alpha(problem.alpha)


def softmax(problem: BlockSparseSoftmaxDescriptor) -> str | None:
    return _beyond({"teams of rows": softmax_teams(problem)})


def inflated_regions(problem: BlockSparseMatmulDescriptor) -> tuple[int, int, int]:
    """Workspace bytes of the sparse matrix as a dense one, of operands that are copied to aligned rows, and
    of the product if it is no C yet."""
    dense, copied, product = _inflated_bytes(KernelProblem(problem))
    return 0 if problem.packed else dense, copied, product


def _inflated_bytes(product: KernelProblem) -> tuple[int, int, int]:
    """Bytes of ``inflated_regions``, and of the dense matrix even if it was packed before."""
    problem, one = product.desc, product.desc.layout
    size = (problem.out_element if product.sampled else problem.element).itemsize
    dense = problem.batch * one.heads * one.rows * one.cols * size
    return align_up(dense), prepared_bytes(product.aligned_operands), align_up(product.product_bytes)
