"""The schedules that a kernel of ``wgmma_sp`` may take, and the one that its cost model ranks first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from ...plan.kernel import align_up
from ...plan.schedule_choice import constants, fastest
from ...vocab import ElementKind
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from .schedule_family import Array, Pairs, ScheduleFamily
from .wgmma_cost_model import CLASS_LIMITS, CLASSES, CostConstants, CostInputs, constants_of, microseconds
from .wgmma_sp import Schedules, WgmmaSpSchedule, narrow_schedules, schedules_for, schedules_in

_GATED_SLICES = 4
"""Slices that several CTAs an SM reduce for both sums of a gate, where threads have the fewest registers."""


class WgmmaSp(ScheduleFamily):
    """Single products and batches of 16 and 8 bits, and of quantized weights."""

    def candidates(
        self, desc: GemmSparse24Descriptor, split_k: int | None = None, *, first: bool = False
    ) -> Schedules:
        quantized = desc.quantization is not None
        min_idle = constants(self.split_rule(desc.element))["min_idle"] if first else None
        if split_k is None:
            return schedules_for(desc.n, desc.m, min_idle, quantized)
        return schedules_in(split_k, desc.n, desc.m, min_idle, quantized)

    def refuses(self, schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor) -> bool:
        """Whether a thread with little room for its sums would spill to finish them."""
        if desc.quantization is not None and schedule.ctas_per_sm > 1:
            is_largest = (schedule.warpgroups, schedule.m_tiles, schedule.split_k) == (2, 2, 1)
            stores_much = is_largest and schedule.tokens > 8
            if desc.epilogue.is_gated:
                return schedule.split_k > _GATED_SLICES or stores_much
            few_scales = desc.weight_group != 32 and desc.weight_scale_element.itemsize == 2
            return stores_much and not (desc.weight_element is ElementKind.S4 and few_scales)
        if desc.out_element is not ElementKind.S8:
            return False
        if schedule.warpgroups == 3:
            return schedule.tokens > (96 if desc.epilogue.is_gated else 128)
        return schedule.ctas_per_sm >= 4 and schedule.tokens > 32

    def model_of(self, desc: GemmSparse24Descriptor, *, first: bool = False) -> str:
        kind = f"{8 * desc.element.itemsize}bit" if desc.quantization is None else "quantized"
        family = "wgmma_sp_split_k" if first else "wgmma_sp"
        return f"{family}_{kind}_{CLASSES[bisect_left(CLASS_LIMITS, desc.n)]}"

    def split_rule(self, element: ElementKind) -> str:
        return f"wgmma_sp_split_k_{8 * element.itemsize}bit"

    def inputs(self, pairs: Pairs) -> CostInputs:
        return CostInputs(pairs)

    def microseconds(self, work: CostInputs, fit: CostConstants) -> Array:
        return microseconds(work, fit)

    def constants_of(self, model: str) -> CostConstants:
        return constants_of(model)

    def allowed(
        self, desc: GemmSparse24Descriptor, entry: GemmEntry, whole_m: int | None = None
    ) -> Schedules:
        return narrow_schedules(desc.n) if entry.promoted else super().allowed(desc, entry, whole_m)

    def allowed_of_batches(
        self, desc: GemmSparse24Descriptor, entry: GemmEntry, single: WgmmaSpSchedule
    ) -> Schedules:
        """The schedules that give each batch the bits of ``single``. Batches fill the SMs without stream-K.

        Threads whose sums of K chunks wait in the workspace have no registers for C of batches.
        """
        if entry.promoted or desc.element is ElementKind.S8:
            tried = self.allowed(desc.one_batch, entry)
        else:
            tried = self.candidates(desc, single.split_k * single.k_chunks)
        whole = [one for one in tried if not one.stream_k and not (desc.has_c and one.saved_accumulators)]
        return tuple(one for one in whole if not self.refuses(one, desc))

    @lru_cache(4096)  # noqa: B019 - families are few and stay
    def best_of_batches(
        self,
        desc: GemmSparse24Descriptor,
        entry: GemmEntry,
        single: WgmmaSpSchedule,
        max_workspace: int | None = None,
    ) -> WgmmaSpSchedule:
        """The schedule of batches of the least predicted time. One batch alone has that of ``single``."""

        def times(tried: Sequence[WgmmaSpSchedule]) -> Array:
            pairs = [(schedule, _as_one_product(desc, schedule)) for schedule in tried]
            return self.times(pairs, self.model_of(pairs[0][1]))

        tried = self.allowed_of_batches(desc, entry, single)
        return fastest(tried, times, WgmmaSpSchedule.workspace_bytes, max_workspace)

    def configurations(self, desc: GemmSparse24Descriptor) -> list[dict[str, int]]:
        """The schedules that tuning may try, for every kernel: each refuses what breaks its guarantee."""
        invariant = self.candidates(desc, self.split_k(desc.m, desc.k, desc.element))
        return [one._asdict() for one in dict.fromkeys(self.candidates(desc) + invariant)]


WGMMA_SP = WgmmaSp()


def _as_one_product(desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule) -> GemmSparse24Descriptor:
    """A single product with the work tiles of all batches: batches of one weight are further tokens."""
    if desc.shared_weight:
        return desc.one_batch.model_copy(update={"n": align_up(desc.n, schedule.tokens) * desc.batch_count})
    rows = align_up(desc.m, schedule.rows * schedule.cluster_m)
    return desc.one_batch.model_copy(update={"m": rows * desc.batch_count})
