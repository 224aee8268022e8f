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
from ..vocab import CANONICAL_LAYOUT, ElementKind, MatrixOrder
from ..weights.packed_layouts import Quantization
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import CanonicalWeight, PackedWeight, Sparse24Weight
from .overlap import lie_apart, overlap, spans_of

Views: TypeAlias = dict[str, TensorView]
"""Checked operands by their names to the kernel. A weight is ``values``, ``metadata`` and, if quantized,
``scales``; or ``packed``."""


class Role(Enum):
    """The use of an operand.

    ``IN`` and ``OUT`` are tensors. ``WEIGHT``: a weight object, which is read. ``TABLES``: an object of the
    family, whose look-up tables are read and never move. ``PACKED``: an object of the family that its plans
    pack, which is read.
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


class Packing(NamedTuple):
    """How an object that a family's plans pack becomes views."""

    views: Mapping[str, tuple[str, ...]]
    """Names of the views to the kernel, by the object's layout."""
    parts: Mapping[str, tuple[str, ...]]
    """Names of the views to callers, by the object's layout."""
    forms: Mapping[str, tuple[tuple[tuple[int, ...], ElementKind], ...]]
    """Shape and element of each view, by the object's layout."""
    unpack: Callable[[Any, str, tuple[str, ...], Device], Views]
    """Gives the views of an object for an argument's name, the plan's layouts and its device. Raises
    InvalidProblemError for any other object."""


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
    layout: str | None = None
    """A weight's layout; None: any layout that the plan's kernel reads."""
    quantization: Quantization | None = None
    """How a weight stores its values; None: as they are."""
    optional: bool = False
    alignment: int = 1
    may_be: str | None = None
    """The operand whose memory this one may share: its elements lie at the same addresses."""
    of: Callable[[Any], TensorView] | None = None
    """Gives the memory of look-up tables. Raises InvalidProblemError for any other object."""
    packing: Packing | None = None
    """How a PACKED operand becomes views."""
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
        self.arguments = {
            view: _buffer_name(operand, view, layouts)
            for operand in operands
            for view in _views_of(operand, layouts)
        }
        """Callers' name of each view: an argument, or a canonical weight's buffer as ``weight.values``."""
        self.alignments = {
            self.arguments[view]: alignment
            for operand in operands
            for view, alignment in _view_alignments(operand, alignment_of(operand.name), layouts).items()
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
    if operand.role is Role.WEIGHT:
        return _WeightCheck(operand, _layouts_of(operand, layouts), needed.address, home)
    if operand.packing is not None:
        return _PackedCheck(
            operand, operand.packing, _view_alignments(operand, needed, layouts), layouts, home
        )
    return _TensorCheck(operand, Alignment(_address_alignment(operand, needed), needed.line), home)


def _address_alignment(operand: Operand, needed: Alignment) -> int:
    if operand.role is Role.WEIGHT:
        return needed.address
    return max(needed.address, operand.alignment, operand.element.itemsize)


class _TensorCheck:
    __slots__ = ("_alignment", "_empty", "_home", "_operand", "_raw")

    def __init__(self, operand: Operand, alignment: Alignment, home: Device) -> None:
        self._operand, self._alignment, self._home = operand, alignment, home
        self._raw = reinterpretable(operand.element)
        self._empty = 0 in operand.shape

    def __call__(self, args: Args, views: Views) -> None:
        operand = self._operand
        name = operand.argument
        given = getattr(args, name)
        if operand.of is not None:
            given = operand.of(given)
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
            hint = "; call plan.pack" if operand.role is Role.TABLES else ""
            raise InvalidProblemError(f"{name}: expected memory on {self._home}, got {view.device}{hint}")
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
    return _TensorCheck(operand, Alignment(_address_alignment(operand, alignment), 1), home).view(given)


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


_ONE_PART = ("packed",)


def _parts(operand: Operand, layout: str) -> tuple[str, ...]:
    """Names of a weight's buffers in a layout."""
    if layout != CANONICAL_LAYOUT:
        return _ONE_PART
    return ("values", "metadata", "scales") if operand.quantization else ("values", "metadata")


def _layouts_of(operand: Operand, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """Layouts that a weight may have: its declared one, or those that the plan's kernel reads."""
    return layouts if operand.layout is None else (operand.layout,)


def _views_of(operand: Operand, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the views that an operand may become."""
    if operand.packing is not None:
        return tuple(dict.fromkeys(name for one in layouts for name in operand.packing.views[one]))
    if operand.role is not Role.WEIGHT:
        return (operand.name,)
    return tuple(name for one in _layouts_of(operand, layouts) for name in _parts(operand, one))


def _view_alignments(operand: Operand, needed: Alignment, layouts: tuple[str, ...]) -> dict[str, int]:
    """Bytes that must divide the address of each view. The parts of a PACKED operand differ in element."""
    least = _address_alignment(operand, needed)
    if operand.packing is None:
        return dict.fromkeys(_views_of(operand, layouts), least)
    views, forms = operand.packing.views, operand.packing.forms
    return {
        view: max(least, element.itemsize)
        for one in layouts
        for view, (_, element) in zip(views[one], forms[one], strict=True)
    }


def _buffer_name(operand: Operand, view: str, layouts: tuple[str, ...]) -> str:
    """The argument; the buffers of a canonical weight and of a PACKED operand are its parts."""
    if operand.packing is not None:
        found = {
            name: part
            for layout in layouts
            for name, part in zip(operand.packing.views[layout], operand.packing.parts[layout], strict=True)
        }
        return f"{operand.argument}.{found[view]}"
    canonical = operand.role is Role.WEIGHT and view not in _ONE_PART
    return f"{operand.argument}.{view}" if canonical else operand.argument


class _WeightCheck:
    __slots__ = ("_alignment", "_home", "_layouts", "_operand")

    def __init__(self, operand: Operand, layouts: tuple[str, ...], alignment: int, home: Device) -> None:
        self._operand, self._layouts, self._alignment, self._home = operand, layouts, alignment, home

    def __call__(self, args: Args, views: Views) -> None:
        operand = self._operand
        weight = check_weight(getattr(args, operand.argument), operand, self._layouts, self._home)
        for name, view in zip(_parts(operand, weight.layout_id), weight.buffers, strict=True):
            if 0 not in view.shape:
                check_alignment(operand.argument, view.address, self._alignment)
            views[name] = view


class _PackedCheck:
    __slots__ = ("_alignments", "_home", "_layouts", "_operand", "_packing")

    def __init__(
        self,
        operand: Operand,
        packing: Packing,
        alignments: Mapping[str, int],
        layouts: tuple[str, ...],
        home: Device,
    ) -> None:
        self._operand, self._packing, self._alignments = operand, packing, alignments
        self._layouts, self._home = layouts, home

    def __call__(self, args: Args, views: Views) -> None:
        name = self._operand.argument
        for part, view in self._packing.unpack(getattr(args, name), name, self._layouts, self._home).items():
            if 0 not in view.shape:
                check_alignment(name, view.address, self._alignments[part])
            views[part] = view


CANONICAL_WEIGHTS = (Sparse24Weight, Sparse24QuantizedWeight)


def check_weight(given: Any, operand: Operand, layouts: tuple[str, ...], home: Device) -> PackedWeight:
    """``given`` as a packed weight in one of the ``layouts``. A canonical weight needs no packing."""
    name = operand.argument
    weight = given
    if type(given) in (*CANONICAL_WEIGHTS, PackedWeight):
        check_weight_fits(given, operand, home)  # first, because packing a wrong weight would be in vain
    if type(given) in CANONICAL_WEIGHTS and CANONICAL_LAYOUT in layouts:
        weight = PackedWeight.canonical(given)
    if type(weight) is not PackedWeight:
        hint = "; call plan.pack(weight)" if type(weight) in CANONICAL_WEIGHTS else ""
        canonical = (Sparse24QuantizedWeight if operand.quantization else Sparse24Weight).__name__
        wanted = " or a ".join(
            canonical if layout == CANONICAL_LAYOUT else f"PackedWeight of layout {layout!r}"
            for layout in layouts
        )
        raise InvalidProblemError(f"{name}: expected a {wanted}, got {type(weight).__name__}{hint}")
    if weight.layout_id not in layouts:
        wanted = " or ".join(repr(layout) for layout in layouts)
        raise InvalidProblemError(
            f"{name}: expected layout {wanted}, got {weight.layout_id!r}; call plan.pack(weight)"
        )
    return weight


def check_weight_fits(weight: PackedWeight | CanonicalWeight, operand: Operand, home: Device) -> None:
    """Raise InvalidProblemError if shape, element, quantization or device are not the operand's."""
    name, (m, k) = operand.argument, operand.shape
    if (weight.m, weight.k) != (m, k) or weight.element is not operand.element:
        raise InvalidProblemError(
            f"{name}: expected {operand.element}[{m}, {k}], got {weight.element}[{weight.m}, {weight.k}]"
        )
    if weight.quantization != operand.quantization:
        wanted, got = (
            one or "values that are not quantized" for one in (operand.quantization, weight.quantization)
        )
        raise InvalidProblemError(f"{name}: expected {wanted}, got {got}")
    if weight.device != home:
        raise InvalidProblemError(f"{name}: expected memory on {home}, got {weight.device}")


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
        _Pair(out, other, _views_of(other, layouts))
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
