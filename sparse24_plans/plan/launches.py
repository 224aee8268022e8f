"""The one memory of launches: what a plan enqueued before, by where the operands lay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ..device.streams import CurrentStream, Launch, launch_on
from ..device.tensors import LOCATION_OF_TYPE, MAX_ADDRESS, Device, view_at
from ..errors import InvalidProblemError, shown
from ..vocab.fields import integer
from .kernel import Kernel
from .operands import OperandChecks, Views, check_alignment
from .overlap import overlap, piece, spans_of

MAX_LAUNCHES = 1024
"""Launches that a plan keeps: a model has many layers of one shape, and an allocator gives the same addresses
again and again."""
MAX_KERNELS = 8192
"""Kernels that the kept launches enqueue together: the launch of many batches holds parameters for each."""


class Located(NamedTuple):
    """The launch of operands where they lie."""

    launch: Launch
    current: CurrentStream
    """The stream that None stands for."""


class LaunchCache:
    """The launches of one plan, by hashable keys that say where the operands lie. Threads may share it.

    It keeps no operand alive: a launch is made from views that own nothing, and a key holds no tensor.
    """

    def __init__(self, kernel: Kernel[Any], arguments: Mapping[str, str]) -> None:
        """``arguments`` are the callers' names of the views."""
        self._kernel, self._arguments = kernel, arguments
        self._launches: dict[object, Any] = {}
        self.find = self._launches.get
        """Gives the launch of a key of :class:`Caller`, or None."""

    def __len__(self) -> int:
        return len(self._launches)

    def find_located(self, operands: tuple[Any, ...]) -> tuple[object, Located | None]:
        """A key of where the operands lie, and its Located. None for both where an operand doesn't say it."""
        try:
            key = tuple([LOCATION_OF_TYPE[type(one)](one) for one in operands])
            return key, self._launches.get(key)
        except Exception:  # noqa: BLE001 - the checks tell what is wrong, and name the argument
            return None, None

    def add(self, key: object, views: Views, workspace: int) -> Launch:
        """Make the launch of checked operands at the addresses in a Caller's key, and keep it."""
        launch = self._kernel.launcher(views, workspace)
        self._keep(key, launch)
        return launch

    def add_located(self, key: object, views: Views, workspace: int, current: CurrentStream) -> Located:
        """Make the launch of checked operands, and keep it. Without a key it is made for one use."""
        if key is None:
            return Located(self._kernel.launcher(views, workspace), current)
        views = {name: view_at(view, view.address, None) for name, view in views.items()}
        located = Located(self._kernel.launcher(views, workspace), current)
        self._keep(key, located)
        return located

    def _keep(self, key: object, entry: object) -> None:
        if len(self._launches) >= min(MAX_LAUNCHES, MAX_KERNELS // max(1, self._kernel.launches)):
            self._launches.clear()
        self._launches[key] = entry

    def check_workspace(self, workspace: int, views: Views) -> None:
        """Raise where a kernel that needs scratch can't use that at the address ``workspace``."""
        needed, alignment = self._kernel.workspace_size, self._kernel.workspace_alignment
        if not needed:
            return
        if workspace == 0:
            raise InvalidProblemError("workspace: expected memory, got a null address")
        check_alignment("workspace", workspace, alignment)
        for name, view in views.items():
            if any(overlap(piece(workspace, needed), span) for span in spans_of(view)):
                argument = self._arguments[name]
                raise InvalidProblemError(f"workspace: expected memory apart from {argument}, got an overlap")


class Caller:
    """Launches one plan on operands of the same shapes, strides, elements and devices, at any addresses.

    Each call looks at the addresses alone: that they are aligned, and that no result overlaps another
    operand. Addresses that the plan has seen aren't looked at again. The caller keeps no operand alive. Made
    by ``plan.caller(args)``. Threads may share it.
    """

    def __init__(self, launches: LaunchCache, checks: OperandChecks, home: Device, views: Views) -> None:
        self._launches, self._checks, self._home = launches, checks, home
        self._views = {name: view_at(view, view.address, None) for name, view in views.items()}
        self.operands: tuple[str, ...] = tuple(checks.arguments[name] for name in views)
        """The names of the addresses that :meth:`launch` takes, in its order. They are fields of the args: of
        those that were given, each once. A canonical weight has two buffers, ``weight.values`` and
        ``weight.metadata``."""

    def alignment(self, operand: str) -> int:
        """Bytes that the address of one of :attr:`operands` must be a multiple of.

        Raises InvalidProblemError for another name.
        """
        if type(operand) is not str or operand not in self.operands:
            raise InvalidProblemError(
                f"operand: expected one of {', '.join(self.operands)}, got {shown(operand)}"
            )
        return self._checks.alignments[operand]

    def launch(self, addresses: tuple[int, ...], workspace: int, stream: int) -> None:
        """Enqueue on the stream of that handle (0 on the host). Allocates nothing on the device.

        ``addresses`` are those of :attr:`operands`, in their order. ``workspace`` is the address of
        ``plan.workspace_size()`` bytes, a multiple of ``plan.workspace_alignment``, or 0 if the plan needs
        none. The operands must stay alive until the stream has run it.

        Raises MisalignedOperandError, InvalidProblemError or DriverError, before anything is written.
        """
        key = self, addresses, workspace
        try:
            launch = self._launches.find(key)
        except TypeError:  # the checks tell what no key can hold
            launch = None
        if launch is None:
            launch = self._launches.add(key, self._checked(addresses, workspace), workspace)
        launch_on(self._home, launch, stream)

    def _checked(self, addresses: tuple[int, ...], workspace: int) -> Views:
        views: Views = {}
        if type(addresses) is not tuple or not all(map(_is_address, addresses)):
            raise InvalidProblemError(
                "addresses: expected a tuple of the integer addresses of "
                f"{', '.join(self.operands)}, got {shown(addresses)}"
            )
        if not _is_address(workspace):
            raise InvalidProblemError(f"workspace: expected an address, got {shown(workspace)}")
        if len(addresses) != len(self.operands):
            raise InvalidProblemError(
                f"addresses: expected those of {', '.join(self.operands)}, got {len(addresses)}"
            )
        for (name, view), address in zip(self._views.items(), addresses, strict=True):
            if 0 not in view.shape:
                named = self._checks.arguments[name]
                if address == 0:
                    raise InvalidProblemError(f"{named}: expected memory, got a null address: was it freed?")
                check_alignment(named, address, self._checks.alignments[named])
            views[name] = view_at(view, address, None)
        self._checks.check_apart(views)
        self._launches.check_workspace(workspace, views)
        return views

    def __copy__(self) -> Caller:
        return self

    def __deepcopy__(self, memo: object) -> Caller:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidProblemError(
            "Caller: cannot be pickled, because it launches in this process; pickle the plan instead"
        )


def _is_address(value: object) -> bool:
    number = integer(value)
    return number is not None and 0 <= number < MAX_ADDRESS
