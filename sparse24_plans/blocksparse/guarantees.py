"""What the kernels of block-sparse matrices promise, and why."""

from __future__ import annotations

from ..plan.arithmetic import in_order
from ..plan.guarantee import PrecisionGuarantee, of_sums_in_float32
from .descriptor import BlockSparseDescriptor, BlockSparseMatmulDescriptor


def strict(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # Every step is an IEEE operation in a defined order: docs/blocksparse.md.
    return of_sums_in_float32(problem.element, same_bits=True, nonfinite="skips_pruned", terms_per_k=1.0)


def strict_matmul(problem: BlockSparseMatmulDescriptor) -> PrecisionGuarantee:
    return strict(problem).model_copy(update={"arithmetic": in_order(problem.element)})


def host_blas(problem: BlockSparseDescriptor) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    return of_sums_in_float32(problem.element, same_bits=False, nonfinite="skips_pruned", terms_per_k=1.0)
