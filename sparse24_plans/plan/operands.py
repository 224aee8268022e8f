"""The operands of a product, checked: what backends get, and the checks that a caller's tensors pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..device.tensors import Device, TensorView
from ..errors import InvalidProblemError, MisalignedOperandError
from ..vocab import ElementKind, MatrixOrder
from ..weights.weight import PackedWeight


class Operands:
    """Checked operands, as backends get them: names by role, so that both ops share code.

    Strides are those of rows (in a ``column`` order: of columns), in elements. A plain class: one is made on
    every run.
    """

    __slots__ = (
        "bias",
        "result",
        "result_stride",
        "scale_w",
        "scale_x",
        "source",
        "source_stride",
        "weight",
    )

    def __init__(
        self,
        weight: PackedWeight,
        source: TensorView,
        result: TensorView,
        bias: TensorView | None,
        source_stride: int,
        result_stride: int,
    ) -> None:
        self.weight, self.source, self.result, self.bias = weight, source, result, bias
        self.source_stride, self.result_stride = source_stride, result_stride
        self.scale_x: TensorView | None = None
        self.scale_w: TensorView | None = None


class Remembered:
    """What a plan made of the same arguments the last time. No part of their value: a copy starts without.

    ``last`` is the plan, where everything lay (None after a first run: arguments that are used once need not
    pay for it), and the launcher.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: tuple[object, list[object] | None, Callable[[int], None]] | None = None

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()


def reinterpretable(element: ElementKind) -> ElementKind | None:
    """Types that some frameworks lack may arrive as raw bits; the rest must come as themselves."""
    return element if element in (ElementKind.BF16, ElementKind.FP8_E4M3, ElementKind.FP8_E5M2) else None


def matrix(
    name: str,
    tensor: Any,
    shape: tuple[int, int],
    element: ElementKind,
    device: Device,
    alignment: int,
    order: MatrixOrder,
    row_alignment: int = 1,
) -> tuple[TensorView, int]:
    """The checked view and the stride of its rows; in ``column`` order, read columns for rows."""
    view = TensorView.of(tensor, element=reinterpretable(element), argument=name)
    check_tensor(name, view, shape, element, device)
    (rows, width), (stride, step), line = shape, view.strides, "row"
    if order is MatrixOrder.COLUMN:
        rows, width, stride, step, line = width, rows, step, stride, "column"
    if rows == 0 or width == 0:
        return view, width
    if width > 1 and step != 1:
        raise InvalidProblemError(
            f"{name}: expected unit stride along its {line}s, got strides {view.strides}"
        )
    check_alignment(name, view.address, max(alignment, element.itemsize))
    if rows == 1:
        return view, width
    if stride < width:
        raise InvalidProblemError(
            f"{name}: expected a {line} stride of at least {width} elements, got {stride}"
        )
    check_alignment(f"{name} {line} stride", stride * element.itemsize, row_alignment)
    return view, stride


def check_tensor(
    name: str, view: TensorView, shape: tuple[int, ...], element: ElementKind, device: Device
) -> None:
    if view.shape != shape:
        raise InvalidProblemError(f"{name}: expected shape {list(shape)}, got {list(view.shape)}")
    if view.element is not element:
        raise InvalidProblemError(f"{name}: expected element {element}, got {view.element}")
    if view.device != device:
        raise InvalidProblemError(f"{name}: expected memory on {device}, got {view.device}")


def check_alignment(name: str, address: int, alignment: int) -> None:
    if address % alignment:
        raise MisalignedOperandError(name, alignment, address)


def check_apart(name: str, out: TensorView, other_name: str, other: TensorView) -> None:
    """Refuse a result that shares memory with an input. Column windows of one buffer share none."""
    if out.address >= other.end or other.address >= out.end:
        return
    if len(other.shape) == 2 and out.shape[0] > 1 and other.shape[0] > 1:
        pitch = out.strides[0] * out.element.itemsize
        if pitch == other.strides[0] * other.element.itemsize:
            apart = (other.address - out.address) % pitch
            own, others = out.shape[1] * out.element.itemsize, other.shape[1] * other.element.itemsize
            if apart >= own and apart + others <= pitch:
                return
    raise InvalidProblemError(f"{name}: expected memory apart from {other_name}, got an overlap")
