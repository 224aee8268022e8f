"""Plans that prepare weights: prune, compress, both at once, decompress, pack, prune 4x4 tiles, apply masks.

The five steps of gemm.py: ``Descriptor -> Plan.select -> can_implement -> workspace_size -> run``; ``bind``
and ``launch`` for many launches. Results are the caller's memory. The rules of pruning, the formats and the
positions of groups with fewer than two non-zeros: docs/formats.md. W is [M, K], K a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
from typing_extensions import Self

from ..device.devices import home_of, resolve
from ..device.streams import launch_on, stream_handle
from ..device.tensors import HOST, TensorView, Workspace, import_cupy
from ..errors import InvalidProblemError, Sparse24Error
from ..gemm import table as registry
from ..gemm.plan import Explanation, Verdict
from ..plan.bound import Bound
from ..plan.operands import check_alignment, check_apart, check_tensor, reinterpretable
from ..vocab import DeviceProperties, EpilogueKind, KernelSku, PlanPreference, PrecisionGuarantee, PrepareOp
from ..weights import canonical
from ..weights.weight import PackedWeight, Sparse24Weight
from . import table as prepare_registry
from .descriptor import (
    NOTHING_FOUND,
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    MaskSparse24Descriptor,
    Operand,
    PackSparse24Descriptor,
    PrepareDescriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    Role,
    TilePruneSparse24Descriptor,
)

# Arguments ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PruneSparse24Args:
    """``dense`` [M, K] is read. Written: ``pruned`` [M, K], ``mask`` uint8 [M, K/8], or both.

    ``pruned`` is +0 where nothing is kept, and may be ``dense`` itself. Cell 8j + i of a row is bit i of byte
    j of the mask. ``scores`` [M, K] exactly when the descriptor has them.
    """

    dense: Any
    pruned: Any = None
    mask: Any = None
    scores: Any = None


@dataclass(frozen=True, slots=True)
class CompressSparse24Args:
    """``dense`` [M, K] is 2:4. Written: ``values`` [M, K/2], ``metadata`` uint16 [M, K/8], ``status``.

    ``status``, uint8 [8], lies at a multiple of 8 bytes; ``plan.check`` reads it.
    """

    dense: Any
    values: Any
    metadata: Any
    status: Any


@dataclass(frozen=True, slots=True)
class PruneCompressSparse24Args:
    """``dense`` [M, K], and ``scores`` [M, K] exactly when the descriptor has them, are read.

    Written: ``values`` [M, K/2] and ``metadata`` uint16 [M, K/8].
    """

    dense: Any
    values: Any
    metadata: Any
    scores: Any = None


@dataclass(frozen=True, slots=True)
class DecompressSparse24Args:
    """``weight`` is a Sparse24Weight; ``dense`` [M, K] is written, +0 at the pruned positions."""

    weight: Sparse24Weight
    dense: Any


@dataclass(frozen=True, slots=True)
class PackSparse24Args:
    """``weight`` is a Sparse24Weight; ``packed`` uint8 [Mt, Kt, tile bytes] is written: packing.py."""

    weight: Sparse24Weight
    packed: Any


@dataclass(frozen=True, slots=True)
class UnpackSparse24Args:
    """``packed`` is a PackedWeight. Written: ``values`` [M, K/2], ``metadata`` uint16 [M, K/8], ``status``.

    ``status``, uint8 [8], lies at a multiple of 8 bytes; ``plan.check`` reads it.
    """

    packed: PackedWeight
    values: Any
    metadata: Any
    status: Any


@dataclass(frozen=True, slots=True)
class TilePruneSparse24Args:
    """``dense`` [M, K] is read; all else is written.

    ``values`` [M, K/2] and ``metadata`` uint16 [M, K/8] of W; ``values_t`` [K, M/2] and ``metadata_t`` uint16
    [K, M/8] of W^T; ``mask`` uint8 [M/8, K/8, 8] in the layout ``tiles``.
    """

    dense: Any
    values: Any
    metadata: Any
    values_t: Any
    metadata_t: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class MaskSparse24Args:
    """``masked`` [M, K] = ``dense`` [M, K] (a gradient, say) where ``mask`` has a one, +0 elsewhere.

    ``mask`` is uint8, [M, K/8] or [M/8, K/8, 8] by the descriptor's layout. ``masked`` may be ``dense``
    itself.
    """

    dense: Any
    mask: Any
    masked: Any


# The plan -----------------------------------------------------------------------------------------

Views = dict[str, TensorView]


class Kernel(Protocol):
    """What a backend module's ``Kernel`` class provides. Built at select, which compiles it."""

    alignment: int
    """Bytes that the operands' addresses are multiples of."""
    launches: int
    """What one run enqueues: kernels, fills."""
    details: str

    def __init__(self, desc: Any, device: DeviceProperties) -> None: ...

    def prepare(self, views: Views) -> Callable[[int], None]:
        """A launcher that takes a stream handle. ``views`` has the operands given, by name."""
        ...


class BoundPrepare(Bound):
    """A plan with its operands: ``launch`` only launches. Keeps the operands alive."""

    __slots__ = ()


class PreparePlan:
    """What the plans of this module share. Immutable; share one between threads and streams."""

    descriptor_type: ClassVar[type[PrepareDescriptor]]
    args_types: ClassVar[Mapping[PrepareOp, Any]]
    """Operands, by what the descriptor does."""
    workspace_alignment = 1

    def __init__(
        self,
        descriptor: PrepareDescriptor,
        properties: DeviceProperties,
        rows: tuple[registry.Considered[prepare_registry.PrepareSpec], ...],
        spec: prepare_registry.PrepareSpec,
        kernel: Kernel,
    ) -> None:
        self.descriptor, self.device = descriptor, properties
        self._place = home_of(properties)
        self._rows, self._spec, self._kernel = rows, spec, kernel
        self._operands = descriptor.operands()

    @classmethod
    def select(
        cls,
        descriptor: PrepareDescriptor,
        *,
        preference: PlanPreference | Mapping[str, Any] | None = None,
        device: int | str | None = None,
    ) -> Self:
        """Choose and compile a kernel. Nothing is timed. Plans are cached by their arguments.

        ``device`` is a CUDA ordinal, ``"host"``, or None for the current CUDA device (the host where there is
        none). ``preference`` may be a mapping of PlanPreference's fields.

        Raises
        ------
        UnsupportedError
            No row of the table can serve; the message has every row's reason.
        BackendUnavailableError
            The device or CuPy is missing; the message says what to install.
        """
        if type(descriptor) is not cls.descriptor_type:
            raise InvalidProblemError(
                f"descriptor: expected {cls.descriptor_type.__name__}, got {type(descriptor).__name__}"
            )
        plan = _select(descriptor, PlanPreference.of(preference), resolve(device))
        assert isinstance(plan, cls)
        return plan

    @cached_property
    def sku(self) -> KernelSku:
        """Identity of the kernel."""
        desc = self.descriptor
        return KernelSku(
            category=desc.category,
            op=f"{desc.kind}_sparse24",
            element=desc.element,
            aux_element=desc.element,
            layout=desc.layout_id,
            epilogue=EpilogueKind.IDENTITY,
            arch=self._spec.arch,
            backend=self._spec.backend,
            precision_guarantee=self.guarantee,
        )

    @property
    def guarantee(self) -> PrecisionGuarantee:
        """Nothing rounds: the same bits on every device, and on the host."""
        return prepare_registry.guarantee(self.descriptor)

    def explain(self) -> Explanation:
        """Why this kernel was chosen, and why each other one was not."""
        return Explanation(
            device=str(self.device),
            chosen=self._spec.name,
            details=self._kernel.details,
            workspace_size=0,
            rows=tuple((row.spec.name, row.spec.backend.value, row.reason) for row in self._rows),
        )

    def workspace_size(self) -> int:
        """Bytes of device scratch that ``run`` needs: none."""
        return 0

    def can_implement(self, args: Any) -> Verdict:
        """Whether ``run`` would take these operands. Touches no memory."""
        try:
            self._check(args)
        except Sparse24Error as error:
            return Verdict(error)
        return Verdict()

    def run(self, args: Any, *, workspace: Any = None, stream: Any = None) -> None:
        """Check the operands and enqueue the kernel on ``stream``. Writes the results and nothing else.

        Never allocates device memory, compiles or synchronises: safe in CUDA-graph capture. The operands must
        stay alive until the stream has run the kernel. A host plan runs before it returns.

        Raises
        ------
        InvalidProblemError, MisalignedOperandError
            Before anything is written; the message names the argument.
        DriverError
            The launch failed.
        """
        handle = stream_handle(stream, self._place)
        launch = self._kernel.prepare(self._check(args))
        self._check_workspace(workspace)
        launch_on(self._place, launch, handle)

    def bind(self, args: Any, *, workspace: Any = None) -> BoundPrepare:
        """Check once, launch many times. Raises what :meth:`run` raises.

        What takes two steps (a status is reset first) becomes one CUDA graph here: bind outside of a capture.
        """
        views = self._check(args)
        self._check_workspace(workspace)
        launch = self._kernel.prepare(views)
        return BoundPrepare(launch, self._kernel.launches, self._place, (self, views, args))

    # Checks ---------------------------------------------------------------------------------------

    def _check_workspace(self, workspace: Any) -> None:
        if workspace is not None:
            Workspace.of(workspace, self._place)

    def _check(self, args: Any) -> Views:
        expected = self.args_types[self.descriptor.kind]
        if type(args) is not expected:
            raise InvalidProblemError(f"args: expected {expected.__name__}, got {type(args).__name__}")
        views: Views = {}
        known = {operand.argument for operand in self._operands}
        for field in fields(expected):
            if field.name not in known and getattr(args, field.name) is not None:
                raise InvalidProblemError(
                    f"{field.name}: expected None, as the descriptor has it, got a value"
                )
        for operand in self._operands:
            given = getattr(args, operand.argument)
            if given is None and operand.optional:
                continue
            views[operand.name] = self._view(operand, given)
        written = [operand for operand in self._operands if operand.role is Role.OUT]
        if not any(operand.name in views for operand in written):
            names = " or ".join(operand.name for operand in written)
            raise InvalidProblemError(f"{names}: expected at least one result, got None")
        _check_overlaps(self._operands, views)
        return views

    def _view(self, operand: Operand, given: Any) -> TensorView:
        name = operand.argument
        if operand.role is Role.WEIGHT:
            view = self._weight_part(operand, given)
        else:
            view = TensorView.of(given, element=reinterpretable(operand.element), argument=name)
        check_tensor(name, view, operand.shape, operand.element, self._place)
        if not view.is_contiguous:
            raise InvalidProblemError(f"{name}: expected contiguous memory, got {view!r}")
        if operand.role is Role.OUT and view.readonly:
            raise InvalidProblemError(f"{name}: expected writable memory, got a read-only tensor")
        if 0 not in operand.shape:
            check_alignment(name, view.address, max(operand.alignment, self._kernel.alignment))
        return view

    def _weight_part(self, operand: Operand, given: Any) -> TensorView:
        desc = self.descriptor
        expected = PackedWeight if operand.argument == "packed" else Sparse24Weight
        if not isinstance(given, expected):
            raise InvalidProblemError(
                f"{operand.argument}: expected {expected.__name__}, got {type(given).__name__}"
            )
        if (given.m, given.k) != (desc.m, desc.k) or given.element is not desc.element:
            raise InvalidProblemError(
                f"{operand.argument}: expected {desc.element}[{desc.m}, {desc.k}], "
                f"got {given.element}[{given.m}, {given.k}]"
            )
        if isinstance(given, PackedWeight):
            if given.layout_id != desc.layout_id or len(given.buffers) != 1:
                raise InvalidProblemError(
                    f"packed: expected one buffer of layout {desc.layout_id!r}, "
                    f"got {len(given.buffers)} of {given.layout_id!r}"
                )
            return given.buffers[0]
        view: TensorView = given.values_view if operand.name == "values" else given.metadata_view
        return view


def _check_overlaps(operands: tuple[Operand, ...], views: Views) -> None:
    given = [operand for operand in operands if operand.name in views]
    for at, out in enumerate(given):
        if out.role is not Role.OUT:
            continue
        for place, other in enumerate(given):
            if other is out or (other.role is Role.OUT and place > at):
                continue
            if out.may_be == other.name and views[out.name].address == views[other.name].address:
                continue
            check_apart(out.argument, views[out.name], other.argument, views[other.name])


@lru_cache(maxsize=4096)
def _select(
    descriptor: PrepareDescriptor,
    preference: PlanPreference,
    properties: DeviceProperties,
) -> PreparePlan:
    rows = prepare_registry.consider(descriptor, preference, properties)
    spec = registry.choose(rows)
    kernel = import_module(f".backends.{spec.name}", __package__).Kernel(descriptor, properties)
    return _PLANS[type(descriptor)](descriptor, properties, rows, spec, kernel)


# What was found -----------------------------------------------------------------------------------


class _Reporting(PreparePlan):
    """A plan whose results include a status."""

    def check(self, args: Any, *, stream: Any = None) -> None:
        """Wait for ``stream``, then raise FormatError for the first bad group that the last run found.

        The error has ``row`` and ``group``. Of no use in a capture: it reads the status back.
        """
        handle = stream_handle(stream, self._place)
        view = self._check(args)["status"]
        status = np.empty(1, np.uint64)
        if self._place == HOST:
            status.view(np.uint8)[...] = view.bits()
        else:
            launch_on(self._place, lambda on: _fetch(view, status, on), handle)
        if int(status[0]) != NOTHING_FOUND:
            place, detail = divmod(int(status[0]), 256)
            error = canonical.crowded_error if self._reads_dense else canonical.metadata_error
            raise error(*divmod(place, self.descriptor.k // 4), detail)

    @property
    def _reads_dense(self) -> bool:
        return self.descriptor.kind is PrepareOp.COMPRESS


def _fetch(view: TensorView, status: Any, stream: int) -> None:
    runtime = import_cupy().cuda.runtime
    runtime.memcpyAsync(status.ctypes.data, view.address, status.nbytes, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)


def _weight_of(plan: PreparePlan, values: TensorView, metadata: TensorView) -> Sparse24Weight:
    return Sparse24Weight(values, metadata, element=plan.descriptor.element, validate=False)


# The plans ----------------------------------------------------------------------------------------


class PruneSparse24Plan(PreparePlan):
    """Keeps the two largest of every group of four, by |value| or by scores; gives matrix, mask, or both."""

    descriptor_type = PruneSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PRUNE: PruneSparse24Args}


class CompressSparse24Plan(_Reporting):
    """Compresses a matrix that is 2:4 already, and checks that it is, on the device.

    A group with more than two non-zeros keeps the first two, and :meth:`check` raises.
    """

    descriptor_type = CompressSparse24Descriptor
    args_types: ClassVar = {PrepareOp.COMPRESS: CompressSparse24Args}

    def weight(self, args: CompressSparse24Args) -> Sparse24Weight:
        """The results as a weight, sharing their memory. Sound once :meth:`check` has passed."""
        views = self._check(args)
        return _weight_of(self, views["values"], views["metadata"])


class PruneCompressSparse24Plan(PreparePlan):
    """Prunes and compresses in one pass."""

    descriptor_type = PruneCompressSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PRUNE_COMPRESS: PruneCompressSparse24Args}

    def weight(self, args: PruneCompressSparse24Args) -> Sparse24Weight:
        """The results as a weight, sharing their memory."""
        views = self._check(args)
        return _weight_of(self, views["values"], views["metadata"])


class DecompressSparse24Plan(PreparePlan):
    """Expands a canonical weight to the dense matrix."""

    descriptor_type = DecompressSparse24Descriptor
    args_types: ClassVar = {PrepareOp.DECOMPRESS: DecompressSparse24Args}


class PackSparse24Plan(_Reporting):
    """Canonical weights to the layout of the sparse tensor core kernels, or back.

    Unpacking checks the metadata on the device; :meth:`check` raises for what it found. Packing has nothing
    to check.
    """

    descriptor_type = PackSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PACK: PackSparse24Args, PrepareOp.UNPACK: UnpackSparse24Args}

    def check(self, args: UnpackSparse24Args, *, stream: Any = None) -> None:
        """Wait for ``stream``, then raise FormatError, with row and group, for the first bad nibble found."""
        if self.descriptor.kind is PrepareOp.UNPACK:
            super().check(args, stream=stream)

    def weight(self, args: PackSparse24Args | UnpackSparse24Args) -> PackedWeight | Sparse24Weight:
        """The results as a weight, sharing their memory; of an unpacked one sound once checked."""
        views, desc = self._check(args), self.descriptor
        if desc.kind is PrepareOp.UNPACK:
            return _weight_of(self, views["values"], views["metadata"])
        return PackedWeight(desc.layout_id, desc.m, desc.k, desc.element, self._place, (views["packed"],))


class TilePruneSparse24Plan(PreparePlan):
    """Transposable 2:4: prunes 4x4 tiles, and compresses W and W^T, in one pass.

    Positions are those of the mask; spare slots take the lowest free positions and hold +0.
    """

    descriptor_type = TilePruneSparse24Descriptor
    args_types: ClassVar = {PrepareOp.TILE_PRUNE: TilePruneSparse24Args}

    def weights(self, args: TilePruneSparse24Args) -> tuple[Sparse24Weight, Sparse24Weight]:
        """The results as weights, W [M, K] and W^T [K, M], sharing their memory."""
        views = self._check(args)
        return (
            _weight_of(self, views["values"], views["metadata"]),
            _weight_of(self, views["values_t"], views["metadata_t"]),
        )


class MaskSparse24Plan(PreparePlan):
    """Sets to zero what a mask has no one for: how gradients of pruned weights are pruned."""

    descriptor_type = MaskSparse24Descriptor
    args_types: ClassVar = {PrepareOp.MASK: MaskSparse24Args}


_PLANS: dict[type[PrepareDescriptor], type[PreparePlan]] = {
    plan.descriptor_type: plan
    for plan in (
        PruneSparse24Plan,
        CompressSparse24Plan,
        PruneCompressSparse24Plan,
        DecompressSparse24Plan,
        PackSparse24Plan,
        TilePruneSparse24Plan,
        MaskSparse24Plan,
    )
}
