"""How ``blocksparse/blocks_strict.cu`` is cut for a problem."""

from __future__ import annotations

from typing import NamedTuple

from ..vocab import BlockSparseOp
from .descriptor import BlockSparseMatmulDescriptor
from .lookup_tables import GROUP, groups

_TOKENS = (128, 32)
_LANES = 16
"""Threads that share a row."""


class StrictTiles(NamedTuple):
    """A block of threads computes ``rows`` x ``tokens`` results."""

    rows: int
    tokens: int

    @classmethod
    def of(cls, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> StrictTiles:
        """The largest tokens that leave no half of the device idle. No bit depends on them."""
        rows = min(desc.layout.block, 64)
        if desc.op is BlockSparseOp.SDD:
            return cls(rows, _TOKENS[0])
        for tokens in _TOKENS:
            found = cls(rows, tokens)
            if 2 * desc.n > tokens and 2 * found.blocks(desc) >= multiprocessors:
                break
        return found

    @property
    def threads(self) -> int:
        return self.rows // (4 if self.rows < 64 else 8) * _LANES

    def lines(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Rows of blocks of op(S) in all heads; of ``sdd`` groups of neighbouring blocks."""
        if desc.op is BlockSparseOp.SDD:
            return groups(desc.layout)
        return desc.layout.heads * desc.sides[1 if desc.op is BlockSparseOp.DDS else 0] // desc.layout.block

    def token_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """That cover the results of a line; of ``sdd`` of a group."""
        return -(-(GROUP if desc.op is BlockSparseOp.SDD else desc.n) // self.tokens)

    def blocks(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Of threads."""
        row_tiles = desc.layout.block // self.rows
        return desc.batch * self.token_tiles(desc) * self.lines(desc) * row_tiles
