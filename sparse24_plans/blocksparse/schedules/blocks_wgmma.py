"""How ``blocksparse/blocks_wgmma.cu`` is cut for a problem: tiles, clusters, stages.

The chosen schedule is the fastest candidate by cost models, whose constants are in ``tuning/models``. Bits
don't depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ...plan.schedule_choice import SHARED_BYTES, constants, fastest, first_enough
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem
from ..panels import (
    NARROW_PANEL_ROWS,
    PANEL_ROWS,
    expected_occupancy,
    narrow_panel_block_rows,
    narrow_panel_rows,
)
from ..shape import BlockSparseShape
from .blocks_wgmma_cost import cost_model, expected_longest_panel, panel_count, work

Columns = np.ndarray[Any, np.dtype[np.int64]]
_ROW_BYTES = 128
_BARRIER_BYTES = 256
_MAX_STAGES = 8
"""The kernel's producer has a bit of 64 for each of 8 stages and 8 pieces."""
TOKENS = (256, 128, 64)
SIZES = ((64, 128), (64, 256), (128, 64), (128, 128), (128, 256))
"""Rows and tokens of the tiles that are tried for ``dsd`` and ``dds`` with blocks below 64."""
_SDD_COLUMNS = (64, 128, 192, 256)
"""Columns of a warpgroup that are tried for ``sdd``."""
HELD_CELLS = 128 * 128
"""Cells of a tile for which registers hold the sums of two slices."""
_MAX_PANELS = 2048
"""The model of ``sdd`` looks at no more row panels than these, to be quick."""
_MIN_SDD_STAGES, _ENOUGH_SDD_STAGES = 3, 4
"""Fewest stages that are tried for ``sdd``, and fewest for which its model adds no cost."""


class BlocksWgmmaSchedule(NamedTuple):
    """Everything that the kernel is compiled with beyond the problem's types, and how it is launched."""

    rows: int
    """Rows of a CTA's tile: a row panel, or for ``sdd`` with large blocks a block row."""
    tokens: int
    """Tokens of a CTA's tile; for ``sdd`` columns."""
    warpgroups: int
    """Consumer warpgroups of a CTA."""
    cluster_n: int
    """CTAs of a cluster, which have tokens of their own and share the rows of a panel by multicast."""
    stages: int
    """Pipeline stages."""
    buffers: int
    """Staging buffers of a warpgroup's results."""

    @classmethod
    def of(
        cls, desc: BlockSparseMatmulDescriptor, multiprocessors: int, most_cells: int | None = None
    ) -> BlocksWgmmaSchedule:
        """The fastest schedule by the model of the problem's op and block.

        ``most_cells`` bounds rows times tokens of a tile of ``dsd`` or ``dds``. It has the rows of a panel
        then.
        """
        if desc.op is not BlockSparseOp.SDD and desc.layout.block >= NARROW_PANEL_ROWS:
            tiles = tiles_of_large_blocks(desc, most_cells)
            return fastest(tiles, lambda tried: large_time(tried, desc, multiprocessors))
        time = sdd_time if desc.op is BlockSparseOp.SDD else small_time
        fit, tried = constants(model_of(desc)), schedules_by_density(desc)
        if most_cells is not None:
            tried = [one for one in tried if one.rows == PANEL_ROWS and one.rows * one.tokens <= most_cells]
        return fastest(tried, lambda tried: time(tried, desc, multiprocessors, fit))

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and four producer warps."""
        return 128 * (self.warpgroups + 1)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that run at once on a multiprocessor."""
        return 2 if self.warpgroups == 1 else 1

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tokens) * _ROW_BYTES

    def shared_bytes(self) -> int:
        staging = self.warpgroups * self.buffers * NARROW_PANEL_ROWS * _ROW_BYTES
        return self.stages * self.stage_bytes + staging + _BARRIER_BYTES

    def cluster_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Token tiles of clusters that cover all columns of a result; not for ``sdd``."""
        return -(-desc.n // (self.tokens * self.cluster_n))

    def groups(self, layout: BlockSparseShape) -> int:
        """The most work tiles that the columns of a row panel can become, for ``sdd``."""
        return -(-layout.cols // (self.tokens * self.cluster_n))

    def block_columns(self, block: int) -> int:
        """The most block columns in a CTA's tile, for ``sdd``; wider blocks are split."""
        return max(self.tokens // block, 1)

    def work_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Work tiles, one a cluster; for ``sdd`` the most there can be."""
        if desc.op is BlockSparseOp.SDD:
            return panel_count(desc, self.rows) * self.groups(desc.layout) if desc.layout.blocks else 0
        return panel_count(desc, self.rows) * self.cluster_tiles(desc)

    def most_work_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Work tiles if as many panels as possible are cut."""
        slicing = KernelProblem(desc).slicing(self.rows)
        more = slicing.more if slicing else 0
        return self.work_tiles(desc) + desc.batch * more * self.cluster_tiles(desc)

    def held_bytes(self, desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> int:
        """Workspace bytes of the sums of earlier slices of all CTAs: none if they fit in registers."""
        cells = self.rows * self.tokens
        ctas = min(self.work_tiles(desc), self.resident_clusters(multiprocessors)) * self.cluster_n
        return 0 if cells <= HELD_CELLS else 4 * cells * ctas

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once."""
        return max(1, multiprocessors * self.ctas_per_sm // self.cluster_n)

    def raster_tiles(self, desc: BlockSparseMatmulDescriptor) -> int:
        """Token tiles that are taken with every row panel before the next ones, so that they stay in L2."""
        tiles = desc.batch * self.cluster_tiles(desc)
        tile_bytes = desc.reduction * self.tokens * self.cluster_n * desc.element.itemsize * desc.layout.heads
        most: int = constants("blocks_tiles")[
            "group_bytes" if desc.layout.block >= NARROW_PANEL_ROWS else "small_group_bytes"
        ]
        raster_groups = -(-tiles * tile_bytes // most)
        return -(-tiles // max(raster_groups, 1))


def fitting(rows: int, tokens: int, warpgroups: int, cluster_n: int) -> BlocksWgmmaSchedule:
    """The schedule with as many stages as shared memory has room for."""
    one = BlocksWgmmaSchedule(rows, tokens, warpgroups, cluster_n, stages=0, buffers=2)
    room = SHARED_BYTES[one.ctas_per_sm] - one.shared_bytes()
    return one._replace(stages=min(room // one.stage_bytes, _MAX_STAGES))


def tiles_of_large_blocks(
    desc: BlockSparseMatmulDescriptor, most_cells: int | None = None
) -> list[BlocksWgmmaSchedule]:
    """The candidates for blocks of 64 and 128 whose tiles have at most ``most_cells`` cells."""
    found = []
    for tokens in TOKENS:
        # Multicast of S's values pays if they are a large part of the loaded bytes.
        is_large_part = (tokens == TOKENS[0]) != (desc.layout.block == PANEL_ROWS)
        shares = is_large_part and -(-desc.n // tokens) % 2 == 0
        if most_cells is None or PANEL_ROWS * tokens <= most_cells:
            found.append(fitting(PANEL_ROWS, tokens, 2, 2 if shares else 1))
    return found


def large_time(
    tried: Sequence[BlocksWgmmaSchedule], desc: BlockSparseMatmulDescriptor, multiprocessors: int
) -> list[float]:
    """Microseconds of ``dsd`` or ``dds`` with blocks of 64 or 128, whose panels are not cut."""
    model = cost_model(desc)
    return [model.microseconds(work(desc, one.rows, one.tokens, math.inf, multiprocessors)) for one in tried]


def model_of(desc: BlockSparseMatmulDescriptor) -> str:
    """The name of the model whose constants serve the problem."""
    return f"blocks_wgmma_{desc.op}_{desc.layout.block}"


def busy_tokens(panels: int, n: int, multiprocessors: int) -> tuple[int, bool]:
    """The widest tile with which enough SMs have work, and whether it is the widest of all."""
    enough = multiprocessors * constants("blocks_tiles")["busy_percent"] // 100
    tokens = first_enough(TOKENS, lambda one: panels * -(-n // one) >= enough)
    return tokens, tokens == TOKENS[0]


def small_time(
    tried: Sequence[BlocksWgmmaSchedule], desc: BlockSparseMatmulDescriptor, multiprocessors: int, fit: Any
) -> list[float]:
    """Time of ``dsd`` or ``dds`` with blocks below 64 kept at random, in arbitrary units.

    A narrow panel has fewer columns with blocks, and wide ones are fewer work tiles. A wave that is begun
    takes ``partial_wave`` of a whole one, and a full tile ``step`` for each column with blocks. No CTA ends
    before its longest panel does.
    """
    found, across = [], max(desc.reduction // desc.layout.block, 1)
    for one in tried:
        waves, part = one.work_tiles(desc) / multiprocessors, fit["partial_wave"]
        waves = part * math.ceil(waves) + (1 - part) * max(waves, 1.0)
        step = fit["step"][f"{one.rows}x{one.tokens}"]
        occupancy = expected_occupancy(desc.layout, one.rows // desc.layout.block)
        found.append(max(waves * occupancy, expected_longest_panel(desc, one.rows) / across) * step)
    return found


def schedules_by_density(desc: BlockSparseMatmulDescriptor) -> list[BlocksWgmmaSchedule]:
    """The candidates where the density decides: for ``sdd``, and for the other ops with small blocks."""
    if desc.op is BlockSparseOp.SDD:
        return sampled_schedules(desc.layout)
    return [fitting(*sizes, 2, 1) for sizes in SIZES] if desc.layout.block < NARROW_PANEL_ROWS else []


def sampled_schedules(layout: BlockSparseShape) -> list[BlocksWgmmaSchedule]:
    """All that serve ``sdd``: each of two warpgroups has 64 rows, and whole blocks or equal parts of one."""
    rows, block = narrow_panel_rows(layout.block), layout.block
    tokens = [2 * one * NARROW_PANEL_ROWS // rows for one in _SDD_COLUMNS]
    fit = [one for one in tokens if one % block == 0 or block % one == 0]
    found = [fitting(rows, one, 2, cluster_n) for one in fit for cluster_n in (1, 2)]
    return [one for one in found if one.stages >= _MIN_SDD_STAGES]


def sdd_time(
    tried: Sequence[BlocksWgmmaSchedule], desc: BlockSparseMatmulDescriptor, multiprocessors: int, fit: Any
) -> list[float]:
    """The work of the busiest cluster of ``sdd`` with blocks kept at random, in rows that a step loads.

    It is summed over layouts that keep a little less, as much and a little more: layouts differ, and the sum
    blurs whether a wave is just full.
    """
    loads = sdd_loads(tried, desc, multiprocessors)
    return [float(busiest(one, load, fit).sum()) for one, load in zip(tried, loads, strict=True)]


def sdd_loads(
    tried: Sequence[BlocksWgmmaSchedule], desc: BlockSparseMatmulDescriptor, multiprocessors: int
) -> list[Columns]:
    """Return ``cluster_loads`` for each schedule. The middle axis has the layouts whose times are summed."""
    block = desc.layout.block
    panels = min(panel_count(desc, narrow_panel_rows(block)), _MAX_PANELS)
    layouts = [
        _kept_columns(desc.layout, panels, share) for share in constants("blocks_wgmma_sdd")["relative_means"]
    ]
    return [
        np.stack([cluster_loads(one, columns, block, multiprocessors) for columns in layouts], axis=1)
        for one in tried
    ]


def _kept_columns(layout: BlockSparseShape, panels: int, share: float = 1.0) -> Columns:
    """Block columns that each of ``panels`` row panels keeps: quantiles of random layouts, largest first.

    ``share`` scales their mean.
    """
    kept = expected_occupancy(layout, narrow_panel_block_rows(layout))
    mean, deviation = layout.block_cols * kept * share, (layout.block_cols * kept * (1 - kept)) ** 0.5
    kept_columns = np.rint(mean + deviation * _normal_quantiles(panels))
    found: Columns = np.clip(kept_columns, 0, layout.block_cols).astype(np.int64)
    return found


@lru_cache(64)
def _normal_quantiles(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The medians of equally probable parts of the normal distribution, the largest first."""
    return np.array([NormalDist().inv_cdf(1 - (part + 0.5) / count) for part in range(count)])


def cluster_loads(one: BlocksWgmmaSchedule, columns: Columns, block: int, multiprocessors: int) -> Columns:
    """Work tiles of each cluster, and the columns that a CTA of it loads for all of them: two rows.

    ``columns`` are the block columns of each row panel. Work tiles are assigned to clusters as in the kernel.
    """
    part = min(block, one.tokens)
    parts = columns * (block // part)
    groups = -(-parts // (one.block_columns(block) * one.cluster_n))
    _, panel = np.nonzero(np.arange(groups.max(initial=0))[:, None] < groups)
    clusters = one.resident_clusters(multiprocessors)
    round_, cluster = np.divmod(np.arange(len(panel)), clusters)
    cluster = np.where(round_ % 2, clusters - 1 - cluster, cluster)
    mine = -(-parts // np.maximum(groups * one.cluster_n, 1)) * part
    loaded = np.bincount(cluster, mine[panel], minlength=clusters).astype(np.int64)
    return np.array([np.bincount(cluster, minlength=clusters), loaded])


def busiest(one: BlocksWgmmaSchedule, loads: Columns, fit: Any) -> Any:
    """The most rows that a CTA loads in a step of each of its work tiles, with the tiles' own cost.

    ``loads`` is what ``cluster_loads`` gives, or many of one schedule along a middle axis.
    """
    tiles, columns = loads
    rows = one.rows * (fit["shared_rows"] if one.cluster_n > 1 else 1.0)
    slower = fit["few_stages"] if one.stages < _ENOUGH_SDD_STAGES else 1.0
    return (slower * (tiles * rows + columns) + tiles * fit["tile"]).max(axis=-1)
