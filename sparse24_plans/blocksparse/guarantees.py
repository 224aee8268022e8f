"""Guarantees of the block-sparse kernels, and the reasons for them."""

from __future__ import annotations

from ..arithmetic.epilogue import IN_STEPS
from ..plan.arithmetic import in_order
from ..plan.guarantee import FP8_ROUNDOFF, PrecisionGuarantee, of_sums_in_float32
from ..vocab import BlockSparseConvOp, ElementKind, InnerPattern, MathPrecision
from .convolution import BlockSparseConv2dDescriptor
from .descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseDescriptor,
    BlockSparseMatmulDescriptor,
)
from .kernel_problem import KernelProblem
from .schedules.blocks_wgmma_cuts import may_be_evened

TILE_ROWS = 64
"""Rows of a tile of the tensor cores."""


def strict(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # Every step is an IEEE operation in a defined order: docs/blocksparse.md.
    return of_sums_in_float32(problem.element, same_bits=True, nonfinite="skips_pruned", terms_per_k=1.0)


def strict_matmul(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # The steps of 2:4 blocks are their kept cells.
    return _of_pattern(problem, _in_order(problem))


def _in_order(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    return strict(problem).model_copy(update={"arithmetic": in_order(problem.element)})


def _of_pattern(problem: BlockSparseMatmulDescriptor, found: PrecisionGuarantee) -> PrecisionGuarantee:
    """Return the guarantee of a kernel that multiplies kept cells alone."""
    half = problem.inner is InnerPattern.SPARSE24
    return found.model_copy(update={"terms_per_k": 0.5}) if half else found


def _of_images(problem: BlockSparseConv2dDescriptor, found: PrecisionGuarantee) -> PrecisionGuarantee:
    """Return the guarantee of a convolution: a filter's gradient sums over every image."""
    sums_images = problem.op is BlockSparseConvOp.WGRAD
    return found.model_copy(update={"batch_invariant": False}) if sums_images else found


def strict_convolution(problem: BlockSparseConv2dDescriptor) -> PrecisionGuarantee:
    return _of_images(problem, _in_order(problem))


def strict_attention(problem: BlockSparseAttentionDescriptor) -> PrecisionGuarantee:
    return _of_dropout(problem, strict(problem))


def attention(problem: BlockSparseAttentionDescriptor) -> PrecisionGuarantee:
    return _of_dropout(problem, tensor_cores(problem))


def _of_dropout(problem: BlockSparseAttentionDescriptor, found: PrecisionGuarantee) -> PrecisionGuarantee:
    """Return the guarantee of attention: dropout drops other cells of another batch element."""
    return found.model_copy(update={"batch_invariant": False}) if problem.dropout else found


def fixed_order(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # A row's sum is reduced in float32, in an order that its number of blocks gives. The exponential is the
    # GPU's instruction, which another GPU may round differently. Its error is below 2^-20.8: more than the
    # rounding of one step, but less than that of the at least 16 steps of a row.
    return strict(problem).model_copy(
        update={"bit_stable_across_hardware": False, "unit_roundoff": 2 * ElementKind.F32.unit_roundoff}
    )


def host_blas(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    return of_sums_in_float32(problem.element, same_bits=False, nonfinite="skips_pruned", terms_per_k=1.0)


def host_blas_matmul(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # Cells that 2:4 blocks don't keep are multiplied as zeros.
    update = {"nonfinite": "propagates"} if problem.inner is InnerPattern.SPARSE24 else {}
    return host_blas(problem).model_copy(update=update)


def tensor_cores(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # A result's kept blocks are summed in increasing k. The tensor cores truncate when they align and add: up
    # to 2^-22 a step. Block rows of small blocks share tiles, where zeros replace the blocks that one lacks.
    # In attention, one CTA computes a block row (a block column for the gradients of K and V), whatever the
    # other block rows are. Exponentials and gradients of scores enter products rounded to the element, as
    # math_precision says.
    return PrecisionGuarantee(
        math_precision=MathPrecision.of(problem.element),
        accumulator=ElementKind.F32,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        bit_stable_across_hardware=False,
        subnormals="preserved",
        nonfinite="skips_pruned" if problem.layout.block >= TILE_ROWS else "propagates",
        unit_roundoff=2.0**-22,
        terms_per_k=1.0,
    )


def blocks_mma_any(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # An m16 tile lies in one block row, whose number of kept blocks decides into how many slices and shares
    # they are divided. The sums of shares, and of slices, are added in order: steps are fewer than k.
    return tensor_cores(problem).model_copy(update={"nonfinite": "skips_pruned"})


def blocks_mma(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # Other kernels, with other bits, serve more tokens.
    return blocks_mma_any(problem).model_copy(update={"batch_invariant": False})


def sdd_mma(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # A result's products are summed in a few steps of the tensor cores, in an order that n alone determines.
    return tensor_cores(problem).model_copy(update={"nonfinite": "skips_pruned"})


def sparse_tensor_cores(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # A 64-row tile has one block row, and the tensor cores choose the cells of X by the metadata.
    return _of_pattern(problem, tensor_cores(problem))


def blocks_wgmma(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # Few tokens make panels worth cutting that more do not, long ones or all. Sums of integers have the same
    # bits then.
    found = blocks_wgmma_any(problem)
    may_cut = KernelProblem(problem).slicing() is not None or may_be_evened(problem)
    if not may_cut or problem.element is ElementKind.S8:
        return found
    return found.model_copy(update={"batch_invariant": False})


def blocks_wgmma_any(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # Long rows are summed in slices that follow from the layout alone, and the slices are added in order. A
    # slice has hundreds of k, of which the tensor cores add 16 or more in a step: steps are fewer than k.
    if problem.element is ElementKind.FP8_E4M3:
        return tensor_cores(problem).model_copy(update={"unit_roundoff": FP8_ROUNDOFF})
    if problem.element is not ElementKind.S8:
        return tensor_cores(problem)
    # Sums of integers are exact in any order. The epilogue is rounded step by step as on the host, except for
    # the activations of approximate functions.
    if problem.epilogue in IN_STEPS:
        return strict_matmul(problem)
    return strict(problem).model_copy(update={"bit_stable_across_hardware": False})


def convolution(problem: BlockSparseConv2dDescriptor) -> PrecisionGuarantee:
    # A pixel's sum runs over its block row's kept blocks in order. A filter's gradient is summed in splits of
    # as many pixels as the shape determines, which are added in order.
    return _of_images(problem, tensor_cores(problem))


def cublas(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # The algorithm and its workspace are fixed at select, as cuBLAS demands for reproducible bits. It
    # multiplies the zeros of blocks that are not kept, too.
    update: dict[str, object] = {"batch_invariant": False, "nonfinite": "propagates"}
    if problem.element is ElementKind.F32:
        update["unit_roundoff"] = ElementKind.F32.unit_roundoff
    return tensor_cores(problem).model_copy(update=update)
