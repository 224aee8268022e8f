"""How ``gemm/inflate_strict.cu`` cuts a problem into tiles. No bit depends on it."""

from __future__ import annotations

from typing import NamedTuple

from ...plan.schedule_choice import first_enough
from ..descriptor import GemmSparse24Descriptor
from ..limits import STRICT_SMALL_TILE, most_token_tiles


class InflateStrictSchedule(NamedTuple):
    """A CTA computes ``rows`` outputs of ``tokens`` tokens."""

    rows: int
    tokens: int
    threads: int
    """Threads of a CTA."""

    @classmethod
    def of(cls, desc: GemmSparse24Descriptor, multiprocessors: int) -> InflateStrictSchedule:
        """The largest tile that n fills by half and that leaves less than half of the SMs idle.

        The choice may depend on n, because no bit of a result depends on the tile.
        """
        mean = desc.n // max(1, min(desc.groups, desc.n))
        return first_enough(
            TILES, lambda one: 2 * mean > one.tokens and 2 * one.ctas(desc) >= multiprocessors
        )

    def work_tiles(self, desc: GemmSparse24Descriptor) -> int:
        """Work tiles of a batch, or the most there can be: each group may end within a tile."""
        return -(-desc.sums // self.rows) * most_token_tiles(desc, self.tokens)

    def ctas(self, desc: GemmSparse24Descriptor) -> int:
        """CTAs of the launch, one a work tile."""
        return self.work_tiles(desc) * desc.batch_count


TILES = (
    InflateStrictSchedule(128, 128, 256),
    InflateStrictSchedule(128, 32, 128),
    InflateStrictSchedule(*STRICT_SMALL_TILE, 128),
)
"""The tiles from the largest down, as the kernel numbers them."""
