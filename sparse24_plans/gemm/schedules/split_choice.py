"""How float32 in parts of bf16 is cut into blocks, and a model of the time that it takes.

The schedules are wgmma_sp's, of which some are tried: threads hold sums twice and parts of W
besides. A tile is 64 rows x 64 columns of W. As with wgmma_sp the model knows the shape alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...vocab import ElementKind
from ...weights.layouts import TILE_M, TILES_32BIT
from ..descriptor import GemmSparse24Descriptor
from ..table import GemmRow
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import FEW, Schedule, widths

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


class _Fit(NamedTuple):
    """As measured on an H200, in microseconds."""

    tile: float
    """Of a tile for each of two row tiles, in a block that has its multiprocessor to itself,"""
    token: float
    """and for each token."""


_FITS = {2: _Fit(0.47, 0.0027), 3: _Fit(0.62, 0.0053)}
"""By the parts of a float32."""
_LAUNCH, _CLUSTER, _RESULT = 2.0, 0.2, 1.3e-4
"""Of both kernels; for each doubling of a cluster; of a result that is stored or folded."""
_PAIR, _REFILL = 0.97, 1.5
"""What a tile takes for blocks that share X, relative to one; microseconds to fill a sliced block's ring."""
_MEMORY, _STREAM = 4.05e6, 41e3
"""Bytes of W per microsecond, of the whole device and of one multiprocessor."""


def predicted(schedule: Schedule, desc: GemmSparse24Descriptor, parts: int) -> float:
    """Microseconds of one run, weights coming from memory."""
    items, fit = schedule.items(desc.n, desc.m), _FITS[parts]
    resident = schedule.resident_clusters(H200_MULTIPROCESSORS)
    waves, busy = -(-items // resident), min(items, resident) * schedule.cluster
    tiles = -(-desc.k // TILES_32BIT.tile_k) / schedule.slices
    rows = schedule.rows // TILE_M
    multiplied = (fit.tile + fit.token * schedule.tokens) * (0.5 + 0.25 * rows)
    multiplied *= _PAIR if schedule.share > 1 else 1.0
    streamed = rows * TILES_32BIT.tile_bytes / min(_STREAM, _MEMORY / busy) if desc.n <= FEW else 0.0
    stored = schedule.rows * min(schedule.tokens, desc.n) * _RESULT
    block = tiles * max(multiplied, streamed) + stored + (_REFILL if schedule.slices > 1 else 0.0)
    return _LAUNCH + _CLUSTER * math.log2(schedule.cluster) + waves * block


@lru_cache(1024)
def _tried(n: int) -> tuple[Schedule, ...]:
    found = []
    for warpgroups, row_tiles, share, slices in _OF_FEW if n <= FEW else _OF_MANY:
        most = _CROWDED if warpgroups * row_tiles > 2 else _SLICED if slices > 1 else _WIDEST
        shape = [Schedule(warpgroups, row_tiles, tokens, share, slices) for tokens in widths(n, most)]
        found += [one for one in shape if one.fits() and one.tokens <= most]
    return tuple(found)


@lru_cache(4096)
def best_schedule(desc: GemmSparse24Descriptor, row: GemmRow, whole_m: int | None = None) -> Schedule:
    """The row's schedule of the least predicted time. ``whole_m``: M of the weight that W is a part of."""
    allowed = allowed_schedules(desc, row, whole_m)
    return min(allowed, key=lambda one: predicted(one, desc, row.parts))


def allowed_schedules(
    desc: GemmSparse24Descriptor, row: GemmRow, whole_m: int | None = None
) -> tuple[Schedule, ...]:
    """The schedules with which the row keeps what it promises."""
    tried = _tried(desc.n)
    if not row.guarantee(desc).batch_invariant:
        return tried
    slices = invariant_slices(whole_m or desc.m, desc.k, row.parts)
    return tuple(one for one in tried if one.slices == slices)


@lru_cache(4096)
def invariant_slices(m: int, k: int, parts: int) -> int:
    """Slices of K where the bits must not depend on n: those that lose least, by the model, over all n.

    What is lost beside free schedules counts by its square, so that no n loses much.
    """
    lost = dict.fromkeys(_SLICES, 0.0)
    for n in _JUDGED:
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=ElementKind.F32)
        us = {one: predicted(one, desc, parts) for one in _tried(n)}
        for slices in _SLICES:
            least = min(time for one, time in us.items() if one.slices == slices)
            lost[slices] += math.log(least / min(us.values())) ** 2
    return min(_SLICES, key=lost.__getitem__)
