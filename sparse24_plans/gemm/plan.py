"""The GEMM of the package: ``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse.

``GemmSparse24Descriptor -> GemmSparse24Plan.select -> can_implement -> workspace_size -> run``. Shapes and
types are checked once against the descriptor; ``run`` checks the operands and launches; ``bind`` checks
once for many launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, Protocol

from ..device.adapters import addresses_of
from ..device.devices import home_of, resolve
from ..device.streams import Launch, launch_on, stream_handle
from ..device.tensors import TensorView, Workspace
from ..errors import InvalidProblemError, Sparse24Error, WorkspaceTooSmallError
from ..plan.bound import Bound
from ..plan.operands import Operands as Operands
from ..plan.operands import Remembered, check_alignment, check_apart, check_tensor, matrix, reinterpretable
from ..vocab import (
    CANONICAL_LAYOUT,
    BackendKind,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GemmOp,
    KernelSku,
    Model,
    OpCategory,
    PlanPreference,
    PrecisionGuarantee,
    ScaleKind,
    Tier,
)
from ..weights import packing
from ..weights.weight import PackedWeight, Sparse24Weight
from . import table as registry
from .descriptor import GemmSparse24Descriptor as GemmSparse24Descriptor
from .tuned import TunedKernel, TuningTable, shipped


@dataclass(frozen=True, slots=True)
class GemmSparse24Args:
    """Operands of a ``forward`` plan. Tensors of any framework, on the plan's device.

    ``weight``: what ``plan.pack`` returned, or a canonical Sparse24Weight where the plan reads that.
    ``x`` [N, K] of the element; ``y`` [N, M] of ``out_element``, written; ``bias`` [M] of ``bias_element``
    exactly when the epilogue has one. Rows of x and y may be further apart than their width; in a ``column``
    order it is their columns that are contiguous. ``scale_x``, ``scale_w``: f32, [1] for a scale of the
    tensor, [N] and [M] for one a row, exactly when the descriptor has them.
    """

    weight: Sparse24Weight | PackedWeight
    x: Any
    y: Any
    bias: Any = None
    scale_x: Any = None
    scale_w: Any = None
    _remembered: Remembered = field(default_factory=Remembered, init=False, repr=False, compare=False)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.x, self.y, self.bias, self.scale_x, self.scale_w


@dataclass(frozen=True, slots=True)
class DgradSparse24Args:
    """Operands of a ``dgrad`` plan: ``dy`` [N, M] of the element is read, ``dx`` [N, K] is written."""

    weight: Sparse24Weight | PackedWeight
    dy: Any
    dx: Any
    _remembered: Remembered = field(default_factory=Remembered, init=False, repr=False, compare=False)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.dy, self.dx


class BackendKernel(Protocol):
    """What a backend module's ``Kernel`` class is. Built at select: it compiles and sizes itself.

    It states only what is other than here: one launch on the device, without workspace, for any operands.
    """

    workspace_size: int = 0
    workspace_alignment: int = 1
    weight_alignment: int = 16
    """Bytes that the addresses of the weight's buffers are multiples of."""
    source_alignment: int = 1
    source_row_alignment: int = 1
    """Bytes that the source's address, and the distance of its rows, are multiples of."""
    result_alignment: int = 1
    launches: int = 1
    """Kernels that one run enqueues."""
    details: str
    """One line for ``explain``: tile, algorithm."""

    # A kernel whose layout is neither the canonical one nor packing.py's has ``pack(weight)``. One that can
    # be tuned takes ``configuration``, a mapping of names to integers, beside the arguments below; its module
    # has ``candidates`` and ``tuning_version`` (tuning_table.TunableBackend).
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


class BoundGemm(Bound):
    """A plan with its operands: ``launch`` only launches. Keeps the operands alive."""

    __slots__ = ()


class GemmSparse24Plan:
    """A kernel chosen for a descriptor on a device. Immutable; share it between threads and streams.

    Make one with :meth:`select`.
    """

    def __init__(
        self,
        descriptor: GemmSparse24Descriptor,
        preference: PlanPreference,
        properties: DeviceProperties,
        rows: tuple[registry.Considered[registry.KernelSpec], ...],
        spec: registry.KernelSpec,
        kernel: BackendKernel,
        tested: tuple[str, ...] = (),
    ) -> None:
        self.descriptor = descriptor
        self.preference = preference
        self.device = properties
        self._place = home_of(properties)
        self._rows, self._spec, self._kernel, self._tested = rows, spec, kernel, tested

    @staticmethod
    def select(
        descriptor: GemmSparse24Descriptor,
        *,
        preference: PlanPreference | Mapping[str, Any] | None = None,
        device: int | str | None = None,
        tuning: TuningTable | None = None,
    ) -> GemmSparse24Plan:
        """Choose and compile a kernel. The same answer every time: nothing is timed.

        ``device`` is a CUDA ordinal, ``"host"``, or None for the current CUDA device (the host where there
        is none). ``preference`` may be a mapping of PlanPreference's fields. ``tuning`` has configurations
        for the kernels that can be tuned; None is the table that comes with the package for the device. What
        is stamped for another machine is ignored with a TuningWarning. Plans are cached by their arguments.

        Raises
        ------
        UnsupportedError
            No row of the table can serve, or the forced one can't; the message has every row's reason.
        BackendUnavailableError
            The device, CuPy or a library is missing; the message says what to install.
        """
        _check_descriptor(descriptor)
        properties = resolve(device)
        return _select(descriptor, PlanPreference.of(preference), properties, _table(tuning, properties))

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
            precision_guarantee=registry.guarantee_of(self._spec, self.descriptor, self._tested),
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
        self._check_fit(weight)
        own = getattr(self._kernel, "pack", None)  # a library's layout: only its kernel can make it
        make = PackedWeight.canonical if self._spec.layout == CANONICAL_LAYOUT else own or packing.pack
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

        From the third run on, the same ``args`` and workspace, all where they lay in the last run, are only
        launched.

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
        launch_on(self._place, self._launcher(args, workspace), handle)

    def bind(self, args: GemmSparse24Args | DgradSparse24Args, *, workspace: Any = None) -> BoundGemm:
        """Check once, launch many times. Raises what :meth:`run` raises.

        Where the kernel is several launches, they become one CUDA graph here, which holds a little device
        memory for as long as the BoundGemm lives; so bind outside of a capture.
        """
        operands = self._check(args)
        launch = self._kernel.prepare(operands, self._check_workspace(workspace))
        return BoundGemm(launch, self._kernel.launches, self._place, (self, operands, workspace))

    def _launcher(self, args: GemmSparse24Args | DgradSparse24Args, workspace: Any) -> Launch:
        if type(args) is not GemmSparse24Args and type(args) is not DgradSparse24Args:
            self._check(args)  # which refuses it
        last = args._remembered.last
        places = addresses_of((*args.tensors, workspace)) if last is not None and last[0] is self else None
        if last is not None and places is not None and last[1] == places:
            return last[2]
        launch = self._kernel.prepare(self._check(args), self._check_workspace(workspace))
        args._remembered.last = self, places, launch
        return launch

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
        shape, alignment = (desc.n, across), kernel.source_alignment
        src, src_stride = matrix(
            names[0],
            source,
            shape,
            desc.element,
            self._place,
            alignment,
            desc.x_order,
            kernel.source_row_alignment,
        )
        shape, alignment = (desc.n, out_across), kernel.result_alignment
        out, out_stride = matrix(
            names[1], result, shape, desc.out_element, self._place, alignment, desc.y_order
        )
        if out.readonly:
            raise InvalidProblemError(f"{names[1]}: expected writable memory, got a read-only tensor")
        check_apart(names[1], out, names[0], src)
        for view in weight.buffers:
            check_apart(names[1], out, "weight", view)
        if bias is not None:
            check_apart(names[1], out, "bias", bias)
        operands = Operands(weight, src, out, bias, src_stride, out_stride)
        if type(args) is GemmSparse24Args:
            operands.scale_x = self._check_scale("scale_x", args.scale_x, desc.scale_x, desc.n, out)
            operands.scale_w = self._check_scale("scale_w", args.scale_w, desc.scale_w, desc.m, out)
        return operands

    def _check_scale(
        self, name: str, scale: Any, kind: ScaleKind, rows: int, out: TensorView
    ) -> TensorView | None:
        length = 1 if kind is ScaleKind.TENSOR else rows
        if (scale is None) != (kind is ScaleKind.NONE):
            wanted = "None" if kind is ScaleKind.NONE else f"a tensor [{length}]"
            raise InvalidProblemError(f"{name}: expected {wanted}, got {type(scale).__name__}")
        if scale is None:
            return None
        view = self._vector(name, scale, length, ElementKind.F32)
        check_apart("y", out, name, view)
        return view

    def _vector(self, name: str, tensor: Any, length: int, element: ElementKind) -> TensorView:
        view = TensorView.of(tensor, element=reinterpretable(element), argument=name)
        check_tensor(name, view, (length,), element, self._place)
        if length > 1 and view.strides[0] != 1:
            raise InvalidProblemError(f"{name}: expected contiguous memory, got {view!r}")
        check_alignment(name, view.address, view.element.itemsize)
        return view

    def _check_weight(self, weight: Any) -> PackedWeight:
        layout = self._spec.layout
        if type(weight) is not PackedWeight:
            hint = "; call plan.pack(weight)" if type(weight) is Sparse24Weight else ""
            raise InvalidProblemError(
                f"weight: expected a PackedWeight of layout {layout!r}, got {type(weight).__name__}{hint}"
            )
        if weight.layout_id != layout:
            raise InvalidProblemError(
                f"weight: expected layout {layout!r}, got {weight.layout_id!r}; call plan.pack(weight)"
            )
        self._check_fit(weight)
        for view in weight.buffers:
            check_alignment("weight", view.address, self._kernel.weight_alignment)
        return weight

    def _check_fit(self, weight: PackedWeight | Sparse24Weight) -> None:
        desc = self.descriptor
        if (weight.m, weight.k) != (desc.m, desc.k) or weight.element is not desc.element:
            raise InvalidProblemError(
                f"weight: expected {desc.element}[{desc.m}, {desc.k}], "
                f"got {weight.element}[{weight.m}, {weight.k}]"
            )
        if weight.device != self._place:
            raise InvalidProblemError(f"weight: expected memory on {self._place}, got {weight.device}")

    def _check_bias(self, bias: Any) -> TensorView | None:
        desc = self.descriptor
        if (bias is None) != (desc.epilogue is EpilogueKind.IDENTITY):
            wanted = f"a tensor [{desc.m}]" if desc.epilogue.has_bias else "None"
            raise InvalidProblemError(
                f"bias: expected {wanted} for epilogue {desc.epilogue}, got {type(bias).__name__}"
            )
        if bias is None:
            return None
        return self._vector("bias", bias, desc.m, desc.bias_element)

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
        check_alignment("workspace", space.address, self._kernel.workspace_alignment)
        return space.address


def explain(
    descriptor: GemmSparse24Descriptor,
    *,
    preference: PlanPreference | Mapping[str, Any] | None = None,
    device: int | str | DeviceProperties | None = None,
    tuning: TuningTable | None = None,
) -> Explanation:
    """What ``select`` would choose and why, uncompiled. ``device`` may be properties of an absent GPU."""
    _check_descriptor(descriptor)
    properties = device if isinstance(device, DeviceProperties) else resolve(device)
    entries, _ = _tuned(descriptor, properties, _table(tuning, properties))
    tested = {name: entry.promises for name, entry in entries.items()}
    rows = registry.consider(descriptor, PlanPreference.of(preference), properties, tested)
    chosen = next((row.spec for row in rows if row.reason is None), None)
    return _explanation(properties, rows, chosen, None)


def _check_descriptor(descriptor: object) -> None:
    if type(descriptor) is not GemmSparse24Descriptor:
        raise InvalidProblemError(
            f"descriptor: expected GemmSparse24Descriptor, got {type(descriptor).__name__}"
        )


def _explanation(
    device: DeviceProperties,
    rows: tuple[registry.Considered[registry.KernelSpec], ...],
    chosen: registry.KernelSpec | None,
    kernel: BackendKernel | None,
) -> Explanation:
    return Explanation(
        device=str(device),
        chosen=chosen.name if chosen else None,
        details=kernel.details if kernel else "",
        workspace_size=kernel.workspace_size if kernel else None,
        rows=tuple((row.spec.name, row.spec.backend.value, row.reason) for row in rows),
    )


def _table(tuning: TuningTable | None, properties: DeviceProperties) -> TuningTable:
    if tuning is not None and type(tuning) is not TuningTable:
        raise InvalidProblemError(f"tuning: expected a TuningTable, got {type(tuning).__name__}")
    return shipped(properties.name) if tuning is None else tuning


def _backend(kind: BackendKind) -> Any:
    return import_module(f".backends.{kind}", __package__)


def _tuned(
    descriptor: GemmSparse24Descriptor, properties: DeviceProperties, table: TuningTable
) -> tuple[dict[str, TunedKernel], dict[str, str]]:
    """The table's entries for the problem: those that apply here, and why the others don't, by row."""
    fitting: dict[str, TunedKernel] = {}
    reasons: dict[str, str] = {}
    for name, entry in table.find(descriptor).items():
        spec = registry.find(name)
        version = _backend(spec.backend).tuning_version(properties) if spec else "gone"
        if reason := table.mismatch(entry, properties, version):
            reasons[name] = reason
        else:
            fitting[name] = entry
    return fitting, reasons


@lru_cache(maxsize=4096)
def _select(
    descriptor: GemmSparse24Descriptor,
    preference: PlanPreference,
    properties: DeviceProperties,
    table: TuningTable,
) -> GemmSparse24Plan:
    entries, reasons = _tuned(descriptor, properties, table)
    tested = {name: entry.promises for name, entry in entries.items()}
    rows = registry.consider(descriptor, preference, properties, tested)
    spec = registry.choose(rows)
    if spec.name in reasons:
        table.warn(table.find(descriptor)[spec.name], reasons[spec.name])
    entry = entries.get(spec.name)
    tuned: dict[str, Any] = {"configuration": dict(entry.configuration)} if entry else {}
    kernel = _backend(spec.backend).Kernel(descriptor, properties, spec, preference, **tuned)
    tested_here = entry.promises if entry else ()
    return GemmSparse24Plan(descriptor, preference, properties, rows, spec, kernel, tested_here)
