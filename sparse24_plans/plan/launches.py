"""The one memory of launches: what a plan enqueued before, by where the operands lay."""

from __future__ import annotations

from typing import Any

from ..device.streams import Launch, launch_on
from ..device.tensors import LOCATION_OF_TYPE, Device, view_at
from ..errors import InvalidProblemError
from .kernel import Kernel
from .operands import OperandChecks, Views, check_alignment
from .overlap import overlap, piece, span_of

MOST_LAUNCHES = 1024
"""Launches that a plan keeps: a model has many layers of one shape, and an allocator gives the same addresses
again and again."""


class LaunchCache:
    """The launches of one plan, by hashable keys that say where the operands lie. Threads may share it.

    It keeps no operand alive: a launch is made from views that own nothing, and a key holds no tensor.
    """

    def __init__(self, kernel: Kernel[Any]) -> None:
        self._kernel = kernel
        self._launches: dict[object, Launch] = {}
        self.find = self._launches.get
        """Gives the launch of a key, or None."""

    def __len__(self) -> int:
        return len(self._launches)

    def find_located(self, operands: tuple[Any, ...]) -> tuple[object, Launch | None]:
        """A key of where the operands lie, and its launch. None for both where an operand doesn't say it."""
        try:
            key = tuple([LOCATION_OF_TYPE[type(one)](one) for one in operands])
            return key, self._launches.get(key)
        except Exception:  # noqa: BLE001 - the checks tell what is wrong, and name the argument
            return None, None

    def add(self, key: object, views: Views, workspace: int) -> Launch:
        """Make the launch of checked operands, and keep it. Without a key it is made for one use."""
        if key is None:
            return self._kernel.launcher(views, workspace)
        views = {name: view_at(view, view.address, None) for name, view in views.items()}
        launch = self._kernel.launcher(views, workspace)
        if len(self._launches) >= MOST_LAUNCHES:
            self._launches.clear()
        self._launches[key] = launch
        return launch

    def check_workspace(self, workspace: int, views: Views) -> None:
        """Raise where a kernel that needs scratch can't use that at the address ``workspace``."""
        needed, alignment = self._kernel.workspace_size, self._kernel.workspace_alignment
        if not needed:
            return
        if workspace == 0:
            raise InvalidProblemError("workspace: expected memory, got a null address")
        check_alignment("workspace", workspace, alignment)
        for name, view in views.items():
            if overlap(piece(workspace, needed), span_of(view)):
                raise InvalidProblemError(f"workspace: expected memory apart from {name}, got an overlap")


class Caller:
    """Launches one plan on operands of the same shapes, strides, elements and devices, at any addresses.

    Each call looks at the addresses alone: that they are aligned, and that no result overlaps another
    operand. Addresses that the plan has seen aren't looked at again. The caller keeps no operand alive. Made
    by ``plan.caller(args)``.
    """

    def __init__(self, launches: LaunchCache, checks: OperandChecks, home: Device, views: Views) -> None:
        self._launches, self._checks, self._home = launches, checks, home
        self._views = {name: view_at(view, view.address, None) for name, view in views.items()}
        self.operands: tuple[str, ...] = tuple(views)
        """The names of the addresses that :meth:`launch` takes, in its order. A weight has several: its
        buffers."""

    def alignment(self, operand: str) -> int:
        """Bytes that the operand's address must be a multiple of."""
        return self._checks.alignment(operand)

    def launch(self, addresses: tuple[int, ...], workspace: int, stream: int) -> None:
        """Enqueue on the stream of that handle (0 on the host). Allocates nothing on the device.

        ``addresses`` are those of :attr:`operands`; ``workspace`` is one of ``plan.workspace_size()`` bytes,
        ``plan.workspace_alignment`` observed. The operands must stay alive until the stream has run it.

        Raises MisalignedOperandError, InvalidProblemError or DriverError, before anything is written.
        """
        key = self, addresses, workspace
        launch = self._launches.find(key)
        if launch is None:
            launch = self._launches.add(key, self._checked(addresses, workspace), workspace)
        launch_on(self._home, launch, stream)

    def _checked(self, addresses: tuple[int, ...], workspace: int) -> Views:
        views: Views = {}
        for (name, view), address in zip(self._views.items(), addresses, strict=True):
            if 0 not in view.shape:
                if address == 0:
                    raise InvalidProblemError(f"{name}: expected memory, got a null address: was it freed?")
                check_alignment(name, address, self.alignment(name))
            views[name] = view_at(view, address, None)
        self._checks.check_apart(views)
        self._launches.check_workspace(workspace, views)
        return views
