"""How ``blocksparse/sdd_mma.cu`` cuts a problem. Bits do not depend on it."""

from __future__ import annotations

from typing import NamedTuple

from ...plan.schedule_choice import constants, first_enough
from ..descriptor import BlockSparseMatmulDescriptor

MAX_TERMS = 64
"""Most products of a sum: a warp keeps its rows of op(A) in registers."""
WARPS = 4
"""Warps of a CTA."""
_M16_ROWS = 16
"""Rows of an mma."""
_M16_TILES = (4, 2, 1)
"""Numbers of m16 tiles of a warp."""
_LEFT_WORDS = 24
"""Registers of a lane for op(A)."""
_WORD_TERMS = 8
"""Products of a sum for which each lane has one register of an operand's row: four lanes have two each."""
_VECTORS = (8, 4, 2, 1)
"""Neighbouring cells of 16 bits that a lane can load together."""
_RUN_CELLS = 4096
"""Most results of a warp with several blocks. Each lane looks up one of the blocks."""


class SddMmaSchedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types, and the length of runs."""

    m16_tiles: int
    """m16 tiles, each of 16 rows, that a warp computes of each of its blocks."""
    words: int
    """Registers of a lane for a row of op(A), or a column of op(B)."""
    vector: int
    """Neighbouring k that a lane loads together if they are contiguous."""
    run_blocks: int
    """Most neighbouring blocks for which a warp computes a row tile."""

    @classmethod
    def of(cls, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> SddMmaSchedule:
        """The schedule with the most m16 tiles, and then the longest runs, that keeps the device busy.

        Below ``busy`` warps per SM warps get fewer m16 tiles, and runs are shortened to reach ``enough``.
        """
        block, words = desc.layout.block, max(-(-desc.n // _WORD_TERMS), 1)
        limits = constants("sdd_mma_warps")
        vector = next(one for one in _VECTORS if desc.n % one == 2 * words % one == 0)
        most = min(block // _M16_ROWS, _LEFT_WORDS // (2 * words))
        tried = [cls(one, words, vector, 1) for one in _M16_TILES if one <= most]
        found = first_enough(tried, lambda one: one.warps(desc) >= limits["busy"] * multiprocessors)
        longest = _RUN_CELLS // (found.m16_tiles * _M16_ROWS * block)
        enough = found.warps(desc) // (limits["enough"] * multiprocessors)
        return found._replace(run_blocks=max(min(longest, enough), 1))

    @staticmethod
    def along_k(desc: BlockSparseMatmulDescriptor) -> tuple[bool, bool]:
        """Whether k is contiguous in op(A), and in op(B). With one k, neighbouring rows or columns are."""
        return not desc.trans_a and desc.n > 1, desc.trans_b and desc.n > 1

    def runs(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Runs of a batch element's blocks."""
        return -(-desc.layout.blocks // self.run_blocks)

    def warps(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Warps that have work."""
        row_tiles = desc.layout.block // (_M16_ROWS * self.m16_tiles)
        return desc.batch * self.runs(desc) * row_tiles

    def ctas(self, desc: BlockSparseMatmulDescriptor) -> int:
        """CTAs of the launch."""
        return -(-self.warps(desc) // WARPS)
