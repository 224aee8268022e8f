"""The base classes of foreign 2:4 formats, and the data that passes through their methods.

A format is one file with a subclass of :class:`ForeignFormat`, or of ``quantized.QuantizedFormat``, and one
line in ``table.py``. Memory orders are in ``vendor/``; positions and nibbles, which formats share, are in
``positions.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from .._vendor import torch_tile
from ..device.tensors import Device, TensorView, wrong
from ..errors import InvalidProblemError, UnsupportedError, shown
from ..vocab import ElementKind, integer
from ..weights import canonical

ALL_ELEMENTS = (
    ElementKind.F32,
    ElementKind.F16,
    ElementKind.BF16,
    ElementKind.S8,
    ElementKind.FP8_E4M3,
    ElementKind.FP8_E5M2,
)
"""Elements that a weight can have."""

Parts = dict[str, Any]
"""The tensors of a foreign weight by name."""
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""NumPy's name of each part's type (``VALUES`` means the element) and its shape. The values come first."""
VALUES = "values"

_MAX_CELLS = 1 << 62
_WORDS = {1: ElementKind.U8, 2: ElementKind.U16, 4: ElementKind.I32}


# Arguments ---------------------------------------------------------------------------------------


def two_sizes(name: str, value: Any) -> tuple[int, int]:
    """M and K from a sequence or a tensor of two integers. Raises InvalidProblemError naming ``name``."""
    if isinstance(value, (bytes, bytearray, memoryview)):  # these are sequences of integers, too
        raise wrong(name, "two sizes, M and K", value)
    try:
        flat = value if isinstance(value, Sequence) else value.reshape(-1)[:3].tolist()
        m, k = (integer(size) for size in islice(flat, 3))
    except Exception:  # noqa: BLE001 - whatever a broken object raises
        m = k = None
    if m is None or k is None:
        raise wrong(name, "two sizes, M and K", value)
    if min(m, k) < 0 or max(m, k) >= _MAX_CELLS or m * k >= _MAX_CELLS:
        raise wrong(name, "M * K from 0 to below 2^62", [m, k])
    return m, k


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword that a format takes.

    ``check(name, value)`` returns the value to use, or raises InvalidProblemError. ``default`` is used if the
    caller gives no value.
    """

    default: Any
    check: Callable[[str, Any], Any]


def integer_option(default: int, expected: str, allows: Callable[[int], bool]) -> Option:
    """An integer option. ``expected`` describes allowed values."""

    def check(name: str, value: Any) -> int:
        number = integer(value)
        if number is None or not allows(number):
            raise wrong(name, expected, value)
        return number

    return Option(default, check)


SHAPE = Option(None, two_sizes)
"""M and K, for formats whose values don't tell them. ``to_foreign`` takes them from the weight."""


@dataclass(frozen=True, slots=True)
class WeightShape:
    """A weight [m, k] of an element, and all options of its format but ``shape``."""

    m: int
    k: int
    element: ElementKind
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nibbles(self) -> int:
        """Nibbles per row in formats that hold float32 as 1:2."""
        return self.k // (2 if self.element is ElementKind.F32 else 4)


# Data -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Incoming:
    """The parts of a foreign weight that is read."""

    shape: WeightShape
    layout: Layout
    parts: Mapping[str, Any]
    device: Device

    def words(self, part: str, *, as_stored: bool = False) -> Any:
        """A part's words, as many as its layout has, as a flat contiguous array of unsigned integers.

        Metadata of three axes is taken for PyTorch's view, because PyTorch's CUTLASS weights may hold the
        tile packer's metadata. ``as_stored`` turns this off.
        """
        dtype, sizes = self.layout[part]
        array = self._bits(part, _WORDS[np.dtype(dtype).itemsize])
        if part.startswith("meta") and not as_stored:
            array = torch_tile.as_stored(array)
        count = math.prod(sizes)
        if array.size != count:
            raise InvalidProblemError(
                f"{part}: expected {count} words {dtype} for M = {self.shape.m}, K = {self.shape.k}, "
                f"got {array.size}"
            )
        return canonical.array_module(array).ascontiguousarray(array.reshape(-1))

    def values(self, part: str = "") -> Any:
        """A part's elements (by default the first part's) as bits in its layout's shape."""
        part = part or next(iter(self.layout))
        array = self._bits(part, self.shape.element)
        if array.shape != self.layout[part][1]:
            raise InvalidProblemError(
                f"{part}: expected shape {list(self.layout[part][1])} for M = {self.shape.m}, "
                f"K = {self.shape.k}, got {list(array.shape)}"
            )
        return array

    def _bits(self, part: str, kind: ElementKind) -> Any:
        view = TensorView.of(self.parts[part], element=kind, argument=part)
        if view.device != self.device:
            raise InvalidProblemError(f"{part}: expected memory on {self.device}, got {view.device}")
        return view.bits()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A canonical weight that is written: bits [m, k/2] and codes uint8 [m, k/4]."""

    shape: WeightShape
    values: Any
    codes: Any

    def typed(self, bits: Any) -> Any:
        """A copy of ``bits`` as an array of the element's type."""
        return TensorView.of(bits.copy(), element=self.shape.element).array()


# The format ---------------------------------------------------------------------------------------


class Format:
    """Base of all foreign formats: each describes itself.

    ``origin`` names the software that writes and reads it. ``parts`` are the tensors that ``to_foreign``
    returns; the ``optional`` ones may be missing where a weight is read, but are checked if they are given.
    ``constraint`` describes the shapes, ``options`` the keywords that the format takes.
    """

    name: ClassVar[str]
    origin: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    constraint: ClassVar[str] = "K a multiple of 8"
    optional: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, Option]] = MappingProxyType({})

    def settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every option: the given one, checked, or the default if it is None or missing."""
        for name, value in given.items():
            if value is not None and name not in self.options:
                raise InvalidProblemError(f"{name}: {self.name} takes no such option, got {shown(value)}")
        return {
            name: option.default if given.get(name) is None else option.check(name, given[name])
            for name, option in self.options.items()
        }


class ForeignFormat(Format, ABC):
    """A foreign format, with the conversions of weights to it and from it.

    ``elements`` are those of weights that it holds. The first of ``parts`` are the values.
    """

    elements: ClassVar[tuple[ElementKind, ...]]

    def fits(self, shape: WeightShape) -> bool:
        """Whether ``constraint`` allows a shape of a valid element and a K that is a multiple of 8."""
        return True

    @abstractmethod
    def layout(self, shape: WeightShape) -> Layout:
        """The type and shape of every part of a weight of this shape, the values first."""

    @abstractmethod
    def decode(self, found: Incoming) -> tuple[Any, Any]:
        """Bits of the values [m, k/2], and codes uint8 [m, k/4] of any positions.

        Raises InvalidProblemError for parts that don't fit the layout, and FormatError (row and group) for
        invalid metadata.
        """

    @abstractmethod
    def encode(self, out: Outgoing) -> Parts:
        """The parts, as new arrays. Raises FormatError (row and group) for a weight that doesn't fit."""

    def sizes(self, values: TensorView) -> tuple[int, int]:
        """M and K from the first part's shape, used if the caller doesn't give them."""
        if len(values.shape) != 2 or values.shape[1] % 4:
            raise InvalidProblemError(
                f"{self.parts[0]}: expected shape [M, K/2] with K a multiple of 8, "
                f"got a tensor {list(values.shape)}"
            )
        return values.shape[0], 2 * values.shape[1]

    def shape_of(self, m: int, k: int, element: ElementKind, /, **options: Any) -> WeightShape:
        """A weight's shape with the format's options, checked, or their defaults."""
        settled = self.settle(options)
        settled.pop("shape", None)
        return WeightShape(m, k, element, settled)

    def check(self, shape: WeightShape) -> None:
        """Raise UnsupportedError for an element, InvalidProblemError for a shape that doesn't fit."""
        if shape.element not in self.elements:
            raise UnsupportedError(f"{self.name} holds {', '.join(self.elements)}, got {shape.element}")
        if shape.m < 0 or shape.k < 0 or shape.k % 8 or not self.fits(shape):
            raise InvalidProblemError(
                f"{self.name}: expected {self.constraint}; got M = {shape.m}, K = {shape.k}, {shape.element}"
                + "".join(f", {name} = {value}" for name, value in shape.options.items())
            )


def row_major(shape: WeightShape) -> tuple[str, tuple[int, ...]]:
    """The layout of values [M, K/2] in row-major order, as most formats have them."""
    return VALUES, (shape.m, shape.k // 2)
