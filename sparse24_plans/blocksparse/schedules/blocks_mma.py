"""How ``blocksparse/blocks_mma.cu`` cuts a problem. No bit depends on it."""

from __future__ import annotations

from typing import NamedTuple

from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem, Prepared
from .blocks_wgmma import MULTIPROCESSORS, has_long_panel

STRIP_ROWS, TILE_TOKENS = 16, 8
"""Rows and tokens of an mma."""
_STRIPS = (4, 2, 1)
"""Numbers of strips of a CTA."""
_MOST_STRIPS = {1: 4, 2: 2, 4: 2, 8: 1}
"""Most strips of a CTA by its tiles of eight tokens: registers hold the sums and what is in flight."""
_LANE_WORDS = 32
"""Registers of a lane for values in flight, and for cells of X in flight. With 64 tokens values have half."""
_BUSY_CTAS = 2
"""CTAs for each SM, below which a CTA gets fewer strips."""
_FEW_UNITS, _MANY_UNITS = 16, 64
"""Mean number of units of a block row below which four warps share it, and from which 16 may."""
_MANY_TILES, _FEW_TILES = 6 * MULTIPROCESSORS, MULTIPROCESSORS
"""Row tiles from which CTAs of four warps keep the H200 busy, and below which 16 warps share a block row."""
_LONG_UNITS = 512
"""Units of a full block row beyond which four warps would take too long for it."""
_WARPS = (4, 8, 16)
"""Numbers of warps of a CTA."""
RESIDENT_WARPS = 16
"""Warps that a multiprocessor runs at once, at least."""
SLOTS = 8
"""Places for the sums of shares of a block row."""
_ROUND_US, _BYTES_PER_US = 0.9, 2.3e6
"""Time from a warp's loads to their values, and bytes of values that are multiplied in a microsecond."""


class BlocksMmaSchedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types."""

    warps: int
    """Warps of a CTA."""
    strips: int
    """Strips of 16 rows of a CTA's tile."""
    n8_tiles: int
    """Tiles of eight tokens of a CTA's tile."""
    depth: int
    """k of a unit, which a warp multiplies at a time."""
    x_along_k: bool
    """Whether k is contiguous in X; otherwise its tokens are."""

    @classmethod
    def of(cls, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> BlocksMmaSchedule:
        """The schedule with the most strips that keeps the device busy.

        More warps share a block row if a long one would take longer than all others.
        """
        x_along_k = _reads_along_k(desc) or any(copy.transposes for copy in prepared_x(desc))
        shared = n8_tiles_of(desc), unit_depth(desc.layout.block), x_along_k
        most = min(desc.layout.block // STRIP_ROWS, _MOST_STRIPS[shared[0]])
        strips = [one for one in _STRIPS if one <= most]
        tried = [cls(_warps(desc), one, *shared) for one in strips]
        found = next((one for one in tried if one.ctas(desc) >= _BUSY_CTAS * multiprocessors), tried[-1])
        more = [found._replace(warps=one) for one in _WARPS if one >= found.warps]
        return next((one for one in more if not one.waits_for_a_long_row(desc)), more[-1])

    def waits_for_a_long_row(self, desc: BlockSparseMatmulDescriptor) -> bool:
        """Whether the longest block row is known to take longer than all values from memory."""
        if not has_long_panel(desc):
            return False
        values = 2 * desc.layout.blocks * desc.layout.block**2
        units = desc.longest_panel * (desc.layout.block // self.depth)
        return units / (self.warps * self.units) * _ROUND_US > values / _BYTES_PER_US

    @property
    def rows(self) -> int:
        """Rows of a CTA's tile."""
        return STRIP_ROWS * self.strips

    @property
    def tokens(self) -> int:
        """Tokens of a CTA's tile."""
        return TILE_TOKENS * self.n8_tiles

    @property
    def units(self) -> int:
        """Units of a warp whose values are in flight."""
        words = _LANE_WORDS // 2 if self.n8_tiles == max(_MOST_STRIPS) else _LANE_WORDS
        return max(words // (self.strips * self.depth // 4), 1)

    @property
    def x_units(self) -> int:
        """Units of a warp whose X is in flight."""
        cells_of_word = 1 if self.n8_tiles == 1 and not self.x_along_k else 2
        return min(_LANE_WORDS * cells_of_word // (self.n8_tiles * self.depth // 4), self.units)

    def n_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Token tiles of a result."""
        return -(-desc.n // self.tokens)

    def ctas(self, desc: BlockSparseMatmulDescriptor) -> int:
        """CTAs of the launch, each with a tile of the result."""
        return desc.batch * block_rows(desc) * (desc.layout.block // self.rows) * self.n_tiles(desc)

    def shared_bytes(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Shared memory for the slots, padded as ``gemm/split_k.cuh`` pads them."""
        rows, tokens = self.rows, self.tokens
        if KernelProblem(desc).tokens_contiguous:
            padded = rows * (tokens + (8 if tokens % 16 == 0 else 0))
        else:
            padded = tokens * (rows + 4)
        return 4 * padded * SLOTS


def block_rows(desc: BlockSparseMatmulDescriptor) -> int:
    """Block rows of op(S) in all heads."""
    return desc.layout.heads * KernelProblem(desc).head_block_rows


def unit_depth(block: int) -> int:
    """k of a unit: a lane loads a quarter of a row's as one piece of at most 16 bytes."""
    return min(block, 32)


def n8_tiles_of(desc: BlockSparseMatmulDescriptor) -> int:
    """Tiles of eight tokens of a CTA. Units of large blocks leave less room for X."""
    most = 8 if unit_depth(desc.layout.block) == STRIP_ROWS else 4
    return next(one for one in _MOST_STRIPS if TILE_TOKENS * one >= desc.n or one == most)


def prepared_x(desc: BlockSparseMatmulDescriptor) -> tuple[Prepared, ...]:
    """X, if a pre-pass must copy it.

    A lane loads as many contiguous tokens at a time as a CTA has tiles of eight, so rows of X must be
    multiples. They are padded for blocks of 16, of which a transposed X would be read in pieces of 32 bytes.
    Larger blocks read a transposed X faster.
    """
    if _reads_along_k(desc) or desc.n % n8_tiles_of(desc) == 0:
        return ()
    right = KernelProblem(desc).right
    x = next(one for one in desc.operands() if one.name == right)
    return (Prepared.of(x, transposes=desc.layout.block > STRIP_ROWS),)


def _reads_along_k(desc: BlockSparseMatmulDescriptor) -> bool:
    """Whether k is contiguous in X as the caller stores it."""
    return desc.dense_k_last or desc.n == 1


def _warps(desc: BlockSparseMatmulDescriptor) -> int:
    """Warps that share a block row.

    The fewer share it, the more units each has, and the less of a CTA's time is the wait for its first ones.
    """
    one, lines = desc.layout, max(block_rows(desc), 1)
    depth = unit_depth(one.block)
    units, tiles = (
        one.blocks / lines * (one.block // depth),
        lines * -(-one.block // (STRIP_ROWS * _STRIPS[0])),
    )
    if units < _FEW_UNITS or (tiles >= _MANY_TILES and desc.reduction <= _LONG_UNITS * depth):
        return 4
    return 16 if units >= _MANY_UNITS and tiles < _FEW_TILES else 8
