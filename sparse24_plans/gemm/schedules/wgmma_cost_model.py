"""A model of the time that ``wgmma_sp`` takes with a schedule. Fitted to an H200; it ranks, no more.

It knows the shape alone, not the device at hand: another number of multiprocessors must not mean another
schedule, since a schedule's slices of K fix the bits. A launch takes the longest of three things, nearly:
what the busiest multiprocessor does, wave after wave of blocks; what L2 hands to all of them; what memory
moves. What a block streams from memory is held up where others share its way there: the two
multiprocessors of a pair take 80 GB/s together, and three pairs little more than twice that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...weights.packed_layouts import TILE_M, layout_of
from ..descriptor import GemmSparse24Descriptor
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import MAX_MEMORY_BOUND_N, WIDEST, Schedule

Array = Any


@dataclass(frozen=True, kw_only=True)
class CostConstants:
    """Constants of the model, of one multiprocessor where nothing else is said."""

    launch: float
    """Microseconds before and after all else,"""
    cluster: float
    """and more of them for each doubling of a cluster;"""
    met: float = 0.0
    """and until its blocks have met to fold (of 8 bits it ranks no better with it)."""
    stall: float
    """Nanoseconds that a warpgroup waits in a step of its tensor instructions, while others can work;"""
    step: float
    """nanoseconds of a step itself,"""
    step_token: float
    """and for each token of it."""
    beside: float
    """What a warpgroup takes longer for each block beside its own on a multiprocessor: a share;"""
    beside_token: float
    """and for each token."""
    pair: float
    """Relative to one, what a step takes for blocks that share X,"""
    pair_in_ranges: float
    """and where these have equal ranges;"""
    of_widest: float = 1.0
    """what of it is left where they are the widest: a share;"""
    three_in_ranges: float = 1.0
    """and what one takes for three warpgroups that have ranges."""
    alone: float
    """Bytes per microsecond that a block gets from memory with a third of the multiprocessors busy,"""
    apart: float
    """with half of them,"""
    together: float
    """and with all."""
    memory: float
    """Bytes per microsecond of the whole device's memory;"""
    l2: float
    """of its L2 cache;"""
    copied: float
    """of L2 to one multiprocessor."""
    unaligned: float
    """What X takes more where its rows don't start at lines of 128 bytes: a share."""
    fold: float
    """Microseconds to add up one sum of a cluster's slices."""
    add: float
    """Microseconds to add one sum of a part to those before it,"""
    park: float
    """and where those are parked."""
    stored: float
    """Bytes of results per microsecond, while nothing is multiplied."""
    ragged: float
    """Results per microsecond that a warpgroup stores one by one, where rows of Y end within 16 bytes."""
    crowded: float
    """What storing takes where several blocks share a multiprocessor, relative to one."""
    join: float
    """Microseconds until a block has the sums that it goes on from,"""
    handed: float
    """and to hand over one of them;"""
    loose: float
    """what tiles take more where blocks begin anywhere in K: a share."""
    again: float
    """Microseconds to turn to a further item,"""
    refill: float
    """and to fill the pipeline of a further cluster."""
    even: float
    """How nearly multiplying hides copying, or the other way round (an exponent)."""
    sharp: float
    """How nearly the longest of the three is the whole time (an exponent)."""


# By how many the tokens are, and the bytes of an element. Fitted by benchmarks/schedules/fit.py to a class's
# part of 2,285 problems, or earlier to fewer where that did no better for matrices that were held out. What
# ranges, parking and ragged rows take was found apart. Of all 2,417 that have been measured by now the choice
# misses the fastest schedule by 0.5 to 1.7% in the mean of a class, by 3 to 8% in one of twenty, by 9 to 20%
# at the worst, and once by 33%.
TOKENS = (MAX_MEMORY_BOUND_N, 512)
"""The most of all classes but the last."""
_NARROWER = 192
"""Blocks by so many tokens narrower than the widest take all that is said of pairs, wider ones less."""
_FITS = {
    (0, 2): CostConstants(
        launch=2.1, cluster=0.139, met=0.2, stall=41.9, step=10.1, step_token=0.139, beside=0.271,
        beside_token=0.00569, pair=1.03, pair_in_ranges=1.03, three_in_ranges=1.03, alone=88.6e3,
        apart=75.9e3, together=42.7e3, memory=5.41e6, l2=40e6, copied=500e3, unaligned=2, fold=2.30e-4,
        add=1.90e-5, park=1.1e-4, stored=29.6e3, ragged=1.86e3, crowded=1.66, join=1, handed=1.5e-4,
        loose=0.05, again=0.589, refill=1.82, even=8.96, sharp=3.7,
    ),
    (0, 1): CostConstants(
        launch=2.05, cluster=0.15, stall=37.5, step=10.3, step_token=0.122, beside=0.271,
        beside_token=0.00845, pair=1, pair_in_ranges=1, alone=98.2e3, apart=79.2e3, together=45.1e3,
        memory=7e6, l2=40e6, copied=410e3, unaligned=2, fold=2.02e-4, add=7.90e-6, park=1.1e-4,
        stored=31.7e3, ragged=2.4e3, crowded=1.96, join=4, handed=6e-5, loose=0, again=0.475, refill=1.79,
        even=7.6, sharp=1.98,
    ),
    (1, 2): CostConstants(
        launch=1, cluster=0.418, stall=13.1, step=31.1, step_token=0.173, beside=0.0509,
        beside_token=0.00271, pair=1.09, pair_in_ranges=1, of_widest=0, three_in_ranges=1.05, alone=50e3,
        apart=83.6e3, together=56.6e3, memory=7e6, l2=18e6, copied=144e3, unaligned=0.792, fold=1.72e-4,
        add=4.44e-5, park=2e-4, stored=48.4e3, ragged=4.16e3, crowded=1, join=3, handed=1e-4, loose=0,
        again=0.578, refill=3.28, even=5.75, sharp=8,
    ),
    (1, 1): CostConstants(
        launch=1, cluster=0.448, stall=1, step=33.1, step_token=0.291, beside=0.026,
        beside_token=0.000112, pair=1.06, pair_in_ranges=1.06, alone=59.2e3, apart=66.1e3, together=64e3,
        memory=7e6, l2=16.5e6, copied=157e3, unaligned=1.83, fold=1.64e-4, add=4.07e-5, park=2e-4,
        stored=42.2e3, ragged=5.66e3, crowded=2.49, join=2, handed=1.2e-4, loose=0.05, again=0.304,
        refill=2.66, even=6.43, sharp=5.95,
    ),
    (2, 2): CostConstants(
        launch=1, cluster=1.5, stall=16.6, step=17.4, step_token=0.304, beside=0.049, beside_token=0.0033,
        pair=1, pair_in_ranges=1, alone=50e3, apart=30e3, together=53.1e3, memory=7e6, l2=15.3e6,
        copied=161e3, unaligned=0.776, fold=9.50e-5, add=1.94e-5, park=2e-4, stored=326e3, ragged=4.49e3,
        crowded=1.09, join=2, handed=1.47e-4, loose=0.08, again=1.38, refill=4.49, even=5.09,
        sharp=3.72,
    ),
    (2, 1): CostConstants(
        launch=1, cluster=1.23, stall=2.12, step=36.4, step_token=0.239, beside=0.0644,
        beside_token=2.04e-5, pair=1, pair_in_ranges=1, alone=50e3, apart=30e3, together=54.1e3,
        memory=7e6, l2=18.2e6, copied=127e3, unaligned=1.09, fold=9.05e-5, add=1.55e-5, park=2e-4,
        stored=65.5e3, ragged=2.96e3, crowded=2.07, join=2.2, handed=1.2e-4, loose=0.03, again=1.76,
        refill=2.71, even=12, sharp=2.98,
    ),
}  # fmt: skip


class CostInputs:
    """What the model knows of pairs of a schedule and a problem: an array a name, an entry a pair."""

    def __init__(self, pairs: Sequence[tuple[Schedule, GemmSparse24Descriptor]]) -> None:
        self._take_sizes(pairs)
        self._take_waves()

    def _take_sizes(self, pairs: Sequence[tuple[Schedule, GemmSparse24Descriptor]]) -> None:
        problems = {id(desc): _sizes_of(desc) for _, desc in pairs}
        rows = [(*_places_of(schedule), *problems[id(desc)]) for schedule, desc in pairs]
        columns = np.array(rows, dtype=np.float64).T
        (self.warpgroups, _, self.width, self.cluster_m, self.split_k, self.ctas_per_sm) = columns[:6]
        (self.k_chunks, self.stream_k) = columns[6:8]
        (self.resident, self.resident_alone, self.rows, self.cluster, self.saved_accumulators) = columns[8:13]
        (self.n, self.m, self.outputs, self.k, self.size, self.out_size, self.weight) = columns[13:]
        self.token_blocks = np.ceil(self.n / self.width)
        self.items = np.ceil(self.m / (self.rows * self.cluster_m)) * self.token_blocks
        self.tokens = np.minimum(self.width, self.n)
        self.sums = self.rows * self.tokens
        self.depth = self.k / self.split_k
        self.ragged = self.outputs * self.out_size % 16 != 0
        self.unaligned = self.k * self.size % 128 != 0

    def _take_waves(self) -> None:
        """Full waves of blocks, and the blocks of the last one."""
        self.waves = np.ceil(self.items / self.resident)
        self.in_turn = np.ceil(self.items / self.resident_alone)
        """Waves, were there one block a multiprocessor."""
        self.full = np.floor(self.items / self.resident)
        self.rest = (self.items - self.full * self.resident) * self.cluster
        self.usable = np.minimum(self.resident_alone * self.cluster, H200_MULTIPROCESSORS)
        self._take_ranges()

    def _take_ranges(self) -> None:
        """Where clusters have equal ranges of tiles: parts of waves."""
        cut, even = self.stream_k > 0, self.items / np.maximum(self.stream_k, 1)
        self.turns = np.where(cut, np.ceil(even), self.waves)
        """Items that a block writes."""
        self.apart = np.where(
            cut, (self.stream_k + self.items % np.maximum(self.stream_k, 1)) / self.items, 0.0
        )
        """Of all tiles, those in ranges."""
        self.waves = np.where(cut, even, self.waves)
        self.in_turn = np.where(cut, even, self.in_turn)
        self.full = np.where(cut, even, self.full)
        self.rest = np.where(cut, 0, self.rest)


@lru_cache(4096)
def _places_of(schedule: Schedule) -> tuple[int, ...]:
    """What doesn't depend on the problem."""
    return (
        *schedule,
        schedule.resident_clusters(H200_MULTIPROCESSORS),
        schedule.resident_alone(H200_MULTIPROCESSORS),
        schedule.rows,
        schedule.cluster,
        schedule.saved_accumulators * 128 * schedule.warpgroups,
    )


def _sizes_of(desc: GemmSparse24Descriptor) -> tuple[float, ...]:
    """What doesn't depend on the schedule."""
    layout = layout_of(desc.element)
    weight = layout.tile_bytes / (TILE_M * layout.tile_k)
    return desc.n, desc.m, desc.outputs, desc.k, desc.element.itemsize, desc.out_element.itemsize, weight


def predicted(schedules: Sequence[Schedule], desc: GemmSparse24Descriptor) -> Array:
    """Microseconds of one launch with each schedule, weights coming from memory."""
    return microseconds(CostInputs([(one, desc) for one in schedules]), fit_of(desc))


def fastest(schedules: Sequence[Schedule], desc: GemmSparse24Descriptor) -> Schedule:
    """The one of the least predicted time."""
    return schedules[int(predicted(schedules, desc).argmin())]


def fit_of(desc: GemmSparse24Descriptor) -> CostConstants:
    """The constants for such a problem."""
    return _FITS[bisect_left(TOKENS, desc.n), desc.element.itemsize]


def microseconds(work: CostInputs, fit: CostConstants) -> Array:
    """Predicted time of one launch of each."""
    terms = np.array([_of_one(work, fit), _of_l2(work, fit), _of_memory(work, fit)])
    longest = terms.max(axis=0)
    shares = ((terms / longest) ** fit.sharp).sum(axis=0)
    clustered = fit.cluster * np.log2(work.cluster) + fit.met * (work.split_k > 1)
    return fit.launch + clustered + longest * shares ** (1 / fit.sharp)


def _of_one(work: CostInputs, fit: CostConstants) -> Array:
    """Microseconds of the busiest multiprocessor."""
    multiply, copy = _multiplied(work, fit), _copied(work, fit)
    folds = work.split_k > 1
    results = work.sums * (work.outputs / work.m)  # of a gate one for two sums
    stored = results * (work.out_size / fit.stored + work.ragged / (fit.ragged * work.warpgroups))
    crowded = (work.ctas_per_sm > 1) & (work.items > work.resident_alone)
    out = np.where(folds, fit.fold * work.sums, stored) * np.where(crowded, fit.crowded, 1.0)
    add = fit.add * work.sums + fit.park * work.saved_accumulators
    out = work.turns * out + work.in_turn * add * (work.k_chunks - 1)
    again = (work.turns - 1) * (fit.again + fit.refill * folds)
    out += (work.stream_k > 0) * (fit.join + fit.handed * work.sums)
    both = (multiply**fit.even + copy**fit.even) ** (1 / fit.even)
    return both * _taken_longer(work, fit) + out + again


def _taken_longer(work: CostInputs, fit: CostConstants) -> Array:
    """What a step takes, relative to one of a block for itself that takes whole items."""
    pair = np.where(work.stream_k > 0, fit.pair_in_ranges, fit.pair)
    left = fit.of_widest + (1 - fit.of_widest) * np.minimum((WIDEST - work.width) / _NARROWER, 1.0)
    three = (work.stream_k > 0) & (work.warpgroups == 3)
    longer = np.where(work.cluster_m > 1, 1 + (pair - 1) * left, 1.0) * np.where(
        three, fit.three_in_ranges, 1.0
    )
    return longer * (1 + fit.loose * work.apart)


def _multiplied(work: CostInputs, fit: CostConstants) -> Array:
    steps = work.depth * work.size / 64
    tiles = work.rows / TILE_M
    each = work.waves * fit.stall + work.in_turn * tiles * (fit.step + fit.step_token * work.width)
    beside = 1 + (work.ctas_per_sm - 1) * (fit.beside + fit.beside_token * work.width)
    return 1e-3 * steps * each * beside


def _copied(work: CostInputs, fit: CostConstants) -> Array:
    """Weights of the first tokens from memory, those of the others and X from L2.

    Blocks that share X each ask for their part of it: rows that don't start at lines cost less there.
    """
    weight = work.weight * work.rows
    full = work.full * np.maximum(work.ctas_per_sm / fit.together, work.resident * work.cluster / fit.memory)
    deep = np.minimum(work.ctas_per_sm, np.ceil(work.rest / work.usable))
    few, half = work.rest <= work.usable / 3, work.rest <= work.usable / 2
    rest = np.where(few, 1 / fit.alone, np.where(half, 1 / fit.apart, deep / fit.together))
    rest = np.where(work.rest > 0, np.maximum(rest, work.rest / fit.memory), 0.0)
    first = 1 / work.token_blocks
    source = _source(work, fit, work.cluster_m)
    return work.depth * (
        weight * first * (full + rest) + work.in_turn * (weight * (1 - first) + source) / fit.copied
    )


def _source(work: CostInputs, fit: CostConstants, shares: Array | float = 1.0) -> Array:
    """Bytes of X of a block's tokens, as what they take, for a column; asked for in so many shares."""
    return work.size * work.tokens * (1 + fit.unaligned * work.unaligned / shares)


def _of_l2(work: CostInputs, fit: CostConstants) -> Array:
    each = work.weight * work.rows + _source(work, fit) / work.cluster_m
    return work.items * work.cluster * work.depth * each / fit.l2


def _of_memory(work: CostInputs, fit: CostConstants) -> Array:
    n, m, k = work.n, work.m, work.k
    return (work.weight * m * k + work.size * n * k + work.out_size * n * work.outputs) / fit.memory
