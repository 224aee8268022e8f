"""What the kernels of block-sparse matrices promise, and why."""

from __future__ import annotations

from ..arithmetic.epilogue import IN_STEPS
from ..plan.arithmetic import in_order
from ..plan.guarantee import FP8_ROUNDOFF, PrecisionGuarantee, of_sums_in_float32
from ..vocab import ElementKind, MathPrecision
from .descriptor import BlockSparseAttentionDescriptor, BlockSparseDescriptor, BlockSparseMatmulDescriptor

TILE_ROWS = 64
"""Of a tile of the tensor cores."""


def strict(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # Every step is an IEEE operation in a defined order: docs/blocksparse.md.
    return of_sums_in_float32(problem.element, same_bits=True, nonfinite="skips_pruned", terms_per_k=1.0)


def strict_matmul(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    return strict(problem).model_copy(update={"arithmetic": in_order(problem.element)})


def fixed_order(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # A row's sum is folded in float32, in an order that its number of blocks gives. The exponential is the
    # GPU's: another one may round it otherwise. It errs by less than 2^-20.8, which is more than a step's
    # rounding, but less than that of the 16 steps and more of any row.
    return strict(problem).model_copy(
        update={"bit_stable_across_hardware": False, "unit_roundoff": 2 * ElementKind.F32.unit_roundoff}
    )


def host_blas(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    return of_sums_in_float32(problem.element, same_bits=False, nonfinite="skips_pruned", terms_per_k=1.0)


def tensor_cores(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # Of a result's kept blocks, in increasing k. The tensor cores truncate when they align and add: up to
    # 2^-22 a step. Lines of small blocks share tiles, in which zeros stand for what one of them lacks.
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


def blocks_wgmma(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    if problem.element is ElementKind.FP8_E4M3:
        return tensor_cores(problem).model_copy(update={"unit_roundoff": FP8_ROUNDOFF})
    if problem.element is not ElementKind.S8:
        return tensor_cores(problem)
    # Sums of integers are exact in any order. What follows is rounded step by step, as on the host, but for
    # the activations of CUDA's math library.
    if problem.epilogue in IN_STEPS:
        return strict_matmul(problem)
    return strict(problem).model_copy(update={"bit_stable_across_hardware": False})


def fused_attention(problem: BlockSparseAttentionDescriptor) -> PrecisionGuarantee:
    # A row of blocks is one thread block's, which takes its kept blocks in order, whatever the others are.
    # Exponentials enter the second product rounded to the element, as math_precision says.
    return tensor_cores(problem)


def cublas(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    # The algorithm and its workspace are fixed at select, which is what cuBLAS asks for reproducible bits. It
    # multiplies the zeros of blocks that aren't kept, too.
    on_cores = problem.element is not ElementKind.F32
    return tensor_cores(problem).model_copy(
        update={
            "batch_invariant": False,
            "nonfinite": "propagates",
            "unit_roundoff": 2.0**-22 if on_cores else ElementKind.F32.unit_roundoff,
        }
    )
