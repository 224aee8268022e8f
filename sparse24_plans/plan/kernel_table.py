"""Tables of kernels, and the whole of selection, for every family.

A row says what a kernel serves and what it guarantees; rows stand in order of preference. Selection is a pure
function of descriptor, preference, device properties and tuning table: it times nothing and asks no device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
GRID_BLOCKS = 2**31 - 1
"""The most blocks of a launch, along x."""


def grid_limit_refusal(blocks: int) -> str | None:
    """Why so many blocks can't be launched, or None."""
    return None if blocks <= GRID_BLOCKS else f"{blocks} blocks exceed the grid limit {GRID_BLOCKS}"


@dataclass(frozen=True)
class KernelEntry:
    """One row. ``backend`` is also the name of the module under the family's ``backends/`` that launches it.

    ``limits`` gives the reason why a problem can't be served, ``missing`` what has to be installed first;
    None where there is none. ``min_workspace`` is the bytes without which the kernel can't run. A family's
    own row adds what its problems differ in, and says in ``refusal`` what it doesn't serve.
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
    """Layouts that its kernel reads too, in more time."""
    limits: Callable[[Any], str | None] = lambda descriptor: None
    missing: Callable[[DeviceProperties], str | None] = lambda device: None
    min_workspace: Callable[[Any], int] = lambda descriptor: 0
    on_request: bool = False
    """Whether it serves only where an arithmetic is required by name."""
    for_a_bound: bool = False
    """Whether it serves only where an error bound is required, or its backend or arithmetic by name."""

    kernel_type: ClassVar[type[Kernel[Any]] | None] = None
    """Where a family has one kernel and no ``backends/``."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The layouts of weights that its kernel reads: its own, and others."""
        return (self.layout, *self.also_reads)

    @property
    def on_host(self) -> bool:
        return self.tier is Tier.HOST

    @property
    def module(self) -> str:
        """The module of ``backends/`` that has the kernel."""
        return self.backend

    @property
    def kernel(self) -> type[Kernel[Any]]:
        """The kernel's class: ``Kernel`` of its module, imported when it is first asked for."""
        if self.kernel_type is not None:
            return self.kernel_type
        family = sys.modules[type(self).__module__].__package__
        found: type[Kernel[Any]] = import_module(f"{family}.backends.{self.module}").Kernel
        return found

    def refusal(self, descriptor: Any) -> str | None:
        """Why the row doesn't serve such a problem, in the family's own words; None: it does."""
        return None

    def least_workspace(self, descriptor: Any) -> int:
        """``min_workspace`` of the same problem's smallest batch, where batches may differ in bits."""
        return self.min_workspace(descriptor)

    def shard_refusal(self, descriptor: Any, whole_m: int) -> str | None:
        """Why the row can't give rows of W the bits that they have among ``whole_m`` rows, or None."""
        return None

    def promises(
        self, choice: Choice, tested: Sequence[str] = (), *, named: bool = True
    ) -> PrecisionGuarantee:
        """The whole guarantee of the row's kernel for a choice.

        ``tested``: flags that a configuration's self-test has confirmed. Not ``named``: without an arithmetic
        that follows from how the problem is cut, which takes its time to work out.
        """
        promised = self.guarantee(choice.descriptor)
        more: dict[str, Any] = dict.fromkeys(tested, True)
        if named:
            more["arithmetic"] = self.kernel.arithmetic(choice)
        return promised.model_copy(update=more) if more else promised


R = TypeVar("R", bound=KernelEntry)


def with_wgmma(row: R) -> R:
    """The row as that of a kernel with wgmma, which one architecture alone has."""
    return replace(
        row,
        arch=ArchSku.SM90A,
        min_compute_capability=HOPPER,
        below_compute_capability=_BEYOND_HOPPER,
    )


@dataclass(frozen=True)
class JudgedEntry(Generic[R]):
    """A row and why it can't serve; ``reason`` None: it can.

    ``unavailable``: something isn't installed; ``crowded``: ``max_workspace_bytes`` alone is in its way,
    and that not for smaller batches.
    """

    entry: R
    reason: str | None
    unavailable: bool = False
    crowded: bool = False


def consider(
    rows: Sequence[R],
    descriptor: Any,
    preference: PlanPreference,
    device: DeviceProperties,
    tested: Mapping[str, Sequence[str]] | None = None,
    configured: Mapping[str, Mapping[str, int]] | None = None,
) -> tuple[JudgedEntry[R], ...]:
    """Every row, in order, with the reason why it can't serve.

    ``tested``: row -> flags of its guarantee that a self-test of the configuration at hand has confirmed;
    ``configured``: row -> that configuration.
    """
    flags, cuts = tested or {}, configured or {}
    choices = [Choice(descriptor, device, row, preference, cuts.get(row.name, {})) for row in rows]
    found = [_judge(choice, flags.get(choice.entry.name, ())) for choice in choices]
    if preference.require.batch_invariant:
        found = _of_every_batch(found, choices)
    return tuple(found)


def _of_every_batch(found: list[JudgedEntry[R]], choices: Sequence[Choice]) -> list[JudgedEntry[R]]:
    """Without rows that would serve this batch alone: smaller ones would have another row, and its bits."""
    crowded = next((at for at, one in enumerate(found) if one.crowded), len(found))
    for at in range(crowded + 1, len(found)):
        name = found[crowded].entry.name
        if found[at].reason is None and not _alike(choices[crowded], choices[at]):
            reason = f"has other bits than {name}, to which max_workspace_bytes leaves smaller batches"
            found[at] = replace(found[at], reason=reason)
    return found


def _alike(crowded: Choice, other: Choice) -> bool:
    """Whether their rows give the same bits, had the first its workspace."""
    roomy = crowded.preference.model_copy(update={"max_workspace_bytes": None})
    first = crowded.entry.promises(crowded._replace(preference=roomy)).arithmetic
    return first is not None and first == other.entry.promises(other).arithmetic


def choose(considered: Sequence[JudgedEntry[R]]) -> R:
    """The first row that can serve.

    Raises UnsupportedError with every row's reason; BackendUnavailableError where the only obstacle is
    something that can be installed.
    """
    for one in considered:
        if one.reason is None:
            return one.entry
    reasons = "; ".join(f"{one.entry.name}: {one.reason}" for one in considered)
    kind = BackendUnavailableError if any(one.unavailable for one in considered) else UnsupportedError
    raise kind(f"no kernel can serve this problem. {reasons}")


def log_choice(descriptor: Any, device: DeviceProperties, considered: Sequence[JudgedEntry[R]]) -> None:
    """Say what was chosen (INFO), what would have been but isn't installed (WARNING), the rest (DEBUG)."""
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
    row: KernelEntry = choice.entry
    reason = (
        _misplaced(row, choice.preference, choice.device)
        or _unserved(row, choice.descriptor)
        or _unwanted(choice, tested)
    )
    if reason is not None:
        return JudgedEntry(row, reason)
    absent, allowed = row.missing(choice.device), choice.preference.max_workspace_bytes
    if allowed is not None and (needed := row.min_workspace(choice.descriptor)) > allowed:
        reason = f"needs a workspace of {needed} bytes, max_workspace_bytes is {allowed}"
        crowded = absent is None and row.least_workspace(choice.descriptor) <= allowed
        return JudgedEntry(row, reason, crowded=crowded)
    return JudgedEntry(row, absent, unavailable=absent is not None)


def _misplaced(row: KernelEntry, preference: PlanPreference, device: DeviceProperties) -> str | None:
    """Why the row isn't the one asked for, or can't run on the device."""
    if preference.prefer_backend not in (None, row.backend, row.name):
        return f"prefer_backend is {preference.prefer_backend}"
    if preference.tier not in (None, row.tier):
        return f"tier is {preference.tier}"
    if row.on_host != (device.kind == "host"):
        return f"runs on {'the host' if row.on_host else 'a CUDA device'}, the plan is for {device}"
    if row.on_host:
        return None
    found, least, below = device.compute_capability, row.min_compute_capability, row.below_compute_capability
    if found < least:
        return f"needs compute capability {_dotted(least)}, got {_dotted(found)}"
    if found >= below:
        return f"needs a compute capability below {_dotted(below)}, got {_dotted(found)}"
    if row.arch is ArchSku.SM90A and not preference.allow_sm90a:
        return "allow_sm90a is false"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _unserved(row: KernelEntry, descriptor: Any) -> str | None:
    """Why the row can't serve the problem, or better shouldn't."""
    if descriptor.element not in row.elements:
        return f"serves elements {', '.join(row.elements)}, not {descriptor.element}"
    return row.refusal(descriptor) or row.limits(descriptor)


def _unwanted(choice: Choice, tested: Sequence[str]) -> str | None:
    """Which of the caller's conditions the row fails."""
    row: KernelEntry = choice.entry
    descriptor, preference, require = choice.descriptor, choice.preference, choice.preference.require
    if preference.whole_m is not None and (cut := row.shard_refusal(descriptor, preference.whole_m)):
        return cut
    if row.on_request and require.arithmetic is None:
        return "runs the arithmetic that require names, and only that"
    asked = require.max_error_bound, require.arithmetic, preference.prefer_backend
    if row.for_a_bound and asked == (None, None, None):
        return "has a wider error bound: serves where max_error_bound allows it"
    promised = row.promises(choice, tested, named=require.arithmetic is not None)
    return require.unmet(promised, descriptor.reduction)
