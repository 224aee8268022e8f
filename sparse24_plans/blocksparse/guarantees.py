"""What the kernels of block-sparse matrices promise, and why."""

from __future__ import annotations

from ..plan.arithmetic import EXACT_SUM, FMA32
from ..plan.guarantee import PrecisionGuarantee
from ..vocab import ElementKind, MathPrecision
from .descriptor import BlockSparseDescriptor, BlockSparseMatmulDescriptor


def strict(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # Every step is an IEEE operation in a defined order: docs/blocksparse.md.
    return _on_host(problem, same_bits=True)


def strict_matmul(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    named = EXACT_SUM if problem.element is ElementKind.S8 else FMA32
    return strict(problem).model_copy(update={"arithmetic": named})


def host_blas(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    return _on_host(problem, same_bits=False)


def _on_host(problem: BlockSparseDescriptor, *, same_bits: bool) -> PrecisionGuarantee:
    integer = problem.element is ElementKind.S8
    return PrecisionGuarantee(
        math_precision=MathPrecision.INT8 if integer else MathPrecision.F32,
        accumulator=ElementKind.I32 if integer else ElementKind.F32,
        deterministic=same_bits,
        bit_stable_on_same_hardware=same_bits,
        batch_invariant=same_bits,
        bit_stable_across_hardware=same_bits,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=0.0 if integer else 2.0**-24,
        terms_per_k=1.0,
    )
