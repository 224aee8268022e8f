"""What backends that prepare weights share: alignment, the macros of an element, the status they report."""

from __future__ import annotations

from typing import TypeVar

from ..device.streams import Launch
from ..device.tensors import TensorView, import_cupy
from ..plan.kernel import Kernel
from ..plan.operands import Alignment
from ..vocab import ElementKind
from ..weights import canonical
from .descriptor import PrepareDescriptor

P = TypeVar("P", bound=PrepareDescriptor)

_STATUS_BYTES = 8
_INTEGERS = {ElementKind.U8: 0, ElementKind.S8: 1}
_FLOAT = 2  # Number::SIGN_MAGNITUDE


class PrepareKernel(Kernel[P]):
    """A kernel of the device: all its operands lie at multiples of 16 bytes."""

    default_alignment = Alignment(16)


def element_defines(element: ElementKind) -> dict[str, int]:
    """The macros that prepare/groups.cuh asks for."""
    return {
        "WIDTH": element.itemsize,
        "NUMBER": _INTEGERS.get(element, _FLOAT),
        "FIRST_NAN": canonical.FIRST_NAN.get(element, 0),
    }


def reset_then(status: TensorView, kernel: Launch) -> Launch:
    """``kernel`` behind a fill of the status with ones, which say that nothing was found."""
    fill = import_cupy().cuda.runtime.memsetAsync

    def launch(stream: int) -> None:
        fill(status.address, 0xFF, _STATUS_BYTES, stream)
        kernel(stream)

    return launch
