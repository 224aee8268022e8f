"""Look-up tables: what kernels read of a layout, as int32 in one piece of memory that never moves.

The order of a layout's values, row by row, is the one that the tables define; a second set of them walks the
same blocks column by column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..device.adapters import Unmoving
from ..device.devices import current_on
from ..device.streams import stream_handle
from ..device.tensors import HOST, Device, TensorView, check_device, import_cupy
from ..errors import BackendUnavailableError, InvalidProblemError
from .layout import BlockSparseLayout
from .shape import BlockSparseShape

Array = np.ndarray[Any, np.dtype[np.int32]]
STRIP = 128
"""Rows of cells whose blocks kernels take together."""
TILE = 64
"""Rows of a narrow strip, which ``sdd`` takes, and the others of small blocks where that is less work."""
FEW_LINES = 2
"""Rows of blocks of a strip, up to which kernels read the bits of each."""
GROUP = 256
"""Columns of cells of neighbouring blocks of a row that kernels take together."""


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
    row_bits: Array
    """[heads * R, ceil(C / 32)]: bit c % 32 of word c / 32 is whether the row keeps column c."""
    column_bits: Array
    """[heads * C, ceil(R / 32)]: the same of the columns."""
    row_strips: Array
    """[heads * S], S = ceil(rows / 128): the strips of 128 rows of cells, those that keep blocks in the most
    columns first; of equals the first. Strip s of head h is h * S + s."""
    column_strips: Array
    """The same of 128 columns."""
    row_strip_columns: Array
    """[heads * S]: of how many columns each strip keeps a block."""
    column_strip_rows: Array
    """The same of 128 columns."""
    rows_by_length: Array
    """[heads * R]: of each head its rows, as h * R + r, those with the most blocks first; of equals the
    first."""
    columns_by_length: Array
    """[heads * C]: the same of the columns, as h * C + c."""
    group_rows: Array
    """[groups]: h * R + r of each group of neighbouring blocks of a row; -1 past the last group."""
    group_firsts: Array
    """[groups]: place of a group's first block in the values. It has at most ``group_size``."""
    row_strip_pointers: Array
    """[heads * S + 1]: where strip s of head h, at h * S + s, begins in the next two. These three are there
    for blocks of 16 and 32 alone, of which a strip has several rows."""
    row_strip_met: Array
    """[U], U at most the blocks: columns in which the strip keeps any block, rising; room is for all."""
    row_strip_places: Array
    """[U, 128 / block]: of each such column the place of every row's block in the values, -1: not kept."""
    column_strip_pointers: Array
    """The same of strips of 128 columns."""
    column_strip_met: Array
    """The same."""
    column_strip_places: Array
    """The same."""
    row_tiles: Array
    """[heads * T], T = ceil(rows / tile_size): narrow strips, of ``tile_size`` rows, like ``row_strips``."""
    column_tiles: Array
    """The same of columns. Of larger blocks than 64 a strip is a row (column) of them."""
    row_tile_columns: Array
    """Like ``row_strip_columns``, of narrow strips."""
    column_tile_rows: Array
    """The same of columns."""
    row_tile_pointers: Array
    """Like those of strips, as are the next ones."""
    row_tile_met: Array
    """The same."""
    row_tile_places: Array
    """The same."""
    column_tile_pointers: Array
    """The same."""
    column_tile_met: Array
    """The same."""
    column_tile_places: Array
    """The same."""

    @classmethod
    def of(cls, memory: Array, shape: BlockSparseShape) -> LookUp:
        """Views of the parts of ``memory``, int32 [:func:`length`]."""
        ends = np.cumsum(_lengths(shape))[:-1]
        return cls(*np.split(memory, ends))


def _lengths(shape: BlockSparseShape) -> tuple[int, ...]:
    rows, columns, count = shape.heads * shape.block_rows, shape.heads * shape.block_cols, shape.blocks
    bits = rows * words(shape.block_cols), columns * words(shape.block_rows)
    strips = shape.heads * head_strips(shape.rows), shape.heads * head_strips(shape.cols)
    size = group_size(shape)
    groups = min(count, (count + rows * (size - 1)) // size)  # as many as there can be
    sparse = rows + 1, count, count, columns + 1, count, count
    tile = tile_size(shape.block)
    tiles = shape.heads * head_strips(shape.rows, tile), shape.heads * head_strips(shape.cols, tile)
    strips_met: tuple[int, ...] = (0,) * 6
    tiles_met = strips_met
    if strip_lines(shape) > FEW_LINES:
        across = shape.block_cols, shape.block_rows
        strips_met, tiles_met = (
            _met_lengths(count, counts, across, lines)
            for counts, lines in ((strips, strip_lines(shape)), (tiles, tile_lines(shape)))
        )
    met = *strips_met, *tiles, *tiles, *tiles_met
    return *sparse, *bits, *strips, *strips, rows, columns, groups, groups, *met


def _met_lengths(count: int, strips: tuple[int, int], across: tuple[int, int], lines: int) -> tuple[int, ...]:
    """Of both sides: strips, columns that they meet, and places."""
    met = [min(count, one * other) for one, other in zip(strips, across, strict=True)]
    return strips[0] + 1, met[0], met[0] * lines, strips[1] + 1, met[1], met[1] * lines


def words(bits: int) -> int:
    """Int32s of so many bits."""
    return -(-bits // 32)


def head_strips(cells: int, size: int = STRIP) -> int:
    """Strips of a head, of so many rows or columns of cells, each of ``size``."""
    return -(-cells // size)


def tile_size(block: int) -> int:
    """Cells of a narrow strip."""
    return max(TILE, block)


def tile_lines(shape: BlockSparseShape) -> int:
    """Rows of blocks of a narrow strip."""
    return tile_size(shape.block) // shape.block


def met_share(shape: BlockSparseShape, lines: int) -> float:
    """Of the columns, those in which so many lines keep any block, were the kept blocks random."""
    return 1 - (1 - shape.density) ** lines


def strip_lines(shape: BlockSparseShape) -> int:
    """Rows of blocks of a strip."""
    return STRIP // shape.block


def group_size(shape: BlockSparseShape) -> int:
    """The most blocks of a group."""
    return GROUP // shape.block


def groups(shape: BlockSparseShape) -> int:
    """The most groups of such a layout."""
    return _lengths(shape)[LookUp._fields.index("group_rows")]


def addresses(start: int, shape: BlockSparseShape) -> dict[str, int]:
    """Where each table lies, by name, when the first is at ``start``."""
    found, at = {}, start
    for name, count in zip(LookUp._fields, _lengths(shape), strict=True):
        found[name] = at
        at += 4 * count
    return found


def length(shape: BlockSparseShape) -> int:
    """Int32s of the tables of such a layout."""
    return sum(_lengths(shape))


class BlockSparseTables(Unmoving):
    """A layout's look-up tables, which plans take; made once, and at the same addresses for life.

    :meth:`update` writes the tables of another mask over them, so whatever was bound or captured with them
    serves that mask from then on. Made by ``plan.pack(layout)``; serves its device's plans of its shape.
    """

    __slots__ = ("_memory", "_there", "_view", "device", "lookup", "shape")

    shape: BlockSparseShape
    """Of the layouts that they can be of."""
    device: Device
    """Where plans read them."""
    lookup: LookUp
    """The tables by name, on the host, read-only: ``row_pointers``, ``columns``, ``rows`` and so on."""

    def __init__(self, layout: BlockSparseLayout, device: Device = HOST) -> None:
        """In memory of their own on ``device``; on a GPU, filled on CuPy's current stream.

        Raises InvalidProblemError for anything but a layout, BackendUnavailableError where CuPy or the device
        is missing, or its memory is full.
        """
        shape = _checked(layout).shape
        self._set(shape, np.empty(length(shape), np.int32), check_device("device", device))
        self.update(layout)

    def _set(self, shape: BlockSparseShape, memory: Array, device: Device) -> None:
        self.shape, self._memory, self.device = shape, memory, device
        shown = memory.view()
        shown.flags.writeable = False
        self.lookup = LookUp.of(shown, shape)
        self._there = None if device == HOST else _allocated(memory.size, device)
        self._view = _read_only(TensorView.of(shown if self._there is None else self._there))

    def update(self, layout: BlockSparseLayout, *, stream: Any = None) -> None:
        """Write the tables of ``layout``, which has the same shape, in place.

        On the host it is done when the call returns; no plan may run with the tables meanwhile. On a GPU they
        are copied there on ``stream`` (CuPy's current one by default): what that stream runs later reads the
        new mask. It is no work for a CUDA graph's capture. Raises InvalidProblemError for another shape or no
        stream, before anything is written.
        """
        other = _checked(layout).shape
        if other != self.shape:
            raise InvalidProblemError(f"layout: expected {self.shape!r}, got {other!r}")
        handle = stream_handle(stream, self.device)
        _fill(LookUp.of(self._memory, self.shape), layout.bitmap, self.shape)
        self._copy(handle)

    def _copy(self, stream: int) -> None:
        """To the device. The driver has taken what lies in pageable memory when the call returns."""
        if self._there is not None:
            with current_on(self.device):
                self._there.data.copy_from_host_async(
                    self._memory.ctypes.data, self._memory.nbytes, import_cupy().cuda.ExternalStream(stream)
                )

    @property
    def view(self) -> TensorView:
        """All of them, read-only: int32, one table behind the other."""
        return self._view

    def __repr__(self) -> str:
        return f"BlockSparseTables({self.shape!r} on {self.device})"

    def __deepcopy__(self, memo: object) -> BlockSparseTables:
        return _restored(self.shape, self._memory.copy(), self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.shape, self._memory, self.device)


def _restored(shape: BlockSparseShape, memory: Array, device: Device) -> BlockSparseTables:
    if memory.size != length(shape):  # another version's
        raise InvalidProblemError(
            f"tables: expected {length(shape)} integers for {shape}, got {memory.size}; make them anew"
        )
    tables = BlockSparseTables.__new__(BlockSparseTables)
    tables._set(shape, memory, device)
    tables._copy(stream_handle(None, device))
    return tables


def _allocated(count: int, device: Device) -> Any:
    """Int32s on a GPU."""
    cupy = import_cupy()
    try:
        with current_on(device):
            return cupy.empty(count, np.int32)
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
        raise BackendUnavailableError(f"no tables on {device}: {error}") from error


def _read_only(view: TensorView) -> TensorView:
    return TensorView(view.address, view.shape, view.element, view.device, readonly=True, owner=view.owner)


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
    _fill_bits(kept, tables.row_bits)
    _fill_strips(kept, strip_lines(shape), tables.row_strips, tables.row_strip_columns)
    turned = np.ascontiguousarray(kept.transpose(0, 2, 1))
    _fill_bits(turned, tables.column_bits)
    _fill_strips(turned, strip_lines(shape), tables.column_strips, tables.column_strip_rows)
    _fill_strips(kept, tile_lines(shape), tables.row_tiles, tables.row_tile_columns)
    _fill_strips(turned, tile_lines(shape), tables.column_tiles, tables.column_tile_rows)
    tables.rows_by_length[...] = _by_length(tables.row_pointers, shape.heads)
    tables.columns_by_length[...] = _by_length(tables.column_pointers, shape.heads)
    _fill_groups(tables, group_size(shape))
    if strip_lines(shape) > FEW_LINES:
        places = np.full(kept.shape, -1, np.int32)
        places[kept] = np.arange(shape.blocks)
        found = tables.row_strip_pointers, tables.row_strip_met, tables.row_strip_places
        _fill_met(places, strip_lines(shape), *found)
        found = tables.column_strip_pointers, tables.column_strip_met, tables.column_strip_places
        _fill_met(places.transpose(0, 2, 1), strip_lines(shape), *found)
        found = tables.row_tile_pointers, tables.row_tile_met, tables.row_tile_places
        _fill_met(places, tile_lines(shape), *found)
        found = tables.column_tile_pointers, tables.column_tile_met, tables.column_tile_places
        _fill_met(places.transpose(0, 2, 1), tile_lines(shape), *found)


def _fill_bits(kept: Any, bits: Array) -> None:
    heads, lines, across = kept.shape
    packed = np.zeros((heads, lines, 4 * words(across)), np.uint8)
    packed[:, :, : -(-across // 8)] = np.packbits(kept, axis=-1, bitorder="little")
    bits[...] = packed.view("<i4").reshape(-1)


def _fill_strips(kept: Any, size: int, order: Array, counts: Array) -> None:
    """Of so many lines each."""
    any_of_strip = kept[:, ::size].copy()
    for at in range(1, size):
        part = kept[:, at::size]
        any_of_strip[:, : part.shape[1]] |= part
    counts[...] = np.count_nonzero(any_of_strip, axis=-1).reshape(-1)
    order[...] = np.argsort(-counts, kind="stable")


def _fill_met(places: Array, size: int, pointers: Array, met: Array, of_lines: Array) -> None:
    """``places`` [heads, lines, across]: of every block, -1 where it isn't kept."""
    heads, lines, across = places.shape
    of_head = -(-lines // size)
    padded = np.full((heads, of_head * size, across), -1, np.int32)
    padded[:, :lines] = places
    strips = padded.reshape(heads * of_head, size, across).transpose(0, 2, 1)
    strip, column = np.nonzero((strips >= 0).any(axis=-1))
    pointers[0] = 0
    np.cumsum(np.bincount(strip, minlength=len(strips)), out=pointers[1:])
    met[...] = 0
    of_lines[...] = -1
    met[: len(column)] = column
    of_lines[: len(column) * size] = strips[strip, column].reshape(-1)


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
    """The memory of tables of such layouts. Raises InvalidProblemError for anything else."""
    if type(given) is not BlockSparseTables:
        hint = "; call plan.pack(layout)" if type(given) is BlockSparseLayout else ""
        raise InvalidProblemError(f"layout: expected BlockSparseTables, got {type(given).__name__}{hint}")
    if given.shape != shape:
        raise InvalidProblemError(f"layout: expected tables of {shape!r}, got those of {given.shape!r}")
    return given.view
