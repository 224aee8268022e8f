"""How float32 in parts of bf16 is cut into blocks, and a model of the time that it takes.

The schedules are wgmma_sp's, of which some are tried: threads hold sums twice and, of six products, parts of
W besides. A tile is 64 rows x 64 columns of W. As with wgmma_sp the model knows the shape alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...plan.kernel import align_up
from ...vocab import ElementKind
from ...weights.packed_layouts import TILE_M, TILES_32BIT
from ..arithmetic.split import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from ..limits import split_bytes
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import MAX_MEMORY_BOUND_N, Schedule, widths

_WIDEST, _SLICED, _CROWDED = 128, 112, 16
"""Tokens of a block at most; where K is cut; and where it has more than two row tiles."""
_SLICES = (1, 2, 3, 4, 8)
"""Of K, where the bits must not depend on n; and the n that they are judged by."""
_JUDGED = (1, 16, 48, 100, 300, 700, 1500, 4000)
# (warpgroups, row tiles of one, blocks that share X, slices)
_OF_FEW = (
    *((*rows, 1, slices) for rows in ((1, 1), (2, 1), (2, 2)) for slices in (1, 2, 3, 4, 8)),
    *((3, 1, 1, slices) for slices in (1, 2, 3, 4)),  # with 8 there aren't registers enough
)
_OF_MANY = ((2, 1, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 3), (2, 1, 1, 4), (2, 1, 1, 8))
RANGE_TILES = {2: SPLIT_SUM[2] // SPLIT_TILE, 3: 2}
"""By the parts of a float32, tiles of which ranges are cut: whole sums of the tensor cores, whole turns."""


class _Fit(NamedTuple):
    """As measured on an H200, in microseconds."""

    tile: float
    """Of a tile for each of two row tiles, in a block that has its multiprocessor to itself,"""
    token: float
    """and for each token."""


_FITS = {
    (2, True): _Fit(0.47, 0.0027),
    (2, False): _Fit(0.2, 0.0040),
    (3, True): _Fit(0.62, 0.0053),
    (3, False): _Fit(0.62, 0.0053),
}
"""By the parts of a float32, and whether tokens are few."""
_LAUNCH, _CLUSTER, _RESULT = 2.0, 0.2, 1.3e-4
"""Of both kernels; for each doubling of a cluster; of a result that is stored or folded."""
_PAIR, _REFILL, _JOIN = 0.97, 1.5, 6.0
"""What a tile takes for blocks that share X, relative to one; microseconds to fill a sliced block's ring, and
until a block has the sums that it goes on from."""
_MEMORY, _STREAM = 4.05e6, 41e3
"""Bytes of W per microsecond, of the whole device and of one multiprocessor."""


def predicted(schedule: Schedule, desc: GemmSparse24Descriptor, parts: int) -> float:
    """Microseconds of one run, weights coming from memory."""
    items, fit = schedule.items(desc.n, desc.m), _FITS[parts, desc.n <= MAX_MEMORY_BOUND_N]
    resident = schedule.stream_k or schedule.resident_clusters(H200_MULTIPROCESSORS)
    waves = items / resident if schedule.stream_k else -(-items // resident)
    busy = min(items, resident) * schedule.cluster
    tiles = -(-desc.k // SPLIT_TILE) / schedule.split_k
    rows = schedule.rows // TILE_M
    multiplied = (fit.tile + fit.token * schedule.tokens) * (0.5 + 0.25 * rows)
    multiplied *= _PAIR if schedule.cluster_m > 1 else 1.0
    streamed = (
        rows * TILES_32BIT.tile_bytes / min(_STREAM, _MEMORY / busy) if desc.n <= MAX_MEMORY_BOUND_N else 0.0
    )
    stored = schedule.rows * min(schedule.tokens, desc.n) * _RESULT
    block = tiles * max(multiplied, streamed) + stored + (_REFILL if schedule.split_k > 1 else 0.0)
    joined = _JOIN if schedule.stream_k else 0.0
    return _LAUNCH + _CLUSTER * math.log2(schedule.cluster) + waves * block + joined


@lru_cache(1024)
def _tried(n: int, m: int, parts: int) -> tuple[Schedule, ...]:
    found = []
    for warpgroups, row_tiles, share, slices in _OF_FEW if n <= MAX_MEMORY_BOUND_N else _OF_MANY:
        most = _CROWDED if warpgroups * row_tiles > 2 else _SLICED if slices > 1 else _WIDEST
        if (warpgroups, slices, parts) == (3, 2, 3):
            continue  # there aren't registers enough
        shape = [Schedule(warpgroups, row_tiles, tokens, share, slices) for tokens in widths(n, most)]
        found += [one for one in shape if one.fits() and one.tokens <= most]
    return (*found, *(ranged for one in found if (ranged := _in_ranges(one, n, m)) is not None))


def _in_ranges(one: Schedule, n: int, m: int) -> Schedule | None:
    """The same in equal shares, where there are items for all clusters, and not as many for each."""
    ranges, items = H200_MULTIPROCESSORS // one.cluster_m, one.items(n, m)
    if n <= MAX_MEMORY_BOUND_N or one.split_k > 1 or items <= ranges or items % ranges == 0:
        return None
    return one._replace(stream_k=ranges)


class Regions(NamedTuple):
    """Of the workspace, behind the parts of X: where they begin, and where all ends."""

    handed: int
    """What blocks hand over."""
    groups: int
    """Sums of groups: of each block, and with ranges of each that hands one over."""
    end: int

    @classmethod
    def of(cls, schedule: Schedule, desc: GemmSparse24Descriptor, parts: int, blocks: int) -> Regions:
        handed = align_up(split_bytes(parts, desc))
        groups = handed + align_up(schedule.workspace_bytes())
        in_groups = schedule.split_k == 1 and 0 < SPLIT_GROUP[parts] < desc.k
        sums = 4 * schedule.rows * schedule.tokens * blocks * (2 if schedule.stream_k else 1)
        return cls(handed, groups, groups + (sums if in_groups else 0))


@lru_cache(4096)
def best_schedule(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None, max_workspace: int | None = None
) -> Schedule:
    """The row's schedule of the least predicted time.

    ``whole_m``: M of the weight that W is a part of; ``max_workspace``: bytes that it may ask for.
    """
    allowed = allowed_schedules(desc, row, whole_m)
    if max_workspace is not None:
        allowed = tuple(one for one in allowed if _workspace(one, desc, row.parts) <= max_workspace)
    return min(allowed, key=lambda one: predicted(one, desc, row.parts))


def _workspace(one: Schedule, desc: GemmSparse24Descriptor, parts: int) -> int:
    clusters = one.stream_k or min(one.items(desc.n, desc.m), one.resident_clusters(H200_MULTIPROCESSORS))
    return Regions.of(one, desc, parts, clusters * one.cluster).end


def allowed_schedules(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None
) -> tuple[Schedule, ...]:
    """The schedules with which the row keeps what it promises."""
    tried = _tried(desc.n, desc.m, row.parts)
    if not row.guarantee(desc).batch_invariant:
        return tried
    slices = invariant_split_k(whole_m or desc.m, desc.k, row.parts)
    return tuple(one for one in tried if one.split_k == slices)


@lru_cache(4096)
def invariant_split_k(m: int, k: int, parts: int) -> int:
    """Slices of K where the bits must not depend on n: those that lose least, by the model, over all n.

    What is lost beside free schedules counts by its square, so that no n loses much.
    """
    lost = dict.fromkeys(_SLICES, 0.0)
    for n in _JUDGED:
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=ElementKind.F32)
        us = {one: predicted(one, desc, parts) for one in _tried(n, m, parts)}
        for slices in _SLICES:
            least = min(time for one, time in us.items() if one.split_k == slices)
            lost[slices] += math.log(least / min(us.values())) ** 2
    return min(_SLICES, key=lost.__getitem__)
