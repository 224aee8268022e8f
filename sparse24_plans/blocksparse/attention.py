"""Shared by the attention backends: scheduling, parameters and macros of ``blocksparse/attention.cuh``."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..device.jit.enum_codes import ELEMENT_CODES
from ..device.jit.launcher import put_maps
from ..device.jit.structs import KernelParams, field, kernel_params
from ..plan.operands import Views
from ..vocab import DeviceProperties
from .descriptor import BlockSparseAttentionDescriptor
from .dropout import drop_bound
from .lookup_tables import addresses
from .wgmma import matrices_map

THREADS = 384
"""Threads of a CTA: two consumer warpgroups and a producer warpgroup."""
BOX = 64
"""Columns of 16 bits in a tensor map's box, which are 128 bytes; also rows of a stationary operand's box."""
MAX_STAGES = 8
"""Most pipeline stages of a pipeline group."""
_SIDE = 128
"""Most rows of a CTA: one block of 128, or two of 64 with a pipeline group each."""
_RASTER_BYTES = 16 << 20
"""Most bytes that the work tiles of a raster group share, so that L2 holds two raster groups."""
_OF_COLUMNS = {"order": "columns_by_length", "pointers": "column_pointers", "entries": "column_rows"}
_OF_ROWS = {"order": "rows_by_length", "pointers": "row_pointers", "entries": "columns"}
"""Look-up tables of a walk, by the fields of AttentionTables."""

HEADS = field("u32", "Number of heads of Q, H.")
SIZES = {
    "heads_per_kv": field("u32", "Number of heads of Q that share one head of K and V."),
    "queries": field("u32", "Number of rows of Q in a head."),
    "keys": field("u32", "Number of rows of K in a head."),
}
RASTER_AND_DROPOUT = {
    "raster_matrices": field("u32", "Number of matrices whose work tiles are interleaved, for L2."),
    "seed_offset": field("const u32*", "Seed and offset of dropout, two integers of 64 bits; or null."),
    "drop_below": field("u32", "Bound of dropped cells' 16 bits, times 2^16."),
    "keep_scale": field("float", "Factor of cells that are not dropped."),
}
"""Fields that both structs of parameters have, in pieces that stand together in both."""


@kernel_params("blocksparse/params/attention_tables.cuh")
class AttentionTables(KernelParams):
    """Lookup tables and lengths that attention kernels walk by."""

    order = field("const int*", "Block rows, or columns, of each head: those with the most blocks first.")
    pointers = field("const int*", "Index in entries where each block row, or block column, begins.")
    entries = field("const int*", "Block column of each kept block, or block row: [blocks].")
    claimed = field("u32*", "Work tiles claimed beyond each pipeline group's first; 0 before the launch.")
    q_lengths = field("const int*", "Valid rows of Q in each batch element: [Z], or null.")
    kv_lengths = field("const int*", "Valid rows of K and V in each batch element: [Z], or null.")


class Walk(NamedTuple):
    """One launch over the kept blocks: its work tiles are block rows, or block columns."""

    problem: BlockSparseAttentionDescriptor
    columns: bool
    groups: int
    """Pipeline groups of a CTA."""

    @property
    def matrices(self) -> int:
        """Batch elements times the heads of Q, or of K."""
        heads = self.problem.kv_heads if self.columns else self.problem.layout.heads
        return self.problem.batch * heads

    @property
    def block_lines(self) -> int:
        """Work tiles of a matrix."""
        one = self.problem.layout
        return one.block_cols if self.columns else one.block_rows

    @property
    def raster_matrices(self) -> int:
        """Matrices of a raster group: their work tiles run together, because they share the streamed
        operands."""
        desc, one = self.problem, self.problem.layout
        streamed = desc.group * one.rows if self.columns else one.cols / max(desc.group, 1)
        nbytes = self.matrices * (2 * streamed * desc.head_size * desc.element.itemsize)
        groups = math.ceil(nbytes / _RASTER_BYTES)
        return max(1, -(-self.matrices // max(groups, 1)))

    def blocks(self, device: DeviceProperties) -> int:
        """CTAs of the launch."""
        return min(-(-self.matrices * self.block_lines // self.groups), device.multiprocessors)

    def details(self, device: DeviceProperties, stages: str) -> str:
        """Line for ``explain``; ``stages`` describes the pipeline stages of a CTA."""
        warpgroups = self.groups * self.problem.layout.block // 64
        return (
            f"{self.matrices * self.block_lines} {'columns' if self.columns else 'rows'} of blocks on "
            f"{self.blocks(device)} CTAs of {warpgroups} x 64 rows, {stages}"
        )

    def numbers(self) -> dict[str, float]:
        """Fields that both structs of parameters have."""
        desc, one = self.problem, self.problem.layout
        return {
            "matrices": self.matrices,
            "heads": one.heads,
            "heads_per_kv": desc.group,
            "queries": one.rows,
            "keys": one.cols,
            "matrix_tiles": self.block_lines,
            "raster_matrices": self.raster_matrices,
            "drop_below": drop_bound(desc.dropout) << 16,
            "keep_scale": 1 / (1 - desc.dropout),
        }

    def fill(self, parameters: KernelParams, views: Views, boxes: dict[str, int], taken: int) -> None:
        """Set the tables, their counter ``taken``, the lengths and the tensor maps.

        ``boxes`` maps the operands [Z, heads, rows, head_size] that have a tensor map, in the order of the
        maps, to the rows of a box. Raises DriverError.
        """
        desc = self.problem
        tables = addresses(views["layout"].address, desc.layout)
        names = _OF_COLUMNS if self.columns else _OF_ROWS
        found = {parameter: tables[name] for parameter, name in names.items()}
        found |= {name: views[name].address for name in ("q_lengths", "kv_lengths") if desc.lengths}
        parameters.tables = AttentionTables(claimed=taken, **found)
        if desc.dropout:
            parameters.seed_offset = views["seed_offset"].address  # type: ignore[attr-defined]
        if desc.layout.blocks:  # else nothing is read
            put_maps(parameters, _maps, views, boxes)


def _maps(views: Views, boxes: dict[str, int]) -> bytes:
    return b"".join(matrices_map(views[name], (lines, BOX)) for name, lines in boxes.items())


def pipeline_groups(problem: BlockSparseAttentionDescriptor) -> int:
    """Pipeline groups of a CTA of two warpgroups."""
    return _SIDE // problem.layout.block


def row_bytes(problem: BlockSparseAttentionDescriptor) -> int:
    """Shared-memory bytes of a row of Q, K or V: whole boxes."""
    return -(-problem.head_size // BOX) * BOX * problem.element.itemsize


def problem_defines(problem: BlockSparseAttentionDescriptor) -> dict[str, int]:
    """Macros of AttentionType that the problem determines."""
    return {
        "ELEMENT": ELEMENT_CODES[problem.element],
        "BLOCK": problem.layout.block,
        "HEAD": problem.head_size,
        "CAUSAL": int(problem.causal),
        "LENGTHS": int(problem.lengths),
        "DROPOUT": int(problem.dropout > 0),
    }
