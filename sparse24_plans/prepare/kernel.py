"""Base of the GPU backends that prepare weights: alignment, macros of an element, the reported status."""

from __future__ import annotations

from typing import TypeVar

from ..device.jit.launcher import fill
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..plan.kernel import Kernel, launch_in_order
from ..plan.operands import Alignment
from ..vocab import ElementKind
from ..weights import canonical
from .descriptor import PrepareDescriptor

P = TypeVar("P", bound=PrepareDescriptor)

_STATUS_BYTES = 8
_INTEGERS = {ElementKind.U8: 0, ElementKind.S8: 1}
_FLOAT = 2  # Number::SIGN_MAGNITUDE


class PrepareKernel(Kernel[P]):
    """Base of a GPU kernel; all operands lie at multiples of 16 bytes."""

    default_alignment = Alignment(16)


def element_defines(element: ElementKind) -> dict[str, int]:
    """Macros that prepare/groups.cuh reads."""
    return {
        "WIDTH": element.itemsize,
        "NUMBER": _INTEGERS.get(element, _FLOAT),
        "FIRST_NAN": canonical.FIRST_NAN.get(element, 0),
    }


def reset_then(status: TensorView, kernel: Launch) -> Launch:
    """Return a launch that fills the status with ones, which mean that nothing was found, then launches
    ``kernel``."""
    return launch_in_order(fill(status.address, 0xFF, _STATUS_BYTES), kernel)
