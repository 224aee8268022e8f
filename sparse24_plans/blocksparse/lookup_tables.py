"""Look-up tables: what kernels read of a layout, as int32 in one piece of memory that never moves.

The tables define the order of a layout's values, row by row. A second set of tables walks the same blocks
column by column.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..device.adapters import Unmoving
from ..device.devices import current_on
from ..device.install import import_cupy
from ..device.streams import stream_handle
from ..device.tensors import HOST, Device, TensorView, check_device
from ..errors import BackendUnavailableError, InvalidProblemError
from .layout import BlockSparseLayout
from .panels import (
    NARROW_PANEL_ROWS,
    PANEL_ROWS,
    SLICE_FIELDS,
    KeptColumns,
    Slicing,
    fill_narrow_slices,
    fill_slices,
    has_narrow_slices,
    head_panels,
    is_small,
    narrow_panel_block_rows,
    panel_block_rows,
    slices_of,
)
from .shape import BlockSparseShape

Array = np.ndarray[Any, np.dtype[np.int32]]
GROUP_COLUMNS = 256
"""Columns of cells in a group of neighbouring blocks of a row."""


class LookUp(NamedTuple):
    """The tables of a shape, in the order of memory. R and C are its block rows and block columns in a head.

    A row panel has 128 rows of cells, and a narrow one has 64, or one block row of larger blocks. S, T and U
    are the panels of a head, its narrow panels and the columns in which the panels of all heads keep a block.
    Narrow panels have the tables of panels, with T for S. Column panels have the tables of row panels, with
    rows and columns exchanged. Tables named ``panel_pointers``, ``panel_kept`` and ``panel_places`` have
    entries for blocks of 16 and 32 alone, of which a panel has several block rows.
    """

    row_pointers: Array
    """[heads * R + 1]: place in the values where the blocks of row r of head h begin, at h * R + r."""
    columns: Array
    """[blocks]: column of each block in its head."""
    rows: Array
    """[blocks]: h * R + r of each block."""
    column_pointers: Array
    """[heads * C + 1]: index in ``column_rows`` where column c of head h begins, at h * C + c."""
    column_rows: Array
    """[blocks]: row of each block in its head, column by column."""
    column_order: Array
    """[blocks]: place of each block in the values, column by column."""
    row_bits: Array
    """[heads * R, ceil(C / 32)]: bit c % 32 of word c / 32 tells whether the row keeps column c."""
    column_bits: Array
    """[heads * C, ceil(R / 32)]: bit r % 32 of word r / 32 tells whether the column keeps row r."""
    row_panels: Array
    """[heads * S]: row panels as h * S + s, those with blocks in the most columns first, ties in order."""
    column_panels: Array
    row_panel_columns: Array
    """[heads * S]: number of columns in which each row panel keeps a block."""
    column_panel_rows: Array
    rows_by_length: Array
    """[heads * R]: rows of each head as h * R + r, those with the most blocks first, ties in order."""
    columns_by_length: Array
    """[heads * C]: columns of each head as h * C + c, those with the most blocks first, ties in order."""
    group_rows: Array
    """[groups]: h * R + r of each group of neighbouring blocks of a row; -1 past the last group."""
    group_firsts: Array
    """[groups]: place in the values of each group's first block; a group has at most ``group_size``."""
    row_panel_pointers: Array
    """[heads * S + 1]: index in ``row_panel_kept`` where panel s of head h begins, at h * S + s."""
    row_panel_kept: Array
    """[U]: increasing columns in which each row panel keeps a block, with room for all."""
    row_panel_places: Array
    """[U, 128 / block]: place in the values of each block row's block in that column, -1 if not kept."""
    column_panel_pointers: Array
    column_panel_kept: Array
    column_panel_places: Array
    row_narrow_panels: Array
    column_narrow_panels: Array
    row_narrow_panel_columns: Array
    column_narrow_panel_rows: Array
    row_narrow_panel_pointers: Array
    row_narrow_panel_kept: Array
    row_narrow_panel_places: Array
    column_narrow_panel_pointers: Array
    column_narrow_panel_kept: Array
    column_narrow_panel_places: Array
    row_slices: Array
    """[slices, 5]: slices of row panels, the longest first, as ``SLICE_FIELDS`` says."""
    column_slices: Array
    row_slice_count: Array
    """[1]: number of slices of row panels."""
    column_slice_count: Array
    row_panel_slices: Array
    """[heads * S]: number of slices of each row panel."""
    column_panel_slices: Array
    row_long_panels: Array
    """[1]: number of row panels that are long enough to be cut, which come first in ``row_panels``."""
    column_long_panels: Array
    row_narrow_slices: Array
    """[slices, 5]: slices of narrow panels, for blocks below 128."""
    column_narrow_slices: Array
    row_narrow_slice_count: Array
    column_narrow_slice_count: Array
    row_narrow_long_panels: Array
    column_narrow_long_panels: Array

    @classmethod
    def of(cls, memory: Array, shape: BlockSparseShape) -> LookUp:
        """Split ``memory``, int32 of :func:`length`, into the tables."""
        ends = accumulate(_lengths(shape))
        return cls(*(memory[end - size : end] for size, end in zip(_lengths(shape), ends, strict=True)))


@lru_cache(1024)
def _lengths(shape: BlockSparseShape) -> tuple[int, ...]:
    rows, columns, count = shape.heads * shape.block_rows, shape.heads * shape.block_cols, shape.blocks
    sparse = rows + 1, count, count, columns + 1, count, count
    bits = rows * words(shape.block_cols), columns * words(shape.block_rows)
    size = group_size(shape)
    groups = min(count, (count + rows * (size - 1)) // size)  # the most there can be
    panels, kept = _panel_lengths(shape, panel_block_rows(shape))
    narrow, narrow_kept = _panel_lengths(shape, narrow_panel_block_rows(shape))
    whole = *sparse, *bits, *panels, *panels, rows, columns, groups, groups, *kept
    return *whole, *narrow, *narrow, *narrow_kept, *_slice_lengths(shape)


def _slice_lengths(shape: BlockSparseShape) -> tuple[int, ...]:
    """Slices of row panels and of column panels, their counts and long panels, and those of narrow panels."""
    whole, narrow = (
        [Slicing.of(shape, by_columns=side, rows=rows) for side in (False, True)]
        for rows in (PANEL_ROWS, NARROW_PANEL_ROWS)
    )
    room, narrow_room = ([SLICE_FIELDS * one.room for one in sides] for sides in (whole, narrow))
    of_narrow = (*narrow_room, 1, 1, 1, 1) if has_narrow_slices(shape) else (0, 0, 0, 0, 0, 0)
    return (*room, 1, 1, *(one.panels for one in whole), 1, 1, *of_narrow)


def _panel_lengths(shape: BlockSparseShape, lines: int) -> tuple[list[int], list[int]]:
    """Panels of ``lines`` block rows, and of block columns; both sides' pointers, kept columns and places."""
    panels = [shape.heads * head_panels(cells, lines * shape.block) for cells in (shape.rows, shape.cols)]
    kept: list[int] = []
    for count, across in zip(panels, (shape.block_cols, shape.block_rows), strict=True):
        most = min(shape.blocks, count * across)
        kept += [count + 1, most, most * lines]
    return panels, kept if is_small(shape) else [0] * len(kept)


def words(bits: int) -> int:
    """Number of int32 words that hold the given number of bits."""
    return -(-bits // 32)


def group_size(shape: BlockSparseShape) -> int:
    """Most blocks of a group."""
    return GROUP_COLUMNS // shape.block


def groups(shape: BlockSparseShape) -> int:
    """Most groups of a layout of this shape."""
    return _lengths(shape)[LookUp._fields.index("group_rows")]


def addresses(start: int, shape: BlockSparseShape) -> dict[str, int]:
    """Address of each table by name, for tables at ``start``."""
    found, at = {}, start
    for name, count in zip(LookUp._fields, _lengths(shape), strict=True):
        found[name] = at
        at += 4 * count
    return found


def length(shape: BlockSparseShape) -> int:
    """Number of int32 in the tables of this shape."""
    return sum(_lengths(shape))


class BlockSparseTables(Unmoving):
    """A layout's look-up tables, which plans take; made once, and at the same addresses for life.

    :meth:`update` writes the tables of another mask over them, so whatever was bound or captured with them
    serves that mask from then on. Made by ``plan.pack(layout)``; serves its device's plans of its shape.
    """

    __slots__ = ("_is_captured", "_lookup", "_memory", "_there", "_view", "device", "is_behind", "shape")

    shape: BlockSparseShape
    """Shape of the layouts that the tables can describe."""
    device: Device
    """Device on which plans read the tables."""
    is_behind: bool
    """Whether the GPU may have other tables than the host: after ``plan.update``, and for good once a CUDA
    graph has captured it, since the host sees no replay."""

    def __init__(self, layout: BlockSparseLayout, device: Device = HOST) -> None:
        """Allocate tables on ``device``; on a GPU they are filled on CuPy's current stream.

        Raises InvalidProblemError for anything but a layout, BackendUnavailableError if CuPy or the device is
        missing or its memory is full.
        """
        shape = _checked(layout).shape
        self._set(shape, np.empty(length(shape), np.int32), check_device("device", device))
        self.update(layout)

    def _set(self, shape: BlockSparseShape, memory: Array, device: Device) -> None:
        self.shape, self._memory, self.device = shape, memory, device
        shown = memory.view()
        shown.flags.writeable = False
        self._lookup, self.is_behind, self._is_captured = LookUp.of(shown, shape), False, False
        self._there = None if device == HOST else _allocated(memory.size, device)
        self._view = TensorView.of(shown if self._there is None else self._there)
        self._view.readonly = True

    def update(self, layout: BlockSparseLayout, *, stream: Any = None) -> None:
        """Write the tables of ``layout``, which has the same shape, in place.

        On the host it is done when the call returns; no plan may run with the tables meanwhile. On a GPU they
        are copied there on ``stream`` (CuPy's current one by default): what that stream runs later reads the
        new mask. A CUDA graph cannot capture it. Raises InvalidProblemError for another shape or no
        stream, before anything is written.
        """
        other = _checked(layout).shape
        if other != self.shape:
            raise InvalidProblemError(f"layout: expected {self.shape!r}, got {other!r}")
        handle = stream_handle(stream, self.device)
        _fill(LookUp.of(self._memory, self.shape), layout.bitmap, self.shape)
        self.is_behind = self._is_captured
        self._copy(handle)

    def _copy(self, stream: int) -> None:
        """Copy to the device. The driver has read pageable memory when the call returns."""
        if self._there is not None:
            with current_on(self.device):
                self._there.data.copy_from_host_async(
                    self._memory.ctypes.data, self._memory.nbytes, import_cupy().cuda.ExternalStream(stream)
                )

    @property
    def lookup(self) -> LookUp:
        """The tables by name, on the host, read-only: ``row_pointers``, ``columns``, ``rows`` and so on.

        Waits for the device if ``is_behind``.
        """
        self._catch_up()
        return self._lookup

    def _catch_up(self) -> None:
        """Read what was last written on the GPU."""
        if self.is_behind and self._there is not None:
            with current_on(self.device):
                import_cupy().cuda.Device().synchronize()
                self._memory[...] = self._there.get()
            self.is_behind = self._is_captured

    @property
    def view(self) -> TensorView:
        """All tables, read-only: int32, one behind the other."""
        return self._view

    def __repr__(self) -> str:
        return f"BlockSparseTables({self.shape!r} on {self.device})"

    def __deepcopy__(self, memo: object) -> BlockSparseTables:
        self._catch_up()
        return _restored(self.shape, self._memory.copy(), self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        self._catch_up()
        return _restored, (self.shape, self._memory, self.device)


def note_update(tables: BlockSparseTables, stream: int) -> None:
    """Note that work on a stream of the GPU writes the tables."""
    tables._is_captured |= bool(import_cupy().cuda.runtime.streamIsCapturing(stream))
    tables.is_behind = True


def _restored(shape: BlockSparseShape, memory: Array, device: Device) -> BlockSparseTables:
    if memory.size != length(shape):  # written by another version
        raise InvalidProblemError(
            f"tables: expected {length(shape)} integers for {shape}, got {memory.size}; make them again"
        )
    tables = BlockSparseTables.__new__(BlockSparseTables)
    tables._set(shape, memory, device)
    tables._copy(stream_handle(None, device))
    return tables


def _allocated(count: int, device: Device) -> Any:
    """Allocate int32 on a GPU."""
    cupy = import_cupy()
    try:
        with current_on(device):
            return cupy.empty(count, np.int32)
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
        raise BackendUnavailableError(f"no tables on {device}: {error}") from error


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
        column = column.astype(np.uint16)  # NumPy sorts 16-bit integers by radix
    tables.column_order[...] = np.argsort(column, kind="stable")
    np.take(row, tables.column_order, out=tables.column_rows)
    tables.column_pointers[0] = 0
    np.cumsum(np.bincount(column, minlength=columns), out=tables.column_pointers[1:])
    _fill_groups(tables, group_size(shape))
    places = np.full(kept.shape if is_small(shape) else (0, 0, 0), -1, np.int32)
    if places.size:
        places[kept] = np.arange(shape.blocks)
    transposed = np.ascontiguousarray(kept.transpose(0, 2, 1))
    _fill_side(tables, shape, ("row", "column"), kept, places)
    _fill_side(tables, shape, ("column", "row"), transposed, places.transpose(0, 2, 1))


def _fill_side(
    tables: LookUp, shape: BlockSparseShape, names: tuple[str, str], kept: Any, places: Array
) -> None:
    """Fill the tables of one side except its pointers. ``names``: the side's, then the other's."""
    (side, other), found = names, tables._asdict()
    _fill_bits(kept, found[f"{side}_bits"])
    found[f"{side}s_by_length"][...] = _by_length(found[f"{side}_pointers"], shape.heads)
    sizes = {"panel": panel_block_rows(shape), "narrow_panel": narrow_panel_block_rows(shape)}
    for kind, size in sizes.items():
        panel = f"{side}_{kind}"
        _fill_panels(kept, size, found[f"{panel}s"], found[f"{panel}_{other}s"])
        if is_small(shape):
            of_panel = (found[f"{panel}_{name}"] for name in ("pointers", "kept", "places"))
            _fill_kept_columns(places, size, *of_panel)
    _fill_side_slices(found, shape, side, other)


def _fill_side_slices(found: dict[str, Array], shape: BlockSparseShape, side: str, other: str) -> None:
    """Fill the slices of one side's panels, whose own tables are there."""
    widths = {PANEL_ROWS: f"{side}_"}
    if has_narrow_slices(shape):
        widths[NARROW_PANEL_ROWS] = f"{side}_narrow_"
    slices = dict[str, Array]()
    for rows, panels in widths.items():
        slicing = Slicing.of(shape, by_columns=side == "column", rows=rows)
        slices[panels] = slices_of(found[f"{panels}panel_{other}s"], slicing.longest, slicing.uncut)
        found[f"{panels}long_panels"][...] = np.count_nonzero(slices[panels] > 1)
    if is_small(shape):
        _fill_joint_slices(found, shape, side, *slices.values())
        del slices[widths[NARROW_PANEL_ROWS]]
    found[f"{side}_panel_slices"][...] = slices[widths[PANEL_ROWS]]
    for panels, counts in slices.items():
        table, lengths = found[f"{panels}slices"].reshape(-1, SLICE_FIELDS), found[f"{panels}panel_{other}s"]
        found[f"{panels}slice_count"][...] = fill_slices(table, lengths, counts, found[f"{panels}panels"])


def _fill_joint_slices(
    found: dict[str, Array], shape: BlockSparseShape, side: str, slices: Array, of_narrow: Array
) -> None:
    """Fill the slices of narrow panels of small blocks; ``slices`` gets the cuts that these ask for."""
    across, cells = (shape.block_rows, shape.cols) if side == "column" else (shape.block_cols, shape.rows)
    head, panel = np.divmod(np.arange(len(of_narrow)), max(head_panels(cells, NARROW_PANEL_ROWS), 1))
    panel_of = head * head_panels(cells) + panel // 2
    np.maximum.at(slices, panel_of, of_narrow)
    wide, narrow = (
        KeptColumns(found[f"{kind}_pointers"], found[f"{kind}_kept"])
        for kind in (f"{side}_panel", f"{side}_narrow_panel")
    )
    table = found[f"{side}_narrow_slices"].reshape(-1, SLICE_FIELDS)
    count = fill_narrow_slices(table, slices, across, wide, narrow, panel_of)
    found[f"{side}_narrow_slice_count"][...] = count


def _fill_bits(kept: Any, bits: Array) -> None:
    heads, lines, across = kept.shape
    packed = np.zeros((heads, lines, 4 * words(across)), np.uint8)
    packed[:, :, : -(-across // 8)] = np.packbits(kept, axis=-1, bitorder="little")
    bits[...] = packed.view("<i4").reshape(-1)


def longest_panel(layout: BlockSparseLayout, *, by_columns: bool) -> int:
    """The most columns in which a row panel, or a column panel, keeps a block."""
    kept = layout.bitmap.transpose(0, 2, 1) if by_columns else layout.bitmap
    return int(_panel_counts(kept, panel_block_rows(layout.shape)).max(initial=0))


def _panel_counts(kept: Any, size: int) -> Any:
    """The number of columns in which each panel of ``size`` block rows keeps a block."""
    any_of_panel = kept[:, ::size].copy()
    for at in range(1, size):
        part = kept[:, at::size]
        any_of_panel[:, : part.shape[1]] |= part
    return np.count_nonzero(any_of_panel, axis=-1).reshape(-1)


def _fill_panels(kept: Any, size: int, order: Array, counts: Array) -> None:
    """Fill the tables of panels that have ``size`` block rows each."""
    counts[...] = _panel_counts(kept, size)
    order[...] = np.argsort(-counts, kind="stable")


def _fill_kept_columns(
    places: Array, size: int, pointers: Array, kept_columns: Array, of_lines: Array
) -> None:
    """Fill the kept columns of panels. ``places`` [heads, lines, across] is -1 for blocks not kept."""
    heads, lines, across = places.shape
    of_head = -(-lines // size)
    padded = np.full((heads, of_head * size, across), -1, np.int32)
    padded[:, :lines] = places
    panels = padded.reshape(heads * of_head, size, across).transpose(0, 2, 1)
    panel, column = np.nonzero((panels >= 0).any(axis=-1))
    pointers[0] = 0
    np.cumsum(np.bincount(panel, minlength=len(panels)), out=pointers[1:])
    kept_columns[...] = 0
    of_lines[...] = -1
    kept_columns[: len(column)] = column
    of_lines[: len(column) * size] = panels[panel, column].reshape(-1)


def _by_length(pointers: Array, heads: int) -> Array:
    counts = np.diff(pointers).reshape(heads, -1) if heads else np.zeros((0, 0), np.int32)
    order = np.argsort(-counts, axis=1, kind="stable") + np.arange(heads)[:, None] * counts.shape[1]
    return order.reshape(-1).astype(np.int32)


def _fill_groups(tables: LookUp, size: int) -> None:
    counts = -(-np.diff(tables.row_pointers) // size)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    in_row = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    tables.group_rows[...] = -1
    tables.group_firsts[...] = 0
    tables.group_rows[: len(rows)] = rows
    tables.group_firsts[: len(rows)] = tables.row_pointers[rows] + size * in_row


def view_of(shape: BlockSparseShape, given: object) -> TensorView:
    """Return the memory of tables of this shape. Raises InvalidProblemError for anything else."""
    if type(given) is not BlockSparseTables:
        hint = "; call plan.pack(layout)" if type(given) is BlockSparseLayout else ""
        raise InvalidProblemError(f"layout: expected BlockSparseTables, got {type(given).__name__}{hint}")
    if given.shape != shape:
        raise InvalidProblemError(f"layout: expected tables of {shape!r}, got those of {given.shape!r}")
    return given.view
