"""Launches ``blocksparse/tables.cu``, which makes the look-up tables of a layout from a bitmap on the GPU."""

from __future__ import annotations

from functools import lru_cache

from ..device.jit.launcher import Function, load
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.streams import Launch
from ..errors import UnsupportedError
from ..plan.kernel import nothing
from ..vocab import DeviceProperties
from .lookup_tables import addresses, group_size, groups, words
from .panels import NARROW_PANEL_ROWS, PANEL_ROWS, Slicing, head_panels, panel_block_rows
from .shape import BlockSparseShape

SOURCE = "blocksparse/tables.cu"
_THREADS = 512
_MAX_CTAS = 128
"""Most CTAs, unless there are more heads: each counts the blocks of all heads."""
_MAX_SHARED_BYTES = 96 << 10
"""Most shared-memory bytes of a CTA, which every device from compute capability 8.0 on has."""


@kernel_params("blocksparse/params/tables.cuh")
class BlockTablesParams(KernelParams):
    """Parameters of ``blocksparse/tables.cu``. ``LookUp`` has the shapes of the tables, which are written."""

    bitmap = field("const u8*", "Not 0 where a block is kept: [heads, block_rows, block_cols].")
    row_pointers = field("int*", "Place in the values where each block row begins.")
    columns = field("int*", "Column of each block.")
    rows = field("int*", "Block row of each block.")
    column_pointers = field("int*", "Index in column_rows where each block column begins.")
    column_rows = field("int*", "Row of each block, column by column.")
    column_order = field("int*", "Place of each block in the values, column by column.")
    row_bits = field("u32*", "One bit for each column, set where a block row keeps it.")
    column_bits = field("u32*", "One bit for each row, set where a block column keeps it.")
    row_panels = field("int*", "Row panels, those with blocks in the most columns first.")
    column_panels = field("int*", "Column panels, those with blocks in the most rows first.")
    row_panel_columns = field("int*", "Number of columns in which each row panel keeps a block.")
    column_panel_rows = field("int*", "Number of rows in which each column panel keeps a block.")
    rows_by_length = field("int*", "Block rows, those with the most blocks first.")
    columns_by_length = field("int*", "Block columns, those with the most blocks first.")
    group_rows = field("int*", "Block row of each group of neighbouring blocks; -1 past the last group.")
    group_firsts = field("int*", "Place in the values of each group's first block.")
    row_narrow_panels = field("int*", "Narrow row panels, those with blocks in the most columns first.")
    column_narrow_panels = field("int*", "Narrow column panels, those with blocks in the most rows first.")
    row_narrow_panel_columns = field("int*", "Number of columns that each narrow row panel keeps a block in.")
    column_narrow_panel_rows = field("int*", "Number of rows that each narrow column panel keeps a block in.")
    row_slices = field("int*", "Slices of row panels, five integers each, the longest first.")
    column_slices = field("int*", "Slices of column panels.")
    row_slice_count = field("int*", "Number of slices of row panels.")
    column_slice_count = field("int*", "Number of slices of column panels.")
    row_panel_slices = field("int*", "Number of slices of each row panel.")
    column_panel_slices = field("int*", "Number of slices of each column panel.")
    row_long_panels = field("int*", "Number of row panels with several slices.")
    column_long_panels = field("int*", "Number of column panels with several slices.")
    row_narrow_slices = field("int*", "Slices of narrow row panels. Only blocks of 64 have them.")
    column_narrow_slices = field("int*", "Slices of narrow column panels (blocks of 64).")
    row_narrow_slice_count = field("int*", "Number of slices of narrow row panels (blocks of 64).")
    column_narrow_slice_count = field("int*", "Number of slices of narrow column panels (blocks of 64).")
    row_narrow_long_panels = field("int*", "Number of narrow row panels with several slices (blocks of 64).")
    column_narrow_long_panels = field(
        "int*", "Number of narrow column panels with several slices (blocks of 64)."
    )
    heads = field("u32", "Number of heads.")
    block_rows = field("u32", "Number of block rows of a head.")
    block_cols = field("u32", "Number of block columns of a head.")
    blocks = field("u32", "Number of kept blocks of all heads that the tables have room for.")
    row_words = field("u32", "Number of words of a block row in row_bits.")
    column_words = field("u32", "Number of words of a block column in column_bits.")
    row_panels_of_head = field("u32", "Number of row panels of a head.")
    column_panels_of_head = field("u32", "Number of column panels of a head.")
    groups = field("u32", "Number of groups that the tables have room for.")
    group_size = field("u32", "Most blocks of a group.")
    slice_columns = field("u32", "Most columns of a slice of a row panel.")
    slice_rows = field("u32", "Most rows of a slice of a column panel.")
    uncut_columns = field("u32", "Most columns of a row panel that has one slice.")
    uncut_rows = field("u32", "Most rows of a column panel that has one slice.")
    row_slice_room = field("u32", "Number of slices of row panels that the tables have room for.")
    column_slice_room = field("u32", "Number of slices of column panels that the tables have room for.")
    narrow_slice_columns = field("u32", "Most columns of a slice of a narrow row panel.")
    narrow_slice_rows = field("u32", "Most rows of a slice of a narrow column panel.")
    narrow_uncut_columns = field("u32", "Most columns of a narrow row panel that has one slice.")
    narrow_uncut_rows = field("u32", "Most rows of a narrow column panel that has one slice.")
    row_narrow_slice_room = field(
        "u32", "Number of slices of narrow row panels that the tables have room for."
    )
    column_narrow_slice_room = field(
        "u32", "Number of slices of narrow column panels that the tables have room for."
    )


def shared_bytes(shape: BlockSparseShape) -> int:
    """Shared memory of a CTA: the counts of all heads, starts and bits of one, and cuts of any panel."""
    lines = shape.block_rows + shape.block_cols
    panels = head_panels(shape.rows) + head_panels(shape.cols) if panel_block_rows(shape) > 1 else 0
    starts = lines + 2 + shape.block_rows + 1
    bits = shape.block_rows * (words(shape.block_cols) | 1)
    return 4 * (shape.heads * (lines + panels) + starts + lines + 2 + bits + _THREADS // 32)


def _ctas(shape: BlockSparseShape) -> int:
    """CTAs of the launch: a head has as many as its lines keep busy, a warp each, within the most."""
    lines = max(shape.block_rows, shape.block_cols)
    return shape.heads * max(1, min(-(-lines // (_THREADS // 32)), _MAX_CTAS // max(shape.heads, 1)))


class TableKernel:
    """The kernel for layouts of one shape on one device, compiled.

    Raises UnsupportedError for blocks below 64, and for layouts whose counts exceed shared memory.
    """

    def __init__(self, shape: BlockSparseShape, device: DeviceProperties) -> None:
        if shape.block < NARROW_PANEL_ROWS:
            raise UnsupportedError(f"bitmap: expected blocks of 64 or 128, got {shape.block}; call update")
        if (needed := shared_bytes(shape)) > _MAX_SHARED_BYTES:
            raise UnsupportedError(
                f"bitmap: expected at most {_MAX_SHARED_BYTES} bytes of counts, got {needed} for {shape}; "
                "call update"
            )
        self._ctas, self._function = _ctas(shape), _function(panel_block_rows(shape), device)
        found = addresses(0, shape)
        (of_rows, of_columns), (of_narrow_rows, of_narrow_columns) = (
            [Slicing.of(shape, by_columns=side, rows=rows) for side in (False, True)]
            for rows in (PANEL_ROWS, NARROW_PANEL_ROWS)
        )
        self._offsets = {name: at for name, at in found.items() if name in BlockTablesParams.declared}
        self._parameters = BlockTablesParams(
            heads=shape.heads,
            block_rows=shape.block_rows,
            block_cols=shape.block_cols,
            blocks=shape.blocks,
            row_words=words(shape.block_cols),
            column_words=words(shape.block_rows),
            row_panels_of_head=head_panels(shape.rows, PANEL_ROWS),
            column_panels_of_head=head_panels(shape.cols, PANEL_ROWS),
            groups=groups(shape),
            group_size=group_size(shape),
            slice_columns=of_rows.longest,
            slice_rows=of_columns.longest,
            uncut_columns=of_rows.uncut,
            uncut_rows=of_columns.uncut,
            row_slice_room=of_rows.room,
            column_slice_room=of_columns.room,
            narrow_slice_columns=of_narrow_rows.longest,
            narrow_slice_rows=of_narrow_columns.longest,
            narrow_uncut_columns=of_narrow_rows.uncut,
            narrow_uncut_rows=of_narrow_columns.uncut,
            row_narrow_slice_room=of_narrow_rows.room,
            column_narrow_slice_room=of_narrow_columns.room,
        )

    def bind(self, bitmap: int, tables: int) -> Launch:
        """A launch that reads the bitmap at one address and writes the tables at another."""
        if self._ctas == 0:
            return nothing
        found = {name: tables + at for name, at in self._offsets.items()}
        parameters = self._parameters.with_values(bitmap=bitmap, **found)
        return self._function.bind(self._ctas, parameters)


@lru_cache(maxsize=1024)
def table_kernel(shape: BlockSparseShape, device: DeviceProperties) -> TableKernel:
    """The one kernel of a shape and device. Raises what TableKernel raises."""
    return TableKernel(shape, device)


@lru_cache(maxsize=1024)
def _function(panel_lines: int, device: DeviceProperties) -> Function:
    return load(SOURCE, "fill_tables", _THREADS, device, {"PANEL_LINES": panel_lines}, _MAX_SHARED_BYTES)
