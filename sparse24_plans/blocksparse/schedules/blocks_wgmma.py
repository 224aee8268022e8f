"""How ``blocksparse/blocks_wgmma.cu`` is cut for a problem: tiles, clusters, stages."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..lookup_tables import STRIP, TILE, head_strips, met_share, tile_lines, tile_size
from ..shape import BlockSparseShape

Columns = np.ndarray[Any, np.dtype[np.int64]]
SHARED_BYTES = 227 << 10
"""Of a block of threads on Hopper."""
_ROW_BYTES = 128
_BARRIER_BYTES = 256

_BAND_BYTES, _BAND_BYTES_OF_SMALL = 40 << 20, 16 << 20
"""Of the dense operand, that the items of a band read: it stays in L2. The second with small blocks."""
_MOST_STAGES = 8
_TOKENS = (256, 128, 64)
_SAMPLED_COLUMNS = (64, 128, 192, 256)
"""Of a warpgroup, of ``sdd``."""
_MOST_STRIPS = 2048
"""That are looked at, of as many as there may be."""
_SHARES_MET = (0.97, 1.0, 1.03)
"""Of what strips of ``sdd`` meet on the mean: one layout differs from another, and a wave is full or not."""
_LEAST_STAGES, _ENOUGH_STAGES = 3, 4
"""Of ``sdd``: with fewer than the first it takes longer whatever the layout."""
_BUSY = 90
"""Percent of the multiprocessors that must have work, or tiles are smaller."""
_Sizes = tuple[int, int]
_STEP_OF_SMALL: dict[tuple[BlockSparseOp, int], dict[_Sizes, int]] = {
    (BlockSparseOp.DSD, 16): {(64, 128): 43, (64, 256): 60, (128, 64): 43, (128, 128): 49, (128, 256): 64},
    (BlockSparseOp.DSD, 32): {(64, 128): 37, (64, 256): 64, (128, 64): 30, (128, 128): 36, (128, 256): 60},
    (BlockSparseOp.DDS, 16): {(64, 128): 60, (64, 256): 93, (128, 64): 36, (128, 128): 54, (128, 256): 79},
    (BlockSparseOp.DDS, 32): {(64, 128): 42, (64, 256): 71, (128, 64): 30, (128, 128): 37, (128, 256): 68},
}
"""What a step takes beside others, by rows and tokens: benchmarks/schedules/h200-block-times.jsonl, bf16."""
_BEGUN = 0.7
"""Of a wave that is begun, the part that takes as long as a whole one."""


class _Cost(NamedTuple):
    """Of ``sdd``, as measured on an H200 for 70 to 80 layouts: in lines of a step, or as a part of them."""

    item: float
    """What an item takes besides."""
    of_shared: float
    """Of the rows that a cluster shares."""
    few_stages: float


_COSTS = {
    16: _Cost(60, 0.5, 1.2),
    32: _Cost(60, 0.5, 1.2),
    64: _Cost(200, 0.6, 1.2),
    128: _Cost(150, 0.9, 1.0),
}
"""By the block."""


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

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and four warps that copy."""
        return 128 * (self.warpgroups + 1)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tokens) * _ROW_BYTES

    def shared_bytes(self) -> int:
        staging = self.warpgroups * self.buffers * TILE * _ROW_BYTES
        return self.stages * self.stage_bytes + staging + _BARRIER_BYTES

    def token_clusters(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of all columns of a result; not of ``sdd``."""
        return -(-desc.n // (self.tokens * self.share))

    def groups(self, layout: BlockSparseShape) -> int:
        """Of ``sdd``: the most pieces of clusters that the columns of a strip can be."""
        return -(-layout.cols // (self.tokens * self.share))

    def parts(self, block: int) -> int:
        """Of columns of blocks that ``sdd`` gives a block of threads at most: whole, or as wide as it."""
        return max(self.tokens // block, 1)

    def items(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' pieces of work; of ``sdd`` at most."""
        if desc.op is BlockSparseOp.SDD:
            return strips_of(desc, self.rows) * self.groups(desc.layout) if desc.layout.blocks else 0
        return strips_of(desc, self.rows) * self.token_clusters(desc)

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once."""
        return max(1, multiprocessors // self.share)

    def band(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Clusters' token tiles that are taken with every line before the next ones."""
        tiles = desc.batch * self.token_clusters(desc)
        tile_bytes = desc.reduction * self.tokens * self.share * desc.element.itemsize * desc.layout.heads
        most = _BAND_BYTES if desc.layout.block >= TILE else _BAND_BYTES_OF_SMALL
        bands = -(-tiles * tile_bytes // most)
        return -(-tiles // max(bands, 1))


def fitting(rows: int, tokens: int, warpgroups: int, share: int) -> Schedule:
    """With as many stages as shared memory has room for."""
    one = Schedule(rows, tokens, warpgroups, share, stages=0, buffers=2)
    return one._replace(stages=min((SHARED_BYTES - one.shared_bytes()) // one.stage_bytes, _MOST_STAGES))


def best_schedule(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    """The kernel's own choice for a problem, as measured on an H200. Bits don't depend on it."""
    block = desc.layout.block
    if desc.op is BlockSparseOp.SDD:
        return _sampled(desc, multiprocessors)
    if block < TILE:
        return _of_small(desc, multiprocessors)
    strips, enough = strips_of(desc, STRIP), multiprocessors * _BUSY // 100
    tokens = next((one for one in _TOKENS if strips * -(-desc.n // one) >= enough), _TOKENS[-1])
    # The values of S from L2 once a cluster: worth it where they are much of what is copied.
    wide = tokens == _TOKENS[0]
    sharing = wide != (block == STRIP) and -(-desc.n // tokens) % 2 == 0
    return fitting(STRIP, tokens, 2, 2 if sharing else 1)


def _of_small(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    """The fastest for random blocks: narrow strips meet fewer columns, wide ones are fewer items."""
    steps = _STEP_OF_SMALL[desc.op, desc.layout.block]

    def time(one: Schedule) -> float:
        waves = one.items(desc) / multiprocessors
        waves = _BEGUN * math.ceil(waves) + (1 - _BEGUN) * max(waves, 1.0)
        return waves * met_share(desc.layout, one.rows // desc.layout.block) * steps[one.rows, one.tokens]

    return min(schedules_by_density(desc), key=time)


def schedules_by_density(desc: BlockSparseMatmulDescriptor) -> list[Schedule]:
    """Those of which the density decides: all of ``sdd``, and of the others where blocks are small."""
    if desc.op is BlockSparseOp.SDD:
        return sampled_schedules(desc.layout)
    return [fitting(*sizes, 2, 1) for sizes in _STEP_OF_SMALL.get((desc.op, desc.layout.block), ())]


def strips_of(desc: BlockSparseMatmulDescriptor, rows: int = STRIP) -> int:
    """Strips of op(S), or for ``dds`` of its transpose, in all batches and heads."""
    side = desc.sides[1 if desc.op is BlockSparseOp.DDS else 0]
    return desc.batch * desc.layout.heads * head_strips(side, rows)


def sampled_schedules(layout: BlockSparseShape) -> list[Schedule]:
    """All that serve ``sdd``: each of two warpgroups has 64 rows, and whole blocks or equal parts of one."""
    rows, block = tile_size(layout.block), layout.block
    tokens = [2 * one * TILE // rows for one in _SAMPLED_COLUMNS]
    fit = [one for one in tokens if one % block == 0 or block % one == 0]
    found = [fitting(rows, one, 2, share) for one in fit for share in (1, 2)]
    return [one for one in found if one.stages >= _LEAST_STAGES]


def _sampled(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> Schedule:
    """The one whose busiest cluster has the least to do, were the kept blocks random."""
    block, strips = desc.layout.block, min(strips_of(desc, tile_size(desc.layout.block)), _MOST_STRIPS)
    layouts = [_met_columns(desc.layout, strips, share) for share in _SHARES_MET]
    return min(
        sampled_schedules(desc.layout),
        key=lambda one: sum(_busiest(one, columns, block, multiprocessors) for columns in layouts),
    )


def _met_columns(layout: BlockSparseShape, strips: int, share: float = 1.0) -> Columns:
    """Of blocks, that so many strips of ``sdd`` meet: the quantiles of random layouts, the most first.

    ``share``: of what these meet on the mean.
    """
    kept = met_share(layout, tile_lines(layout))
    mean, deviation = layout.block_cols * kept * share, (layout.block_cols * kept * (1 - kept)) ** 0.5
    met = np.rint(mean + deviation * _normal_quantiles(strips))
    found: Columns = np.clip(met, 0, layout.block_cols).astype(np.int64)
    return found


@lru_cache(64)
def _normal_quantiles(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The middles of so many equal parts of the normal distribution, the largest first."""
    return np.array([NormalDist().inv_cdf(1 - (part + 0.5) / count) for part in range(count)])


def _busiest(one: Schedule, columns: Columns, block: int, multiprocessors: int) -> float:
    """Lines of a step that the busiest block of threads copies, items being dealt out as the kernel does."""
    part = min(block, one.tokens)
    parts = columns * (block // part)
    groups = -(-parts // (one.parts(block) * one.share))
    _, strip = np.nonzero(np.arange(groups.max(initial=0))[:, None] < groups)
    clusters = one.resident_clusters(multiprocessors)
    turn, cluster = np.divmod(np.arange(len(strip)), clusters)
    cluster = np.where(turn % 2, clusters - 1 - cluster, cluster)
    mine = -(-parts // np.maximum(groups * one.share, 1)) * part
    cost = _COSTS[block]
    rows = one.rows * (cost.of_shared if one.share > 1 else 1.0)
    items = (rows + mine[strip]) * (cost.few_stages if one.stages < _ENOUGH_STAGES else 1.0) + cost.item
    return float(np.bincount(cluster, items, minlength=1).max())
