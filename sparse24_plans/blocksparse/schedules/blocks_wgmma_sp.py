"""How ``blocksparse/blocks_wgmma_sp.cu`` is cut for a problem: tokens, clusters, stages."""

from __future__ import annotations

from typing import NamedTuple

from ..descriptor import BlockSparseMatmulDescriptor
from ..lookup_tables import STRIP
from .blocks_wgmma import SHARED_BYTES, strips_of

THREADS = 384
"""Of a block: two warpgroups that multiply, and four warps that copy."""
_LINE_BYTES = 128
"""Of a line of X in shared memory, which has 64 of what is summed over; and of a staged line."""
_STAGING_LINES = 64
_BARRIER_BYTES = 256
_BAND_BYTES = 20 << 20
"""Of the dense operand, that the items of a band read: it stays in either half of L2."""
_FEW_READS = 2.0
"""Of each row of the dense operand, below which bands gain less than they cost."""
_TOKENS = (256, 128, 64)
_BUSY = 90
"""Percent of the multiprocessors that must have work, or tiles are smaller."""
_MOST_STAGES = 6
_SPARSE_STAGES = 3
"""Of 128 columns."""
_BUFFERS = 2


class Schedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types, and how it is launched."""

    tokens: int
    """Of a block of threads."""
    share: int
    """Blocks of a cluster, which share the values of a strip and have tokens of their own."""
    sparse_stages: int
    dense_stages: int
    buffers: int

    def shared_bytes(self, block: int) -> int:
        staging = 2 * self.buffers * _STAGING_LINES * _LINE_BYTES
        return (
            self.dense_stages * self.tokens * _LINE_BYTES
            + self.sparse_stages * _sparse_bytes(block)
            + staging
            + _BARRIER_BYTES
        )

    def token_clusters(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of all columns of a result."""
        return -(-desc.n // (self.tokens * self.share))

    def items(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of work."""
        return strips_of(desc) * self.token_clusters(desc)

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once."""
        return max(1, multiprocessors // self.share)

    def bands(self, desc: BlockSparseMatmulDescriptor, clusters: int) -> tuple[int, int]:
        """Token tiles of a band, which are taken with every strip before the next ones; and how many bands.

        Small ones, of which every one of so many clusters has an item still. Of equal size where it can be.
        """
        tiles = desc.batch * self.token_clusters(desc)
        tile_bytes = desc.reduction * self.tokens * self.share * desc.element.itemsize * desc.layout.heads
        strips = max(strips_of(desc) // max(desc.batch, 1), 1)
        least = max(-(-clusters * _BUSY // 100 // strips), 1)
        once = desc.layout.density * strips < _FEW_READS  # or nearly: then half as many bands
        most = max(_BAND_BYTES * (1 + once) // max(tile_bytes, 1), least)
        fewest = max(-(-tiles // most), 1)
        bands = next((one for one in range(fewest, tiles // least + 1) if tiles % one == 0), fewest)
        band = -(-tiles // bands)
        return band, -(-tiles // max(band, 1))


def _sparse_bytes(block: int) -> int:
    """Of a stage: values and metadata of a strip's lines."""
    return STRIP // block * (block * block + block * block // 8)


def fitting(block: int, tokens: int, share: int) -> Schedule:
    """With as many stages of X as shared memory has room for."""
    one = Schedule(tokens, share, STRIP // block * _SPARSE_STAGES, 0, _BUFFERS)
    stages = min((SHARED_BYTES - one.shared_bytes(block)) // (tokens * _LINE_BYTES), _MOST_STAGES)
    return one._replace(dense_stages=stages)


def best_schedule(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    """The kernel's own choice for a problem, as measured on an H200. Bits don't depend on it."""
    enough = multiprocessors * _BUSY // 100
    strips = strips_of(desc)
    tokens = next((one for one in _TOKENS if strips * -(-desc.n // one) >= enough), _TOKENS[-1])
    # The values of S from L2 once a cluster.
    sharing = tokens == _TOKENS[0] and -(-desc.n // tokens) % 2 == 0
    return fitting(desc.layout.block, tokens, 2 if sharing else 1)
