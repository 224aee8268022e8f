"""How ``wgmma_sp`` cuts grouped products, whose group sizes are unknown when the schedule is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...plan.kernel import align_up
from ...plan.schedule_choice import REFERENCE_SMS, constants
from ..descriptor import GemmSparse24Descriptor
from ..groups import one_group
from ..kernel_table import GemmEntry
from .schedule_family import Array
from .wgmma_heuristics import WGMMA_SP, WgmmaSp
from .wgmma_sp import MAX_MEMORY_BOUND_N, Schedules, WgmmaSpSchedule

_SHAPES = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2))
"""Shapes that are tried: warpgroups, m64 tiles of a warpgroup, CTAs of a cluster along M. All sum K in one
piece, so that the bits depend on no group's size."""
_TOKENS = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""Tokens of a tile that are tried. Groups are of any size, so no width divides them."""
_MIN_TOKENS = 32
"""Fewest tokens of a tile that are tried if there are as many. A narrower tile takes no less time, because
loading W takes it; a wider one serves popular groups with fewer tiles."""


class Grouped(WgmmaSp):
    """Products of groups of tokens with weights of their own."""

    def allowed(
        self, desc: GemmSparse24Descriptor, entry: GemmEntry, whole_m: int | None = None
    ) -> Schedules:
        return schedules_for(max(desc.n, 1)) + split_schedules(desc, entry)

    def predicted(self, tried: Sequence[WgmmaSpSchedule], desc: GemmSparse24Descriptor) -> Array:
        """Predicted microseconds for groups of about n / groups tokens.

        The cost model is that of single products: as many groups as can have tokens count as one product with
        the work tiles of all their weights.
        """
        active = max(1, min(desc.groups, desc.n))
        mean = max(1.0, desc.n / active)
        factors = constants("wgmma_sp_grouped")["sizes"]  # sizes whose times are added, over the mean
        sizes = sorted({min(desc.n, max(1, math.ceil(mean * one))) for one in factors})
        total = np.zeros(len(tried))
        for size in sizes:
            group = one_group(desc, size)
            of_rows = {
                rows: group.model_copy(update={"m": active * align_up(desc.m, rows)})
                for rows in {_cluster_rows(one) for one in tried}
            }
            pairs = [(one, of_rows[_cluster_rows(one)]) for one in tried]
            total += self.times(pairs, self.model_of(pairs[0][1]))
        return total


GROUPED = Grouped()


def schedules_for(n: int) -> Schedules:
    """The schedules of up to n tokens that sum K in one piece, so all give the same bits."""
    least = min(_MIN_TOKENS, align_up(n, 8))
    widths = [tokens for tokens in _TOKENS if least <= tokens < n + 8]
    tried = (WgmmaSpSchedule(w, r, tokens, cluster) for tokens in widths for w, r, cluster in _SHAPES)
    return tuple(one for one in tried if one.fits())


def split_schedules(desc: GemmSparse24Descriptor, entry: GemmEntry) -> Schedules:
    """The schedules of few tokens in which CTAs share K, if the kernel's bits may depend on n.

    Each possible work tile has a cluster. All clusters run at once, since most may have no work.
    """
    if desc.n > MAX_MEMORY_BOUND_N or not entry.cuts_k_by_n(desc):
        return ()
    return tuple(
        one
        for one in WGMMA_SP.allowed(one_group(desc, desc.n), entry)
        if one.split_k > 1 and one.most_work_tiles(desc) <= one.resident_clusters(REFERENCE_SMS)
    )


def _cluster_rows(schedule: WgmmaSpSchedule) -> int:
    return schedule.rows * schedule.cluster_m
