"""How ``blocksparse/blocks_wgmma.cu`` is cut for a problem: tiles, clusters, stages."""

from __future__ import annotations

from typing import NamedTuple

from ..vocab import BlockSparseOp
from .descriptor import BlockSparseMatmulDescriptor
from .tables import GROUP, STRIP, groups, head_strips

SHARED_BYTES = 227 << 10
"""Of a block of threads on Hopper."""
_ROW_BYTES, _TILE_ROWS = 128, 64
_BARRIER_BYTES = 256

_BAND_BYTES, _BAND_BYTES_OF_SMALL = 40 << 20, 16 << 20
"""Of the dense operand, that the items of a band read: it stays in L2. The second with small blocks."""
_MOST_STAGES = 8
_TOKENS = (256, 128, 64)
_STRIP_TOKENS = 256
"""What a strip's rows of a step cost beside the columns that they are multiplied by, in such."""
_BUSY = 90
"""Percent of the multiprocessors that must have work, or tiles are smaller."""


class Schedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types, and how it is launched."""

    rows: int
    """Of a block of threads: a strip; of ``sdd`` with large blocks a row of blocks."""
    tokens: int
    """Of a block of threads."""
    warpgroups: int
    """That multiply."""
    share: int
    """Blocks of a cluster, which share the values of a line and have tokens of their own."""
    stages: int
    buffers: int

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and four warps that copy."""
        return 128 * (self.warpgroups + 1)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tokens) * _ROW_BYTES

    def shared_bytes(self) -> int:
        staging = self.warpgroups * self.buffers * _TILE_ROWS * _ROW_BYTES
        return self.stages * self.stage_bytes + staging + _BARRIER_BYTES

    def token_clusters(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of all columns of a result; of ``sdd`` of a group."""
        width = desc.n
        if desc.op is BlockSparseOp.SDD:  # of small blocks the most that a strip can meet
            width = GROUP if self.rows == desc.layout.block else desc.layout.cols
        return -(-width // (self.tokens * self.share))

    def items(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of work."""
        if desc.op is BlockSparseOp.SDD and self.rows == desc.layout.block:
            return desc.batch * groups(desc.layout) * self.token_clusters(desc)
        return strips_of(desc) * self.token_clusters(desc)

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once."""
        return max(1, multiprocessors // self.share)

    def band(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' token tiles that are taken with every line before the next ones."""
        tiles = desc.batch * self.token_clusters(desc)
        tile_bytes = desc.reduction * self.tokens * self.share * desc.element.itemsize * desc.layout.heads
        most = _BAND_BYTES if desc.layout.block >= _TILE_ROWS else _BAND_BYTES_OF_SMALL
        bands = -(-tiles * tile_bytes // most)
        return -(-tiles // max(bands, 1))


def fitting(rows: int, tokens: int, warpgroups: int, share: int) -> Schedule:
    """With as many stages as shared memory has room for."""
    one = Schedule(rows, tokens, warpgroups, share, stages=0, buffers=2)
    return one._replace(stages=min((SHARED_BYTES - one.shared_bytes()) // one.stage_bytes, _MOST_STAGES))


def best_schedule(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    """The kernel's own choice for a problem, as measured on an H200. Bits don't depend on it."""
    block = desc.layout.block
    enough = multiprocessors * _BUSY // 100
    if desc.op is BlockSparseOp.SDD and block < _TILE_ROWS:
        met = desc.layout.cols * (1 - (1 - desc.layout.density) ** (STRIP // block))  # of random blocks

        def time(tokens: int) -> int:
            items = strips_of(desc) * -int(-met // tokens)
            return -(-items // multiprocessors) * (tokens + _STRIP_TOKENS)

        return fitting(STRIP, min(_TOKENS, key=time), 2, 1)
    if desc.op is BlockSparseOp.SDD:
        columns = desc.batch * desc.layout.blocks * block
        least = _TILE_ROWS * 2 // (block // _TILE_ROWS)  # of two warpgroups
        tokens = next((one for one in _TOKENS if columns >= enough * one), _TOKENS[-1])
        return fitting(block, max(tokens, least), 2, 1)
    strips = strips_of(desc)
    tokens = next((one for one in _TOKENS if strips * -(-desc.n // one) >= enough), _TOKENS[-1])
    # The values of S from L2 once a cluster: worth it where they are much of what is copied.
    wide = tokens == _TOKENS[0]
    sharing = block >= _TILE_ROWS and wide != (block == STRIP) and -(-desc.n // tokens) % 2 == 0
    return fitting(STRIP, tokens, 2, 2 if sharing else 1)


def strips_of(desc: BlockSparseMatmulDescriptor) -> int:
    """Strips of op(S), or for ``dds`` of its transpose, in all batches and heads."""
    side = desc.sides[1 if desc.op is BlockSparseOp.DDS else 0]
    return desc.batch * desc.layout.heads * head_strips(side)
