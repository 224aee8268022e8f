"""The base of every family's plans: ``Descriptor -> Plan.select -> can_implement -> workspace_size -> run``.

``run`` checks the operands against the descriptor and launches; ``bind`` checks once for many launches. A
family adds its descriptor, its arguments and its table of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

from typing_extensions import Self

from ..device.devices import PlaceLike, described, home_of
from ..device.jit.cache import CompiledKernel
from ..device.streams import current_stream_of, launch_on, stream_handle
from ..device.tensors import Device, Workspace
from ..errors import InvalidProblemError, Sparse24Error, UnsupportedError, WorkspaceTooSmallError, shown
from ..vocab import DeviceProperties, EpilogueKind, Tier
from .bound import Bound
from .descriptor import Descriptor, ProductDescriptor
from .explanation import Explanation, KernelSku, Verdict
from .families import plan_of, register
from .guarantee import PrecisionGuarantee
from .kernel import Choice, Kernel
from .kernel_table import JudgedEntry, KernelEntry, choose, consider, log_choice
from .launches import Caller, LaunchCache, Located
from .operands import Args, Operand, OperandChecks, Views, fields_of
from .preference import PlanPreference

PreferenceLike = PlanPreference | Mapping[str, Any] | None
_SOME_WORKSPACE = 1 << 12
"""The address that stands in for the workspace where ``can_implement`` asks a kernel: null is refused."""


class Tuning(Protocol):
    """Measured configurations of kernels, for families whose kernels can be tuned. Hashable."""

    def promises(
        self, descriptor: Any, entries: Sequence[Any], device: DeviceProperties
    ) -> dict[str, tuple[str, ...]]:
        """Flags of the guarantee that self-tests of the configurations have confirmed, by kernels' names."""
        ...

    def configurations(
        self, descriptor: Any, entries: Sequence[Any], device: DeviceProperties
    ) -> dict[str, Mapping[str, int]]:
        """Configurations that apply, by kernels' names."""
        ...

    def configuration(self, descriptor: Any, entry: Any, device: DeviceProperties) -> Mapping[str, int]:
        """A kernel's configuration. Empty without one, or (with a warning) if it is another machine's."""
        ...


class PlanParts(NamedTuple):
    """The parts of a plan."""

    choice: Choice
    operands: tuple[Operand, ...]
    checks: OperandChecks
    home: Device


class Plan:
    """A kernel chosen for a descriptor on a device. Immutable; share it between threads and streams.

    Make one with :meth:`select`. The attributes ``descriptor``, ``preference`` and ``device``
    (DeviceProperties) are those of the selection.
    """

    descriptor_type: ClassVar[type[Descriptor]]
    """The class of descriptors that the plans serve."""
    table: ClassVar[tuple[KernelEntry, ...]]
    """The family's kernels, in order of preference."""
    args_types: ClassVar[Mapping[Any, type[Args]]]
    """The classes of the plans' arguments, by the descriptors' ``op``."""

    def __init_subclass__(cls) -> None:
        if "descriptor_type" in cls.__dict__:
            register(cls, ((entry.name, entry.backend) for entry in cls.table))

    def __init__(
        self,
        choice: Choice,
        tested: Sequence[str] = (),
        *,
        absent: bool = False,
    ) -> None:
        self._choice, self.descriptor = choice, choice.descriptor
        self.preference = choice.preference
        self.device = choice.device
        self._entry: Any = choice.entry
        self._tested = tested
        self._home, self._absent = home_of(choice.device), absent
        kernel = choice.entry.kernel_for(choice.descriptor)
        self._kernel: Kernel[Any] = kernel.sized(choice) if absent else kernel(choice)
        self._operands = self.descriptor.operands()
        args_type = self.args_type(self.descriptor)
        self._check = OperandChecks(
            args_type,
            self._operands,
            self._kernel.alignment_of,
            choice.entry.reads(choice.descriptor),
            self._home,
        )
        self._args_type, self._operands_in = args_type, attrgetter(*fields_of(args_type))
        self._launches = LaunchCache(self._kernel, self._check.arguments)
        self._tuning: Tuning | None = None

    @classmethod
    def args_type(cls, descriptor: Any) -> type[Args]:
        """The class of the arguments of a plan for the descriptor."""
        cls._check_descriptor(descriptor)
        return cls.args_types[descriptor.op]

    # Selection --------------------------------------------------------------------------------------

    @classmethod
    def select(cls, descriptor: Any, *, preference: PreferenceLike = None, device: PlaceLike = None) -> Self:
        """Choose and compile a kernel. The answer is the same every time, because nothing is timed.

        ``device`` is a CUDA ordinal, ``"cuda:1"``, ``"cuda"``, ``"host"``, a Device or a ``torch.device``.
        None is the current CUDA device, or the host where there is none. ``preference`` may be a mapping of
        PlanPreference's fields. Plans are cached by all of these.

        DeviceProperties, or a name such as ``"h100"`` or ``"h200"``, describe a GPU that needn't be present.
        The plan then compiles nothing and answers every question, but to run it raises
        BackendUnavailableError. Its ``workspace_size`` is exact if one of this package's kernels was chosen;
        for a library's it is an upper bound.

        Raises
        ------
        InvalidProblemError
            An argument is of the wrong type or names nothing.
        UnsupportedError
            No kernel can serve, or the forced one can't; the message has every kernel's reason.
        BackendUnavailableError
            The device, CuPy or a library is missing; the message says what to install.
        """
        return cls._selected(descriptor, preference, described(device), None)

    @classmethod
    def _selected(
        cls,
        descriptor: Any,
        preference: PreferenceLike,
        place: tuple[DeviceProperties, bool],
        tuning: Tuning | None,
    ) -> Self:
        cls._check_descriptor(descriptor)
        chosen: Any = _select  # mypy takes no class for hashable
        table = cls._tuning_for(tuning, place[0])
        plan = chosen(cls, descriptor, PlanPreference.of(preference), *place, table)
        assert isinstance(plan, cls)
        return plan

    @classmethod
    def _tuning_for(cls, given: Tuning | None, device: DeviceProperties) -> Tuning | None:
        """The tuning table of a selection to which ``given`` was passed. A family may have one for a device.

        Raises InvalidProblemError for anything but a table, and for a table that the family has no use for.
        """
        if given is not None:
            raise InvalidProblemError(
                f"tuning: expected None for {cls.__name__}, whose kernels are not tuned, got {shown(given)}"
            )
        return None

    @classmethod
    def explain_choice(
        cls,
        descriptor: Any,
        *,
        preference: PreferenceLike = None,
        device: PlaceLike = None,
        tuning: Tuning | None = None,
    ) -> Explanation:
        """Explain what ``select`` would choose, uncompiled. ``device`` may describe an absent GPU.

        ``tuning`` is as for the family's ``select``; None for a family that has none.
        """
        cls._check_descriptor(descriptor)
        wishes, (properties, _) = PlanPreference.of(preference), described(device)
        tuning = cls._tuning_for(tuning, properties)
        considered = considered_by(cls, descriptor, wishes, properties, tuning)
        entry = next((one.entry for one in considered if one.reason is None), None)
        if entry is None or entry.on_host:  # a host's plan costs no more than its explanation would
            return _explanation(properties, considered, entry, None)
        configuration = tuning.configuration(descriptor, entry, properties) if tuning else {}
        choice = Choice(descriptor, properties, entry, wishes, configuration)
        try:
            return _explanation(properties, considered, entry, entry.kernel_for(descriptor).sized(choice))
        except UnsupportedError as error:  # a library alone knows
            return _explanation(properties, considered, entry, None, str(error))

    @classmethod
    def compile(
        cls,
        descriptor: Any,
        *,
        preference: PreferenceLike = None,
        device: PlaceLike = None,
        tuning: Tuning | None = None,
    ) -> tuple[CompiledKernel, ...]:
        """Compile into the kernel cache what ``select`` would compile and load, but load nothing.

        Needs NVRTC, but no GPU: ``device`` may describe an absent one. ``tuning`` is as for
        :meth:`explain_choice`. The result is empty if the chosen kernel is a library's or the host's. Raises
        what ``select`` raises, and StorageError.
        """
        cls._check_descriptor(descriptor)
        properties, _ = described(device)
        tuning = cls._tuning_for(tuning, properties)
        choice = _choice(cls, descriptor, PlanPreference.of(preference), properties, tuning)
        return tuple(choice.entry.kernel_for(descriptor).compile(choice))

    @classmethod
    def _check_descriptor(cls, descriptor: object) -> None:
        if type(descriptor) is not cls.descriptor_type:
            raise InvalidProblemError(
                f"descriptor: expected {cls.descriptor_type.__name__}, got {type(descriptor).__name__}"
            )

    # Identity ---------------------------------------------------------------------------------------

    @property
    def guarantee(self) -> PrecisionGuarantee:
        """The kernel's promises about its numbers."""
        return self.sku.precision_guarantee

    @cached_property
    def sku(self) -> KernelSku:
        """Identity of the kernel."""
        return KernelSku(**self._identity())

    def _identity(self) -> dict[str, Any]:
        """The fields of the sku. A family replaces those that its descriptors know better."""
        entry, desc = self._entry, self.descriptor
        product = isinstance(desc, ProductDescriptor)
        return {
            "category": desc.category,
            "op": desc.op_name,
            "element": desc.element,
            "aux_element": getattr(desc, "out_element", desc.element),
            "layout": entry.layout_of(desc),
            "epilogue": desc.epilogue if product else EpilogueKind.IDENTITY,
            "arch": entry.arch,
            "backend": entry.backend,
            "kernel": entry.name,
            "precision_guarantee": entry.promises(self._choice, self._tested),
        }

    @property
    def kernel(self) -> str:
        """The name of the kernel entry: ``explain().chosen``, and what ``prefer_kernel`` takes."""
        return self.sku.kernel

    @property
    def tier(self) -> Tier:
        """The part of the machine that the kernel uses, and how it uses the sparsity."""
        tier: Tier = self._entry.tier
        return tier

    @property
    def parts(self) -> PlanParts:
        """The parts of the plan, for tools that look inside, such as ``export_plans``."""
        return PlanParts(self._choice, self._operands, self._check, self._home)

    def explain(self) -> Explanation:
        """Why this kernel was chosen, and why each other one was not."""
        considered = considered_by(type(self), self.descriptor, self.preference, self.device, self._tuning)
        return _explanation(self.device, considered, self._entry, self._kernel)

    def workspace_size(self) -> int:
        """Bytes of device scratch that ``run`` needs; constant for the plan's life."""
        return self._kernel.workspace_size

    @property
    def workspace_alignment(self) -> int:
        """Bytes that must divide the workspace's address."""
        return self._kernel.workspace_alignment

    def __repr__(self) -> str:
        fields = self.descriptor.model_dump(mode="json", exclude_defaults=True)
        problem = ", ".join(f"{name}={value}" for name, value in fields.items())
        return f"{type(self).__name__}({self._entry.name} on {self.device}: {problem})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the arguments of the selection. Reading them selects the plan again."""
        return _selected_again, (
            type(self),
            self.descriptor,
            self.preference,
            self.device if self._absent else self._home,
            None if self._tuning is self._tuning_for(None, self.device) else self._tuning,
        )

    # Running ----------------------------------------------------------------------------------------

    def can_implement(self, args: Any) -> Verdict:
        """Whether ``run`` would take these operands, given a workspace. Touches no memory."""
        try:
            self._kernel.launcher(self._check(args), _SOME_WORKSPACE)
        except Sparse24Error as error:
            return Verdict(error)
        return Verdict()

    def run(self, args: Any, *, workspace: Any = None, stream: Any = None) -> None:
        """Check the operands and enqueue the kernel on ``stream``. Writes the results and the workspace only.

        ``stream`` is a handle, a stream of any framework, or None: the current stream of the operands' own
        framework, PyTorch's for its tensors and CuPy's for all else. Operands and a workspace that lie where
        those of an earlier run lay are only launched, not checked.

        Never allocates device memory, compiles or synchronises: safe in CUDA-graph capture. The operands
        must stay alive until the stream has run the kernel. A host plan runs before it returns.

        Raises
        ------
        InvalidProblemError, UnsupportedError, MisalignedOperandError, WorkspaceTooSmallError
            Before anything is written; the message names the argument.
        DriverError
            The launch failed.
        """
        launch, current = self._located(args, workspace)
        launch_on(self._home, launch, stream_handle(stream, self._home, current))

    def bind(self, args: Any, *, workspace: Any = None) -> Bound:
        """Check once, launch many times. Raises what :meth:`run` raises.

        A kernel of several launches becomes one CUDA graph here, which takes a little device memory while the
        Bound lives; so bind outside of a capture.
        """
        views = self._check(args)
        launch = self._kernel.launcher(views, self._check_workspace(workspace, views))
        current = current_stream_of(self._operands_in(args))
        return Bound(launch, self._kernel.launches, self._home, current, (self, views, args, workspace))

    def caller(self, args: Any) -> Caller:
        """A :class:`Caller`: all but addresses is checked once, for operands that only move.

        Ops of frameworks use it. ``args`` stand for all arguments with their shapes, strides, elements and
        devices. Raises what :meth:`run` raises.
        """
        return Caller(self._launches, self._check, self._home, self._check(args))

    def _located(self, args: Any, workspace: Any) -> Located:
        if type(args) is not self._args_type:
            self._check(args)  # raises
        operands = self._operands_in(args)
        key, located = self._launches.find_located((*operands, workspace))
        if located is None:
            views = self._check(args)
            space = self._check_workspace(workspace, views)
            located = self._launches.add_located(key, views, space, current_stream_of(operands))
        return located

    def _check_workspace(self, workspace: Any, views: Views) -> int:
        needed = self._kernel.workspace_size
        if workspace is None:
            if needed:
                raise WorkspaceTooSmallError(needed, 0)
            return 0
        space = Workspace.of(workspace, self._home)
        if not needed:
            return space.address
        if space.device != self._home:
            raise InvalidProblemError(f"workspace: expected memory on {self._home}, got {space.device}")
        if space.nbytes < needed:
            raise WorkspaceTooSmallError(needed, space.nbytes)
        self._launches.check_workspace(space.address, views)
        return space.address


def explain(
    descriptor: Descriptor,
    *,
    preference: PreferenceLike = None,
    device: PlaceLike = None,
    **options: Any,
) -> Explanation:
    """Explain what ``select`` of the descriptor's plan would choose, uncompiled.

    ``device`` may describe an absent GPU. ``options`` are those of the family's ``select``. Raises
    InvalidProblemError for anything but a descriptor.
    """
    plan: type[Plan] = plan_of(descriptor)
    return plan.explain_choice(descriptor, preference=preference, device=device, **options)


def _explanation(
    device: DeviceProperties,
    considered: tuple[JudgedEntry[Any], ...],
    chosen: KernelEntry | None,
    kernel: Kernel[Any] | None,
    unknown: str = "",
) -> Explanation:
    """``kernel`` is the chosen entry's; if there is none, ``unknown`` says why."""
    return Explanation(
        device=str(device),
        chosen=chosen.name if chosen else None,
        details=kernel.details if kernel else unknown,
        workspace_size=kernel.workspace_size if kernel else None,
        workspace_is_exact=kernel is not None and kernel.workspace_is_exact,
        rows=tuple((one.entry.name, one.entry.backend, one.reason) for one in considered),
    )


def _selected_again(
    cls: type[Plan],
    descriptor: Any,
    preference: PlanPreference,
    place: Device | DeviceProperties,
    tuning: Tuning | None,
) -> Plan:
    options: dict[str, Any] = {} if tuning is None else {"tuning": tuning}
    return cls.select(descriptor, preference=preference, device=place, **options)


@lru_cache(maxsize=4096)
def _select(
    cls: Any,
    descriptor: Descriptor,
    preference: PlanPreference,
    device: DeviceProperties,
    absent: bool,
    tuning: Any,
) -> Plan:
    choice = _choice(cls, descriptor, preference, device, tuning)
    entry = choice.entry
    tested = tuning.promises(descriptor, (entry,), device).get(entry.name, ()) if tuning else ()
    plan: Plan = cls(choice, tested, absent=absent)
    plan._tuning = tuning
    return plan


def _choice(
    cls: type[Plan], descriptor: Descriptor, preference: PlanPreference, device: DeviceProperties, tuning: Any
) -> Choice:
    considered = considered_by(cls, descriptor, preference, device, tuning, until_served=True)
    try:
        entry = choose(considered)
    finally:
        log_choice(descriptor, device, considered)
    configuration = tuning.configuration(descriptor, entry, device) if tuning else {}
    return Choice(descriptor, device, entry, preference, configuration)


def considered_by(
    kind: type[Plan],
    descriptor: Descriptor,
    preference: PlanPreference,
    device: DeviceProperties,
    tuning: Tuning | None,
    *,
    until_served: bool = False,
) -> tuple[JudgedEntry[Any], ...]:
    """Judge the family's kernels by ``consider``, in order of preference."""
    tested = tuning.promises(descriptor, kind.table, device) if tuning else {}
    cuts = None
    if tuning and preference.require.arithmetic is not None:  # it depends on configurations
        cuts = tuning.configurations(descriptor, kind.table, device)
    return consider(kind.table, descriptor, preference, device, tested, cuts, until_served=until_served)
