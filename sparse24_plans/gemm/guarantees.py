"""The guarantees of the gemm kernels, and their reasons."""

from __future__ import annotations

from ..plan.arithmetic import EXACT_SUM, PROMOTED_EVERY, Arithmetic, in_order
from ..plan.guarantee import FP8_ROUNDOFF, PrecisionGuarantee, of_sums_in_float32
from ..vocab import FP8, ElementKind, GemmOp, MathPrecision
from .arithmetic.bf16_terms import SPLIT_SUM
from .arithmetic.tensor_core import named
from .descriptor import GemmSparse24Descriptor

F32, I32 = ElementKind.F32, ElementKind.I32
S8 = ElementKind.S8

SPLIT_STEP = {2: 3 * 2.0**-24, 3: 2.0**-24}
"""Relative error of adding one kept product, by the number of bf16 terms of a float32."""
SPLIT_ROUNDOFF = {2: 2.0**-15 + 2.0**-24, 3: 2.0**-23}
"""Relative error of one product from the terms that are not multiplied, by the number of bf16 terms."""


def strict(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # Only kept positions are steps: K/2 of a row, but up to all M of a column.
    return of_sums_in_float32(
        problem.element,
        same_bits=True,
        nonfinite="skips_pruned",
        terms_per_k=0.5 if problem.op is GemmOp.FORWARD else 1.0,
        arithmetic=in_order(problem.element),
    )


def host_blas(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    return of_sums_in_float32(problem.element, same_bits=False, nonfinite="propagates", terms_per_k=1.0)


def mma_sp(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # Only kept positions are steps; the tensor cores truncate when they align and add: up to 2^-22 a step.
    return PrecisionGuarantee(
        math_precision=MathPrecision.of(problem.element),
        accumulator=F32,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        bit_stable_across_hardware=False,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=2.0**-22,
        terms_per_k=0.5,
    )


def wgmma_sp(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # Split-K is chosen for the shape, n included.
    return mma_sp(problem).model_copy(update={"batch_invariant": False})


def wgmma_sp_s8(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # Sums of integers are exact in any order. The other steps are rounded one by one, as the host does; only
    # the activations of approximate functions differ from it.
    name = named(problem, EXACT_SUM)
    same = {"bit_stable_across_hardware": name is not None, "arithmetic": name}
    return strict(problem).model_copy(update=same)


def wgmma_sp_fp8(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # Hopper keeps about 13 bits below the largest addend when it adds products of fp8.
    return wgmma_sp(problem).model_copy(update={"unit_roundoff": FP8_ROUNDOFF})


def mma_sp_fp8(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # Hopper's tensor cores are the least precise ones of fp8, so their bound serves all of them.
    return mma_sp(problem).model_copy(update={"unit_roundoff": FP8_ROUNDOFF})


def wgmma_sp_fp8_promoted(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # The tensor cores add the 64 kept products of 128 columns; float32 adds these sums.
    return mma_sp(problem).model_copy(
        update={
            "unit_roundoff": FP8_ROUNDOFF,
            "promoted_every": PROMOTED_EVERY,
            "arithmetic": named(problem, str(Arithmetic.promoted())),
        }
    )


def split(terms: int, problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    """Return the guarantee of float32 that is multiplied in ``terms`` bf16 terms."""
    # With six products each tile's small ones are added first and lose little. With three they are added to
    # the sum of several tiles, so each product loses as much. Split-K is chosen for the shape, n included.
    return wgmma_sp(problem).model_copy(
        update={
            "math_precision": MathPrecision.BF16,
            "unit_roundoff": SPLIT_STEP[terms],
            "promoted_every": SPLIT_SUM[terms],
            "product_roundoff": SPLIT_ROUNDOFF[terms],
        }
    )


def split_invariant(terms: int, problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    return split(terms, problem).model_copy(update={"batch_invariant": True})


def host_tensor_core(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # The kernel can run any arithmetic of the tensor cores, so the bound is that of the weakest one.
    if problem.element is F32:
        return split_invariant(2, problem)
    return mma_sp_fp8(problem) if problem.element in FP8 else mma_sp(problem)


def cublas(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # The algorithm and its workspace are fixed at select, which is what cuBLAS asks for reproducible bits.
    # Tensor cores truncate when they align and add, so a step costs up to 2^-22 there.
    roundoff = 2.0**-24 if problem.element is F32 else 2.0**-22
    differs = {"nonfinite": "propagates", "unit_roundoff": roundoff, "terms_per_k": 1.0}
    return wgmma_sp(problem).model_copy(update=differs)


def cusparselt(problem: GemmSparse24Descriptor) -> PrecisionGuarantee:
    # NVIDIA says nothing of bits, and some algorithms are wrong (pytorch#155333): a plan promises more only
    # where its algorithm is pinned by a tuning table whose self-test it passed (tuned.py).
    # fp8: Hopper's tensor cores keep about 13 bits below the largest addend when they add.
    roundoff = {S8: 0.0, **dict.fromkeys(FP8, FP8_ROUNDOFF)}.get(problem.element, 2.0**-22)
    return wgmma_sp(problem).model_copy(
        update={
            "accumulator": I32 if problem.element is S8 else F32,
            "deterministic": False,
            "bit_stable_on_same_hardware": False,
            "unit_roundoff": roundoff,
            "tanh_error": 2.0**-11,  # its GELU takes tanh.approx.f32 (PTX ISA)
        }
    )
