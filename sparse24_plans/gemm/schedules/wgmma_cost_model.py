"""A model of the time that ``wgmma_sp`` takes with a schedule. It ranks schedules, and is not exact.

The model knows the problem's shape and not the device at hand: another number of SMs must not mean another
schedule, since a schedule's split-K fixes the bits. A launch takes nearly the longest of three times: that of
the busiest SM, wave after wave of CTAs; that of L2, which serves all SMs; and that of memory. Fewer CTAs get
more of memory's bandwidth each: on an H200 the two SMs of a pair share a path to memory, and so do three
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ...plan.schedule_choice import REFERENCE_SMS, constants
from ...weights.packed_layouts import TILE_M
from ..descriptor import GemmSparse24Descriptor
from .wgmma_sp import MAX_MEMORY_BOUND_N, WIDEST, WgmmaSpSchedule, tiles_of

Array = Any


@dataclass(frozen=True, kw_only=True)
class CostConstants:
    """Fitted constants of the model. Times are microseconds, and rates are those of one SM, unless stated."""

    launch: float
    """Time of a launch that does nothing."""
    cluster_launch: float
    """Added time of a launch for each doubling of the cluster size."""
    cluster_sync: float
    """Time for which the CTAs of a cluster wait for each other before they reduce split-K sums."""
    stall: float
    """Nanoseconds for which a warpgroup waits in each 64-byte step of K, while other warpgroups may work."""
    step: float
    """Nanoseconds of the tensor cores for each 64-byte step of K of a tile of 64 rows."""
    step_token: float
    """Nanoseconds that each token of the tile adds to such a step."""
    cta_slowdown: float
    """Relative slowdown of a CTA's steps by each further CTA on its SM."""
    cta_slowdown_token: float
    """Relative slowdown that each token of the tile adds to ``cta_slowdown``."""
    multicast: float
    """Time of a step in a cluster that multicasts X, relative to a single CTA's."""
    multicast_stream_k: float
    """Time of a step in a stream-K cluster that multicasts X, relative to a single CTA's."""
    multicast_widest: float
    """Fraction of the slowdown by multicast that remains for tiles of the maximum width."""
    three_warpgroups_stream_k: float
    """Time of a stream-K step of three warpgroups, relative to one without stream-K."""
    bw_third_busy: float
    """Bytes per microsecond that a CTA gets from memory while at most a third of the SMs are busy."""
    bw_half_busy: float
    """Bytes per microsecond that a CTA gets from memory while a third to half of the SMs are busy."""
    bw_all_busy: float
    """Bytes per microsecond that an SM gets from memory while more than half of the SMs are busy."""
    dram_bandwidth: float
    """Bytes per microsecond of the whole device's memory."""
    l2_bandwidth: float
    """Bytes per microsecond of the whole device's L2 cache."""
    sm_l2_bandwidth: float
    """Bytes per microsecond from L2 to one SM."""
    unaligned_x: float
    """Relative added cost of loading X where its rows don't start at multiples of 128 bytes."""
    cluster_reduce: float
    """Time to reduce one output over the split-K CTAs of a cluster."""
    add_chunk: float
    """Time to add one sum of a chunk of K to the sum of the chunks before it."""
    add_saved: float
    """Added time for each such sum that is kept in the workspace for lack of registers."""
    store_bandwidth: float
    """Bytes per microsecond of stored results."""
    ragged_store_rate: float
    """Results per microsecond that a warpgroup stores singly, where Y's rows aren't multiples of 16 bytes."""
    crowded_store: float
    """Time to store results while several CTAs share an SM, relative to one CTA's."""
    fixup_wait: float
    """Time for which a stream-K CTA waits for the partial sums that it continues."""
    fixup_store: float
    """Time to store one partial sum for the next stream-K CTA."""
    stream_k_slowdown: float
    """Relative slowdown of tiles whose work begins in the middle of K."""
    next_tile: float
    """Time to begin each further work tile of a persistent CTA."""
    pipeline_refill: float
    """Added time to begin a further work tile where clusters split K, which refills the pipeline."""
    overlap_exponent: float
    """Exponent of the norm that joins multiplying and loading: the larger, the better one hides the other."""
    bottleneck_exponent: float
    """Exponent of the norm that joins the times of SM, L2 and memory: the larger, the better they overlap."""


CLASS_LIMITS = (MAX_MEMORY_BOUND_N, 512)
"""Maximum n of each class of problems that has constants of its own; the last class has no maximum."""
CLASSES = ("few", "some", "many")
_NARROWER = WIDEST - MAX_MEMORY_BOUND_N
"""Tokens by which a tile is narrower than the widest if it has the fewest of a product that multicast serves:
multicast costs such a tile in full, and wider ones linearly less."""


class CostInputs:
    """The facts that the model reads of pairs of a schedule and a problem: arrays with an entry a pair."""

    def __init__(self, pairs: Sequence[tuple[WgmmaSpSchedule, GemmSparse24Descriptor]]) -> None:
        distinct = {id(desc): desc for _, desc in pairs}
        problems = np.array([_facts_of_problem(desc) for desc in distinct.values()], dtype=np.float64)
        place_of = dict(zip(distinct, range(len(distinct)), strict=True))
        facts = _facts_of_schedules(tuple(one for one, _ in pairs))
        (self.warpgroups, _, self.tile_n, self.cluster_m, self.split_k, self.ctas_per_sm) = facts[:6]
        (self.k_chunks, self.stream_k) = facts[6:8]
        (self.resident, self.resident_alone, self.rows, self.cluster, self.saved_accumulators) = facts[8:]
        facts = np.ascontiguousarray(problems[[place_of[id(desc)] for _, desc in pairs]].T)
        (self.n, self.m, self.outputs, self.k, self.size, self.out_size, self.weight) = facts
        self.token_tiles = np.ceil(self.n / self.tile_n)
        self.work_tiles = np.ceil(self.m / (self.rows * self.cluster_m)) * self.token_tiles
        self.tokens = np.minimum(self.tile_n, self.n)
        self.sums = self.rows * self.tokens
        self.depth = self.k / self.split_k
        self.ragged = self.outputs * self.out_size % 16 != 0
        self.unaligned = self.k * self.size % 128 != 0
        self._count_waves()

    def _count_waves(self) -> None:
        """Count waves of CTAs; those of stream-K are fractions, since its CTAs have equal shares of K."""
        ranges, streams = np.maximum(self.stream_k, 1), self.stream_k > 0
        share, cut = self.work_tiles / ranges, self.stream_k + self.work_tiles % ranges
        waves, full = np.ceil(self.work_tiles / self.resident), np.floor(self.work_tiles / self.resident)
        self.tiles_of_cta = np.where(streams, np.ceil(share), waves)
        """Work tiles that the busiest CTA stores."""
        self.stream_k_fraction = np.where(streams, cut / self.work_tiles, 0.0)
        """Fraction of the work tiles that stream-K cuts."""
        self.waves = np.where(streams, share, waves)
        self.waves_alone = np.where(streams, share, np.ceil(self.work_tiles / self.resident_alone))
        """Waves that there would be with one CTA an SM."""
        self.full_waves = np.where(streams, share, full)
        last = (self.work_tiles - full * self.resident) * self.cluster
        self.last_wave_ctas = np.where(streams, 0, last)
        self.usable_sms = np.minimum(self.resident_alone * self.cluster, REFERENCE_SMS)


@lru_cache(512)
def _facts_of_schedules(schedules: tuple[WgmmaSpSchedule, ...]) -> Array:
    """Return an array with a row for each fact; many problems are tried with the same schedules."""
    facts = np.array([_facts_of_schedule(one) for one in schedules], dtype=np.float64).T
    facts.flags.writeable = False  # all callers share it
    return facts


@lru_cache(4096)
def _facts_of_schedule(schedule: WgmmaSpSchedule) -> tuple[int, ...]:
    return (
        *schedule,
        schedule.resident_clusters(REFERENCE_SMS),
        schedule.resident_alone(REFERENCE_SMS),
        schedule.rows,
        schedule.cluster,
        schedule.saved_accumulators * 128 * schedule.warpgroups,
    )


def _facts_of_problem(desc: GemmSparse24Descriptor) -> tuple[float, ...]:
    layout = tiles_of(desc)
    weight = layout.tile_bytes / (TILE_M * layout.tile_k)  # bytes of W for each of its dense cells
    return desc.n, desc.m, desc.outputs, desc.k, desc.element.itemsize, desc.out_element.itemsize, weight


@cache
def constants_of(model: str) -> CostConstants:
    return CostConstants(**constants(model))


def microseconds(work: CostInputs, fit: CostConstants) -> Array:
    """Predicted time of one launch of each pair."""
    terms = np.array([_sm_time(work, fit), _l2_time(work, fit), _memory_time(work, fit)])
    longest = terms.max(axis=0)
    shares = ((terms / longest) ** fit.bottleneck_exponent).sum(axis=0)
    clustered = fit.cluster_launch * np.log2(work.cluster) + fit.cluster_sync * (work.split_k > 1)
    return fit.launch + clustered + longest * shares ** (1 / fit.bottleneck_exponent)


def _sm_time(work: CostInputs, fit: CostConstants) -> Array:
    """Microseconds of the busiest SM."""
    multiply, load = _multiply_time(work, fit), _load_time(work, fit)
    reduces = work.split_k > 1
    results = work.sums * (work.outputs / work.m)  # an epilogue with a gate makes one result of two sums
    ragged = work.ragged / (fit.ragged_store_rate * work.warpgroups)
    stored = results * (work.out_size / fit.store_bandwidth + ragged)
    crowded = (work.ctas_per_sm > 1) & (work.work_tiles > work.resident_alone)
    out = np.where(reduces, fit.cluster_reduce * work.sums, stored)
    out *= np.where(crowded, fit.crowded_store, 1.0)
    add = fit.add_chunk * work.sums + fit.add_saved * work.saved_accumulators
    out = work.tiles_of_cta * out + work.waves_alone * add * (work.k_chunks - 1)
    further = (work.tiles_of_cta - 1) * (fit.next_tile + fit.pipeline_refill * reduces)
    out += (work.stream_k > 0) * (fit.fixup_wait + fit.fixup_store * work.sums)
    both = (multiply**fit.overlap_exponent + load**fit.overlap_exponent) ** (1 / fit.overlap_exponent)
    return both * _slowdown(work, fit) + out + further


def _slowdown(work: CostInputs, fit: CostConstants) -> Array:
    """Time of a step, relative to that of a single CTA that takes whole work tiles."""
    streams = work.stream_k > 0
    multicast = np.where(streams, fit.multicast_stream_k, fit.multicast) - 1
    narrow = np.minimum((WIDEST - work.tile_n) / _NARROWER, 1.0)
    multicast = multicast * (fit.multicast_widest + (1 - fit.multicast_widest) * narrow)
    three = np.where(streams & (work.warpgroups == 3), fit.three_warpgroups_stream_k, 1.0)
    longer = np.where(work.cluster_m > 1, 1 + multicast, 1.0) * three
    return longer * (1 + fit.stream_k_slowdown * work.stream_k_fraction)


def _multiply_time(work: CostInputs, fit: CostConstants) -> Array:
    steps = work.depth * work.size / 64
    tiles = work.rows / TILE_M
    each = work.waves * fit.stall + work.waves_alone * tiles * (fit.step + fit.step_token * work.tile_n)
    slowdown = (work.ctas_per_sm - 1) * (fit.cta_slowdown + fit.cta_slowdown_token * work.tile_n)
    return 1e-3 * steps * each * (1 + slowdown)


def _load_time(work: CostInputs, fit: CostConstants) -> Array:
    """Memory serves the weights of the first token tile; L2 those of the others, and X.

    The CTAs of a cluster each load a part of X, so rows of X that aren't aligned cost them less.
    """
    weight = work.weight * work.rows
    resident = work.resident * work.cluster
    full = work.full_waves * np.maximum(work.ctas_per_sm / fit.bw_all_busy, resident / fit.dram_bandwidth)
    last = work.last_wave_ctas
    deep = np.minimum(work.ctas_per_sm, np.ceil(last / work.usable_sms))
    third, half = last <= work.usable_sms / 3, last <= work.usable_sms / 2
    rest = np.where(half, 1 / fit.bw_half_busy, deep / fit.bw_all_busy)
    rest = np.where(third, 1 / fit.bw_third_busy, rest)
    rest = np.where(last > 0, np.maximum(rest, last / fit.dram_bandwidth), 0.0)
    first = 1 / work.token_tiles
    from_l2 = work.waves_alone * (weight * (1 - first) + _x_bytes(work, fit, work.cluster_m))
    return work.depth * (weight * first * (full + rest) + from_l2 / fit.sm_l2_bandwidth)


def _x_bytes(work: CostInputs, fit: CostConstants, loaders: Array | float = 1.0) -> Array:
    """Bytes of X that each loading CTA loads for one column of W, with the cost of alignment."""
    return work.size * work.tokens * (1 + fit.unaligned_x * work.unaligned / loaders)


def _l2_time(work: CostInputs, fit: CostConstants) -> Array:
    each = work.weight * work.rows + _x_bytes(work, fit) / work.cluster_m
    return work.work_tiles * work.cluster * work.depth * each / fit.l2_bandwidth


def _memory_time(work: CostInputs, fit: CostConstants) -> Array:
    n, m, k = work.n, work.m, work.k
    nbytes = work.weight * m * k + work.size * n * k + work.out_size * n * work.outputs
    return nbytes / fit.dram_bandwidth
