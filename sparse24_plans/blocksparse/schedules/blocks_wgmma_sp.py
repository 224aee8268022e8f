"""How ``blocksparse/blocks_wgmma_sp.cu`` is cut for a problem: tokens, clusters, stages."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from ...plan.schedule_choice import SHARED_BYTES, constants
from ..descriptor import BlockSparseMatmulDescriptor
from ..panels import PANEL_ROWS
from .blocks_wgmma import busy_tokens
from .blocks_wgmma_cost import panel_count

THREADS = 384
"""Threads of a CTA: two consumer warpgroups, and four producer warps."""
_LINE_BYTES = 128
"""Bytes of a staged row, and of a shared-memory row of X, which has 64 columns."""
_STAGING_LINES = 64
_BARRIER_BYTES = 256
_MAX_STAGES = 6
_SPARSE_STAGES = 3
"""Pipeline stages of S; each has 128 columns."""
_BUFFERS = 2


class BlocksWgmmaSpSchedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types, and how it is launched."""

    tokens: int
    """Tokens of a CTA's tile."""
    cluster_n: int
    """CTAs of a cluster, which have tokens of their own and share the values of a panel by multicast."""
    sparse_stages: int
    dense_stages: int
    buffers: int
    """Staging buffers of a warpgroup's results."""

    @classmethod
    def of(cls, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> BlocksWgmmaSpSchedule:
        """The kernel's own choice for a problem. Bits don't depend on it."""
        tokens, widest = busy_tokens(panel_count(desc), desc.n, multiprocessors)
        sharing = widest and -(-desc.n // tokens) % 2 == 0  # S's values are loaded from L2 once a cluster
        return fitting(desc.layout.block, tokens, 2 if sharing else 1)

    def shared_bytes(self, block: int) -> int:
        staging = 2 * self.buffers * _STAGING_LINES * _LINE_BYTES
        return (
            self.dense_stages * self.tokens * _LINE_BYTES
            + self.sparse_stages * _sparse_bytes(block)
            + staging
            + _BARRIER_BYTES
        )

    def cluster_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Token tiles of clusters that cover all columns of a result."""
        return -(-desc.n // (self.tokens * self.cluster_n))

    def work_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Work tiles, one a cluster."""
        return panel_count(desc) * self.cluster_tiles(desc)

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once."""
        return max(1, multiprocessors // self.cluster_n)

    def raster_groups(self, desc: BlockSparseMatmulDescriptor, clusters: int) -> tuple[int, int]:
        """Return the token tiles of a raster group, and how many groups there are.

        A group's token tiles are computed with every panel before the next group. Groups stay in half of L2
        but leave each of the ``clusters`` a work tile. They are equal if possible.
        """
        fit = constants("blocks_tiles")
        tiles = desc.batch * self.cluster_tiles(desc) if panel_count(desc) else 0
        tile_bytes = desc.reduction * self.tokens * self.cluster_n * desc.element.itemsize * desc.layout.heads
        panels = max(panel_count(desc) // max(desc.batch, 1), 1)
        least = max(-(-clusters * fit["busy_percent"] // 100 // panels), 1)
        # If a row of X is read hardly more than once, groups gain less than they cost, so half as many serve.
        once = desc.layout.density * panels < fit["sparse24_min_reads"]
        most = max(fit["sparse24_group_bytes"] * (1 + once) // max(tile_bytes, 1), least)
        fewest = max(-(-tiles // most), 1)
        raster_groups = _least_divisor(tiles, fewest, tiles // least)
        raster_tiles = -(-tiles // raster_groups)
        return raster_tiles, -(-tiles // max(raster_tiles, 1))


def _least_divisor(number: int, least: int, most: int) -> int:
    """Return the least divisor from ``least`` to ``most``, or ``least`` if there is none.

    Numbers reach 2^31: only divisors up to the square root are tried, and each gives the one beyond it.
    """
    below = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    divisors = (*below, *(number // one for one in below))
    return min((one for one in divisors if least <= one <= most), default=least)


def _sparse_bytes(block: int) -> int:
    """Bytes of a stage of S: values and metadata of a panel's block rows."""
    return PANEL_ROWS // block * (block * block + block * block // 8)


def fitting(block: int, tokens: int, cluster_n: int) -> BlocksWgmmaSpSchedule:
    """The schedule with as many stages of X as shared memory has room for."""
    one = BlocksWgmmaSpSchedule(tokens, cluster_n, PANEL_ROWS // block * _SPARSE_STAGES, 0, _BUFFERS)
    stages = min((SHARED_BYTES[1] - one.shared_bytes(block)) // (tokens * _LINE_BYTES), _MAX_STAGES)
    return one._replace(dense_stages=stages)
