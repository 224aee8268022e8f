"""The schedules that a kernel of ``wgmma_sp`` may take, and the one that its cost model ranks first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np

from ...plan.kernel import align_up
from ...plan.schedule_choice import constants, fastest, invariant_split
from ...vocab import ElementKind
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from .wgmma_cost_model import CostInputs, constants_of, microseconds, model_of, predicted, predicted_of_all
from .wgmma_sp import WgmmaSpSchedule, narrow_schedules, schedules_for, schedules_in

_GATED_SLICES = 4
"""Slices that several CTAs an SM reduce for both sums of a gate, where threads have the fewest registers."""
_SPLITS = (1, 2, 3, 4, 8)
"""Split-K that a batch-invariant kernel may have."""


@lru_cache(4096)
def best_schedule(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None, max_workspace: int | None = None
) -> WgmmaSpSchedule:
    """The kernel's schedule of the least predicted time; column-major X is summed as row-major X is.

    ``whole_m``: M of the weight that W is a part of; ``max_workspace``: bytes that it may ask for.
    """
    return fastest(
        allowed_schedules(desc, row, whole_m),
        lambda tried: predicted(tried, desc),
        WgmmaSpSchedule.workspace_bytes,
        max_workspace,
    )


@lru_cache(4096)
def batched_schedule(
    desc: GemmSparse24Descriptor, row: GemmEntry, single: WgmmaSpSchedule, max_workspace: int | None = None
) -> WgmmaSpSchedule:
    """The schedule of batches of the least predicted time, where one batch alone has that of ``single``."""

    def time(tried: Sequence[WgmmaSpSchedule]) -> Sequence[float]:
        pairs = [(schedule, _as_one_product(desc, schedule)) for schedule in tried]
        times: list[float] = microseconds(CostInputs(pairs), constants_of(model_of(pairs[0][1]))).tolist()
        return times

    tried = batched_schedules(desc, row, single)
    return fastest(tried, time, WgmmaSpSchedule.workspace_bytes, max_workspace)


def batched_schedules(
    desc: GemmSparse24Descriptor, row: GemmEntry, single: WgmmaSpSchedule
) -> tuple[WgmmaSpSchedule, ...]:
    """The schedules that give each batch the bits of ``single``. Batches fill the SMs without stream-K.

    Threads whose sums of K chunks wait in the workspace have no registers for C of batches.
    """
    if row.promoted or desc.element is ElementKind.S8:
        tried = allowed_schedules(desc.one_batch, row)
    else:
        slices, quantized = single.split_k * single.k_chunks, desc.quantization is not None
        tried = schedules_in(slices, desc.n, desc.m, quantized=quantized)
    whole = [one for one in tried if not one.stream_k and not (desc.has_c and one.saved_accumulators)]
    return tuple(one for one in whole if _leaves_registers(one, desc))


def _as_one_product(desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule) -> GemmSparse24Descriptor:
    """A single product with the work tiles of all batches: batches of one weight are further tokens."""
    if desc.shared_weight:
        return desc.one_batch.model_copy(update={"n": align_up(desc.n, schedule.tokens) * desc.batch_count})
    rows = align_up(desc.m, schedule.rows * schedule.cluster_m)
    return desc.one_batch.model_copy(update={"m": rows * desc.batch_count})


def allowed_schedules(
    desc: GemmSparse24Descriptor, row: GemmEntry, whole_m: int | None = None
) -> tuple[WgmmaSpSchedule, ...]:
    """The schedules with which the kernel keeps its guarantee. Some of them need no workspace."""
    if row.promoted:
        return narrow_schedules(desc.n)
    if not row.cuts_k_by_n(desc):
        slices = invariant_split_k(whole_m or desc.m, desc.k, desc.element)
        tried = schedules_in(slices, desc.n, desc.m, quantized=desc.quantization is not None)
    else:
        tried = schedules_for(desc.n, desc.m, quantized=desc.quantization is not None)
    return tuple(one for one in tried if _leaves_registers(one, desc))


def _leaves_registers(schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor) -> bool:
    """Whether a thread with little room for its sums can finish them without spilling."""
    if desc.quantization is not None and schedule.ctas_per_sm > 1:
        is_largest = (schedule.warpgroups, schedule.m_tiles, schedule.split_k) == (2, 2, 1)
        stores_much = is_largest and schedule.tokens > 8
        if desc.epilogue.is_gated:
            return schedule.split_k <= _GATED_SLICES and not stores_much
        few_scales = desc.weight_group != 32 and desc.weight_scale_element.itemsize == 2
        return not stores_much or (desc.weight_element is ElementKind.S4 and few_scales)
    if desc.out_element is not ElementKind.S8:
        return True
    if schedule.warpgroups == 3:
        return schedule.tokens <= (96 if desc.epilogue.is_gated else 128)
    return schedule.ctas_per_sm < 4 or schedule.tokens <= 32


def candidates(desc: GemmSparse24Descriptor) -> list[dict[str, int]]:
    """The schedules that tuning may try, for every kernel: each refuses what breaks its guarantee."""
    quantized, slices = desc.quantization is not None, invariant_split_k(desc.m, desc.k, desc.element)
    free = schedules_for(desc.n, desc.m, quantized=quantized)
    invariant = schedules_in(slices, desc.n, desc.m, quantized=quantized)
    return [one._asdict() for one in dict.fromkeys(free + invariant)]


@lru_cache(4096)
def invariant_split_k(m: int, k: int, element: ElementKind) -> int:
    """The split-K of kernels whose bits must not depend on n. It is a function of the weight alone.

    It fixes bits, so its constants are those of their first fit, and no refit moves them.
    """
    family = "wgmma_sp_split_k"
    given = constants(f"{family}_{8 * element.itemsize}bit")
    min_idle = given["min_idle"]
    judged: dict[str, float] = given["judged"]
    # For each n the schedules that are free to differ, then those with each split-K.
    tried = [
        (schedules_for(n, m, min_idle), *(schedules_in(split, n, m, min_idle) for split in _SPLITS))
        for n in map(int, judged)
    ]
    problems = [GemmSparse24Descriptor(n=int(n), m=m, k=k, element=element) for n in judged]
    times = predicted_of_all([[*chain(*found)] for found in tried], problems, family)
    best = {}
    for desc, found, us in zip(problems, tried, times, strict=True):
        begins = [0, *accumulate(map(len, found[:-1]))]
        free, *split = np.minimum.reduceat(us, begins).tolist()
        best[desc.n] = free, split
    return invariant_split(_SPLITS, best.__getitem__, judged=judged, power=given["power"])
