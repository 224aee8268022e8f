"""The table of kernels, and the whole of selection.

A row says what a kernel serves and what it guarantees; rows stand in order of preference. Selection is a
pure function of descriptor, preference and device properties: it times nothing and asks no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from .errors import BackendUnavailableError, UnsupportedError
from .vocab import (
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

F32, F16, BF16 = ElementKind.F32, ElementKind.F16, ElementKind.BF16
S8, FP8, I32 = ElementKind.S8, ElementKind.FP8_E4M3, ElementKind.I32

EXACT_EPILOGUES = tuple(kind for kind in EpilogueKind if kind is not EpilogueKind.BIAS_GELU_TANH)


class Problem(Protocol):
    """What selection reads of a descriptor."""

    n: int
    m: int
    k: int
    op: GemmOp
    element: ElementKind
    epilogue: EpilogueKind
    alpha: float
    out_element: ElementKind
    bias_element: ElementKind
    x_order: MatrixOrder
    y_order: MatrixOrder
    scale_x: ScaleKind
    scale_w: ScaleKind

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


def _fills_badly(problem: Problem, device: DeviceProperties) -> str | None:
    """mma_sp has a block or two for each 64 rows of W.

    As measured on an H200, wgmma_sp is the faster one where the last wave is nearly empty or waves are many.
    """
    blocks, available = -(-problem.m // 64), max(1, device.multiprocessors)
    waves = -(-blocks // available)
    if waves == 1 or (waves * available < 1.5 * blocks and waves <= 4):
        return None
    return f"is preferred where its blocks fill the device evenly, not for {blocks} on {available}"


def few_tokens(problem: Problem) -> int:
    """Up to which n mma_sp beats inflating, as measured on an H200; beyond, only its guarantees count."""
    return 256 if problem.m * problem.k >= 1 << 26 else 128


def _tile_blocks(problem: Problem) -> str | None:
    """Whether the tensor core kernels' smallest tiles, each cut into at most 8 slices of K, fit the grid."""
    blocks = -(-problem.m // 64) * -(-problem.n // 8) * 8
    return None if blocks <= _GRID_X else f"{blocks} blocks may exceed the grid limit {_GRID_X}"


def _mma_sp_limits(problem: Problem) -> str | None:
    if problem.n == 0 or problem.m == 0:
        return "serves no empty results"
    return _tile_blocks(problem)


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
    return _tile_blocks(problem)


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


# What the library takes: element -> its results. The bias is of the result's type, of f32 for integers.
_CUSPARSELT_OUT = {F16: (F16,), BF16: (BF16,), S8: (I32, S8, F16, BF16), FP8: (BF16, F16, F32)}
_CUSPARSELT_GELU = ((S8, S8), (FP8, BF16))


def _cusparselt_limits(problem: Problem) -> str | None:
    out, element = problem.out_element, problem.element
    if problem.n == 0 or problem.m == 0 or problem.k == 0:
        return "serves no empty operands"
    size = element.itemsize
    for name, unit in (("n", 16 // size), ("m", 16 if size == 2 else 32), ("k", 16 if size == 2 else 32)):
        if getattr(problem, name) % unit:
            return f"needs {name} a multiple of {unit} for {element}, got {getattr(problem, name)}"
    if max(problem.m * problem.k, problem.n * problem.k, problem.n * problem.m) >= 2**31:
        return "serves operands of fewer than 2^31 elements: beyond, the library is not tested"
    if out not in _CUSPARSELT_OUT[element]:
        return f"serves out_element {', '.join(_CUSPARSELT_OUT[element])} for {element}, not {out}"
    gelu = problem.epilogue is EpilogueKind.BIAS_GELU_TANH
    if gelu and (element, out) not in _CUSPARSELT_GELU:
        return f"serves bias_gelu_tanh from s8 to s8 and from fp8_e4m3 to bf16, not from {element} to {out}"
    bias = F32 if out.is_integer else out
    if problem.epilogue.has_bias and problem.bias_element is not bias:
        return f"needs bias_element {bias} for out_element {out}, got {problem.bias_element}"
    if problem.x_order is MatrixOrder.COLUMN and size == 1:
        return f"serves x_order row for {element}"
    if problem.scale_x is not ScaleKind.NONE or problem.scale_w is ScaleKind.TENSOR:
        return "takes no scale but a scale_w of rows"
    if problem.scale_w is ScaleKind.ROW and (element is not S8 or problem.alpha != 1):
        return f"takes a scale_w for s8 with alpha 1, not for {element} with alpha {problem.alpha}"
    return None


_CUSPARSELT_OLDEST, _CUSPARSELT_BELOW = (0, 8), (1, 0)
"""The versions whose structs the vendor code knows."""


def _needs_cusparselt(device: DeviceProperties) -> str | None:
    install = "pip install -U 'sparse24_plans[cusparselt12]' (or [cusparselt13])"
    if device.cusparselt is None:
        return f"cuSPARSELt doesn't load: {install}"
    major, minor = (int(part) for part in device.cusparselt.split(".")[:2])
    if not _CUSPARSELT_OLDEST <= (major, minor) < _CUSPARSELT_BELOW:
        return f"cuSPARSELt {device.cusparselt} loads, but 0.8 or a later 0.x is needed: {install}"
    return None


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
    limits=_mma_sp_limits,
)

_WGMMA_SP = replace(
    _MMA_SP_MANY,
    name="wgmma_sp",
    backend=BackendKind.WGMMA_SP,
    arch=ArchSku.SM90A,
    min_compute_capability=(9, 0),
    below_compute_capability=(9, 1),  # wgmma is of this architecture alone
    guarantee=_wgmma_sp,
    limits=_wgmma_sp_limits,
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
    limits=_cusparselt_limits,
    missing=_needs_cusparselt,
)

KERNELS: tuple[KernelSpec, ...] = (
    replace(_MMA_SP_MANY, name="mma_sp", limits=_up_to(lambda problem: DECODE_TOKENS), yields=_fills_badly),
    _WGMMA_SP,
    # The bits of mma_sp for any n: chosen where batch invariance is required.
    replace(_WGMMA_SP, name="wgmma_sp_invariant", guarantee=_mma_sp),
    replace(_WGMMA_SP_8BIT, name="wgmma_sp_s8", guarantee=_wgmma_sp_s8, elements=(S8,)),
    replace(_WGMMA_SP_8BIT, name="wgmma_sp_fp8", guarantee=_wgmma_sp_fp8, elements=(FP8,)),
    replace(_WGMMA_SP_8BIT, name=PROMOTED_FP8, guarantee=_wgmma_sp_fp8_promoted, elements=(FP8,)),
    # Where there is no wgmma.
    replace(_MMA_SP_MANY, name="mma_sp_batch", limits=_up_to(few_tokens)),
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
    _MMA_SP_MANY,
    KernelSpec(
        name="inflate_strict",
        backend=BackendKind.INFLATE_STRICT,
        tier=Tier.INFLATE,
        arch=ArchSku.ANY,
        min_compute_capability=(8, 0),
        guarantee=_strict,
        limits=_strict_limits,
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
