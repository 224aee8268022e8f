"""Which schedules a row of ``wgmma_sp`` may take, and the best of them by the model of their time."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain

from ...vocab import ElementKind
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from .wgmma_cost_model import fastest, predicted
from .wgmma_sp import MAX_MEMORY_BOUND_N, Schedule, narrow_schedules, schedules_for, schedules_in

_SLICES = (1, 2, 3, 4, 8)
"""Of K, where the bits must not depend on n; and the n that they are judged by."""
_JUDGED = (1, 16, 33, 64, 100, 160, 256, 362, 470, 640, 900, 1500, 2600, 5000)
_BELIEVED = {2: 0.6, 1: 1.0}
"""By the bytes of an element: of the predicted cost of slices beyond MAX_MEMORY_BOUND_N tokens. Of 570 measured
problems of 16 bits two thirds of it is true; of 8 bits as much for hundreds of tokens, all for thousands."""


@lru_cache(4096)
def best_schedule(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None, max_workspace: int | None = None
) -> Schedule:
    """The row's schedule of the least predicted time.

    ``whole_m``: M of the weight that W is a part of; ``max_workspace``: bytes that it may ask for. What lies
    in columns is summed as it would be in rows.
    """
    allowed = allowed_schedules(desc, row, whole_m)
    if max_workspace is not None:
        allowed = tuple(one for one in allowed if one.workspace_bytes() <= max_workspace)
    return fastest(allowed, desc)


def allowed_schedules(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None
) -> tuple[Schedule, ...]:
    """The schedules with which the row keeps what it promises. Some ask for no workspace."""
    if row.promoted:
        return narrow_schedules(desc.n)
    if row.guarantee(desc).batch_invariant and desc.element is not ElementKind.S8:
        tried = schedules_in(invariant_split_k(whole_m or desc.m, desc.k, desc.element), desc.n, desc.m)
    else:
        tried = schedules_for(desc.n, desc.m)
    return tuple(one for one in tried if _leaves_registers(one, desc))


def _leaves_registers(schedule: Schedule, desc: GemmSparse24Descriptor) -> bool:
    """Whether a thread with little room for its sums can round them to s8, and spill none."""
    if desc.out_element is not ElementKind.S8:
        return True
    most = 128 if schedule.warpgroups == 3 else 32 if schedule.ctas_per_sm == 4 else schedule.tokens
    return schedule.tokens <= most


def candidates(desc: GemmSparse24Descriptor) -> list[dict[str, int]]:
    """What the model ranks, for every row; a row refuses those with which it wouldn't keep its promises."""
    invariant = schedules_in(invariant_split_k(desc.m, desc.k, desc.element), desc.n, desc.m)
    return [one._asdict() for one in dict.fromkeys(schedules_for(desc.n, desc.m) + invariant)]


@lru_cache(4096)
def invariant_split_k(m: int, k: int, element: ElementKind) -> int:
    """Slices of K where the bits must not depend on n: those that lose least, by the model, over all n.

    What is lost beside free schedules counts by its fourth power, so that no n loses much; beyond
    MAX_MEMORY_BOUND_N tokens a part of it, for there slices cost less than is predicted. Nothing is lost where slices that free
    schedules don't have are faster than these.
    """
    lost = dict.fromkeys(_SLICES, 0.0)
    for n in _JUDGED:
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element)
        free, sliced = schedules_for(n, m), {slices: schedules_in(slices, n, m) for slices in _SLICES}
        every = tuple(dict.fromkeys(chain(free, *sliced.values())))
        us = dict(zip(every, predicted(every, desc).tolist(), strict=True))
        least = min(us[one] for one in free)
        for slices, tried in sliced.items():
            slower = math.log(min(us[one] for one in tried) / least)
            if n > MAX_MEMORY_BOUND_N:
                slower *= _BELIEVED[element.itemsize]
            lost[slices] += max(0.0, slower) ** 4
    return min(_SLICES, key=lost.__getitem__)
