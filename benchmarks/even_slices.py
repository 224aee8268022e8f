"""The fit of the time in which clusters exchange the sums of the slices of a panel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparse24_plans import BlockSparseMatmulDescriptor
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cost import cost_model
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import (
    EXCHANGE_TERMS,
    Cut,
    cluster_exchange,
    cut_work,
    exchange_us,
)

from .block_fits import PACKED, UNEVEN, packed_lines
from .descent import Array, Constants, files_of, limits_entry, plain

EVEN_FAMILIES = (PACKED, UNEVEN)
"""Measured problems whose panels were also cut evenly. Models of whole panels take the mean one to be that of
a random layout, so they aren't fitted to uneven ones."""


def even_times(gpu: str) -> list[tuple[BlockSparseMatmulDescriptor, dict[Cut, float]]]:
    """Measured products of packed operands whose panels were also cut evenly, with the time of each cut."""
    return [
        (desc, {Cut.named(name): us for name, us in row["us"].items()})
        for family in EVEN_FAMILIES
        for row, desc in packed_lines(gpu, family)
        if any("/" in name for name in row.get("us", ()))
    ]


def even_slices_entry(gpu: str) -> Constants:
    """The times of an exchange of sums in a cluster by which the choice of slices loses least."""
    measured = even_times(gpu)
    most = max(len(times) for _, times in measured)
    taken, rest = (np.full((len(measured), most), np.inf) for _ in range(2))
    amounts = np.zeros((len(measured), most, len(EXCHANGE_TERMS)))
    for at, (desc, times) in enumerate(measured):
        taken[at, : len(times)] = list(times.values())
        model = cost_model(desc)
        for i, cut in enumerate(times):
            rest[at, i] = model.microseconds(cut_work(desc, cut))
            if cut.cluster_slices > 1:
                amounts[at, i] = cluster_exchange(desc, cut)
            else:
                rest[at, i] += exchange_us(desc, cut)

    def lost(costs: Sequence[float]) -> Array:
        chosen = (rest + amounts @ np.array(costs)).argmin(axis=1)
        found: Array = taken[np.arange(len(taken)), chosen] / taken.min(axis=1)
        return found

    tried = [
        (exchange / 4, round(cells * 1e-5, 7), wave / 2)
        for exchange in range(12)
        for cells in range(0, 40, 2)
        for wave in range(13)
    ]
    best = min(tried, key=lambda costs: np.log(lost(costs)).sum())
    costs = dict(zip(EXCHANGE_TERMS, map(plain, best), strict=True))
    return limits_entry(costs, lost(best).tolist(), files_of(gpu, EVEN_FAMILIES))
