"""Base of the GPU backends that prepare weights: alignment, macros of an element, launch, reported status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

from ..device.jit.launcher import Function, fill
from ..device.jit.structs import KernelParams
from ..device.streams import Launch
from ..plan.kernel import Choice, Kernel, launch_in_order, nothing
from ..plan.operands import Alignment, Views
from ..vocab import ElementKind
from ..weights import canonical
from .descriptor import STATUS, PrepareDescriptor

P = TypeVar("P", bound=PrepareDescriptor)

_INTEGERS = {ElementKind.U8: 0, ElementKind.S8: 1}
_FLOAT = 2  # Number::SIGN_MAGNITUDE


class PrepareKernel(Kernel[P]):
    """Base of a GPU kernel; all operands lie at multiples of 16 bytes.

    Parameters have the names of the operands, or those that ``renamed`` has for them. A status is filled with
    ones first, which mean that nothing was found.
    """

    default_alignment = Alignment(16)
    parameters: ClassVar[type[KernelParams]]
    renamed: Mapping[str, str] = {}
    sizes: Mapping[str, int]
    """The parameters that are no operands."""
    blocks: int
    function: Function

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.launches = 2 if STATUS in self.descriptor.operands() else 1

    def launcher(self, views: Views, workspace: int) -> Launch:
        kernel: Launch = nothing
        if self.blocks:
            at = {self.renamed.get(name, name): view.address for name, view in views.items()}
            kernel = self.function.bind(self.blocks, self.parameters(**at, **self.sizes))
        status = views.get(STATUS.name)
        if status is None:
            return kernel
        return launch_in_order(fill(status.address, 0xFF, status.nbytes_spanned), kernel)


def element_defines(element: ElementKind) -> dict[str, int]:
    """Macros that prepare/groups.cuh reads."""
    return {
        "WIDTH": element.itemsize,
        "NUMBER": _INTEGERS.get(element, _FLOAT),
        "FIRST_NAN": canonical.FIRST_NAN.get(element, 0),
    }
