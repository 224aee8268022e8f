"""Schedules of float32 in bf16 terms, a model of the time that they take, and the fastest by that model.

The schedules are some of wgmma_sp's: threads hold sums twice and, for six products, terms of W as well. A
tile is 64 rows x 64 columns of W. The model knows the problem's shape alone, as wgmma_sp's does.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...plan.kernel import align_up
from ...plan.schedule_choice import constants, fastest, invariant_split
from ...vocab import ElementKind
from ...weights.packed_layouts import TILE_M, TILES_32BIT
from ..arithmetic.bf16_terms import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from ..limits import split_bytes
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import MAX_MEMORY_BOUND_N, WgmmaSpSchedule, widths

_WIDEST, _WIDEST_SPLIT_K, _WIDEST_OF_MANY_ROWS = 128, 112, 16
"""Maximum tokens of a tile, as registers limit them: in general, with split-K, with many rows."""
_SPLITS = (1, 2, 3, 4, 8)
"""Split-K that a batch-invariant kernel may have."""
# (warpgroups, m64 tiles of a warpgroup, CTAs that share X, split-K)
_OF_FEW = (
    *((*rows, 1, slices) for rows in ((1, 1), (2, 1), (2, 2)) for slices in (1, 2, 3, 4, 8)),
    *((3, 1, 1, slices) for slices in (1, 2, 3, 4)),  # registers don't suffice for 8
)
_OF_MANY = ((2, 1, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 3), (2, 1, 1, 4), (2, 1, 1, 8))
RANGE_TILES = {2: SPLIT_SUM[2] // SPLIT_TILE, 3: 2}
"""The unit of stream-K in K tiles for each number of terms. A unit is a whole number of tensor-core sums."""


def predicted(schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor, parts: int) -> float:
    """Microseconds of one run, weights coming from memory."""
    fit, few = constants("f32_split"), desc.n <= MAX_MEMORY_BOUND_N
    tile, token = (fit[name][str(parts)]["few" if few else "many"] for name in ("tile", "token"))
    work_tiles = schedule.work_tiles(desc.n, desc.m)
    resident = schedule.stream_k or schedule.resident_clusters(H200_MULTIPROCESSORS)
    waves = work_tiles / resident if schedule.stream_k else -(-work_tiles // resident)
    busy = min(work_tiles, resident) * schedule.cluster
    tiles = -(-desc.k // SPLIT_TILE) / schedule.split_k
    rows = schedule.rows // TILE_M
    multiply = (tile + token * schedule.tokens) * (0.5 + 0.25 * rows)
    multiply *= fit["multicast"] if schedule.cluster_m > 1 else 1.0
    bandwidth = min(fit["sm_bandwidth"], fit["dram_bandwidth"] / busy)
    load = rows * TILES_32BIT.tile_bytes / bandwidth if few else 0.0
    stored = schedule.rows * min(schedule.tokens, desc.n) * fit["output"]
    each = tiles * max(multiply, load) + stored + (fit["pipeline_refill"] if schedule.split_k > 1 else 0.0)
    fixup = fit["fixup_wait"] if schedule.stream_k else 0.0
    return float(fit["launch"] + fit["cluster_launch"] * math.log2(schedule.cluster) + waves * each + fixup)


@lru_cache(1024)
def _tried(n: int, m: int, parts: int) -> tuple[WgmmaSpSchedule, ...]:
    found = []
    for warpgroups, m_tiles, cluster_m, split_k in _OF_FEW if n <= MAX_MEMORY_BOUND_N else _OF_MANY:
        most = _WIDEST_SPLIT_K if split_k > 1 else _WIDEST
        most = _WIDEST_OF_MANY_ROWS if warpgroups * m_tiles > 2 else most
        if (warpgroups, split_k, parts) == (3, 2, 3):
            continue  # registers don't suffice
        shape = [
            WgmmaSpSchedule(warpgroups, m_tiles, tokens, cluster_m, split_k) for tokens in widths(n, most)
        ]
        found += [one for one in shape if one.fits() and one.tokens <= most]
    return (*found, *(ranged for one in found if (ranged := _with_stream_k(one, n, m)) is not None))


def _with_stream_k(one: WgmmaSpSchedule, n: int, m: int) -> WgmmaSpSchedule | None:
    """The schedule with stream-K; None unless there is more than one wave and the last is partial."""
    ranges, work_tiles = H200_MULTIPROCESSORS // one.cluster_m, one.work_tiles(n, m)
    if n <= MAX_MEMORY_BOUND_N or one.split_k > 1 or work_tiles <= ranges or work_tiles % ranges == 0:
        return None
    return one._replace(stream_k=ranges)


class Regions(NamedTuple):
    """Offsets in the workspace, behind the terms of X, in bytes."""

    handed: int
    """The partial sums and flags of stream-K begin here."""
    groups: int
    """The sums of groups of columns begin here: one set a CTA, and with stream-K two."""
    end: int

    @classmethod
    def of(cls, schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor, parts: int, blocks: int) -> Regions:
        handed = align_up(split_bytes(parts, desc))
        groups = handed + align_up(schedule.workspace_bytes())
        in_groups = schedule.split_k == 1 and 0 < SPLIT_GROUP[parts] < desc.k
        sums = 4 * schedule.rows * schedule.tokens * blocks * (2 if schedule.stream_k else 1)
        return cls(handed, groups, groups + (sums if in_groups else 0))


@lru_cache(4096)
def best_schedule(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None, max_workspace: int | None = None
) -> WgmmaSpSchedule:
    """The kernel's schedule of the least predicted time.

    ``whole_m``: M of the weight that W is a part of; ``max_workspace``: bytes that it may ask for.
    """
    return fastest(
        allowed_schedules(desc, row, whole_m),
        lambda tried: [predicted(one, desc, row.split_terms) for one in tried],
        lambda one: _workspace(one, desc, row.split_terms),
        max_workspace,
    )


def _workspace(one: WgmmaSpSchedule, desc: GemmSparse24Descriptor, parts: int) -> int:
    clusters = one.stream_k or min(
        one.work_tiles(desc.n, desc.m), one.resident_clusters(H200_MULTIPROCESSORS)
    )
    return Regions.of(one, desc, parts, clusters * one.cluster).end


def allowed_schedules(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None
) -> tuple[WgmmaSpSchedule, ...]:
    """The schedules with which the kernel keeps its guarantee."""
    tried = _tried(desc.n, desc.m, row.split_terms)
    if not row.guarantee(desc).batch_invariant:
        return tried
    split = invariant_split_k(whole_m or desc.m, desc.k, row.split_terms)
    return tuple(one for one in tried if one.split_k == split)


@lru_cache(4096)
def invariant_split_k(m: int, k: int, parts: int) -> int:
    """The split-K of kernels whose bits must not depend on n. It is a function of the weight alone."""

    def times(n: int) -> tuple[float, list[float]]:
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=ElementKind.F32)
        us = {one: predicted(one, desc, parts) for one in _tried(n, m, parts)}
        return min(us.values()), [min(us[one] for one in us if one.split_k == split) for split in _SPLITS]

    return invariant_split(_SPLITS, times, **constants("f32_split_split_k"))
