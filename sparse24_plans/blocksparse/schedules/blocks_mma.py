"""How ``blocksparse/blocks_mma.cu`` cuts a problem.

Of a schedule only ``row_slices`` and ``depth`` decide bits. Both follow from the layout and from how long its
longest panel is known to be; only compute capability 9.0 has several slices.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...plan.kernel import align_up
from ...plan.schedule_choice import REFERENCE_SMS, CostModel, fastest
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem, Prepared, prepared_bytes
from .blocks_wgmma_cost import by_order_and_block, dense_bytes, expected_longest_panel

M16_ROWS, TILE_TOKENS = 16, 8
"""Rows and tokens of an mma."""
_M16_TILES = (4, 2, 1)
"""Numbers of m16 tiles of a CTA."""
_MAX_M16_TILES = {1: 4, 2: 2, 4: 2, 8: 1}
"""Most m16 tiles of a CTA by its tiles of eight tokens: registers hold the sums and what is in flight."""
_SHARES = ((16, 4), (64, 8), (math.inf, 16))
"""The most units of a block row, and its shares."""
# The next four numbers say where sums are cut, so they define bits, and no fit moves them.
_MAX_ROW_SLICES, _SLICE_UNITS = 4, 128
"""Most slices of a block row, and most units of a slice, unless its row has the most slices."""
_LONG_ROW_UNITS, _LONG_ROW = 192, 3.0
"""Least units of a long row, and the ratio to the units of an SM's equal part of all work that it must
exceed."""
_LANE_WORDS = 32
"""Registers of a lane for values in flight, and for cells of X in flight. With 64 tokens values have half."""
_WARPS = (4, 8, 16)
"""Numbers of warps of a CTA."""
SLOTS = 8
"""Places for the sums of shares of a block row."""
MODEL = "packed_mma"
"""The name of the cost models, one for each size of a block and order of X."""
TERMS = (
    "memory_bytes", "l2_bytes", "x_loads", "wave", "rounds", "x_rounds",
    "written_cells", "exchanged", "copies", "copied_bytes",
)  # fmt: skip
"""The names of the kinds of work that take time."""


class BlocksMmaSchedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types."""

    warps: int
    """Warps of a CTA."""
    m16_tiles: int
    """m16 tiles, each of 16 rows, of a CTA's tile."""
    n8_tiles: int
    """Tiles of eight tokens of a CTA's tile."""
    depth: int
    """k of a unit, which a warp multiplies at a time."""
    x_along_k: bool
    """Whether k is contiguous in X; otherwise its tokens are."""
    row_slices: int
    """Most slices of a block row, which the CTAs of a cluster compute. The number follows from the
    layout, and decides bits."""

    @classmethod
    def candidates(
        cls, desc: BlockSparseMatmulDescriptor, *, may_slice: bool = True
    ) -> list[BlocksMmaSchedule]:
        """Every schedule of a problem. If a CTA of many tokens needs a copy of X, others have fewer."""
        depth, widest, along_k = unit_depth(desc.layout.block), _widest(desc), _reads_along_k(desc)
        tiles = {widest: along_k}
        if not along_k and desc.n % widest:
            # With blocks of 16, a transposed X would be read in pieces of 32 bytes, so its rows are padded.
            tiles = {widest: desc.layout.block > M16_ROWS, math.gcd(desc.n, widest): False}
        slices = _row_slices(desc) if may_slice else 1
        return [
            cls(warps, m16_tiles, n8_tiles, depth, x_along_k, slices)
            for n8_tiles, x_along_k in tiles.items()
            for m16_tiles in _M16_TILES
            if m16_tiles <= min(desc.layout.block // M16_ROWS, _MAX_M16_TILES[n8_tiles])
            for warps in _WARPS
        ]

    @classmethod
    def of(
        cls,
        desc: BlockSparseMatmulDescriptor,
        multiprocessors: int,
        max_workspace: int | None = None,
        *,
        may_slice: bool = True,
    ) -> BlocksMmaSchedule:
        """The fastest schedule by prediction whose copy of X takes at most ``max_workspace`` bytes.

        ``may_slice``: whether the device can compute slices of block rows.
        """
        model = CostModel.of(by_order_and_block(MODEL, desc), TERMS)
        return fastest(
            cls.candidates(desc, may_slice=may_slice),
            lambda some: [model.microseconds(one.work(desc, multiprocessors)) for one in some],
            lambda one: prepared_bytes(one.prepared(desc)),
            max_workspace,
        )

    @property
    def name(self) -> str:
        """The name of this schedule among the problem's others, in files of measured times."""
        sliced = "" if self.row_slices == 1 else f"/{self.row_slices}"
        return f"{self.warps},{self.m16_tiles},{self.n8_tiles}{sliced}"

    def prepared(self, desc: BlockSparseMatmulDescriptor) -> tuple[Prepared, ...]:
        """X, if a pre-pass must copy it.

        A lane loads as many contiguous tokens at a time as a CTA has tiles of eight, so rows of X must be
        multiples: they are padded, or X is transposed.
        """
        if _reads_along_k(desc) or (not self.x_along_k and desc.n % self.n8_tiles == 0):
            return ()
        return (_copy_of_x(desc, transposes=self.x_along_k),)

    def work(self, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> tuple[float, ...]:
        """The amount of each kind of work in TERMS.

        Memory delivers values, X and C. L2 delivers X to every CTA, and values again to further tokens. A
        load of X takes as long if it has fewer tokens. In each wave CTAs begin and write cells of C. No CTA
        ends before the rounds of its block row do, of which the longest counts, and before those in which X
        is loaded. The CTAs of a cluster exchange sums. X may be copied first.
        """
        one = desc.layout
        values = desc.batch * one.blocks * one.block**2 * desc.element.itemsize
        longest = expected_longest_panel(desc, one.block)
        busy = (self.ctas(desc) + self.tiles(desc)) / 2  # about half of the CTAs of clusters exit at once
        waves = busy / self.resident_ctas(multiprocessors)
        waves = max((waves + math.ceil(waves)) / 2, 1.0)  # a partial wave takes a part of a whole one
        units, copies = longest * one.block / self.depth, self.prepared(desc)
        units /= min(self.row_slices, max(units / _SLICE_UNITS, 1.0))
        rounds = units / min(self.warps, shares_of(units))
        cells_of_a_thread = self.rows * self.tokens / (32 * self.warps)
        return (
            values + dense_bytes(desc),
            values * (self.n_tiles(desc) * (1 + self.tokens / self.rows) - 1),
            values / desc.element.itemsize * self.n_tiles(desc) * self.tokens / self.rows / self.x_cells,
            waves,
            rounds / self.units,
            rounds / self.x_units,
            waves * cells_of_a_thread,
            self.n8_tiles if self.row_slices > 1 else 0,
            len(copies),
            prepared_bytes(copies),
        )

    @property
    def resident_warps(self) -> int:
        """Warps that a multiprocessor has registers for.

        More fit if a unit has few rows, and X is not loaded as single tokens, each of which takes a register.
        """
        if self.n8_tiles > 1 or self.m16_tiles == max(_M16_TILES):
            return 16
        if self.x_along_k:
            return 24
        return 16 if self.m16_tiles == 1 else 20

    def resident_ctas(self, multiprocessors: int) -> int:
        """CTAs that run at once."""
        return multiprocessors * (self.resident_warps // self.warps)

    @property
    def rows(self) -> int:
        """Rows of a CTA's tile."""
        return M16_ROWS * self.m16_tiles

    @property
    def tokens(self) -> int:
        """Tokens of a CTA's tile."""
        return TILE_TOKENS * self.n8_tiles

    @property
    def x_cells(self) -> int:
        """Contiguous cells of X that a lane loads at a time."""
        return self.depth // 4 if self.x_along_k else self.n8_tiles

    @property
    def units(self) -> int:
        """Units of a warp whose values are in flight."""
        words = _LANE_WORDS // 2 if self.n8_tiles == max(_MAX_M16_TILES) else _LANE_WORDS
        return max(words // (self.m16_tiles * self.depth // 4), 1)

    @property
    def x_units(self) -> int:
        """Units of a warp whose X is in flight."""
        cells = _LANE_WORDS * (1 if self.n8_tiles == 1 and not self.x_along_k else 2)
        if self.n8_tiles == 4 and self.units == 8:  # the columns of eight units take registers, too
            cells //= 2
        return min(cells // (self.n8_tiles * self.depth // 4), self.units)

    def n_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Token tiles of a result."""
        return -(-desc.n // self.tokens)

    def tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Tiles of the result, each of one CTA, or of a cluster."""
        return desc.batch * block_rows(desc) * (desc.layout.block // self.rows) * self.n_tiles(desc)

    def long_rows(self, desc: BlockSparseMatmulDescriptor) -> int:
        """The most block rows that can be so long that they have several slices."""
        if self.row_slices == 1:
            return 0
        units = desc.layout.blocks * desc.layout.block // self.depth
        return min(units // (_SLICE_UNITS + 1), block_rows(desc))

    def ctas(self, desc: BlockSparseMatmulDescriptor) -> int:
        """CTAs that are launched: whole clusters, one for each tile of a row that may have slices."""
        of_row = self.tiles(desc) // max(block_rows(desc), 1)
        whole = (block_rows(desc) - self.long_rows(desc)) * of_row
        return align_up(self.long_rows(desc) * of_row * self.row_slices + whole, self.row_slices)

    def shared_bytes(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Shared memory for the slots, padded as ``gemm/split_k.cuh`` pads them."""
        rows, tokens = self.rows, self.tokens
        if KernelProblem(desc).tokens_contiguous:
            padded = rows * (tokens + (8 if tokens % 16 == 0 else 0))
        else:
            padded = tokens * (rows + 4)
        return 4 * padded * SLOTS


def shares_of(units: float) -> int:
    """Number of shares of a block row of ``units`` units."""
    return next(shares for most, shares in _SHARES if units <= most)


def block_rows(desc: BlockSparseMatmulDescriptor) -> int:
    """Block rows of op(S) in all heads."""
    return desc.layout.heads * KernelProblem(desc).head_block_rows


def _row_slices(desc: BlockSparseMatmulDescriptor) -> int:
    """Most slices of a block row: several if the longest row has many units, and more than thrice an SM's.

    The longest row's length is expected from the known longest panel; if none is known, it is the mean
    row's. An SM's units are its equal part of all work, where every m16 tile has the units of its row. So a
    few equal rows of a long K have slices, too.

    The tables order rows by length in each head, so only layouts of one head have their long rows first.
    """
    layout = desc.layout
    units_of_block = layout.block / unit_depth(layout.block)
    longest = expected_longest_panel(desc, layout.block) * units_of_block
    m16_tiles = layout.block // M16_ROWS
    of_an_sm = layout.blocks * units_of_block * m16_tiles / REFERENCE_SMS
    is_long = longest >= _LONG_ROW_UNITS and longest > _LONG_ROW * of_an_sm
    return _MAX_ROW_SLICES if is_long and layout.heads == 1 else 1


def unit_depth(block: int) -> int:
    """k of a unit: a lane loads a quarter of a row's as one piece of at most 16 bytes."""
    return min(block, 32)


def _widest(desc: BlockSparseMatmulDescriptor) -> int:
    """Most tiles of eight tokens of a CTA. Units of large blocks leave less room for X."""
    most = 8 if unit_depth(desc.layout.block) == M16_ROWS else 4
    return next(one for one in _MAX_M16_TILES if TILE_TOKENS * one >= desc.n or one == most)


@lru_cache(256)
def _copy_of_x(desc: BlockSparseMatmulDescriptor, *, transposes: bool) -> Prepared:
    """The copy of X, which schedules of a problem share."""
    right = KernelProblem(desc).right
    return Prepared.of(next(one for one in desc.operands() if one.name == right), transposes=transposes)


def _reads_along_k(desc: BlockSparseMatmulDescriptor) -> bool:
    """Whether k is contiguous in X as the caller stores it."""
    return desc.dense_k_last or desc.n == 1
