"""Packed operands: what plans make once of a block-sparse matrix that stays, such as a layer's weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..device.tensors import HOST, Device, TensorView, wrong
from ..errors import InvalidProblemError
from ..plan.operands import Forms, Packing, Part, Views
from ..vocab import BLOCKS_LAYOUT, DENSE_BLOCKS_LAYOUT, ElementKind, element_kind, integer
from ..vocab.fields import INT32_MAX
from ..weights.weight import Packed, restored_buffers
from .lookup_tables import length, view_of
from .shape import BlockSparseShape

_PARTS = {BLOCKS_LAYOUT: ("values", "tables"), DENSE_BLOCKS_LAYOUT: ("dense",)}
"""The callers' names of the buffers of each layout."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks(Packed):
    """A block-sparse operand in the form that a plan's kernel reads. Made by ``plan.pack(layout, values)``.

    ``layout_id`` names the form, and ``buffers`` are its memory. ``blocks``: the caller's values, which must
    not change, and look-up tables. ``dense_blocks``: a dense copy. ``shape``, ``batch``, ``element`` and
    ``device`` are the matrix's. Plans of every n that read the form can use it.

    Raises InvalidProblemError for buffers that do not fit the form, BufferTooSmallError for short ones.
    """

    layout_id: str
    shape: BlockSparseShape
    batch: int
    element: ElementKind
    device: Device
    buffers: tuple[TensorView, ...]

    def __post_init__(self) -> None:
        if type(self.layout_id) is not str or self.layout_id not in _PARTS:
            raise wrong("layout_id", " or ".join(_PARTS), self.layout_id)
        if type(self.shape) is not BlockSparseShape:
            raise wrong("shape", "a BlockSparseShape", self.shape)
        batch = integer(self.batch)
        if batch is None or not 0 <= batch <= INT32_MAX:
            raise wrong("batch", "an integer from 0 to 2^31 - 1", self.batch)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "element", element_kind(self.element))
        self._check_place()
        parts = _PARTS[self.layout_id]
        if len(self.buffers) != len(parts):
            raise InvalidProblemError(f"buffers: expected {', '.join(parts)}, got {len(self.buffers)}")
        self._check_buffers(_bytes(*form) for form in self._forms)

    @property
    def _forms(self) -> Forms:
        return _forms(self.shape, self.batch, self.element)[self.layout_id]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, the caller's values included."""
        return sum(_bytes(*form) for form in self._forms)

    @property
    def views(self) -> tuple[TensorView, ...]:
        """The buffers in their shapes, read-only."""
        found = []
        for buffer, (shape, element) in zip(self.buffers, self._forms, strict=True):
            view = TensorView(buffer.address, shape, element, buffer.device, owner=buffer.owner)
            view.readonly = True
            found.append(view)
        return tuple(found)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the bits. Raises UnsupportedError for an operand in device memory."""
        fields = (self.layout_id, self.shape, self.batch, self.element.value)
        return _restored, (*fields, self._portable_parts())


def _restored(
    layout_id: str, shape: BlockSparseShape, batch: int, element: str, parts: list[tuple[Any, str]]
) -> PackedBlocks:
    return PackedBlocks(layout_id, shape, batch, element_kind(element), HOST, restored_buffers(parts))


def _forms(shape: BlockSparseShape, batch: int, element: ElementKind) -> dict[str, Forms]:
    """Shape and element of each buffer, by layout."""
    values = batch, shape.blocks, shape.block, shape.block
    return {
        BLOCKS_LAYOUT: ((values, element), ((length(shape),), ElementKind.I32)),
        DENSE_BLOCKS_LAYOUT: (((batch, shape.heads, shape.rows, shape.cols), element),),
    }


def _bytes(shape: tuple[int, ...], element: ElementKind) -> int:
    return math.prod(shape) * element.itemsize


@dataclass(frozen=True, slots=True)
class TablesPacking(Packing):
    """How look-up tables become the view that kernels know as ``layout``."""

    shape: BlockSparseShape

    def parts(self, layout: str) -> tuple[Part, ...]:
        return (Part("layout", alignment=ElementKind.I32.itemsize),)

    def forms(self, layout: str) -> Forms:
        return (((length(self.shape),), ElementKind.I32),)

    def unpack(self, given: Any, argument: str, layouts: tuple[str, ...], home: Device) -> Views:
        view = view_of(self.shape, given)
        if view.device != home:
            raise InvalidProblemError(
                f"{argument}: expected memory on {home}, got {view.device}; call plan.pack"
            )
        return {"layout": view}


@dataclass(frozen=True, slots=True)
class BlocksPacking(Packing):
    """How a packed operand becomes the views that kernels know by ``name`` and ``layout``."""

    name: str
    shape: BlockSparseShape
    batch: int
    element: ElementKind

    def parts(self, layout: str) -> tuple[Part, ...]:
        names = zip((self.name, "layout"), _PARTS[layout], self.forms(layout), strict=False)
        return tuple(Part(view, name, element.itemsize) for view, name, (_, element) in names)

    def forms(self, layout: str) -> Forms:
        return _forms(self.shape, self.batch, self.element)[layout]

    def unpack(self, given: Any, argument: str, layouts: tuple[str, ...], home: Device) -> Views:
        wanted = " or ".join(map(repr, layouts))
        if type(given) is not PackedBlocks:
            raise InvalidProblemError(
                f"{argument}: expected PackedBlocks of layout {wanted}, got {type(given).__name__}; "
                "call plan.pack(layout, values)"
            )
        expected = {"shape": self.shape, "batch": self.batch, "element": self.element, "device": home}
        for name, value in expected.items():
            if (got := getattr(given, name)) != value:
                raise InvalidProblemError(f"{argument}: expected {name} {value!s}, got {got!s}")
        if given.layout_id not in layouts:
            raise InvalidProblemError(
                f"{argument}: expected layout {wanted}, got {given.layout_id!r}; "
                "call plan.pack(layout, values)"
            )
        return dict(zip((self.name, "layout"), given.views, strict=False))
