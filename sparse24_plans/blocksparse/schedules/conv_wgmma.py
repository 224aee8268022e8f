"""How ``blocksparse/conv_wgmma.cu`` is cut for a problem: tiles, clusters, stages; parts of sums."""

from __future__ import annotations

from typing import NamedTuple

from ...vocab import BlockSparseConvOp
from ..convolution import BlockSparseConv2dDescriptor
from ..limits import filter_parts
from ..lookup_tables import STRIP, groups, head_strips
from .blocks_wgmma import Schedule, fitting

_PIXELS = (256, 128, 64)
_WARPGROUPS, _TILE_ROWS = 2, 64
_BUSY = 90
"""Percent of the multiprocessors that must have work, or tiles are smaller."""
_MANY_TILES = 32
"""Of which one without pixels costs nothing."""
_BAND_BYTES = 40 << 20
"""Of what is read, that the items of a band share: it stays in L2."""


class ConvSchedule(NamedTuple):
    """What the kernel is compiled with beyond the problem, and the work of its clusters."""

    cut: Schedule
    """Its tokens are pixels, of ``wgrad`` columns."""
    strips: int
    """Of a phase; of ``wgrad`` 0."""
    pixel_clusters: int
    """Clusters' tiles that cover a phase's pixels."""
    band: int
    """Of them, taken with every strip before the next ones."""
    parts: int
    """Of the pixels that ``wgrad`` sums."""
    steps: int
    """Of a part: 64 pixels each."""
    items: int
    """Clusters' pieces of work."""

    def blocks(self, multiprocessors: int) -> int:
        """Of the launch."""
        return min(self.items, self.cut.resident_clusters(multiprocessors)) * self.cut.share


def schedule_of(desc: BlockSparseConv2dDescriptor, multiprocessors: int) -> ConvSchedule:
    """The kernel's own choice. Bits depend on no more of it than parts and steps, which the sizes give."""
    if desc.op is BlockSparseConvOp.WGRAD:
        parts, steps = filter_parts(desc)
        cut = fitting(desc.layout.block, _PIXELS[0], _WARPGROUPS, 1)
        return ConvSchedule(cut, 0, 1, 1, parts, steps, parts * groups(desc.layout))
    found = desc.geometry
    rows, read = desc.layout.rows, desc.channels
    if desc.op is BlockSparseConvOp.DGRAD:
        rows, read = read, rows
    strips, pixels = head_strips(rows), desc.batch * found.pixels
    enough = multiprocessors * _BUSY // 100
    tile = next((one for one in _PIXELS if strips * found.phases * -(-pixels // one) >= enough), _PIXELS[-1])
    # The filter's values from L2 once a cluster: worth it where they are much of what is copied.
    wide, tiles = tile == _PIXELS[0], -(-pixels // tile)
    even = tiles % 2 == 0 or tiles >= _MANY_TILES
    sharing = desc.layout.block >= _TILE_ROWS and wide != (desc.layout.block == STRIP) and even
    cut = fitting(STRIP, tile, _WARPGROUPS, 2 if sharing else 1)
    clusters = -(-tiles // cut.share)
    bands = -(-desc.batch * found.h.size * found.w.size * read * desc.element.itemsize // _BAND_BYTES)
    items = clusters * strips * found.phases
    return ConvSchedule(cut, strips, clusters, max(1, -(-clusters // max(bands, 1))), 1, 0, items)
