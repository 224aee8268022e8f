"""The base class of every backend's kernel, and the choice that a kernel is built from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

from typing_extensions import Self

from ..device.jit.cache import CompiledKernel
from ..device.jit.launcher import compiling_only, sizing_only
from ..device.streams import Launch
from ..errors import BackendUnavailableError
from ..vocab import DeviceProperties
from .descriptor import Descriptor
from .operands import Alignment, Views
from .preference import PlanPreference

D = TypeVar("D", bound=Descriptor)


class Choice(NamedTuple):
    """The result of a selection. Kernels are built from it."""

    descriptor: Any
    """The family's descriptor of the problem."""
    device: DeviceProperties
    entry: Any
    """The kernel's entry in the family's table."""
    preference: PlanPreference
    configuration: Mapping[str, int]
    """The tuning table's configuration of the kernel; empty: the kernel chooses its own."""


class Kernel(Generic[D]):
    """Base of every backend's ``Kernel``. ``select`` builds it: it compiles and sizes itself in ``__init__``.

    The defaults are one launch, no workspace, and operands at any address.
    """

    details: str = ""
    """One line for ``explain``: the tile, the algorithm."""
    launches: int = 1
    """Number of kernels and fills that one run enqueues. ``bind`` makes several of them one CUDA graph."""
    workspace_size: int = 0
    workspace_is_exact: bool = True
    """Whether ``workspace_size`` is exact. For a library's kernel on an absent GPU it is an upper bound."""
    workspace_alignment: int = 1
    default_alignment: ClassVar[Alignment] = Alignment()
    """Alignment of operands that ``alignments`` doesn't name."""
    alignments: Mapping[str, Alignment] = {}
    """Alignments by the operands' names to the kernel. Every element is aligned at least to its size."""
    sources: ClassVar[tuple[str, ...]] = ()
    """The files of kernels_cu that the kernel compiles, without the files that these include."""
    tunable: ClassVar[bool] = False
    """Whether the kernel takes configurations, and has ``candidates`` and ``tuning_version``."""

    def __init__(self, choice: Choice) -> None:
        self.descriptor: D = choice.descriptor

    def launcher(self, views: Views, workspace: int) -> Launch:
        """A function that takes a stream handle and enqueues the work. It may be called many times.

        ``views`` are the checked operands by name, ``workspace`` is an address.
        """
        raise NotImplementedError

    @classmethod
    def compile(cls, choice: Choice) -> list[CompiledKernel]:
        """Compile into the cache what a kernel of the choice would load. Needs NVRTC, but no GPU."""
        if not cls.sources:
            return []
        with compiling_only() as found:
            cls(choice)
        return found

    @classmethod
    def sized(cls, choice: Choice) -> Self:
        """A kernel that knows its workspace and details but cannot launch. Needs neither NVRTC nor a GPU.

        Raises UnsupportedError if a library alone could tell the workspace.
        """
        with sizing_only():
            kernel = cls(choice)
        vars(kernel)["launcher"] = _refuse_to_launch
        return kernel

    @classmethod
    def needed_workspace(cls, choice: Choice) -> int:
        """The bytes of workspace without which no kernel of the choice can run, whatever limit it states."""
        needed: int = choice.entry.min_workspace(choice.descriptor)
        return needed

    @classmethod
    def most_workspace(cls, choice: Choice) -> int:
        """An upper bound of the workspace for 1 to as many tokens as the choice's problem has.

        Here it is the problem's own workspace, the largest where more tokens never need less. Kernels with
        several schedules override it. Raises what :meth:`sized` raises.
        """
        return cls.sized(choice).workspace_size

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        """The guarantee's ``arithmetic``. Kernels override it if it depends on how they cut the problem."""
        named: str | None = choice.entry.guarantee(choice.descriptor).arithmetic
        return named

    def alignment_of(self, operand: str) -> Alignment:
        return self.alignments.get(operand, self.default_alignment)

    @classmethod
    def candidates(cls, descriptor: D, device: DeviceProperties) -> list[dict[str, int]]:
        """Configurations worth measuring. The kernel refuses those that would break its promises."""
        return []

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        """Version of the library or of the kernel's sources that configurations are valid for."""
        raise NotImplementedError


def _refuse_to_launch(views: Views, workspace: int) -> NoReturn:
    raise BackendUnavailableError(
        "device: expected a plan of a present GPU, got one for the description of a GPU; "
        "select it for the device itself"
    )


def align_up(size: int, alignment: int = 256) -> int:
    """``size`` rounded up to a multiple of ``alignment``, by default the alignment of workspace parts."""
    return -(-size // alignment) * alignment


def launch_in_order(*launches: Launch) -> Launch:
    """One launch that enqueues several, in order."""
    if len(launches) == 1:
        return launches[0]

    def launch(stream: int) -> None:
        for one in launches:
            one(stream)

    return launch


def nothing(stream: int) -> None:
    """The launch of an empty problem."""
