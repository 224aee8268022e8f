"""The base class of every backend: what a kernel states of itself, and how it becomes a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from ..device.jit.cache import CompiledKernel
from ..device.jit.launcher import compiling_only
from ..device.streams import Launch
from ..vocab import DeviceProperties
from .descriptor import Descriptor
from .operands import Alignment, Views
from .preference import PlanPreference

D = TypeVar("D", bound=Descriptor)


class Choice(NamedTuple):
    """What selection came to, and what a kernel is built from."""

    descriptor: Any
    """The family's own."""
    device: DeviceProperties
    entry: Any
    """The kernel's entry in the family's table."""
    preference: PlanPreference
    configuration: Mapping[str, int]
    """What a tuning table has for the row; empty: the kernel's own choice."""


class Kernel(Generic[D]):
    """Base of every backend's ``Kernel``. Built at select: it compiles and sizes itself in ``__init__``.

    It states only what is other than here: one launch, no workspace, operands at any address.
    """

    details: str = ""
    """One line for ``explain``: tile, algorithm."""
    launches: int = 1
    """What one run enqueues: kernels, fills. Several become one CUDA graph where they are bound."""
    workspace_size: int = 0
    workspace_alignment: int = 1
    default_alignment: ClassVar[Alignment] = Alignment()
    """Of operands that ``alignments`` doesn't name."""
    alignments: Mapping[str, Alignment] = {}
    """By the operands' names to the kernel. Every element is aligned to its size at least."""
    sources: ClassVar[tuple[str, ...]] = ()
    """The files of kernels_cu that it compiles; what they include comes with them."""
    tunable: ClassVar[bool] = False
    """Whether it takes configurations, and has ``candidates`` and ``tuning_version``."""

    def __init__(self, choice: Choice) -> None:
        self.descriptor: D = choice.descriptor

    def launcher(self, views: Views, workspace: int) -> Launch:
        """A function that takes a stream handle and enqueues the work; called many times where it is bound.

        ``views`` are the checked operands by name, ``workspace`` an address.
        """
        raise NotImplementedError

    @classmethod
    def compile(cls, choice: Choice) -> list[CompiledKernel]:
        """Puts what a kernel of the choice loads into the cache. Needs the compiler, but no GPU."""
        if not cls.sources:
            return []
        with compiling_only() as found:
            cls(choice)
        return found

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        """The guarantee's ``arithmetic``: more than the row says where it depends on the problem's cut."""
        named: str | None = choice.entry.guarantee(choice.descriptor).arithmetic
        return named

    def alignment_of(self, operand: str) -> Alignment:
        return self.alignments.get(operand, self.default_alignment)

    @classmethod
    def candidates(cls, descriptor: D, device: DeviceProperties) -> list[dict[str, int]]:
        """Configurations worth trying. A row refuses those that would break its promises."""
        return []

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        """Of the library or of the kernel's sources: configurations are bound to it."""
        raise NotImplementedError


def align_up(size: int, alignment: int = 256) -> int:
    """The least multiple of ``alignment`` that holds ``size``; by default that of a part of a workspace."""
    return -(-size // alignment) * alignment


def launch_in_order(*launches: Launch) -> Launch:
    """One launch of several, one behind the other."""

    def launch(stream: int) -> None:
        for one in launches:
            one(stream)

    return launch


def nothing(stream: int) -> None:
    """The launch of an empty problem."""
