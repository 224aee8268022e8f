"""Kernel entries, and the whole of selection, for every family.

An entry says what a kernel serves and guarantees; a family's table has its entries in order of preference.
Selection is a pure function of descriptor, preference, device properties and tuning table: it times nothing
and asks no device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from logging import DEBUG, WARNING
from typing import Any, ClassVar, Generic, TypeVar

from ..device.log import SELECT
from ..errors import BackendUnavailableError, UnsupportedError
from ..vocab import CANONICAL_LAYOUT, ArchSku, DeviceProperties, ElementKind, Tier
from .guarantee import PrecisionGuarantee
from .kernel import Choice, Kernel
from .preference import PlanPreference

HOPPER = (9, 0)
_BEYOND_HOPPER = (9, 1)
MAX_GRID_CTAS = 2**31 - 1
"""The most CTAs of a launch along x."""


def grid_limit_refusal(ctas: int) -> str | None:
    """A refusal of more CTAs than a launch may have, or None."""
    return None if ctas <= MAX_GRID_CTAS else f"{ctas} CTAs exceed the grid limit {MAX_GRID_CTAS}"


@dataclass(frozen=True)
class KernelEntry:
    """A kernel of a family. ``backend`` names the module under the family's ``backends/`` that launches it.

    ``limits`` gives the reason why a problem can't be served, ``missing`` says what has to be installed; both
    give None if there is no obstacle. ``min_workspace`` gives the bytes without which the kernel can't run; a
    kernel's class may know better, in ``needed_workspace``. A family's subclass adds fields in which its
    problems differ, and a ``refusal`` that reads them.
    """

    name: str
    backend: str
    tier: Tier
    guarantee: Callable[[Any], PrecisionGuarantee]
    elements: tuple[ElementKind, ...]
    arch: ArchSku = ArchSku.ANY
    min_compute_capability: tuple[int, int] = (8, 0)
    below_compute_capability: tuple[int, int] = (99, 0)
    layout: str = CANONICAL_LAYOUT
    also_reads: tuple[str, ...] = ()
    """Further layouts that the kernel reads, in more time."""
    limits: Callable[[Any], str | None] = lambda descriptor: None
    missing: Callable[[DeviceProperties], str | None] = lambda device: None
    min_workspace: Callable[[Any], int] = lambda descriptor: 0
    on_request: bool = False
    """Whether the kernel serves only if an arithmetic is required by name."""
    for_a_bound: bool = False
    """Whether the kernel serves only if an error bound, or its backend or arithmetic by name, is required."""

    exportable: bool = True
    """Whether a GPU kernel's launches can be exported. A library's can't."""

    kernel_type: ClassVar[type[Kernel[Any]] | None] = None
    """The kernel's class in a family that has no ``backends/``."""

    def layout_of(self, descriptor: Any) -> str:
        """The layout of the problem's weight that the kernel prefers."""
        return self.layout

    def ranks_last(self, descriptor: Any) -> bool:
        """Whether each other kernel that can serve the problem is preferred to this one."""
        return False

    def reads(self, descriptor: Any) -> tuple[str, ...]:
        """All layouts of the problem's weight that the kernel reads, its preferred one first."""
        return (self.layout_of(descriptor), *self.also_reads)

    @property
    def on_host(self) -> bool:
        return self.tier is Tier.HOST

    @property
    def module(self) -> str:
        """The module of ``backends/`` that has the kernel."""
        return self.backend

    @property
    def kernel(self) -> type[Kernel[Any]]:
        """The kernel's class: ``Kernel`` of its module."""
        return self.kernel_type or self._kernel_of(self.module)

    def kernel_for(self, descriptor: Any) -> type[Kernel[Any]]:
        """The class that serves the problem: the kernel's, or one that launches it among others."""
        return self.kernel

    def _kernel_of(self, module: str) -> type[Kernel[Any]]:
        """``Kernel`` of a module of ``backends/``, imported when first needed."""
        family = sys.modules[type(self).__module__].__package__
        found: type[Kernel[Any]] = import_module(f"{family}.backends.{module}").Kernel
        return found

    def least_capability(self, descriptor: Any) -> tuple[int, int]:
        """The least compute capability on which the kernel serves the problem."""
        return self.min_compute_capability

    def refusal(self, descriptor: Any) -> str | None:
        """A reason in the family's words why the kernel doesn't serve the problem, or None."""
        return None

    def other_kind(self, descriptor: Any) -> str | None:
        """A reason why the kernel is for problems of another kind altogether, or None."""
        return None

    def needed_workspace(self, choice: Choice) -> int:
        """The kernel's least workspace, with that of the other launches of ``kernel_for``."""
        return self.kernel.needed_workspace(choice)

    def least_workspace(self, choice: Choice) -> int:
        """``needed_workspace`` of the problem's smallest batch."""
        return self.needed_workspace(choice)

    def shard_refusal(self, descriptor: Any, whole_m: int) -> str | None:
        """A reason why a shard's bits differ from those of the whole weight with this M, or None."""
        return None

    def whole_of(self, descriptor: Any, whole_m: int) -> Any:
        """The problem of the whole weight with this M, or None if the problem is no part of one."""
        return None

    def promises(
        self, choice: Choice, tested: Sequence[str] = (), *, named: bool = True
    ) -> PrecisionGuarantee:
        """The whole guarantee of the kernel for a choice.

        ``tested``: flags that a configuration's self-test has confirmed. ``named=False`` leaves out the
        arithmetic, because a kernel may take long to find it.
        """
        promised = self.guarantee(choice.descriptor)
        more: dict[str, Any] = dict.fromkeys(tested, True)
        if named:
            more["arithmetic"] = self.kernel_for(choice.descriptor).arithmetic(choice)
        return _with(promised, tuple(more.items())) if more else promised


@lru_cache(4096)
def _with(promised: PrecisionGuarantee, more: tuple[tuple[str, Any], ...]) -> PrecisionGuarantee:
    """Copies are validated, which takes longer than all else of a kernel's judgement."""
    return promised.model_copy(update=dict(more))


R = TypeVar("R", bound=KernelEntry)


def with_wgmma(entry: R) -> R:
    """The entry with the limits of a kernel that uses wgmma, which one architecture alone has."""
    return replace(
        entry,
        arch=ArchSku.SM90A,
        min_compute_capability=HOPPER,
        below_compute_capability=_BEYOND_HOPPER,
    )


@dataclass(frozen=True)
class JudgedEntry(Generic[R]):
    """A kernel entry and the ``reason`` why it can't serve; None: it can.

    ``unavailable``: a library isn't installed. ``crowded``: ``max_workspace_bytes`` is the only obstacle, and
    smaller batches would fit. ``apart``: it is for another device or element, or the preference names others.
    """

    entry: R
    reason: str | None
    unavailable: bool = False
    crowded: bool = False
    apart: bool = False


def consider(
    entries: Sequence[R],
    descriptor: Any,
    preference: PlanPreference,
    device: DeviceProperties,
    tested: Mapping[str, Sequence[str]] | None = None,
    configured: Mapping[str, Mapping[str, int]] | None = None,
    *,
    until_served: bool = False,
) -> tuple[JudgedEntry[R], ...]:
    """Every entry, in order of preference, with the reason why it can't serve.

    For each kernel's name, ``configured`` has a tuning table's configuration, and ``tested`` the flags of the
    guarantee that self-tests of this configuration have confirmed. ``until_served`` leaves out the entries
    after the first that can serve, unless a bound of the workspace can leave every batch to one of them, or
    the log has every entry's reason.
    """
    flags, cuts, invariant = tested or {}, configured or {}, preference.require.batch_invariant
    bounded = invariant and preference.max_workspace_bytes is not None
    stops = until_served and not bounded and not SELECT.isEnabledFor(DEBUG)
    whole = _choice_of_whole(entries, descriptor, preference, device) if invariant else None
    choices, found = [], list[JudgedEntry[R]]()
    for one in sorted(entries, key=lambda entry: entry.ranks_last(descriptor)):
        choices.append(Choice(descriptor, device, one, preference, cuts.get(one.name, {})))
        judged = _judge(choices[-1], flags.get(one.name, ()))
        if whole and (judged.reason is None or judged.crowded) and not _same_bits(whole, choices[-1]):
            name, m = whole.entry.name, preference.whole_m
            judged = JudgedEntry(one, f"has other bits than {name}, which serves the whole weight of m = {m}")
        found.append(judged)
        if stops and found[-1].reason is None:
            break
    return tuple(_serving_every_batch(found, choices) if invariant else found)


def _choice_of_whole(
    entries: Sequence[R], descriptor: Any, preference: PlanPreference, device: DeviceProperties
) -> Choice | None:
    """The choice for the whole weight of a shard, or for its smaller batches; None without either."""
    if preference.whole_m is None or (problem := entries[0].whole_of(descriptor, preference.whole_m)) is None:
        return None
    considered = consider(entries, problem, preference, device, until_served=True)
    entry = next((one.entry for one in considered if one.reason is None or one.crowded), None)
    return None if entry is None else Choice(problem, device, entry, preference, {})


def _serving_every_batch(found: list[JudgedEntry[R]], choices: Sequence[Choice]) -> list[JudgedEntry[R]]:
    """Refuse kernels if a smaller batch would get another kernel, and so other bits."""
    crowded = next((at for at, one in enumerate(found) if one.crowded), len(found))
    for at in range(crowded + 1, len(found)):
        name = found[crowded].entry.name
        if found[at].reason is None and not _same_bits(choices[crowded], choices[at]):
            reason = f"has other bits than {name}, to which max_workspace_bytes leaves smaller batches"
            found[at] = replace(found[at], reason=reason)
    return found


def _same_bits(one: Choice, other: Choice) -> bool:
    """Whether two batch-invariant kernels would give the same bits if both had their workspace."""
    if (one.entry.backend, one.entry.guarantee) == (other.entry.backend, other.entry.guarantee):
        return True
    first = one.entry.promises(_roomy(one)).arithmetic
    return first is not None and first == other.entry.promises(_roomy(other)).arithmetic


def _roomy(choice: Choice) -> Choice:
    """The choice if any workspace were allowed: without what a kernel needs, it has no schedule."""
    return choice._replace(preference=choice.preference.model_copy(update={"max_workspace_bytes": None}))


def choose(considered: Sequence[JudgedEntry[R]]) -> R:
    """The first entry that can serve.

    Raises UnsupportedError with every kernel's reason, or BackendUnavailableError if installing a library
    would help. Each reason appears once, with all its kernels. Reasons of kernels that aren't ``apart`` say
    most about the problem and come first; then come the reasons of the fewest kernels.
    """
    groups: dict[tuple[bool, str], list[str]] = {}
    for one in considered:
        if one.reason is None:
            return one.entry
        groups.setdefault((one.apart, one.reason), []).append(one.entry.name)
    telling_first = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1])))
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for (_, reason), names in telling_first)
    kind = BackendUnavailableError if any(one.unavailable for one in considered) else UnsupportedError
    raise kind(f"no kernel can serve this problem. {reasons}")


def log_choice(descriptor: Any, device: DeviceProperties, considered: Sequence[JudgedEntry[R]]) -> None:
    """Log the chosen kernel (INFO), preferred ones that need an installation (WARNING), others (DEBUG)."""
    chosen = next((one.entry.name for one in considered if one.reason is None), None)
    SELECT.info("%s for %r on %s", chosen or "no kernel", descriptor, device)
    preferred = True
    for one in considered:
        if one.reason is None:
            preferred = False
            continue
        level = WARNING if one.unavailable and preferred else DEBUG
        SELECT.log(level, "not %s: %s", one.entry.name, one.reason)


def _judge(choice: Choice, tested: Sequence[str]) -> JudgedEntry[Any]:
    entry: KernelEntry = choice.entry
    reason = (
        _misplaced(entry, choice.preference, choice.device, choice.descriptor)
        or _of_elements(entry, choice.descriptor)
        or entry.other_kind(choice.descriptor)
    )
    if reason is not None:
        return JudgedEntry(entry, reason, apart=True)
    if (reason := entry.refusal(choice.descriptor) or entry.limits(choice.descriptor)) is not None:
        return JudgedEntry(entry, reason)
    absent, allowed = entry.missing(choice.device), choice.preference.max_workspace_bytes
    needed = 0 if allowed is None else entry.needed_workspace(choice)
    short = allowed if allowed is not None and needed > allowed else None
    if (reason := _unwanted(choice if short is None else _roomy(choice), tested)) is not None:
        return JudgedEntry(entry, reason)
    if short is not None:
        reason = f"needs a workspace of {needed} bytes, max_workspace_bytes is {short}"
        crowded = absent is None and entry.least_workspace(choice) <= short
        return JudgedEntry(entry, reason, crowded=crowded)
    return JudgedEntry(entry, absent, unavailable=absent is not None)


def _misplaced(
    entry: KernelEntry, preference: PlanPreference, device: DeviceProperties, descriptor: Any
) -> str | None:
    """A reason why the preference or the device rules the kernel out, or None."""
    if preference.prefer_backend not in (None, entry.backend):
        return f"prefer_backend is {preference.prefer_backend}"
    if preference.prefer_kernel not in (None, entry.name):
        return f"prefer_kernel is {preference.prefer_kernel}"
    if preference.tier not in (None, entry.tier):
        return f"tier is {preference.tier}"
    if entry.on_host != (device.kind == "host"):
        return f"runs on {'the host' if entry.on_host else 'a CUDA device'}, the plan is for {device}"
    if preference.exportable and (entry.on_host or not entry.exportable):
        return "can't be exported, and exportable is true"
    if entry.on_host:
        return None
    found = device.compute_capability
    least, below = entry.least_capability(descriptor), entry.below_compute_capability
    if found < least:
        return f"needs compute capability {dotted(least)}, got {dotted(found)}"
    if found >= below:
        return f"needs a compute capability below {dotted(below)}, got {dotted(found)}"
    if entry.arch is ArchSku.SM90A and not preference.allow_sm90a:
        return "allow_sm90a is false"
    return None


def dotted(version: tuple[int, ...]) -> str:
    """The first two numbers of a version, or of a compute capability, for messages."""
    return f"{version[0]}.{version[1]}"


def _of_elements(entry: KernelEntry, descriptor: Any) -> str | None:
    """A reason if the kernel is for other elements, or None."""
    if descriptor.element in entry.elements:
        return None
    return f"serves elements {', '.join(entry.elements)}, not {descriptor.element}"


def _unwanted(choice: Choice, tested: Sequence[str]) -> str | None:
    """A reason why the kernel fails one of the caller's conditions, or None."""
    entry: KernelEntry = choice.entry
    descriptor, preference, require = choice.descriptor, choice.preference, choice.preference.require
    if preference.whole_m is not None and (cut := entry.shard_refusal(descriptor, preference.whole_m)):
        return cut
    if entry.on_request and require.arithmetic is None:
        return "used only when `require=arithmetic=...` asks for it"
    named = preference.prefer_backend or preference.prefer_kernel or require.arithmetic
    if entry.for_a_bound and named is None and require.max_error_bound is None:
        return "has a wider error bound: serves where max_error_bound allows it"
    promised = entry.promises(choice, tested, named=require.arithmetic is not None)
    return require.unmet(promised, descriptor.reduction)
