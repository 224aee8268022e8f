"""How ``blocksparse/blocks_wgmma.cu`` is cut for a problem: tiles, clusters, stages."""

from __future__ import annotations

from typing import NamedTuple

from ..vocab import BlockSparseOp
from .descriptor import BlockSparseMatmulDescriptor
from .shape import BlockSparseShape
from .tables import STRIP, head_strips, head_tiles, tile_rows

SHARED_BYTES = 227 << 10
"""Of a block of threads on Hopper."""
_ROW_BYTES, _TILE_ROWS = 128, 64
_BARRIER_BYTES = 256

_BAND_BYTES, _BAND_BYTES_OF_SMALL = 40 << 20, 16 << 20
"""Of the dense operand, that the items of a band read: it stays in L2. The second with small blocks."""
_MOST_STAGES = 8
_TOKENS = (256, 128, 64)
_SAMPLED_COLUMNS, _MOST_PIECES = (64, 128, 192, 256), 12
"""Of a warpgroup, of ``sdd``; of a strip's columns, beyond which they are as many as a block can have."""
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
    """Blocks of a cluster, which share the rows of a strip and have tokens of their own."""
    stages: int
    buffers: int
    across: int
    """Columns that ``sdd`` gives a block of threads at most; up to ``tokens``."""

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
        """Clusters' pieces of all columns of a result; not of ``sdd``."""
        return -(-desc.n // (self.tokens * self.share))

    def groups(self, layout: BlockSparseShape) -> int:
        """Of ``sdd``: the most pieces of clusters that the columns of a strip can be."""
        return -(-layout.cols // (self.across * self.share))

    def parts(self, block: int) -> int:
        """Of columns of blocks that ``sdd`` gives a block of threads at most: whole, or as wide as it."""
        return self.across // min(block, self.tokens)

    def items(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of work; of ``sdd`` at most."""
        if desc.op is BlockSparseOp.SDD:
            return strips_of(desc) * self.groups(desc.layout) if desc.layout.blocks else 0
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
    one = Schedule(rows, tokens, warpgroups, share, stages=0, buffers=2, across=tokens)
    return one._replace(stages=min((SHARED_BYTES - one.shared_bytes()) // one.stage_bytes, _MOST_STAGES))


def best_schedule(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    """The kernel's own choice for a problem, as measured on an H200. Bits don't depend on it."""
    block = desc.layout.block
    enough = multiprocessors * _BUSY // 100
    if desc.op is BlockSparseOp.SDD:
        return _sampled(desc, multiprocessors)
    strips = strips_of(desc)
    tokens = next((one for one in _TOKENS if strips * -(-desc.n // one) >= enough), _TOKENS[-1])
    # The values of S from L2 once a cluster: worth it where they are much of what is copied.
    wide = tokens == _TOKENS[0]
    sharing = block >= _TILE_ROWS and wide != (block == STRIP) and -(-desc.n // tokens) % 2 == 0
    return fitting(STRIP, tokens, 2, 2 if sharing else 1)


def strips_of(desc: BlockSparseMatmulDescriptor) -> int:
    """Strips of op(S), or for ``dds`` of its transpose, in all batches and heads."""
    if desc.op is BlockSparseOp.SDD:
        return desc.batch * desc.layout.heads * head_tiles(desc.layout)
    side = desc.sides[1 if desc.op is BlockSparseOp.DDS else 0]
    return desc.batch * desc.layout.heads * head_strips(side)


def sampled_schedules(layout: BlockSparseShape) -> list[Schedule]:
    """What is tried for ``sdd``: a strip's columns in few pieces, as wide as what remains of them.

    Each of two warpgroups has 64 rows, and whole blocks or equal parts of one.
    """
    rows, block = tile_rows(layout), layout.block
    widths = [2 * one * _TILE_ROWS // rows for one in _SAMPLED_COLUMNS]
    fit = [one for one in widths if one % block == 0 or block % one == 0]
    met = layout.cols * (1 - (1 - layout.density) ** (rows // block))  # of random blocks
    found = {}
    for share in (1, 2):
        for pieces in range(share, _MOST_PIECES + 1, share):
            wanted = max(-int(-met // (pieces * block)) * block, block)
            tokens = next((one for one in fit if one >= wanted), None)
            if tokens:
                found[tokens, wanted, share] = fitting(rows, tokens, 2, share)._replace(across=wanted)
    for tokens in fit:
        for share in (1, 2):
            found.setdefault((tokens, tokens, share), fitting(rows, tokens, 2, share))
    return list(found.values())


def _sampled(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    layout = desc.layout
    met = layout.cols * (1 - (1 - layout.density) ** (tile_rows(layout) // layout.block))  # of random blocks

    def time(one: Schedule) -> float:
        pieces = max(1, -int(-met // (one.across * one.share)))
        mine = met / (pieces * one.share)
        waves = -(-strips_of(desc) * pieces // one.resident_clusters(multiprocessors))
        return waves * (one.rows / one.share + mine)

    return min(sampled_schedules(layout), key=time)
