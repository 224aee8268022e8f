"""The table of kernels, and the whole of selection.

A row says what a kernel serves and what it guarantees; rows stand in order of preference. Selection is a
pure function of descriptor, preference and device properties: it times nothing and asks no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from .errors import BackendUnavailableError, UnsupportedError
from .vocab import (
    CANONICAL_LAYOUT,
    TILE64X128_LAYOUT,
    ArchSku,
    BackendKind,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GemmOp,
    MathPrecision,
    PlanPreference,
    PrecisionGuarantee,
    Tier,
)

F32, F16, BF16 = ElementKind.F32, ElementKind.F16, ElementKind.BF16


class Problem(Protocol):
    """What selection reads of a descriptor."""

    n: int
    m: int
    k: int
    op: GemmOp
    element: ElementKind
    epilogue: EpilogueKind
    out_element: ElementKind

    @property
    def reduction(self) -> int: ...

    @property
    def outputs(self) -> int: ...


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
    below_compute_capability: tuple[int, int] = (99, 0)
    layout: str = CANONICAL_LAYOUT
    limits: Callable[[Problem], str | None] = lambda problem: None
    min_workspace: Callable[[Problem], int] = lambda problem: 0
    missing: Callable[[DeviceProperties], str | None] = lambda device: None
    """What has to be installed before the kernel can run on the device, or None."""

    @property
    def on_host(self) -> bool:
        return self.tier is Tier.HOST


@dataclass(frozen=True)
class Considered:
    """A row and why it can't serve; ``reason`` None: it can."""

    spec: KernelSpec
    reason: str | None
    unavailable: bool = False


# Guarantees ---------------------------------------------------------------------------------------


def _strict(problem: Problem) -> PrecisionGuarantee:
    # Only kept positions are steps: K/2 of a row, but up to all M of a column.
    return PrecisionGuarantee(
        math_precision=MathPrecision.F32,
        accumulator=F32,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        bit_stable_across_hardware=True,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=2.0**-24,
        terms_per_k=0.5 if problem.op is GemmOp.FORWARD else 1.0,
    )


def _host_blas(problem: Problem) -> PrecisionGuarantee:
    # NumPy's BLAS chooses kernels and threads at run time, so nothing about bits is promised.
    return PrecisionGuarantee(
        math_precision=MathPrecision.F32,
        accumulator=F32,
        deterministic=False,
        bit_stable_on_same_hardware=False,
        batch_invariant=False,
        bit_stable_across_hardware=False,
        subnormals="preserved",
        nonfinite="propagates",
        unit_roundoff=2.0**-24,
        terms_per_k=1.0,
    )


def _mma_sp(problem: Problem) -> PrecisionGuarantee:
    # Only kept positions are steps; the tensor cores truncate when they align and add: up to 2^-22 a step.
    precision = {F16: MathPrecision.F16, BF16: MathPrecision.BF16}
    return PrecisionGuarantee(
        math_precision=precision[problem.element],
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


def _cublas(problem: Problem) -> PrecisionGuarantee:
    # The algorithm and its workspace are fixed at select, which is what cuBLAS asks for reproducible bits.
    # Tensor cores truncate when they align and add, so a step costs up to 2^-22 there.
    on_cores = problem.element is not F32
    precision = {F32: MathPrecision.F32, F16: MathPrecision.F16, BF16: MathPrecision.BF16}
    return PrecisionGuarantee(
        math_precision=precision[problem.element],
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


# Limits -------------------------------------------------------------------------------------------

_GRID_X = 2**31 - 1
INFLATE_BLOCK_BYTES = 16384
"""Dense bytes that a block of the inflate kernel writes."""
STRICT_SMALL_TILE = (32, 16)
"""Outputs x tokens of the strict kernel's smallest tile: what bounds its grid."""


def _strict_limits(problem: Problem) -> str | None:
    rows, tokens = STRICT_SMALL_TILE
    tiles = -(-problem.outputs // rows) * -(-problem.n // tokens)
    return None if tiles <= _GRID_X else f"{tiles} tiles exceed the grid limit {_GRID_X}"


DECODE_TOKENS = 16
"""Up to which n mma_sp is the fastest kernel, as measured on an H200."""


def few_tokens(problem: Problem) -> int:
    """Up to which n mma_sp beats inflating, as measured on an H200; beyond, only its guarantees count."""
    return 256 if problem.m * problem.k >= 1 << 26 else 128


def _mma_sp_limits(problem: Problem) -> str | None:
    if problem.n == 0 or problem.m == 0:
        return "serves no empty results"
    blocks = -(-problem.m // 64) * -(-problem.n // 8) * 8
    return None if blocks <= _GRID_X else f"{blocks} blocks may exceed the grid limit {_GRID_X}"


def _up_to(tokens: Callable[[Problem], int]) -> Callable[[Problem], str | None]:
    """mma_sp's limits, and a preference for at most so many tokens."""

    def limits(problem: Problem) -> str | None:
        most = tokens(problem)
        return (
            _mma_sp_limits(problem) if problem.n <= most else f"is preferred for n <= {most}, not {problem.n}"
        )

    return limits


def _wgmma_sp_limits(problem: Problem) -> str | None:
    if problem.n == 0 or problem.m == 0 or problem.k == 0:
        return "serves no empty operands"
    largest = max(problem.n, problem.m, problem.k)
    if largest >= 2**31:
        return f"dimension {largest} exceeds a tensor map's coordinates, {2**31 - 1}"
    blocks = -(-problem.m // 64) * -(-problem.n // 8) * 8
    return None if blocks <= _GRID_X else f"{blocks} blocks may exceed the grid limit {_GRID_X}"


def _cublas_limits(problem: Problem) -> str | None:
    largest = max(problem.n, problem.m, problem.k)
    if largest >= 2**31:
        return f"dimension {largest} exceeds cuBLAS's limit {2**31 - 1}"
    blocks = -(-problem.m * problem.k * problem.element.itemsize // INFLATE_BLOCK_BYTES)
    return None if blocks <= _GRID_X else f"{blocks} inflate blocks exceed the grid limit {_GRID_X}"


def align_up(size: int, alignment: int = 256) -> int:
    return -(-size // alignment) * alignment


def cublas_regions(problem: Problem) -> tuple[int, int]:
    """Bytes of the inflated weight, and of the float32 accumulators that an epilogue needs."""
    dense = align_up(problem.m * problem.k * problem.element.itemsize)
    accumulators = 4 * problem.n * problem.m if problem.epilogue.has_bias else 0
    return dense, align_up(accumulators)


def _needs_cublaslt(device: DeviceProperties) -> str | None:
    if device.cublaslt:
        return None
    return "cuBLASLt doesn't load: pip install 'sparse24_plans[cuda12]' (or [cuda13])"


# The table ----------------------------------------------------------------------------------------

_MMA_SP = KernelSpec(
    name="mma_sp",
    backend=BackendKind.MMA_SP,
    tier=Tier.SPARSE_TENSOR_CORE,
    arch=ArchSku.SM80,
    min_compute_capability=(8, 0),
    guarantee=_mma_sp,
    elements=(F16, BF16),
    ops=(GemmOp.FORWARD,),
    layout=TILE64X128_LAYOUT,
    limits=_up_to(lambda problem: DECODE_TOKENS),
)

_WGMMA_SP = replace(
    _MMA_SP,
    name="wgmma_sp",
    backend=BackendKind.WGMMA_SP,
    arch=ArchSku.SM90A,
    min_compute_capability=(9, 0),
    below_compute_capability=(9, 1),  # wgmma is of this architecture alone
    guarantee=_wgmma_sp,
    limits=_wgmma_sp_limits,
)

KERNELS: tuple[KernelSpec, ...] = (
    _MMA_SP,
    _WGMMA_SP,
    # The bits of mma_sp for any n: chosen where batch invariance is required.
    replace(_WGMMA_SP, name="wgmma_sp_invariant", guarantee=_mma_sp),
    # Where there is no wgmma.
    replace(_MMA_SP, name="mma_sp_batch", limits=_up_to(few_tokens)),
    KernelSpec(
        name="inflate_cublas",
        backend=BackendKind.INFLATE_CUBLAS,
        tier=Tier.INFLATE,
        arch=ArchSku.ANY,
        min_compute_capability=(8, 0),
        guarantee=_cublas,
        limits=_cublas_limits,
        min_workspace=lambda problem: sum(cublas_regions(problem)),
        missing=_needs_cublaslt,
    ),
    replace(_MMA_SP, name="mma_sp_many", limits=_mma_sp_limits),
    KernelSpec(
        name="inflate_strict",
        backend=BackendKind.INFLATE_STRICT,
        tier=Tier.INFLATE,
        arch=ArchSku.ANY,
        min_compute_capability=(8, 0),
        guarantee=_strict,
        limits=_strict_limits,
    ),
    KernelSpec(
        name="host_blas",
        backend=BackendKind.HOST,
        tier=Tier.HOST,
        arch=ArchSku.ANY,
        min_compute_capability=(0, 0),
        guarantee=_host_blas,
    ),
    KernelSpec(
        name="host_strict",
        backend=BackendKind.HOST,
        tier=Tier.HOST,
        arch=ArchSku.ANY,
        min_compute_capability=(0, 0),
        guarantee=_strict,
    ),
)


def consider(
    problem: Problem, preference: PlanPreference, device: DeviceProperties
) -> tuple[Considered, ...]:
    """Every row of the table, in order, with the reason why it can't serve."""
    return tuple(_judge(spec, problem, preference, device) for spec in KERNELS)


def _judge(
    spec: KernelSpec, problem: Problem, preference: PlanPreference, device: DeviceProperties
) -> Considered:
    reason = _mismatch(spec, problem, preference, device)
    if reason is None and (absent := spec.missing(device)) is not None:
        return Considered(spec, absent, unavailable=True)
    return Considered(spec, reason)


def _mismatch(
    spec: KernelSpec, problem: Problem, preference: PlanPreference, device: DeviceProperties
) -> str | None:
    if preference.prefer_backend not in (None, spec.backend):
        return f"prefer_backend is {preference.prefer_backend}"
    if preference.tier not in (None, spec.tier):
        return f"tier is {preference.tier}"
    if spec.on_host != (device.kind == "host"):
        return f"runs on {'the host' if spec.on_host else 'a CUDA device'}, the plan is for {device}"
    if device.compute_capability < spec.min_compute_capability:
        return f"needs compute capability {spec.min_compute_capability}, got {device.compute_capability}"
    if device.compute_capability >= spec.below_compute_capability:
        below = spec.below_compute_capability
        return f"needs a compute capability below {below}, got {device.compute_capability}"
    if spec.arch is ArchSku.SM90A and not preference.allow_sm90a:
        return "allow_sm90a is false"
    if problem.element not in spec.elements:
        return f"serves elements {', '.join(spec.elements)}, not {problem.element}"
    if problem.op not in spec.ops:
        return f"does not serve op {problem.op}"
    if (limit := spec.limits(problem)) is not None:
        return limit
    needed, allowed = spec.min_workspace(problem), preference.max_workspace_bytes
    if allowed is not None and needed > allowed:
        return f"needs a workspace of {needed} bytes, max_workspace_bytes is {allowed}"
    return preference.require.unmet(spec.guarantee(problem), problem.reduction)


def choose(rows: tuple[Considered, ...], preference: PlanPreference) -> KernelSpec:
    """The first row that can serve.

    Raises UnsupportedError with every row's reason; BackendUnavailableError where the only obstacle is
    something that can be installed.
    """
    for row in rows:
        if row.reason is None:
            return row.spec
    reasons = "; ".join(f"{row.spec.name}: {row.reason}" for row in rows)
    kind = BackendUnavailableError if any(row.unavailable for row in rows) else UnsupportedError
    raise kind(f"no kernel can serve this problem. {reasons}")
