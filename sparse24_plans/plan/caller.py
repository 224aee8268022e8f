"""A plan whose operands only move: everything else about them was checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..device.streams import Launch, launch_on
from ..device.tensors import Device, TensorView, honest_view
from ..errors import InvalidProblemError
from .kernel import Kernel
from .operands import Alignment, Operand, Role, Views, check_alignment

MOST_PLACES = 1024
"""Sets of addresses whose launches a caller keeps: a model's layers of one shape, and an allocator that gives
the same addresses again and again."""


class Caller:
    """Launches one plan on operands of the same shapes, strides, elements and devices, at any addresses.

    Per call it looks at the addresses alone: that they are aligned, that no result overlaps another operand,
    and where it has seen them all before, at nothing. The caller keeps no operand alive. Made by
    ``plan.caller(args)``.
    """

    def __init__(
        self, kernel: Kernel[Any], operands: tuple[Operand, ...], home: Device, views: Views, workspace: int
    ) -> None:
        self._kernel, self._home, self._workspace = kernel, home, workspace
        self._views = {name: _at(view, view.address) for name, view in views.items()}
        self.operands: tuple[str, ...] = tuple(views)
        """The names of the addresses that :meth:`launch` takes, in its order; of a weight, its buffers'."""
        self._alignments = _alignments(operands, views, kernel.alignment_of)
        results = {operand.name for operand in operands if operand.role is Role.OUT}
        self._results = tuple(name for name in views if name in results)
        self._launches: dict[tuple[int, ...], Launch] = {}

    def alignment(self, operand: str) -> int:
        """Bytes that the operand's address must be a multiple of."""
        return self._alignments[operand]

    def launch(self, addresses: tuple[int, ...], workspace: int, stream: int) -> None:
        """Enqueue on the stream of that handle (0 on the host). Allocates nothing on the device.

        ``addresses`` are those of :attr:`operands`; ``workspace`` is one of ``plan.workspace_size()`` bytes,
        ``plan.workspace_alignment`` observed. The operands must stay alive until the stream has run it.

        Raises MisalignedOperandError, InvalidProblemError or DriverError, before anything is written.
        """
        places = (*addresses, workspace)
        launch = self._launches.get(places)
        if launch is None:
            launch = self._kernel.launcher(self._checked(addresses, workspace), workspace)
            if len(self._launches) >= MOST_PLACES:
                self._launches.clear()
            self._launches[places] = launch
        launch_on(self._home, launch, stream)

    def _checked(self, addresses: tuple[int, ...], workspace: int) -> Views:
        views: Views = {}
        for (name, view), address in zip(self._views.items(), addresses, strict=True):
            if address == 0 and 0 not in view.shape:
                raise InvalidProblemError(f"{name}: expected memory, got a null address: was it freed?")
            if 0 not in view.shape:
                check_alignment(name, address, self._alignments[name])
            views[name] = _at(view, address)
        for name in self._results:
            out = views[name]
            for other_name, other in views.items():
                if other_name != name and out.address < other.end and other.address < out.end:
                    raise InvalidProblemError(f"{name}: expected memory apart from {other_name}")
        if self._workspace:
            self._check_workspace(workspace, views)
        return views

    def _check_workspace(self, workspace: int, views: Views) -> None:
        if workspace == 0:
            raise InvalidProblemError("workspace: expected memory, got a null address")
        check_alignment("workspace", workspace, self._kernel.workspace_alignment)
        for name, view in views.items():
            if workspace < view.end and view.address < workspace + self._workspace:
                raise InvalidProblemError(f"workspace: expected memory apart from {name}, got an overlap")


def _at(view: TensorView, address: int) -> TensorView:
    """A view like ``view`` of other memory, which it doesn't keep alive."""
    return honest_view(
        address, view.shape, view.element, view.device, view.strides, view.readonly, None, "caller"
    )


def _alignments(
    operands: tuple[Operand, ...], views: Mapping[str, TensorView], of: Callable[[str], Alignment]
) -> dict[str, int]:
    """By the names of the views; a weight's buffers have the weight's."""
    by_name = {operand.name: operand for operand in operands}
    found: dict[str, int] = {}
    for name, view in views.items():
        operand = by_name.get(name)
        needed = of(name if operand else "weight").address
        least = view.element.itemsize if operand else 1
        found[name] = max(needed, least, operand.alignment if operand else 1)
    return found
