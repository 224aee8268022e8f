"""What the backends of attention share, as ``blocksparse/attention.cuh`` is what their kernels do."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..device.jit.enum_codes import ELEMENT_CODES
from ..device.jit.launcher import put_maps
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.streams import Launch
from ..device.tensors import import_cupy
from ..plan.operands import Views
from ..vocab import DeviceProperties
from .descriptor import BlockSparseAttentionDescriptor
from .lookup_tables import addresses
from .wgmma import matrices_map

THREADS = 384
"""Two warpgroups that multiply and one that copies."""
BOX = 64
"""Columns of 16 bits that a box of a tensor map has: 128 bytes. Rows, of what stays."""
MOST_SLOTS = 8
"""Of a channel."""
_SIDE = 128
"""Rows of a block of threads: one block of 128, or two of 64, each with a channel."""
_BAND_BYTES = 16 << 20
"""Of what the items of a band share: L2 has it, and that of the bands beside."""
_OF_COLUMNS = {"order": "columns_by_length", "pointers": "column_pointers", "entries": "column_rows"}
_OF_ROWS = {"order": "rows_by_length", "pointers": "row_pointers", "entries": "columns"}
"""Lookup tables of a walk, by the fields of AttentionTables."""


@kernel_params("blocksparse/params/attention_tables.cuh")
class AttentionTables(KernelParams):
    """Lookup tables and lengths that attention kernels walk by."""

    order = field("const int*", "Block rows, or columns, of each head: those with the most blocks first.")
    pointers = field("const int*", "Index in entries where each block row, or block column, begins.")
    entries = field("const int*", "Block column of each kept block, or block row: [blocks].")
    claimed = field("u32*", "Work tiles claimed beyond each channel's first; 0 before the launch.")
    q_lengths = field("const int*", "Valid rows of Q in each batch element: [Z], or null.")
    kv_lengths = field("const int*", "Valid rows of K and V in each batch element: [Z], or null.")


class Walk(NamedTuple):
    """One launch over the kept blocks: its items are rows of blocks, or columns."""

    problem: BlockSparseAttentionDescriptor
    columns: bool

    @property
    def matrices(self) -> int:
        """Batches times the heads of Q, or of K."""
        heads = self.problem.kv_heads if self.columns else self.problem.layout.heads
        return self.problem.batch * heads

    @property
    def lines(self) -> int:
        """AttentionTables of a matrix."""
        one = self.problem.layout
        return one.block_cols if self.columns else one.block_rows

    @property
    def band(self) -> int:
        """Matrices whose items are taken together: they share what passes."""
        desc, one = self.problem, self.problem.layout
        passing = desc.group * one.rows if self.columns else one.cols / max(desc.group, 1)
        nbytes = self.matrices * (2 * passing * desc.head_size * desc.element.itemsize)
        bands = math.ceil(nbytes / _BAND_BYTES)
        return max(1, -(-self.matrices // max(bands, 1)))

    def blocks(self, device: DeviceProperties) -> int:
        """Blocks of threads."""
        return min(-(-self.matrices * self.lines // channels(self.problem)), device.multiprocessors)

    def details(self, device: DeviceProperties, slots: str) -> str:
        """Of ``explain``; ``slots`` says what each one of a block of threads holds."""
        return (
            f"{self.matrices * self.lines} {'columns' if self.columns else 'rows'} of blocks on "
            f"{self.blocks(device)} blocks of 2 x 64 rows, {slots}"
        )

    def sizes(self) -> dict[str, int]:
        """The fields of these names of either struct of parameters."""
        one = self.problem.layout
        return {
            "matrices": self.matrices,
            "heads": one.heads,
            "heads_per_kv": self.problem.group,
            "queries": one.rows,
            "keys": one.cols,
            "matrix_tiles": self.lines,
            "raster_matrices": self.band,
        }

    def fill(self, parameters: KernelParams, views: Views, boxes: dict[str, int], taken: int) -> None:
        """Put in where the items' tables, their counter ``taken`` and lengths lie, and the tensor maps.

        ``boxes``: the operands [Z, heads, rows, head_size] that have a map, in the maps' order, and how many
        rows a box of each has. Raises DriverError.
        """
        desc = self.problem
        tables = addresses(views["layout"].address, desc.layout)
        names = _OF_COLUMNS if self.columns else _OF_ROWS
        found = {parameter: tables[name] for parameter, name in names.items()}
        found |= {name: views[name].address for name in ("q_lengths", "kv_lengths") if desc.lengths}
        parameters.tables = AttentionTables(claimed=taken, **found)
        if desc.layout.blocks:  # else nothing is read
            put_maps(parameters, _maps, views, boxes)


def _maps(views: Views, boxes: dict[str, int]) -> bytes:
    return b"".join(matrices_map(views[name], (lines, BOX)) for name, lines in boxes.items())


def channels(problem: BlockSparseAttentionDescriptor) -> int:
    """Of a block of threads."""
    return _SIDE // problem.layout.block


def from_zero(counters: int, nbytes: int, kernel: Launch) -> Launch:
    """``kernel`` behind a fill of the counters that deal its items."""
    fill = import_cupy().cuda.runtime.memsetAsync

    def launch(stream: int) -> None:
        fill(counters, 0, nbytes, stream)
        kernel(stream)

    return launch


def problem_defines(problem: BlockSparseAttentionDescriptor) -> dict[str, int]:
    """Those macros of AttentionType that are the problem's own."""
    return {
        "ELEMENT": ELEMENT_CODES[problem.element],
        "BLOCK": problem.layout.block,
        "HEAD": problem.head_size,
        "CAUSAL": int(problem.causal),
        "LENGTHS": int(problem.lengths),
    }
