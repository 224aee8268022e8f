"""Look-up tables: what kernels read of a layout, as int32 in one piece of memory that never moves.

The order of a layout's values, row by row, is the one that the tables define; a second set of them walks the
same blocks column by column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..device.tensors import TensorView
from ..errors import InvalidProblemError
from .layout import BlockSparseLayout
from .shape import BlockSparseShape

Array = np.ndarray[Any, np.dtype[np.int32]]


class LookUp(NamedTuple):
    """The tables of a shape with R rows and C columns of blocks, in the order in which they lie in memory."""

    row_pointers: Array
    """[heads * R + 1]: where in the values the blocks of row r of head h, at h * R + r, begin."""
    columns: Array
    """[blocks]: column of each block in its head."""
    rows: Array
    """[blocks]: h * R + r of each block."""
    column_pointers: Array
    """[heads * C + 1]: where column c of head h, at h * C + c, begins in the next two."""
    column_rows: Array
    """[blocks]: row of each block in its head, column by column."""
    column_order: Array
    """[blocks]: place of each block in the values, column by column."""

    @classmethod
    def of(cls, memory: Array, shape: BlockSparseShape) -> LookUp:
        """Views of the parts of ``memory``, int32 [:func:`length`]."""
        ends = np.cumsum(_lengths(shape))[:-1]
        return cls(*np.split(memory, ends))


def _lengths(shape: BlockSparseShape) -> tuple[int, ...]:
    rows, columns, count = shape.heads * shape.block_rows, shape.heads * shape.block_cols, shape.blocks
    return rows + 1, count, count, columns + 1, count, count


def length(shape: BlockSparseShape) -> int:
    """Int32s of the tables of such a layout."""
    return sum(_lengths(shape))


class BlockSparseTables:
    """A layout's look-up tables, which plans take; made once, and at the same addresses for life.

    :meth:`update` writes the tables of another mask over them, so whatever was bound or captured with them
    serves that mask from then on. Made by ``plan.pack(layout)``; serves every plan of its shape.
    """

    __slots__ = ("_memory", "_view", "lookup", "shape")

    shape: BlockSparseShape
    """Of the layouts that they can be of."""
    lookup: LookUp
    """The tables by name, read-only: ``row_pointers``, ``columns``, ``rows`` and those of the columns."""

    def __init__(self, layout: BlockSparseLayout) -> None:
        """In memory of their own, on the host. Raises InvalidProblemError for anything but a layout."""
        shape = _checked(layout).shape
        self._set(shape, np.empty(length(shape), np.int32))
        self.update(layout)

    def _set(self, shape: BlockSparseShape, memory: Array) -> None:
        self.shape, self._memory = shape, memory
        shown = memory.view()
        shown.flags.writeable = False
        self.lookup = LookUp.of(shown, shape)
        self._view = TensorView.of(shown)

    def update(self, layout: BlockSparseLayout) -> None:
        """Write the tables of ``layout``, which has the same shape, in place.

        On the host it is done when the call returns; no plan may run with the tables meanwhile. Raises
        InvalidProblemError for another shape, before anything is written.
        """
        other = _checked(layout).shape
        if other != self.shape:
            raise InvalidProblemError(f"layout: expected {self.shape!r}, got {other!r}")
        _fill(LookUp.of(self._memory, self.shape), layout.bitmap, self.shape)

    @property
    def view(self) -> TensorView:
        """All of them, read-only: int32, one table behind the other."""
        return self._view

    def __repr__(self) -> str:
        return f"BlockSparseTables({self.shape!r})"

    def __deepcopy__(self, memo: object) -> BlockSparseTables:
        return _restored(self.shape, self._memory.copy())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.shape, self._memory)


def _restored(shape: BlockSparseShape, memory: Array) -> BlockSparseTables:
    tables = object.__new__(BlockSparseTables)
    tables._set(shape, memory)
    return tables


def _checked(layout: object) -> BlockSparseLayout:
    if type(layout) is not BlockSparseLayout:
        raise InvalidProblemError(f"layout: expected BlockSparseLayout, got {type(layout).__name__}")
    return layout


def _fill(tables: LookUp, kept: Any, shape: BlockSparseShape) -> None:
    lines, across = shape.heads * shape.block_rows, shape.block_cols
    flat = np.flatnonzero(kept)
    tables.row_pointers[...] = np.searchsorted(flat, np.arange(lines + 1) * across)
    tables.rows[...] = np.repeat(np.arange(lines, dtype=np.int32), np.diff(tables.row_pointers))
    np.subtract(flat, tables.rows.astype(np.int64) * across, out=tables.columns, casting="unsafe")
    head, row = np.divmod(tables.rows, max(shape.block_rows, 1)) if shape.heads > 1 else (0, tables.rows)
    column = tables.columns + head * np.int32(across)
    columns = shape.heads * across
    if columns <= 1 << 16:
        column = column.astype(np.uint16)  # which NumPy sorts by radix
    tables.column_order[...] = np.argsort(column, kind="stable")
    np.take(row, tables.column_order, out=tables.column_rows)
    tables.column_pointers[0] = 0
    np.cumsum(np.bincount(column, minlength=columns), out=tables.column_pointers[1:])


def view_of(shape: BlockSparseShape, given: object) -> TensorView:
    """The memory of tables of such layouts. Raises InvalidProblemError for anything else."""
    if type(given) is not BlockSparseTables:
        hint = "; call plan.pack(layout)" if type(given) is BlockSparseLayout else ""
        raise InvalidProblemError(f"layout: expected BlockSparseTables, got {type(given).__name__}{hint}")
    if given.shape != shape:
        raise InvalidProblemError(f"layout: expected tables of {shape!r}, got those of {given.shape!r}")
    return given.view
