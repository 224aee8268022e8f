"""How ``blocksparse/conv_wgmma.cu`` is cut for a problem: tiles, clusters, stages, split-K."""

from __future__ import annotations

from typing import NamedTuple

from ...plan.schedule_choice import REFERENCE_SMS, constants, fastest
from ...vocab import BlockSparseConvOp
from ..convolution import BlockSparseConv2dDescriptor
from ..lookup_tables import groups
from ..panels import PANEL_ROWS, head_panels
from .blocks_wgmma import BlocksWgmmaSchedule, busy_tokens, fitting

_WIDEST, _WARPGROUPS, _TILE_ROWS = 256, 2, 64
_STEP_PIXELS = 64
"""Pixels that the kernel multiplies in a step."""


class ConvSchedule(NamedTuple):
    """The constants that the kernel is compiled with beyond the problem, and the work of its clusters."""

    cut: BlocksWgmmaSchedule
    """The tiles of the kernel; their tokens are pixels, and columns for ``wgrad``."""
    panels: int
    """Row panels of a phase; 0 for ``wgrad``."""
    pixel_clusters: int
    """Tiles of clusters that cover the pixels of a phase."""
    raster_tiles: int
    """Pixel tiles of a raster group: every panel takes them before the next ones, so that they stay in L2."""
    split_k: int
    """Split-K of ``wgrad``, which sums over pixels."""
    steps: int
    """Steps of 64 pixels in each part of the split."""
    work_tiles: int
    """Work tiles, one a cluster."""

    @classmethod
    def of(cls, desc: BlockSparseConv2dDescriptor, multiprocessors: int) -> ConvSchedule:
        """The kernel's own choice. Bits depend on split-K and its steps alone, which the sizes give."""
        if desc.op is BlockSparseConvOp.WGRAD:
            split_k, steps = filter_split_k(desc)
            cut = fitting(desc.layout.block, _WIDEST, _WARPGROUPS, 1)
            return cls(cut, 0, 1, 1, split_k, steps, split_k * groups(desc.layout))
        found = desc.geometry
        rows, read = desc.layout.rows, desc.channels
        if desc.op is BlockSparseConvOp.DGRAD:
            rows, read = read, rows
        panels, pixels = head_panels(rows), desc.batch * found.pixels
        tile, wide = busy_tokens(panels * found.phases, pixels, multiprocessors)
        # Multicast of the filter's values pays if they are a large part of the loaded bytes. It needs pairs
        # of tiles; where there are many, a further one without pixels costs nothing.
        tiles = -(-pixels // tile)
        even = tiles % 2 == 0 or tiles >= constants("conv_tiles")["paired"]
        sharing = desc.layout.block >= _TILE_ROWS and wide != (desc.layout.block == PANEL_ROWS) and even
        cut = fitting(PANEL_ROWS, tile, _WARPGROUPS, 2 if sharing else 1)
        clusters = -(-tiles // cut.cluster_n)
        nbytes = desc.batch * found.h.size * found.w.size * read * desc.element.itemsize
        raster_groups = -(-nbytes // constants("blocks_tiles")["group_bytes"])
        work_tiles = clusters * panels * found.phases
        return cls(cut, panels, clusters, max(1, -(-clusters // max(raster_groups, 1))), 1, 0, work_tiles)

    def blocks(self, multiprocessors: int) -> int:
        """CTAs of the launch."""
        return min(self.work_tiles, self.cut.resident_clusters(multiprocessors)) * self.cut.cluster_n


def filter_split_k(problem: BlockSparseConv2dDescriptor) -> tuple[int, int]:
    """The fastest split-K of a filter's gradient: the number of splits, and steps of 64 pixels in each."""
    one = problem.layout
    steps, work_tiles = -(-problem.reduction // _STEP_PIXELS), max(groups(one), 1)
    fit = constants("conv_wgrad_split_k")

    def us(splits: int) -> float:
        waves = -(-splits * work_tiles // REFERENCE_SMS)
        reduce = splits * one.blocks * one.block**2 * 8 / fit["reduce_bandwidth"] if splits > 1 else 0.0
        return float(waves * (-(-steps // splits) * fit["step"][str(one.block)] + fit["tile"]) + reduce)

    most = max(1, min(fit["most_splits"], steps // fit["min_steps"]))
    splits = fastest(range(1, most + 1), lambda counts: [us(one) for one in counts])
    each = -(-steps // splits)
    return max(1, -(-steps // max(each, 1))), each


def conv_workspace(problem: BlockSparseConv2dDescriptor) -> int:
    """Bytes of a filter gradient's splits, in float32."""
    if problem.op is not BlockSparseConvOp.WGRAD or not problem.reduction:
        return 0
    splits, one = filter_split_k(problem)[0], problem.layout
    return 0 if splits == 1 else 4 * splits * one.blocks * one.block**2
