"""The table of kernels, and the whole of selection.

A row says what a kernel serves and what it guarantees; rows stand in order of preference. Selection is a
pure function of descriptor, preference and device properties: it times nothing and asks no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from ..errors import BackendUnavailableError, UnsupportedError
from ..vocab import (
    CANONICAL_LAYOUT,
    CUSPARSELT_LAYOUT,
    TILE64X128_LAYOUT,
    TILE64X256_LAYOUT,
    ArchSku,
    BackendKind,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GemmOp,
    MathPrecision,
    MatrixOrder,
    PlanPreference,
    PrecisionGuarantee,
    ScaleKind,
    Tier,
)
from . import limits
from .limits import BF16, F16, F32, FP8, I32, S8, Problem

EXACT_EPILOGUES = tuple(kind for kind in EpilogueKind if kind is not EpilogueKind.BIAS_GELU_TANH)


@dataclass(frozen=True)
class KernelSpec:
    """One row. ``backend`` is also the name of the module under ``backends/`` that launches it.

    ``limits`` gives the reason why a problem within the listed elements can't be served, or None;
    ``min_workspace`` the bytes without which the kernel can't run.
    """

    name: str
    backend: BackendKind
    tier: Tier
    arch: ArchSku
    min_compute_capability: tuple[int, int]
    guarantee: Callable[[Problem], PrecisionGuarantee]
    elements: tuple[ElementKind, ...] = (F32, F16, BF16)
    ops: tuple[GemmOp, ...] = (GemmOp.FORWARD, GemmOp.DGRAD)
    epilogues: tuple[EpilogueKind, ...] = EXACT_EPILOGUES
    below_compute_capability: tuple[int, int] = (99, 0)
    layout: str = CANONICAL_LAYOUT
    column_order: bool = False
    """Whether X or Y may lie in columns; ``limits`` may refuse some."""
    scales: bool = False
    """Whether it takes scale_x or scale_w; ``limits`` may refuse some."""
    limits: Callable[[Problem], str | None] = lambda problem: None
    min_workspace: Callable[[Problem], int] = lambda problem: 0
    yields: Callable[[Problem, DeviceProperties], str | None] = lambda problem, device: None
    """Why a row below is the faster one on the device, or None."""
    missing: Callable[[DeviceProperties], str | None] = lambda device: None
    """What has to be installed before the kernel can run on the device, or None."""

    @property
    def on_host(self) -> bool:
        return self.tier is Tier.HOST


class Placed(Protocol):
    """What a row of any table of kernels says of itself."""

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> BackendKind: ...
    @property
    def tier(self) -> Tier: ...
    @property
    def on_host(self) -> bool: ...
    @property
    def min_compute_capability(self) -> tuple[int, int]: ...


Row = TypeVar("Row", bound=Placed)


@dataclass(frozen=True)
class Considered(Generic[Row]):
    """A row and why it can't serve; ``reason`` None: it can."""

    spec: Row
    reason: str | None
    unavailable: bool = False


FP8_ROUNDOFF = 2.0**-13
"""What a step of Hopper's tensor cores costs when they add products of fp8, at most."""

# Guarantees ---------------------------------------------------------------------------------------

_PRECISION = {
    F32: MathPrecision.F32,
    F16: MathPrecision.F16,
    BF16: MathPrecision.BF16,
    S8: MathPrecision.INT8,
    FP8: MathPrecision.FP8_E4M3,
}


def _strict(problem: Problem) -> PrecisionGuarantee:
    # Only kept positions are steps: K/2 of a row, but up to all M of a column.
    integer = problem.element is S8
    return PrecisionGuarantee(
        math_precision=MathPrecision.INT8 if integer else MathPrecision.F32,
        accumulator=I32 if integer else F32,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        bit_stable_across_hardware=True,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=0.0 if integer else 2.0**-24,
        terms_per_k=0.5 if problem.op is GemmOp.FORWARD else 1.0,
    )


def _host_blas(problem: Problem) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    integer = problem.element is S8
    return PrecisionGuarantee(
        math_precision=MathPrecision.INT8 if integer else MathPrecision.F32,
        accumulator=I32 if integer else F32,
        deterministic=False,
        bit_stable_on_same_hardware=False,
        batch_invariant=False,
        bit_stable_across_hardware=False,
        subnormals="preserved",
        nonfinite="propagates",
        unit_roundoff=0.0 if integer else 2.0**-24,
        terms_per_k=1.0,
    )


def _mma_sp(problem: Problem) -> PrecisionGuarantee:
    # Only kept positions are steps; the tensor cores truncate when they align and add: up to 2^-22 a step.
    return PrecisionGuarantee(
        math_precision=_PRECISION[problem.element],
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


def _wgmma_sp(problem: Problem) -> PrecisionGuarantee:
    # The slices of K are chosen for the shape, n included.
    return _mma_sp(problem).model_copy(update={"batch_invariant": False})


def _wgmma_sp_s8(problem: Problem) -> PrecisionGuarantee:
    # Sums of integers are exact in any order. The other steps are rounded one by one, as the host does; only
    # the activations of CUDA's math library differ from it.
    same = problem.epilogue not in (EpilogueKind.BIAS_GELU, EpilogueKind.BIAS_SILU)
    return _strict(problem).model_copy(update={"bit_stable_across_hardware": same})


def _wgmma_sp_fp8(problem: Problem) -> PrecisionGuarantee:
    # Hopper keeps about 13 bits below the largest addend when it adds products of fp8.
    return _wgmma_sp(problem).model_copy(update={"unit_roundoff": FP8_ROUNDOFF})


def _wgmma_sp_fp8_promoted(problem: Problem) -> PrecisionGuarantee:
    # That, for the 64 kept products of 128 columns; their sums are added in float32.
    return _mma_sp(problem).model_copy(update={"unit_roundoff": FP8_ROUNDOFF, "promoted_every": 128})


def _cublas(problem: Problem) -> PrecisionGuarantee:
    # The algorithm and its workspace are fixed at select, which is what cuBLAS asks for reproducible bits.
    # Tensor cores truncate when they align and add, so a step costs up to 2^-22 there.
    on_cores = problem.element is not F32
    return PrecisionGuarantee(
        math_precision=_PRECISION[problem.element],
        accumulator=F32,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=False,
        bit_stable_across_hardware=False,
        subnormals="preserved",
        nonfinite="propagates",
        unit_roundoff=2.0**-22 if on_cores else 2.0**-24,
        terms_per_k=1.0,
    )


def _cusparselt(problem: Problem) -> PrecisionGuarantee:
    # NVIDIA says nothing of bits, and some algorithms are wrong (pytorch#155333): a plan promises more only
    # where its algorithm is pinned by a tuning table whose self-test it passed (tuning_table.py).
    # fp8: Hopper's tensor cores keep about 13 bits below the largest addend when they add.
    roundoff = {S8: 0.0, FP8: FP8_ROUNDOFF}.get(problem.element, 2.0**-22)
    return PrecisionGuarantee(
        math_precision=_PRECISION[problem.element],
        accumulator=I32 if problem.element is S8 else F32,
        deterministic=False,
        bit_stable_on_same_hardware=False,
        batch_invariant=False,
        bit_stable_across_hardware=False,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=roundoff,
        terms_per_k=0.5,
    )


# The table ----------------------------------------------------------------------------------------

# Any n: chosen where there is no wgmma and batch invariance is required.
_MMA_SP_MANY = KernelSpec(
    name="mma_sp_many",
    backend=BackendKind.MMA_SP,
    tier=Tier.SPARSE_TENSOR_CORE,
    arch=ArchSku.SM80,
    min_compute_capability=(8, 0),
    guarantee=_mma_sp,
    elements=(F16, BF16),
    ops=(GemmOp.FORWARD,),
    layout=TILE64X128_LAYOUT,
    limits=limits.mma_sp,
)

_MMA_SP_FEW = replace(
    _MMA_SP_MANY, name="mma_sp_few", limits=limits.up_to(lambda problem: limits.DECODE_TOKENS)
)

_WGMMA_SP = replace(
    _MMA_SP_MANY,
    name="wgmma_sp",
    backend=BackendKind.WGMMA_SP,
    arch=ArchSku.SM90A,
    min_compute_capability=limits.WGMMA[0],
    below_compute_capability=limits.WGMMA[1],
    guarantee=_wgmma_sp,
    limits=limits.wgmma_sp,
)

_WGMMA_SP_8BIT = replace(_WGMMA_SP, layout=TILE64X256_LAYOUT, scales=True)
PROMOTED_FP8 = "wgmma_sp_fp8_promoted"

_HOST_ELEMENTS = (F32, F16, BF16, S8, FP8)

_CUSPARSELT = KernelSpec(
    name="cusparselt",
    backend=BackendKind.CUSPARSELT,
    tier=Tier.SPARSE_TENSOR_CORE,
    arch=ArchSku.SM80,
    min_compute_capability=(8, 0),
    guarantee=_cusparselt,
    elements=(F16, BF16, S8),
    ops=(GemmOp.FORWARD,),
    # The library has no SiLU, and its GELU is the tanh approximation.
    epilogues=(
        EpilogueKind.IDENTITY,
        EpilogueKind.BIAS,
        EpilogueKind.BIAS_RELU,
        EpilogueKind.BIAS_GELU_TANH,
    ),
    layout=CUSPARSELT_LAYOUT,
    column_order=True,
    scales=True,
    limits=limits.cusparselt,
    missing=limits.needs_cusparselt,
)

KERNELS: tuple[KernelSpec, ...] = (
    replace(_MMA_SP_FEW, name="mma_sp", yields=limits.fills_badly),
    _WGMMA_SP,
    # Where batch invariance is required.
    _MMA_SP_FEW,
    # The bits of mma_sp for any n: chosen where batch invariance is required.
    replace(_WGMMA_SP, name="wgmma_sp_invariant", guarantee=_mma_sp),
    replace(_WGMMA_SP_8BIT, name="wgmma_sp_s8", guarantee=_wgmma_sp_s8, elements=(S8,)),
    replace(_WGMMA_SP_8BIT, name="wgmma_sp_fp8", guarantee=_wgmma_sp_fp8, elements=(FP8,)),
    replace(_WGMMA_SP_8BIT, name=PROMOTED_FP8, guarantee=_wgmma_sp_fp8_promoted, elements=(FP8,)),
    # Where there is no wgmma.
    replace(_MMA_SP_MANY, name="mma_sp_batch", limits=limits.up_to(limits.few_tokens)),
    KernelSpec(
        name="inflate_cublas",
        backend=BackendKind.INFLATE_CUBLAS,
        tier=Tier.INFLATE,
        arch=ArchSku.ANY,
        min_compute_capability=(8, 0),
        guarantee=_cublas,
        limits=limits.cublas,
        min_workspace=lambda problem: sum(limits.cublas_regions(problem)),
        missing=limits.needs_cublaslt,
    ),
    _MMA_SP_MANY,
    KernelSpec(
        name="inflate_strict",
        backend=BackendKind.INFLATE_STRICT,
        tier=Tier.INFLATE,
        arch=ArchSku.ANY,
        min_compute_capability=(8, 0),
        guarantee=_strict,
        limits=limits.strict,
    ),
    # Below this package's own kernels, whose bits and layouts are ours to promise: chosen for what they
    # don't serve, and where it is asked for.
    _CUSPARSELT,
    replace(_CUSPARSELT, name="cusparselt_fp8", min_compute_capability=(8, 9), elements=(FP8,)),
    KernelSpec(
        name="host_blas",
        backend=BackendKind.HOST,
        tier=Tier.HOST,
        arch=ArchSku.ANY,
        min_compute_capability=(0, 0),
        guarantee=_host_blas,
        elements=_HOST_ELEMENTS,
        epilogues=tuple(EpilogueKind),
        column_order=True,
        scales=True,
    ),
    KernelSpec(
        name="host_strict",
        backend=BackendKind.HOST,
        tier=Tier.HOST,
        arch=ArchSku.ANY,
        min_compute_capability=(0, 0),
        guarantee=_strict,
        elements=_HOST_ELEMENTS,
        column_order=True,
        scales=True,
    ),
)


def find(name: str) -> KernelSpec | None:
    """The row of this name."""
    return next((spec for spec in KERNELS if spec.name == name), None)


def consider(
    problem: Problem,
    preference: PlanPreference,
    device: DeviceProperties,
    tested: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Considered[KernelSpec], ...]:
    """Every row of the table, in order, with the reason why it can't serve.

    ``tested``: row -> flags of its guarantee that a self-test of the configuration at hand has confirmed.
    """
    return tuple(
        _judge(spec, problem, preference, device, (tested or {}).get(spec.name, ())) for spec in KERNELS
    )


def guarantee_of(spec: KernelSpec, problem: Problem, tested: tuple[str, ...]) -> PrecisionGuarantee:
    """What the row promises for the problem, and what a self-test adds."""
    promised = spec.guarantee(problem)
    return promised.model_copy(update=dict.fromkeys(tested, True)) if tested else promised


def _judge(
    spec: KernelSpec,
    problem: Problem,
    preference: PlanPreference,
    device: DeviceProperties,
    tested: tuple[str, ...],
) -> Considered[KernelSpec]:
    reason = _mismatch(spec, problem, preference, device, tested)
    if reason is None and (absent := spec.missing(device)) is not None:
        return Considered(spec, absent, unavailable=True)
    return Considered(spec, reason)


def misplaced(spec: Placed, preference: PlanPreference, device: DeviceProperties) -> str | None:
    """Why a row of any table isn't the one asked for, or can't run on the device; None: it can."""
    if preference.prefer_backend not in (None, spec.backend):
        return f"prefer_backend is {preference.prefer_backend}"
    if preference.tier not in (None, spec.tier):
        return f"tier is {preference.tier}"
    if spec.on_host != (device.kind == "host"):
        return f"runs on {'the host' if spec.on_host else 'a CUDA device'}, the plan is for {device}"
    if not spec.on_host and device.compute_capability < spec.min_compute_capability:
        return f"needs compute capability {spec.min_compute_capability}, got {device.compute_capability}"
    return None


def _mismatch(
    spec: KernelSpec,
    problem: Problem,
    preference: PlanPreference,
    device: DeviceProperties,
    tested: tuple[str, ...],
) -> str | None:
    if (reason := misplaced(spec, preference, device)) is not None:
        return reason
    if device.compute_capability >= spec.below_compute_capability:
        below = spec.below_compute_capability
        return f"needs a compute capability below {below}, got {device.compute_capability}"
    if spec.arch is ArchSku.SM90A and not preference.allow_sm90a:
        return "allow_sm90a is false"
    if problem.element not in spec.elements:
        return f"serves elements {', '.join(spec.elements)}, not {problem.element}"
    if problem.op not in spec.ops:
        return f"does not serve op {problem.op}"
    if problem.epilogue not in spec.epilogues:
        return f"does not serve epilogue {problem.epilogue}"
    if not spec.column_order and MatrixOrder.COLUMN in (problem.x_order, problem.y_order):
        return "serves x_order and y_order row"
    if not spec.scales and (problem.scale_x, problem.scale_w) != (ScaleKind.NONE, ScaleKind.NONE):
        return "takes no scale_x or scale_w"
    if (limit := spec.limits(problem) or spec.yields(problem, device)) is not None:
        return limit
    needed, allowed = spec.min_workspace(problem), preference.max_workspace_bytes
    if allowed is not None and needed > allowed:
        return f"needs a workspace of {needed} bytes, max_workspace_bytes is {allowed}"
    return preference.require.unmet(guarantee_of(spec, problem, tested), problem.reduction)


def choose(rows: tuple[Considered[Row], ...]) -> Row:
    """The first row of any table that can serve.

    Raises UnsupportedError with every row's reason; BackendUnavailableError where the only obstacle is
    something that can be installed.
    """
    for row in rows:
        if row.reason is None:
            return row.spec
    reasons = "; ".join(f"{row.spec.name}: {row.reason}" for row in rows)
    kind = BackendUnavailableError if any(row.unavailable for row in rows) else UnsupportedError
    raise kind(f"no kernel can serve this problem. {reasons}")
