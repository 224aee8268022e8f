"""How ``blocksparse/blocks_strict.cu`` cuts a problem into tiles."""

from __future__ import annotations

from typing import NamedTuple

from ...plan.schedule_choice import first_enough
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..lookup_tables import GROUP_COLUMNS, groups

_TOKENS = (128, 32)
_ROW_THREADS = 16
"""Threads that share a row of a tile."""


class BlocksStrictSchedule(NamedTuple):
    """A CTA computes ``rows`` x ``tokens`` results."""

    rows: int
    tokens: int

    @classmethod
    def of(cls, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> BlocksStrictSchedule:
        """The largest tile that keeps half of the device busy. No bit depends on it."""
        rows = min(desc.layout.block, 64)
        if desc.op is BlockSparseOp.SDD:
            return cls(rows, _TOKENS[0])
        return first_enough(
            [cls(rows, tokens) for tokens in _TOKENS],
            lambda one: 2 * desc.n > one.tokens and 2 * one.ctas(desc) >= multiprocessors,
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.rows // (4 if self.rows < 64 else 8) * _ROW_THREADS

    def work_rows(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Block rows of op(S) in all heads; for ``sdd`` groups of neighbouring blocks."""
        if desc.op is BlockSparseOp.SDD:
            return groups(desc.layout)
        return desc.layout.heads * desc.sides[1 if desc.op is BlockSparseOp.DDS else 0] // desc.layout.block

    def n_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Tiles that cover the results of a block row, or of a group for ``sdd``."""
        return -(-(GROUP_COLUMNS if desc.op is BlockSparseOp.SDD else desc.n) // self.tokens)

    def ctas(self, desc: BlockSparseMatmulDescriptor) -> int:
        """CTAs of the launch."""
        m_tiles = desc.layout.block // self.rows
        return desc.batch * self.n_tiles(desc) * self.work_rows(desc) * m_tiles
