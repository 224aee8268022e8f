"""How ``blocksparse/conv_wgmma.cu`` is cut for a problem: tiles, clusters, stages, split-K."""

from __future__ import annotations

from typing import NamedTuple

from ...plan.schedule_choice import constants
from ...vocab import BlockSparseConvOp
from ..convolution import BlockSparseConv2dDescriptor
from ..limits import filter_parts
from ..lookup_tables import STRIP, groups, head_strips
from .blocks_wgmma import BlocksWgmmaSchedule, busy_tokens, fitting

_WIDEST, _WARPGROUPS, _TILE_ROWS = 256, 2, 64
_MANY_TILES = 32
"""With so many tiles, one more without pixels costs nothing."""


class ConvSchedule(NamedTuple):
    """What the kernel is compiled with beyond the problem, and the work of its clusters."""

    cut: BlocksWgmmaSchedule
    """The tiles of the kernel; their tokens are pixels, and columns for ``wgrad``."""
    strips: int
    """Row panels of a phase; 0 for ``wgrad``."""
    pixel_clusters: int
    """Tiles of clusters that cover the pixels of a phase."""
    band: int
    """Those of them that are taken with every panel before the next ones, so that they stay in L2."""
    parts: int
    """Split-K of ``wgrad``, which sums over pixels."""
    steps: int
    """Steps of 64 pixels in each part of the split."""
    items: int
    """Work tiles, one a cluster."""

    def blocks(self, multiprocessors: int) -> int:
        """CTAs of the launch."""
        return min(self.items, self.cut.resident_clusters(multiprocessors)) * self.cut.share


def schedule_of(desc: BlockSparseConv2dDescriptor, multiprocessors: int) -> ConvSchedule:
    """The kernel's own choice. Bits depend on parts and steps alone, which the sizes give."""
    if desc.op is BlockSparseConvOp.WGRAD:
        parts, steps = filter_parts(desc)
        cut = fitting(desc.layout.block, _WIDEST, _WARPGROUPS, 1)
        return ConvSchedule(cut, 0, 1, 1, parts, steps, parts * groups(desc.layout))
    found = desc.geometry
    rows, read = desc.layout.rows, desc.channels
    if desc.op is BlockSparseConvOp.DGRAD:
        rows, read = read, rows
    strips, pixels = head_strips(rows), desc.batch * found.pixels
    tile, wide = busy_tokens(strips * found.phases, pixels, multiprocessors)
    # Multicast of the filter's values is worth it where they are much of what is loaded.
    tiles = -(-pixels // tile)
    even = tiles % 2 == 0 or tiles >= _MANY_TILES
    sharing = desc.layout.block >= _TILE_ROWS and wide != (desc.layout.block == STRIP) and even
    cut = fitting(STRIP, tile, _WARPGROUPS, 2 if sharing else 1)
    clusters = -(-tiles // cut.share)
    nbytes = desc.batch * found.h.size * found.w.size * read * desc.element.itemsize
    bands = -(-nbytes // constants("blocks_tiles")["band_bytes"])
    items = clusters * strips * found.phases
    return ConvSchedule(cut, strips, clusters, max(1, -(-clusters // max(bands, 1))), 1, 0, items)
