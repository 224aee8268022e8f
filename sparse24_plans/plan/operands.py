"""Operands: how descriptors declare them, and the one pass that checks a caller's tensors against it.

:class:`OperandChecks` prepares the checks once per plan, so that a run only compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from ..device.tensors import Device, TensorView, contiguous_strides, honest_view
from ..errors import InvalidProblemError, MisalignedOperandError
from ..vocab import ElementKind, MatrixOrder
from .overlap import lie_apart, overlap, spans_of

Views: TypeAlias = dict[str, TensorView]
"""Checked operands by their names to the kernel. An object gives a view for each :class:`Part`."""
Forms: TypeAlias = tuple[tuple[tuple[int, ...], ElementKind], ...]
"""Shape and element of each part of an object."""


class Role(Enum):
    """The use of an operand.

    ``IN`` and ``OUT`` are tensors. The others are objects, which are read: a 2:4 weight, look-up tables, and
    what a family's plans pack.
    """

    IN = 0
    OUT = 1
    WEIGHT = 2
    TABLES = 3
    PACKED = 4


class Alignment(NamedTuple):
    """Bytes that must divide an operand's address, and the distance between its lines."""

    address: int = 1
    line: int = 1


class Part(NamedTuple):
    """A view of an operand that is an object."""

    view: str
    """Name to the kernel."""
    name: str = ""
    """Name to callers, after the argument's name and a dot. Empty: the argument's name is the part's."""
    alignment: int = 1
    """Bytes that divide the address, whatever the kernel."""


class Packing:
    """How an operand that is an object becomes views. A family, or a kind of object, derives its own."""

    __slots__ = ()

    def parts(self, layout: str) -> tuple[Part, ...]:
        """The views of an object for a plan of the layout."""
        raise NotImplementedError

    def forms(self, layout: str) -> Forms:
        """Shape and element of each part, for a layout that isn't a library's."""
        raise NotImplementedError

    def unpack(self, given: Any, argument: str, layouts: tuple[str, ...], home: Device) -> Views:
        """The views of an object for a plan on the device ``home`` whose kernel reads the ``layouts``.

        Raises InvalidProblemError for any other object.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand's declaration: its name to the kernel, and its required properties."""

    name: str
    role: Role
    shape: tuple[int, ...]
    element: ElementKind
    argument: str = ""
    """The field of the arguments that holds the operand; ``name`` by default."""
    lines: MatrixOrder | None = None
    """ROW or COLUMN: the rows (or columns) of the matrix are contiguous and may lie apart. None: the whole
    operand is contiguous."""
    optional: bool = False
    alignment: int = 1
    may_be: str | None = None
    """The operand whose memory this one may share: its elements lie at the same addresses."""
    packing: Packing | None = None
    """How an object becomes views; None: the operand is a tensor."""
    batches: bool = False
    """Whether ``shape`` begins with a number of batches, which may lie anywhere. If there is one batch, the
    kernel gets a view without this dimension."""

    def __post_init__(self) -> None:
        if not self.argument:
            object.__setattr__(self, "argument", self.name)


@dataclass(frozen=True, slots=True)
class Args:
    """Base of every family's arguments. Subclasses are frozen dataclasses with slots: a field an operand."""


def fields_of(args_type: type[Args]) -> tuple[str, ...]:
    """The names of the operands' fields."""
    names: tuple[str, ...] = args_type.__match_args__
    return names


class OperandChecks:
    """The checks of one plan. A call with arguments gives their views.

    Raises InvalidProblemError or MisalignedOperandError, which name the argument, what was expected and what
    came.
    """

    def __init__(
        self,
        args_type: type[Args],
        operands: tuple[Operand, ...],
        alignment_of: Callable[[str], Alignment],
        layouts: tuple[str, ...],
        home: Device,
    ) -> None:
        self._args_type = args_type
        known = {operand.argument for operand in operands}
        self._unknown = tuple(name for name in fields_of(args_type) if name not in known)
        self._checks = tuple(
            _check_for(operand, alignment_of(operand.name), layouts, home) for operand in operands
        )
        self._results = tuple(operand for operand in operands if operand.role is Role.OUT)
        self._needs_a_result = all(operand.optional for operand in self._results)
        self._pairs = _pairs(operands, layouts)
        parts = [(operand, part) for operand in operands for part in _parts_of(operand, layouts)]
        self.arguments = {
            part.view: f"{operand.argument}.{part.name}" if part.name else operand.argument
            for operand, part in parts
        }
        """Callers' name of each view: an argument, or a part of an object as ``weight.values``."""
        self.alignments = {
            self.arguments[part.view]: max(alignment_of(operand.name).address, part.alignment)
            for operand, part in parts
        }
        """Bytes that addresses must be multiples of, by the names in ``arguments``."""

    def __call__(self, args: Args) -> Views:
        if type(args) is not self._args_type:
            raise InvalidProblemError(f"args: expected {self._args_type.__name__}, got {type(args).__name__}")
        for name in self._unknown:
            if (given := getattr(args, name)) is not None:
                raise InvalidProblemError(
                    f"{name}: expected None for this descriptor, got {type(given).__name__}"
                )
        views: Views = {}
        for check in self._checks:
            check(args, views)
        if self._needs_a_result and not any(result.name in views for result in self._results):
            names = " or ".join(result.argument for result in self._results)
            raise InvalidProblemError(f"{names}: expected at least one result, got None")
        self.check_apart(views)
        return views

    def check_apart(self, views: Views) -> None:
        """Raise InvalidProblemError where a result shares memory with another operand."""
        for pair in self._pairs:
            pair.check(views)


def address_of(views: Views, name: str) -> int:
    """Return the operand's address, or 0 if the operand is absent."""
    return views[name].address if name in views else 0


def leading_dimension(view: TensorView, order: MatrixOrder) -> int:
    """Elements from the start of one row (for a column order: column) of checked matrices to the next."""
    return view.strides[-2 if order is MatrixOrder.ROW else -1]


# One operand --------------------------------------------------------------------------------------


def _check_for(
    operand: Operand, needed: Alignment, layouts: tuple[str, ...], home: Device
) -> Callable[[Args, Views], None]:
    if operand.packing is None:
        return _TensorCheck(operand, needed, home)
    parts = _parts_of(operand, layouts)
    alignments = {part.view: max(needed.address, part.alignment) for part in parts}
    return _ObjectCheck(operand.argument, operand.packing, alignments, layouts, home)


def _parts_of(operand: Operand, layouts: tuple[str, ...]) -> tuple[Part, ...]:
    """The views that an operand may become."""
    if operand.packing is None:
        return (Part(operand.name, alignment=_least_alignment(operand)),)
    return tuple(dict.fromkeys(part for layout in layouts for part in operand.packing.parts(layout)))


def _least_alignment(operand: Operand) -> int:
    return max(operand.alignment, operand.element.itemsize)


class _TensorCheck:
    __slots__ = ("_alignment", "_empty", "_home", "_operand", "_raw")

    def __init__(self, operand: Operand, needed: Alignment, home: Device) -> None:
        self._operand, self._home = operand, home
        self._alignment = Alignment(max(needed.address, _least_alignment(operand)), needed.line)
        self._raw = reinterpretable(operand.element)
        self._empty = 0 in operand.shape

    def __call__(self, args: Args, views: Views) -> None:
        operand = self._operand
        name = operand.argument
        given = getattr(args, name)
        if given is None:
            if operand.optional:
                return
            raise InvalidProblemError(
                f"{name}: expected a tensor {operand.element}{list(operand.shape)}, got NoneType"
            )
        views[operand.name] = self.view(given)

    def view(self, given: Any) -> TensorView:
        """The tensor as a checked view."""
        operand, name = self._operand, self._operand.argument
        view = TensorView.of(given, element=self._raw, argument=name)
        if view.shape != operand.shape:
            raise InvalidProblemError(f"{name}: expected shape {list(operand.shape)}, got {list(view.shape)}")
        if view.element is not operand.element:
            raise InvalidProblemError(f"{name}: expected element {operand.element}, got {view.element}")
        if view.device != self._home:
            raise InvalidProblemError(f"{name}: expected memory on {self._home}, got {view.device}")
        if operand.role is Role.OUT and view.readonly:
            raise InvalidProblemError(f"{name}: expected writable memory, got a read-only tensor")
        return self._checked_batches(view) if operand.batches else self._checked_memory(view)

    def _checked_memory(self, view: TensorView) -> TensorView:
        """A view of a tensor, or of one batch, whose strides and alignment are checked."""
        operand, name = self._operand, self._operand.argument
        if not self._empty:
            if operand.lines is not None:
                view = self._checked_lines(view, operand.lines)
            elif not view.is_contiguous:
                raise InvalidProblemError(f"{name}: expected contiguous memory, got {view!r}")
            check_alignment(name, view.address, self._alignment.address)
        elif operand.lines is not None:
            view = _packed_lines(view, operand.lines, name)
        return view

    def _checked_batches(self, view: TensorView) -> TensorView:
        operand, name, stride = self._operand, self._operand.argument, view.strides[0]
        one = self._checked_memory(_restrided(view, view.shape[1:], view.strides[1:], name))
        if operand.shape[0] == 1:
            return one
        if self._empty:
            return _restrided(view, view.shape, contiguous_strides(view.shape), name)
        if stride < 0:
            raise InvalidProblemError(f"{name}: expected a batch stride of at least 0, got {stride}")
        if self._alignment.line > 1:
            check_alignment(f"{name} batch stride", stride * view.element.itemsize, self._alignment.line)
        view = _restrided(view, view.shape, (stride, *one.strides), name)
        if operand.role is Role.OUT and not lie_apart(view):
            raise InvalidProblemError(f"{name}: expected batches that lie apart, got strides {view.strides}")
        return view

    def _checked_lines(self, view: TensorView, order: MatrixOrder) -> TensorView:
        name = self._operand.argument
        (count, width), (stride, step), line = view.shape, view.strides, "row"
        if order is MatrixOrder.COLUMN:
            count, width, stride, step, line = width, count, step, stride, "column"
        if width > 1 and step != 1:
            raise InvalidProblemError(
                f"{name}: expected unit stride along its {line}s, got strides {view.strides}"
            )
        if count == 1:
            return view if stride == width else _packed_lines(view, order, name)
        if stride < width:
            raise InvalidProblemError(
                f"{name}: expected a {line} stride of at least {width} elements, got {stride}"
            )
        if self._alignment.line > 1:
            check_alignment(f"{name} {line} stride", stride * view.element.itemsize, self._alignment.line)
        return view


def check_tensor(given: Any, operand: Operand, alignment: Alignment, home: Device) -> TensorView:
    """``given`` as a view that fits an IN operand. Raises what a run raises for it."""
    return _TensorCheck(operand, Alignment(alignment.address), home).view(given)


def _packed_lines(view: TensorView, order: MatrixOrder, argument: str) -> TensorView:
    """The view with the strides of a dense matrix, because the stride of a single line has no meaning."""
    rows, columns = view.shape
    return _restrided(view, view.shape, (columns, 1) if order is MatrixOrder.ROW else (1, rows), argument)


def _restrided(
    view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...], argument: str
) -> TensorView:
    """Another view from the same address on."""
    return honest_view(
        view.address, shape, view.element, view.device, strides, view.readonly, view.owner, argument
    )


class _ObjectCheck:
    __slots__ = ("_alignments", "_argument", "_home", "_layouts", "_packing")

    def __init__(
        self,
        argument: str,
        packing: Packing,
        alignments: Mapping[str, int],
        layouts: tuple[str, ...],
        home: Device,
    ) -> None:
        self._argument, self._packing, self._alignments = argument, packing, alignments
        self._layouts, self._home = layouts, home

    def __call__(self, args: Args, views: Views) -> None:
        name = self._argument
        for part, view in self._packing.unpack(getattr(args, name), name, self._layouts, self._home).items():
            if 0 not in view.shape:
                check_alignment(name, view.address, self._alignments[part])
            views[part] = view


def reinterpretable(element: ElementKind) -> ElementKind | None:
    """The element, if some frameworks lack it, so that it may arrive as raw bits; else None."""
    return element if element in (ElementKind.BF16, ElementKind.FP8_E4M3, ElementKind.FP8_E5M2) else None


def check_alignment(name: str, address: int, alignment: int) -> None:
    if address % alignment:
        raise MisalignedOperandError(name, alignment, address)


# Overlaps -----------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """A result and another operand that must not overlap."""

    result: Operand
    other: Operand
    views: tuple[str, ...]
    """Names of the other operand's views."""

    def check(self, views: Views) -> None:
        out = views.get(self.result.name)
        if out is None:
            return
        for name in self.views:
            other = views.get(name)
            if other is not None and not (self.result.may_be == self.other.name and _lie_alike(out, other)):
                _check_apart(self.result.argument, out, self.other.argument, other)


def _lie_alike(one: TensorView, other: TensorView) -> bool:
    size = other.element.itemsize
    return (one.address, one.strides, one.element.itemsize) == (other.address, other.strides, size)


def _pairs(operands: tuple[Operand, ...], layouts: tuple[str, ...]) -> tuple[_Pair, ...]:
    return tuple(
        _Pair(out, other, tuple(part.view for part in _parts_of(other, layouts)))
        for at, out in enumerate(operands)
        for where, other in enumerate(operands)
        if out.role is Role.OUT and other is not out and not (other.role is Role.OUT and where > at)
    )


def _check_apart(name: str, out: TensorView, other_name: str, other: TensorView) -> None:
    """Raise InvalidProblemError if a result shares memory with another operand."""
    if out.address >= other.end or other.address >= out.end:  # nearly always
        return
    if any(overlap(one, two) for one in spans_of(out) for two in spans_of(other)):
        raise InvalidProblemError(f"{name}: expected memory apart from {other_name}, got an overlap")
