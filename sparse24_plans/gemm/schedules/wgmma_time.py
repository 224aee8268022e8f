"""A model of the time that ``wgmma_sp`` takes with a schedule. Fitted to an H200; it ranks, no more.

It knows the shape alone, not the device at hand: another number of multiprocessors must not mean another
schedule, since a schedule's slices of K fix the bits. A launch takes the longest of three things, nearly:
what the busiest multiprocessor does, wave after wave of blocks; what L2 hands to all of them; what memory
moves. What a block streams from memory is held up where others share its way there: the two
multiprocessors of a pair take 80 GB/s together, and three pairs little more than twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...weights.layouts import TILE_M, layout_of
from ..descriptor import GemmSparse24Descriptor
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import FEW, Schedule

Array = Any


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants of the model, of one multiprocessor where nothing else is said."""

    launch: float
    """Microseconds before and after all else,"""
    cluster: float
    """and more of them for each doubling of a cluster."""
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
    """Relative to one, what a step takes for blocks that share X."""
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
    """Microseconds to add one sum of a part to those before it."""
    stored: float
    """Bytes of results per microsecond, while nothing is multiplied."""
    ragged: float
    """Results per microsecond that are stored one by one, where rows of Y end within 16 bytes."""
    crowded: float
    """What storing takes where several blocks share a multiprocessor, relative to one."""
    again: float
    """Microseconds to turn to a further item,"""
    refill: float
    """and to fill the pipeline of a further cluster."""
    even: float
    """How nearly multiplying hides copying, or the other way round (an exponent)."""
    sharp: float
    """How nearly the longest of the three is the whole time (an exponent)."""


# By whether the tokens are few, and the bytes of an element. Fitted by benchmarks/schedules/fit.py to 1,891
# random problems. Of matrices that were held out, the choice misses the fastest schedule by 1.0 to 1.8% in
# the mean, by 6 to 8% in one of twenty, by 14 to 33% at the worst.
_FITS = {
    (True, 2): Fit(
        launch=2.1, cluster=0.139, stall=41.9, step=10.1, step_token=0.139, beside=0.271,
        beside_token=0.00569, pair=1.03, alone=88.6e3, apart=75.9e3, together=42.7e3, memory=5.41e6, l2=40e6,
        copied=500e3, unaligned=2, fold=2.30e-4, add=1.90e-5, stored=29.6e3, ragged=3.72e3, crowded=1.66,
        again=0.589, refill=1.82, even=8.96, sharp=3.7,
    ),
    (True, 1): Fit(
        launch=2.05, cluster=0.15, stall=37.5, step=10.3, step_token=0.122, beside=0.271,
        beside_token=0.00845, pair=1, alone=98.2e3, apart=79.2e3, together=45.1e3, memory=7e6, l2=40e6,
        copied=410e3, unaligned=2, fold=2.02e-4, add=7.90e-6, stored=31.7e3, ragged=4.79e3, crowded=1.96,
        again=0.475, refill=1.79, even=7.6, sharp=1.98,
    ),
    (False, 2): Fit(
        launch=2.46, cluster=0.0936, stall=10.3, step=11, step_token=0.328, beside=0.05, beside_token=0.003,
        pair=1.08, alone=108e3, apart=86.3e3, together=56.5e3, memory=6.99e6, l2=16.7e6, copied=167e3,
        unaligned=0.436, fold=1.52e-4, add=5.29e-6, stored=1e6, ragged=5.16e3, crowded=1, again=1.04,
        refill=2.45, even=6.34, sharp=2.54,
    ),
    (False, 1): Fit(
        launch=2.46, cluster=0.275, stall=5.76, step=14.9, step_token=0.331, beside=0.0651,
        beside_token=2.61e-5, pair=1.08, alone=110e3, apart=89.3e3, together=53.6e3, memory=7e6, l2=17.2e6,
        copied=232e3, unaligned=1.16, fold=1.48e-4, add=7.43e-6, stored=87e3, ragged=5.46e3, crowded=3.98,
        again=1.33, refill=1.76, even=5.97, sharp=2.26,
    ),
}  # fmt: skip


class Work:
    """What the model knows of pairs of a schedule and a problem: an array a name, an entry a pair."""

    def __init__(self, pairs: Sequence[tuple[Schedule, GemmSparse24Descriptor]]) -> None:
        self._take_sizes(pairs)
        self._take_waves()

    def _take_sizes(self, pairs: Sequence[tuple[Schedule, GemmSparse24Descriptor]]) -> None:
        rows = []
        for schedule, desc in pairs:
            layout = layout_of(desc.element)
            most = schedule.resident_clusters(H200_MULTIPROCESSORS)
            alone = schedule._replace(blocks_per_sm=1).resident_clusters(H200_MULTIPROCESSORS)
            weight = layout.tile_bytes / (TILE_M * layout.tile_k)
            size, out_size = desc.element.itemsize, desc.out_element.itemsize
            problem = desc.n, desc.m, desc.k, size, out_size, weight, schedule.items(desc.n, desc.m)
            blocks = most, alone, schedule.rows, schedule.cluster, -(-desc.n // schedule.tokens)
            rows.append((*schedule, *problem, *blocks))
        columns = np.array(rows, dtype=np.float64).T
        (_, _, self.width, self.share, self.slices, self.per_sm, self.parts) = columns[:7]
        (self.n, self.m, self.k, self.size, self.out_size, self.weight, self.items) = columns[7:14]
        (self.resident, self.resident_alone, self.rows, self.cluster, self.token_blocks) = columns[14:]
        self.tokens = np.minimum(self.width, self.n)
        self.sums = self.rows * self.tokens
        self.depth = self.k / self.slices
        self.ragged = self.m * self.out_size % 16 != 0
        self.unaligned = self.k * self.size % 128 != 0

    def _take_waves(self) -> None:
        """Full waves of blocks, and the blocks of the last one."""
        self.waves = np.ceil(self.items / self.resident)
        self.in_turn = np.ceil(self.items / self.resident_alone)
        """Waves, were there one block a multiprocessor."""
        self.full = np.floor(self.items / self.resident)
        self.rest = (self.items - self.full * self.resident) * self.cluster
        self.usable = np.minimum(self.resident_alone * self.cluster, H200_MULTIPROCESSORS)


def predicted(schedules: Sequence[Schedule], desc: GemmSparse24Descriptor) -> Array:
    """Microseconds of one launch with each schedule, weights coming from memory."""
    return microseconds(Work([(one, desc) for one in schedules]), fit_of(desc))


def fit_of(desc: GemmSparse24Descriptor) -> Fit:
    """The constants for such a problem."""
    return _FITS[desc.n <= FEW, desc.element.itemsize]


def microseconds(work: Work, fit: Fit) -> Array:
    """Predicted time of one launch of each."""
    terms = np.array([_of_one(work, fit), _of_l2(work, fit), _of_memory(work, fit)])
    longest = terms.max(axis=0)
    shares = ((terms / longest) ** fit.sharp).sum(axis=0)
    return fit.launch + fit.cluster * np.log2(work.cluster) + longest * shares ** (1 / fit.sharp)


def _of_one(work: Work, fit: Fit) -> Array:
    """Microseconds of the busiest multiprocessor."""
    multiply, copy = _multiplied(work, fit), _copied(work, fit)
    folds = work.slices > 1
    stored = work.sums * (work.out_size / fit.stored + work.ragged / fit.ragged)
    crowded = (work.per_sm > 1) & (work.items > work.resident_alone)
    out = np.where(folds, fit.fold * work.sums, stored) * np.where(crowded, fit.crowded, 1.0)
    out = work.waves * out + work.in_turn * fit.add * (work.parts - 1) * work.sums
    again = (work.waves - 1) * (fit.again + fit.refill * folds)
    both = (multiply**fit.even + copy**fit.even) ** (1 / fit.even)
    return both * np.where(work.share > 1, fit.pair, 1.0) + out + again


def _multiplied(work: Work, fit: Fit) -> Array:
    steps = work.depth * work.size / 64
    tiles = work.rows / TILE_M
    each = work.waves * fit.stall + work.in_turn * tiles * (fit.step + fit.step_token * work.width)
    beside = 1 + (work.per_sm - 1) * (fit.beside + fit.beside_token * work.width)
    return 1e-3 * steps * each * beside


def _copied(work: Work, fit: Fit) -> Array:
    """Weights of the first tokens from memory, those of the others and X from L2."""
    weight = work.weight * work.rows
    full = work.full * np.maximum(work.per_sm / fit.together, work.resident * work.cluster / fit.memory)
    deep = np.minimum(work.per_sm, np.ceil(work.rest / work.usable))
    few, half = work.rest <= work.usable / 3, work.rest <= work.usable / 2
    rest = np.where(few, 1 / fit.alone, np.where(half, 1 / fit.apart, deep / fit.together))
    rest = np.where(work.rest > 0, np.maximum(rest, work.rest / fit.memory), 0.0)
    first = 1 / work.token_blocks
    return work.depth * (
        weight * first * (full + rest)
        + work.in_turn * (weight * (1 - first) + _source(work, fit)) / fit.copied
    )


def _source(work: Work, fit: Fit) -> Array:
    """Bytes of X of a block's tokens, as what they take, for a column."""
    return work.size * work.tokens * (1 + fit.unaligned * work.unaligned)


def _of_l2(work: Work, fit: Fit) -> Array:
    each = work.weight * work.rows + _source(work, fit) / work.share
    return work.items * work.cluster * work.depth * each / fit.l2


def _of_memory(work: Work, fit: Fit) -> Array:
    n, m, k = work.n, work.m, work.k
    return (work.weight * m * k + work.size * n * k + work.out_size * n * m) / fit.memory
