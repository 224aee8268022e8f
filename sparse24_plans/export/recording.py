"""Records how a plan's launches follow from its operands, by making them for operands that don't exist.

A kernel's own code makes the launches, for several sets of addresses and strides. A number that follows the
address of an operand, its stride or its alignment is told by how it differs between them; all others are the
problem's. No fact about a kernel is therefore written a second time. A launch that can't be described in this
way is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import cache
from math import prod
from struct import Struct
from typing import Any, NamedTuple

from .._vendor.cuda_driver_abi import MapDescription
from ..device.jit.launcher import KernelCode, RecordedFill, RecordedLaunch, recording
from ..device.jit.structs import KernelParams
from ..device.tensors import Device, TensorView
from ..errors import UnsupportedError
from ..plan.operands import Operand, Role, Views
from ..plan.plan import Plan
from ..vocab import ElementKind, MatrixOrder

WORKSPACE = -1
"""The operand that stands for the workspace."""
_VECTOR = 16
"""Bytes that an alignment flag of a kernel is about."""
_MAX_LAUNCHES = 256
"""Most launches of a plan: each is recorded for every n, with every operand moved."""
_FIRST, _APART, _STEP = 1 << 60, 1 << 50, 1 << 45
_NUMBERS = {4: "I", 8: "Q"}
"""Struct formats of the numbers that a recipe can describe, by their bytes."""


class Kind(IntEnum):
    """The origin of a number in a parameter struct."""

    NUMBER = 0
    """The problem's."""
    ADDRESS = 1
    """The operand's address, a number, and ``factor`` times its stride in elements; 0 without the operand."""
    STRIDE = 2
    """``factor`` times the operand's stride in elements."""
    LAUNCH_ID = 3
    """A number that no other launch has."""
    ALIGNED = 4
    """1 if all lines of the operand begin at multiples of 16 bytes. ``factor``: bytes of an element."""


class Place(NamedTuple):
    """A number and where it comes from. ``slot`` indexes the numbers of a recording."""

    at: int
    """Offset in the parameter struct."""
    size: int
    """Bytes: 4 or 8."""
    kind: Kind
    operand: int
    factor: int
    slot: int


class MapPlace(NamedTuple):
    """A tensor map: the arguments of its encoder, innermost dimension first."""

    at: int
    data_type: int
    swizzle: int
    promotion: int
    only_if_aligned: int
    """The operand without whose 16-byte alignment the map isn't written; WORKSPACE: it always is."""
    address: Place
    sizes: tuple[int, ...]
    """Slots."""
    pitches: tuple[Place, ...]
    """Bytes from one index of a dimension to the next, without the innermost."""
    box: tuple[int, ...]
    """Slots."""
    walk: tuple[int, ...]
    """Numbers of ``cuTensorMapEncodeIm2col``, as in MapDescription; empty for other encoders."""


class Launch(NamedTuple):
    """A kernel's launch. Its threads and shared memory are those of ``code``."""

    code: KernelCode
    overlapping: bool
    """Whether it may begin before the launch in front of it has ended."""
    grid: int
    """Slot of the number of CTAs."""
    nbytes: int
    """Size of the parameter struct."""
    places: tuple[Place, ...]
    maps: tuple[MapPlace, ...]


class Fill(NamedTuple):
    """A fill of memory with a byte."""

    byte: int
    address: Place
    nbytes: int
    """Slot."""


class OperandUse(NamedTuple):
    """The things that a caller passes for an operand, and what is checked of them."""

    name: str
    """Name of the argument; a canonical weight's buffers are ``weight.values`` and ``weight.metadata``."""
    written: bool
    optional: bool
    itemsize: int
    strided: bool
    """Whether lines may lie apart. Else the operand is one line."""
    lines: int
    """Slot of the number of rows, or columns if these are contiguous."""
    width: int
    """Slot of a line's elements."""
    alignment: int
    """Bytes that divide the address."""
    line_alignment: int
    """Bytes that divide the distance of lines."""
    may_be: int
    """The operand that may begin at the same address; WORKSPACE: none."""


class Recipe(NamedTuple):
    """All of a plan's launches but their numbers. Hashable: many n share one."""

    kernel: str
    guarantee: str
    """The guarantee as JSON."""
    workspace_alignment: int
    workspace: int
    """Slot of the workspace's size."""
    operands: tuple[OperandUse, ...]
    launches: tuple[Launch | Fill, ...]


def record(plan: Plan, most_n: int = 0) -> tuple[Recipe, tuple[int, ...]]:
    """The recipe of a plan, and the numbers that its slots index. Needs neither NVRTC nor a GPU.

    Batches of row-major matrices begin ``most_n`` rows apart, or as many as they have.

    Raises UnsupportedError for a library's or the host's kernel, for one of very many launches, and where a
    launch follows from its operands in a way that a recipe can't describe.
    """
    entry = plan.parts.choice.entry
    if entry.on_host or not entry.exportable:
        raise UnsupportedError(f"plan: expected a kernel that can be exported, got {entry.name}")
    with recording():
        return _Recorder(plan, most_n).recipe()


class _Probe(NamedTuple):
    """Operands at chosen places, and the launches that the kernel makes for them."""

    views: Views
    strides: tuple[int, ...]
    launches: list[Any]
    contents: list[tuple[Any, ...]]
    """The values of each launch's parameters, in the order of ``_cells``."""


class _Cell(NamedTuple):
    """A single value of a parameter struct."""

    name: str
    at: int
    size: int
    is_map: bool


class Buffer(NamedTuple):
    """One buffer of an operand."""

    view: str
    operand: Operand
    shape: tuple[int, ...]
    element: ElementKind
    apart: int
    """Lines from one batch of a matrix to the next; 0: it has no batches."""

    def at(self, address: int, stride: int, home: Device) -> TensorView:
        """The buffer at an address, with this stride of its lines."""
        strides: tuple[int, ...] | None = None
        if self.operand.lines is not None:
            strides = (1, stride) if self.operand.lines is MatrixOrder.COLUMN else (stride, 1)
            strides = (self.apart * stride, *strides) if self.apart else strides
        return TensorView(address, self.shape, self.element, home, strides=strides)


class _Recorder:
    def __init__(self, plan: Plan, most_n: int) -> None:
        self._plan = plan
        choice, operands, self._checks, self._home = plan.parts
        self._kernel = choice.entry.kernel_for(choice.descriptor)(choice)
        if self._kernel.launches > _MAX_LAUNCHES:
            raise UnsupportedError(
                f"plan: expected at most {_MAX_LAUNCHES} launches for export, got {self._kernel.launches}"
            )
        self._buffers = buffers_of(operands, choice.entry.layout_of(choice.descriptor), most_n)
        self._numbers: list[int] = []
        self._first = self._probe()
        self._again = self._probe()
        self._moved = self._probe(step=1)
        self._probes = self._first, self._moved
        self._displaced = dict(self._displacements())

    def recipe(self) -> tuple[Recipe, tuple[int, ...]]:
        plan = self._plan
        operands = tuple(map(self._use, range(len(self._buffers))))
        launches = tuple(map(self._launch, range(len(self._first.launches))))
        found = Recipe(
            plan.kernel,
            plan.guarantee.model_dump_json(),
            plan.workspace_alignment,
            self._slot(plan.workspace_size()),
            operands,
            launches,
        )
        return found, tuple(self._numbers)

    def _slot(self, number: int) -> int:
        self._numbers.append(int(number))
        return len(self._numbers) - 1

    # Operands -----------------------------------------------------------------------------------------

    def _use(self, at: int) -> OperandUse:
        buffer, checks = self._buffers[at], self._checks
        operand, name = buffer.operand, checks.arguments[buffer.view]
        lines, width = lines_of(buffer)
        may_be = [number for number, one in enumerate(self._buffers) if one.operand.name == operand.may_be]
        return OperandUse(
            name,
            operand.role is Role.OUT,
            operand.optional,
            buffer.element.itemsize,
            operand.lines is not None,
            self._slot(lines),
            self._slot(width),
            checks.alignments[name],
            self._kernel.alignment_of(operand.name).line,
            may_be[0] if may_be else WORKSPACE,
        )

    def _probe(self, step: int = 0, displaced: int = -1, by: int = 0, wider: int = 0) -> _Probe:
        """``step`` moves all operands. ``displaced`` lies ``by`` bytes further and has a ``wider`` stride."""
        views: Views = {}
        strides = []
        for at, buffer in enumerate(self._buffers):
            address = self._address(at, step) + (by if at == displaced else 0)
            stride = _stride(buffer, at, step) + (wider if at == displaced else 0)
            views[buffer.view] = buffer.at(address, stride, self._home)
            strides.append(stride)
        launches: list[Any] = []
        self._kernel.launcher(views, self._address(WORKSPACE, step))(launches)
        contents = [_values(one.parameters) if isinstance(one, RecordedLaunch) else () for one in launches]
        return _Probe(views, tuple(strides), launches, contents)

    def _address(self, at: int, step: int) -> int:
        at = len(self._buffers) if at == WORKSPACE else at
        return _FIRST + at * _APART + step * (_STEP + 256 * (at + 1))

    def _displacements(self) -> Iterator[tuple[int, tuple[_Probe, ...]]]:
        """For each operand that needn't be aligned to 16 bytes, probes in which it isn't."""
        for at, buffer in enumerate(self._buffers):
            name = self._checks.arguments[buffer.view]
            address = self._checks.alignments[name]
            line = self._kernel.alignment_of(buffer.operand.name).line
            found = []
            if address < _VECTOR:
                found.append(self._probe(displaced=at, by=address))
            if buffer.operand.lines is not None and lines_of(buffer)[0] > 1 and line < _VECTOR:
                found.append(self._probe(displaced=at, wider=max(1, line // buffer.element.itemsize)))
            if found:
                yield at, tuple(found)

    # Launches -----------------------------------------------------------------------------------------

    def _launch(self, at: int) -> Launch | Fill:
        first, again, moved = (one.launches[at] for one in (self._first, self._again, self._moved))
        if isinstance(first, RecordedFill):
            address = self._told(0, 8, first.address, again.address, moved.address)
            return Fill(first.byte, address, self._slot(first.nbytes))
        assert isinstance(first, RecordedLaunch)
        if (first.code, first.blocks, first.overlapping) != (moved.code, moved.blocks, moved.overlapping):
            raise self._refused("the grid")
        places, maps = [], []
        contents = [one.contents[at] for one in (self._first, self._again, self._moved)]
        for index, cell in enumerate(_cells(type(first.parameters))):
            values = [one[index] for one in contents]
            if cell.is_map:
                displaced = self._displaced_values(at, index)
                if (tensor_map := self._map(cell, values, displaced)) is not None:
                    maps.append(tensor_map)
                continue
            if cell.size not in _NUMBERS:
                raise self._refused(cell.name)
            place = self._told(cell.at, cell.size, *values)
            places.append(self._aligned(cell, place, self._displaced_values(at, index)))
        nbytes = ctypes.sizeof(first.parameters)
        grid = self._slot(first.blocks)
        return Launch(first.code, first.overlapping, grid, nbytes, tuple(places), tuple(maps))

    def _displaced_values(self, launch: int, cell: int) -> Iterator[tuple[int, list[Any]]]:
        """The cell's values for each operand that isn't aligned."""
        for operand, probes in self._displaced.items():
            yield operand, [one.contents[launch][cell] for one in probes]

    def _told(self, at: int, size: int, first: int, again: int, moved: int) -> Place:
        """The place of a number, from its values for the first operands, once more, and for moved ones."""
        if first != again:
            return Place(at, size, Kind.LAUNCH_ID, WORKSPACE, 0, self._slot(0))
        if first == moved:
            return Place(at, size, Kind.NUMBER, WORKSPACE, 0, self._slot(first))
        for operand in (*range(len(self._buffers)), WORKSPACE):
            offset, later = first - self._address(operand, 0), moved - self._address(operand, 1)
            stride, wider = (0 if operand == WORKSPACE else one.strides[operand] for one in self._probes)
            factor = (later - offset) // (wider - stride) if stride != wider else 0
            number = offset - factor * stride
            if 0 <= number < _STEP and number == later - factor * wider:
                return Place(at, size, Kind.ADDRESS, operand, factor, self._slot(number))
        for operand, (stride, wider) in enumerate(zip(self._first.strides, self._moved.strides, strict=True)):
            if stride and stride != wider and first % stride == 0 and first // stride * wider == moved:
                return Place(at, size, Kind.STRIDE, operand, first // stride, self._slot(0))
        raise self._refused(f"the number at {at}")

    def _aligned(self, cell: _Cell, place: Place, displaced: Iterable[tuple[int, list[int]]]) -> Place:
        """``place``, or that of a flag, if operands that aren't aligned change its number."""
        for operand, found in displaced:
            expected = [self._value(place, one) for one in self._displaced[operand]]
            if place.kind is Kind.LAUNCH_ID or found == expected:
                continue
            if place.kind is not Kind.NUMBER or self._numbers[place.slot] != 1 or any(found):
                raise self._refused(cell.name)
            itemsize = self._buffers[operand].element.itemsize
            return place._replace(kind=Kind.ALIGNED, operand=operand, factor=itemsize)
        return place

    def _value(self, place: Place, probe: _Probe) -> int:
        """The number that a probe should have at the place."""
        number = self._numbers[place.slot]
        if place.kind is Kind.ADDRESS:
            view = self._buffers[place.operand].view if place.operand != WORKSPACE else None
            if view is None:
                return number + self._address(WORKSPACE, 0)
            return number + probe.views[view].address + place.factor * probe.strides[place.operand]
        return probe.strides[place.operand] * place.factor if place.kind is Kind.STRIDE else number

    def _map(
        self, cell: _Cell, raw: list[bytes], displaced: Iterable[tuple[int, list[bytes]]]
    ) -> MapPlace | None:
        first, _, moved = map(MapDescription.of, raw)
        if first is None or moved is None:
            if first is not moved:
                raise self._refused(cell.name)
            return None
        same = "data_type", "sizes", "box", "swizzle", "promotion", "walk"
        if any(getattr(first, one) != getattr(moved, one) for one in same):
            raise self._refused(cell.name)
        address = self._told(0, 8, first.address, first.address, moved.address)
        pitches = tuple(
            self._told(0, 8, one, one, other) for one, other in zip(first.pitches, moved.pitches, strict=True)
        )
        return MapPlace(
            cell.at,
            first.data_type,
            first.swizzle,
            first.promotion,
            self._condition(cell, displaced),
            address,
            tuple(map(self._slot, first.sizes)),
            pitches,
            tuple(map(self._slot, first.box)),
            first.walk,
        )

    def _condition(self, cell: _Cell, displaced: Iterable[tuple[int, list[bytes]]]) -> int:
        """The operand without whose alignment the map isn't written."""
        for operand, found in displaced:
            written = {MapDescription.of(one) is not None for one in found}
            if written == {False}:
                return operand
            if written == {False, True}:
                raise self._refused(cell.name)
        return WORKSPACE

    def _refused(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"plan: expected launches that a recipe can describe, got {what} of {self._plan.kernel} that "
            "follows from its operands in another way"
        )


@cache
def _cells(struct: type[KernelParams]) -> tuple[_Cell, ...]:
    """The values of a struct, of the structs in it and of its arrays."""
    return tuple(_cells_from(struct, 0))


def _cells_from(struct: type[KernelParams], start: int) -> Iterator[_Cell]:
    for name, field in struct.declared.items():
        kind = field.ctype._type_ if field.length else field.ctype
        size = ctypes.sizeof(kind)
        for index in range(field.length or 1):
            at = start + getattr(struct, name).offset + index * size
            if issubclass(kind, KernelParams):
                yield from _cells_from(kind, at)
            else:
                yield _Cell(name, at, size, field.cxx == "TensorMap")


def _values(parameters: KernelParams) -> tuple[Any, ...]:
    """The value of each cell: the unsigned number of its 4 or 8 bytes, or the bytes of a larger one."""
    return _format(type(parameters)).unpack(bytes(parameters))


@cache
def _format(struct: type[KernelParams]) -> Struct:
    words, end = ["<"], 0
    for cell in _cells(struct):
        words += [f"{cell.at - end}x", _NUMBERS.get(cell.size, f"{cell.size}s")]
        end = cell.at + cell.size
    return Struct("".join((*words, f"{ctypes.sizeof(struct) - end}x")))


def buffers_of(operands: Iterable[Operand], layout: str, most_n: int = 0) -> list[Buffer]:
    """The buffers of operands, in order. ``layout`` is that of packed operands that declare none.

    Batches of row-major matrices begin ``most_n`` rows apart, or as many as they have.
    """
    return [one for operand in operands for one in _buffers_of(operand, layout, most_n)]


def _buffers_of(operand: Operand, layout: str, most_n: int) -> Iterator[Buffer]:
    if operand.packing is not None:
        forms = operand.packing.forms(layout)
        for part, (shape, element) in zip(operand.packing.parts(layout), forms, strict=True):
            yield Buffer(part.view, operand, shape, element, 0)
        return
    shape, apart = operand.shape, 0
    if operand.batches and shape[0] == 1:
        shape = shape[1:]
    elif operand.batches and operand.lines is not None:
        apart = max(shape[1], most_n) if operand.lines is MatrixOrder.ROW else shape[2]
    yield Buffer(operand.name, operand, shape, operand.element, apart)


def lines_of(buffer: Buffer) -> tuple[int, int]:
    """Number of lines, those between batches included, and a line's elements."""
    shape = buffer.shape
    if buffer.operand.lines is None:
        return 1, prod(shape)
    lines, width = shape[-2:] if buffer.operand.lines is MatrixOrder.ROW else shape[:-3:-1]
    earlier = (shape[0] - 1) * buffer.apart if buffer.apart else 0
    return max(0, earlier + lines), width


def _stride(buffer: Buffer, at: int, step: int) -> int:
    lines, width = lines_of(buffer)
    if lines <= 1:
        return width
    return -(-width // _VECTOR) * _VECTOR + _VECTOR * (5 + 3 * at + step * (11 + 7 * at))
