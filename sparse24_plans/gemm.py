"""The GEMM of the package: ``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse.

``GemmSparse24Descriptor -> GemmSparse24Plan.select -> can_implement -> workspace_size -> run``. Shapes and
types are checked once against the descriptor; ``run`` checks the operands and launches; ``bind`` checks
once for many launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from pydantic import Field, field_validator, model_validator

from . import packing, registry
from .devices import place_of, resolve
from .errors import InvalidProblemError, MisalignedOperandError, Sparse24Error, WorkspaceTooSmallError
from .launching import as_graph, launch_on
from .tensors import Device, TensorView, Workspace, stream_handle
from .vocab import (
    CANONICAL_LAYOUT,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GemmOp,
    KernelSku,
    Model,
    OpCategory,
    PlanPreference,
    PrecisionGuarantee,
    Tier,
)
from .weights import PackedWeight, Sparse24Weight

_INT64_MAX = 2**63 - 1


class GemmSparse24Descriptor(Model):
    """The problem: sizes, types and epilogue. Frozen, hashable, JSON round-trip.

    Parameters
    ----------
    n, m, k : int
        Tokens, out features, in features; k a multiple of 8. Any may be 0.
    element : ElementKind
        Type of W's values and of X: ``f32``, ``f16`` or ``bf16``.
    op : GemmOp
        ``forward``: Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T). ``dgrad``: dX[N,K] = alpha * dY[N,M] @ W.
    epilogue : EpilogueKind
        v = alpha * acc, then per kind: v; v + bias; relu(v + bias); gelu(v + bias) = t * Phi(t) (the exact
        one); silu(v + bias) = t / (1 + exp(-t)). ``dgrad`` takes only ``identity``.
    alpha : float
        Finite in float32.
    out_element : ElementKind, optional
        Type of the result: ``element`` (default) or ``f32``.
    bias_element : ElementKind, optional
        Type of bias[M]: ``element`` (default) or ``f32``.

    Raises
    ------
    InvalidProblemError
        Naming the field.
    """

    n: int = Field(ge=0, le=_INT64_MAX, strict=True)
    m: int = Field(ge=0, le=_INT64_MAX, strict=True)
    k: int = Field(ge=0, le=_INT64_MAX, multiple_of=8, strict=True)
    element: ElementKind
    op: GemmOp = GemmOp.FORWARD
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    alpha: float = Field(default=1.0, allow_inf_nan=False)
    out_element: ElementKind = Field(default_factory=lambda data: data["element"])
    bias_element: ElementKind = Field(default_factory=lambda data: data["element"])

    @field_validator("alpha")
    @classmethod
    def _one_zero(cls, alpha: float) -> float:
        return alpha + 0.0  # -0.0 becomes +0.0: equal descriptors must mean the same bits

    @model_validator(mode="after")
    def _consistent(self) -> GemmSparse24Descriptor:
        for name in ("out_element", "bias_element"):
            if getattr(self, name) not in (self.element, ElementKind.F32):
                raise ValueError(f"{name}: expected {self.element} or f32, got {getattr(self, name)}")
        if abs(self.alpha) > float(np.finfo(np.float32).max):
            raise ValueError(f"alpha: expected a value finite in float32, got {self.alpha}")
        if self.op is GemmOp.DGRAD and self.epilogue.has_bias:
            raise ValueError(f"epilogue: expected identity for op dgrad, got {self.epilogue}")
        if self.m * self.k > _INT64_MAX or self.n * max(self.m, self.k) > _INT64_MAX:
            raise ValueError("n, m, k: expected operands of fewer than 2^63 elements")
        return self

    @property
    def reduction(self) -> int:
        """Length of the sum behind one result: K for ``forward``, M for ``dgrad``."""
        return self.k if self.op is GemmOp.FORWARD else self.m

    @property
    def outputs(self) -> int:
        """Results per token: M for ``forward``, K for ``dgrad``."""
        return self.m if self.op is GemmOp.FORWARD else self.k


@dataclass(frozen=True, slots=True)
class GemmSparse24Args:
    """Operands of a ``forward`` plan. Tensors of any framework, on the plan's device.

    ``weight``: what ``plan.pack`` returned, or a canonical Sparse24Weight where the plan reads that.
    ``x`` [N, K] of the element; ``y`` [N, M] of ``out_element``, written; ``bias`` [M] of ``bias_element``
    exactly when the epilogue has one. Rows of x and y may be further apart than their width.
    """

    weight: Sparse24Weight | PackedWeight
    x: Any
    y: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class DgradSparse24Args:
    """Operands of a ``dgrad`` plan: ``dy`` [N, M] of the element is read, ``dx`` [N, K] is written."""

    weight: Sparse24Weight | PackedWeight
    dy: Any
    dx: Any


class Operands:
    """Checked operands, as backends get them: names by role, so that both ops share code.

    Row strides are in elements. A plain class: one is made on every run.
    """

    __slots__ = ("bias", "result", "result_stride", "source", "source_stride", "weight")

    def __init__(
        self, weight: PackedWeight, source: TensorView, result: TensorView, bias: TensorView | None
    ) -> None:
        self.weight, self.source, self.result, self.bias = weight, source, result, bias
        rows, width = source.shape
        self.source_stride = source.strides[0] if rows > 1 else width
        rows, width = result.shape
        self.result_stride = result.strides[0] if rows > 1 else width


class Kernel(Protocol):
    """What a backend module's ``Kernel`` class provides. Built at select: it compiles and sizes itself."""

    workspace_size: int
    workspace_alignment: int
    weight_alignment: int
    """Bytes that the addresses of the weight's buffers are multiples of."""
    source_alignment: int
    source_row_alignment: int
    """Bytes that the source's address, and the distance of its rows, are multiples of."""
    result_alignment: int
    launches: int
    """Kernels that one run enqueues."""
    details: str
    """One line for ``explain``: tile, algorithm."""

    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        device: DeviceProperties,
        spec: registry.KernelSpec,
        preference: PlanPreference,
    ) -> None: ...

    def prepare(self, operands: Operands, workspace: int) -> Callable[[int], None]:
        """A launcher that takes a stream handle; called many times by a BoundGemm."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """Truthy where the plan can run the arguments; else ``error`` is what ``run`` would raise."""

    error: Sparse24Error | None = None

    def __bool__(self) -> bool:
        return self.error is None


class Explanation(Model):
    """Why this kernel, and why not the others."""

    device: str
    chosen: str | None
    details: str
    workspace_size: int | None
    rows: tuple[tuple[str, str, str | None], ...]
    """(kernel, backend, reason why it can't serve or None) for every row of the table, in order."""

    def __str__(self) -> str:
        lines = [f"device: {self.device}", f"chosen: {self.chosen or 'none'}  {self.details}".rstrip()]
        for name, backend, reason in self.rows:
            state = "chosen" if name == self.chosen else reason or "can serve; a row above it was preferred"
            lines.append(f"  {name} ({backend}): {state}")
        return "\n".join(lines)


class BoundGemm:
    """A plan with its operands: ``launch`` only launches. Keeps the operands alive."""

    __slots__ = ("_device", "_keep", "_launch")

    def __init__(self, launch: Callable[[int], None], device: Device, keep: tuple[Any, ...]) -> None:
        self._launch, self._device, self._keep = launch, device, keep

    def launch(self, stream: Any = None) -> None:
        """Enqueue on ``stream``. Never allocates, compiles or synchronises: safe in CUDA-graph capture."""
        launch_on(self._device, self._launch, stream_handle(stream, self._device))


class GemmSparse24Plan:
    """A kernel chosen for a descriptor on a device. Immutable; share it between threads and streams.

    Make one with :meth:`select`.
    """

    def __init__(
        self,
        descriptor: GemmSparse24Descriptor,
        preference: PlanPreference,
        properties: DeviceProperties,
        rows: tuple[registry.Considered, ...],
        spec: registry.KernelSpec,
        kernel: Kernel,
    ) -> None:
        self.descriptor = descriptor
        self.preference = preference
        self.device = properties
        self._place = place_of(properties)
        self._rows, self._spec, self._kernel = rows, spec, kernel

    @staticmethod
    def select(
        descriptor: GemmSparse24Descriptor,
        *,
        preference: PlanPreference | Mapping[str, Any] | None = None,
        device: int | str | None = None,
    ) -> GemmSparse24Plan:
        """Choose and compile a kernel. The same answer every time: nothing is timed.

        ``device`` is a CUDA ordinal, ``"host"``, or None for the current CUDA device (the host where there
        is none). ``preference`` may be a mapping of PlanPreference's fields. Plans are cached by their
        arguments.

        Raises
        ------
        UnsupportedError
            No row of the table can serve, or the forced one can't; the message has every row's reason.
        BackendUnavailableError
            The device, CuPy or a library is missing; the message says what to install.
        """
        _check_descriptor(descriptor)
        return _select(descriptor, _preference(preference), resolve(device))

    @property
    def guarantee(self) -> PrecisionGuarantee:
        """What the kernel promises about its numbers."""
        return self.sku.precision_guarantee

    @cached_property
    def sku(self) -> KernelSku:
        """Identity of the kernel."""
        return KernelSku(
            category=OpCategory.GEMM,
            op=f"gemm_sparse24_{self.descriptor.op}",
            element=self.descriptor.element,
            aux_element=self.descriptor.out_element,
            layout=self._spec.layout,
            epilogue=self.descriptor.epilogue,
            arch=self._spec.arch,
            backend=self._spec.backend,
            precision_guarantee=self._spec.guarantee(self.descriptor),
        )

    @property
    def tier(self) -> Tier:
        return self._spec.tier

    def explain(self) -> Explanation:
        """Why this kernel was chosen, and why each other one was not."""
        return _explanation(self.device, self._rows, self._spec, self._kernel)

    def workspace_size(self) -> int:
        """Bytes of device scratch that ``run`` needs; constant for the plan's life."""
        return self._kernel.workspace_size

    @property
    def workspace_alignment(self) -> int:
        """Bytes that the workspace's address must be a multiple of."""
        return self._kernel.workspace_alignment

    def pack(self, weight: Sparse24Weight) -> PackedWeight:
        """``weight`` in the layout of this plan's kernel, on its device. Usable by every n.

        Raises InvalidProblemError where shape, element or device differ from the plan's.
        """
        if type(weight) is not Sparse24Weight:
            raise InvalidProblemError(f"weight: expected Sparse24Weight, got {type(weight).__name__}")
        make = PackedWeight.canonical if self._spec.layout == CANONICAL_LAYOUT else packing.pack
        return self._check_weight(make(weight))

    def can_implement(self, args: GemmSparse24Args | DgradSparse24Args) -> Verdict:
        """Whether ``run`` would take these operands (the workspace apart). Touches no memory."""
        try:
            self._kernel.prepare(self._check(args), 0)
        except Sparse24Error as error:
            return Verdict(error)
        return Verdict()

    def run(
        self, args: GemmSparse24Args | DgradSparse24Args, *, workspace: Any = None, stream: Any = None
    ) -> None:
        """Check the operands and enqueue the kernel on ``stream``. Writes y (or dx) and the workspace only.

        Never allocates device memory, compiles or synchronises: safe in CUDA-graph capture. The operands
        must stay alive until the stream has run the kernel. A host plan runs before it returns.

        Raises
        ------
        InvalidProblemError, UnsupportedError, MisalignedOperandError, WorkspaceTooSmallError
            Before anything is written; the message names the argument.
        DriverError
            The launch failed.
        """
        handle = stream_handle(stream, self._place)
        operands = self._check(args)
        launch = self._kernel.prepare(operands, self._check_workspace(workspace))
        launch_on(self._place, launch, handle)

    def bind(self, args: GemmSparse24Args | DgradSparse24Args, *, workspace: Any = None) -> BoundGemm:
        """Check once, launch many times. Raises what :meth:`run` raises.

        Where the kernel is several launches, they become one CUDA graph here, which holds a little device
        memory for as long as the BoundGemm lives; so bind outside of a capture.
        """
        operands = self._check(args)
        launch = self._kernel.prepare(operands, self._check_workspace(workspace))
        if self._kernel.launches > 1:
            made: list[Callable[[int], None]] = []
            launch_on(self._place, lambda _: made.append(as_graph(launch)), 0)
            launch = made[0]
        return BoundGemm(launch, self._place, (self, operands, workspace))

    # Checks ---------------------------------------------------------------------------------------

    def _check(self, args: GemmSparse24Args | DgradSparse24Args) -> Operands:
        desc, kernel = self.descriptor, self._kernel
        forward = desc.op is GemmOp.FORWARD
        across, out_across = (desc.k, desc.m) if forward else (desc.m, desc.k)
        expected = GemmSparse24Args if forward else DgradSparse24Args
        if type(args) is not expected:
            raise InvalidProblemError(
                f"args: expected {expected.__name__} for op {desc.op}, got {type(args).__name__}"
            )
        given = args.weight
        if type(given) is Sparse24Weight and self._spec.layout == CANONICAL_LAYOUT:
            given = PackedWeight.canonical(given)
        weight = self._check_weight(given)
        bias = None
        if type(args) is GemmSparse24Args:
            names, source, result = ("x", "y"), args.x, args.y
            bias = self._check_bias(args.bias)
        else:
            assert type(args) is DgradSparse24Args
            names, source, result = ("dy", "dx"), args.dy, args.dx
        src = _matrix(names[0], source, (desc.n, across), desc.element, self._place, kernel.source_alignment)
        if desc.n > 1:
            _check_alignment(
                f"{names[0]} row stride", src.strides[0] * src.element.itemsize, kernel.source_row_alignment
            )
        out = _matrix(
            names[1], result, (desc.n, out_across), desc.out_element, self._place, kernel.result_alignment
        )
        if out.readonly:
            raise InvalidProblemError(f"{names[1]}: expected writable memory, got a read-only tensor")
        _check_apart(names[1], out, names[0], src)
        for view in weight.buffers:
            _check_apart(names[1], out, "weight", view)
        if bias is not None:
            _check_apart(names[1], out, "bias", bias)
        return Operands(weight, src, out, bias)

    def _check_weight(self, weight: Any) -> PackedWeight:
        desc, layout = self.descriptor, self._spec.layout
        if type(weight) is not PackedWeight:
            hint = "; call plan.pack(weight)" if type(weight) is Sparse24Weight else ""
            raise InvalidProblemError(
                f"weight: expected a PackedWeight of layout {layout!r}, got {type(weight).__name__}{hint}"
            )
        if weight.layout_id != layout:
            raise InvalidProblemError(
                f"weight: expected layout {layout!r}, got {weight.layout_id!r}; call plan.pack(weight)"
            )
        if (weight.m, weight.k) != (desc.m, desc.k) or weight.element is not desc.element:
            raise InvalidProblemError(
                f"weight: expected {desc.element}[{desc.m}, {desc.k}], "
                f"got {weight.element}[{weight.m}, {weight.k}]"
            )
        if weight.device != self._place:
            raise InvalidProblemError(f"weight: expected memory on {self._place}, got {weight.device}")
        for view in weight.buffers:
            _check_alignment("weight", view.address, self._kernel.weight_alignment)
        return weight

    def _check_bias(self, bias: Any) -> TensorView | None:
        desc = self.descriptor
        if (bias is None) != (desc.epilogue is EpilogueKind.IDENTITY):
            wanted = f"a tensor [{desc.m}]" if desc.epilogue.has_bias else "None"
            raise InvalidProblemError(
                f"bias: expected {wanted} for epilogue {desc.epilogue}, got {type(bias).__name__}"
            )
        if bias is None:
            return None
        view = TensorView.of(bias, element=_reinterpretable(desc.bias_element), argument="bias")
        _check_tensor("bias", view, (desc.m,), desc.bias_element, self._place)
        if desc.m > 1 and view.strides[0] != 1:
            raise InvalidProblemError(f"bias: expected contiguous memory, got {view!r}")
        _check_alignment("bias", view.address, view.element.itemsize)
        return view

    def _check_workspace(self, workspace: Any) -> int:
        needed = self._kernel.workspace_size
        if workspace is None:
            if needed:
                raise WorkspaceTooSmallError(needed, 0)
            return 0
        space = Workspace.of(workspace, self._place)
        if not needed:
            return space.address
        if space.device != self._place:
            raise InvalidProblemError(f"workspace: expected memory on {self._place}, got {space.device}")
        if space.nbytes < needed:
            raise WorkspaceTooSmallError(needed, space.nbytes)
        _check_alignment("workspace", space.address, self._kernel.workspace_alignment)
        return space.address


def explain(
    descriptor: GemmSparse24Descriptor,
    *,
    preference: PlanPreference | Mapping[str, Any] | None = None,
    device: int | str | DeviceProperties | None = None,
) -> Explanation:
    """What ``select`` would choose and why, uncompiled. ``device`` may be properties of an absent GPU."""
    _check_descriptor(descriptor)
    properties = device if isinstance(device, DeviceProperties) else resolve(device)
    rows = registry.consider(descriptor, _preference(preference), properties)
    chosen = next((row.spec for row in rows if row.reason is None), None)
    return _explanation(properties, rows, chosen, None)


def _check_descriptor(descriptor: object) -> None:
    if type(descriptor) is not GemmSparse24Descriptor:
        raise InvalidProblemError(
            f"descriptor: expected GemmSparse24Descriptor, got {type(descriptor).__name__}"
        )


def _preference(given: PlanPreference | Mapping[str, Any] | None) -> PlanPreference:
    if given is None:
        return _NO_PREFERENCE
    if type(given) is PlanPreference:
        return given
    if not isinstance(given, Mapping):
        raise InvalidProblemError(
            f"preference: expected PlanPreference or a mapping of its fields, got {type(given).__name__}"
        )
    return PlanPreference.model_validate(given)


_NO_PREFERENCE = PlanPreference()


def _explanation(
    device: DeviceProperties,
    rows: tuple[registry.Considered, ...],
    chosen: registry.KernelSpec | None,
    kernel: Kernel | None,
) -> Explanation:
    return Explanation(
        device=str(device),
        chosen=chosen.name if chosen else None,
        details=kernel.details if kernel else "",
        workspace_size=kernel.workspace_size if kernel else None,
        rows=tuple((row.spec.name, row.spec.backend.value, row.reason) for row in rows),
    )


@lru_cache(maxsize=4096)
def _select(
    descriptor: GemmSparse24Descriptor, preference: PlanPreference, properties: DeviceProperties
) -> GemmSparse24Plan:
    rows = registry.consider(descriptor, preference, properties)
    spec = registry.choose(rows, preference)
    backend = import_module(f".backends.{spec.backend}", __package__)
    kernel = backend.Kernel(descriptor, properties, spec, preference)
    return GemmSparse24Plan(descriptor, preference, properties, rows, spec, kernel)


def _reinterpretable(element: ElementKind) -> ElementKind | None:
    """Types that some frameworks lack may arrive as raw bits; the rest must come as themselves."""
    return element if element in (ElementKind.BF16, ElementKind.FP8_E4M3, ElementKind.FP8_E5M2) else None


def _matrix(
    name: str, tensor: Any, shape: tuple[int, int], element: ElementKind, device: Device, alignment: int
) -> TensorView:
    view = TensorView.of(tensor, element=_reinterpretable(element), argument=name)
    _check_tensor(name, view, shape, element, device)
    rows, width = shape
    if rows == 0 or width == 0:
        return view
    if width > 1 and view.strides[1] != 1:
        raise InvalidProblemError(f"{name}: expected unit stride along its rows, got strides {view.strides}")
    _check_alignment(name, view.address, max(alignment, element.itemsize))
    if rows > 1 and view.strides[0] < width:
        raise InvalidProblemError(
            f"{name}: expected a row stride of at least {width} elements, got {view.strides[0]}"
        )
    return view


def _check_tensor(
    name: str, view: TensorView, shape: tuple[int, ...], element: ElementKind, device: Device
) -> None:
    if view.shape != shape:
        raise InvalidProblemError(f"{name}: expected shape {list(shape)}, got {list(view.shape)}")
    if view.element is not element:
        raise InvalidProblemError(f"{name}: expected element {element}, got {view.element}")
    if view.device != device:
        raise InvalidProblemError(f"{name}: expected memory on {device}, got {view.device}")


def _check_alignment(name: str, address: int, alignment: int) -> None:
    if address % alignment:
        raise MisalignedOperandError(name, alignment, address)


def _check_apart(name: str, out: TensorView, other_name: str, other: TensorView) -> None:
    """Refuse a result that shares memory with an input. Column windows of one buffer share none."""
    if out.address >= other.end or other.address >= out.end:
        return
    if len(other.shape) == 2 and out.shape[0] > 1 and other.shape[0] > 1:
        pitch = out.strides[0] * out.element.itemsize
        if pitch == other.strides[0] * other.element.itemsize:
            apart = (other.address - out.address) % pitch
            own, others = out.shape[1] * out.element.itemsize, other.shape[1] * other.element.itemsize
            if apart >= own and apart + others <= pitch:
                return
    raise InvalidProblemError(f"{name}: expected memory apart from {other_name}, got an overlap")
