"""A model of the time that ``wgmma_sp`` takes with a schedule. Fitted to an H200; it ranks, no more.

It knows the shape alone, not the device at hand: another number of multiprocessors must not mean another
schedule, since a schedule's slices of K fix the bits. A launch takes the longest of three things, nearly:
what one multiprocessor does, block after block; what L2 hands to all of them; what memory moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ...weights.layouts import TILE_M, layout_of
from ..descriptor import GemmSparse24Descriptor
from ..table import GemmRow
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import FEW, Schedule, allowed_schedules


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants of the model, of one multiprocessor where nothing else is said."""

    launch: float
    """Microseconds before and after all else."""
    step: float
    """Nanoseconds of one step of a warpgroup's tensor instructions, whatever its width; and"""
    step_token: float
    """for each token of it."""
    lone: float
    """What a step takes where a block has one warpgroup, relative to more of them."""
    copied: float
    """Bytes per microsecond into shared memory."""
    least_tokens: float
    """Fewer take as long to copy."""
    l2: float
    """Bytes per microsecond out of the whole device's L2 cache."""
    memory: float
    """Bytes per microsecond of the whole device's memory;"""
    idle: float
    """how its speed falls with multiprocessors that have no block (an exponent)."""
    fold: float
    """Microseconds to add up one sum of a cluster's slices."""
    add: float
    """Microseconds to add one sum of a part to those before it."""
    stored: float
    """Bytes of results per microsecond, while nothing is multiplied."""
    crowded: float
    """What storing takes where several blocks share a multiprocessor, relative to one."""
    again: float
    """Microseconds to turn to a further item,"""
    refill: float
    """and to fill the pipeline of a further cluster."""
    sharp: float
    """How nearly the longest of the three is the whole time (an exponent)."""


# By whether the tokens are few, and the bytes of an element. Fitted to the times of 526 random problems
# (benchmarks/schedules/), on which the choice misses the fastest schedule by 3 to 4% in the mean, by 13 to
# 16% in one of twenty, by 46% at the worst.
_FITS = {
    (True, 2): Fit(
        launch=2.41, step=12.3, step_token=0.256, lone=1.4, copied=155e3, least_tokens=64, l2=40e6,
        memory=4.6e6, idle=0.101, fold=3.04e-4, add=3.95e-5, stored=15.2e3, crowded=1.74, again=0.451,
        refill=2.21, sharp=2.36,
    ),
    (True, 1): Fit(
        launch=2.43, step=15.5, step_token=0.317, lone=1.5, copied=176e3, least_tokens=43, l2=40e6,
        memory=4.53e6, idle=0.001, fold=1.86e-4, add=3.95e-5, stored=134e3, crowded=1.5, again=0.05,
        refill=2.51, sharp=1.85,
    ),
    (False, 2): Fit(
        launch=2.5, step=14.1, step_token=0.319, lone=1.0, copied=124e3, least_tokens=8, l2=18.9e6,
        memory=4.44e6, idle=0.0883, fold=1.27e-4, add=5.13e-6, stored=1e6, crowded=1.0, again=1.1,
        refill=2.25, sharp=3.03,
    ),
    (False, 1): Fit(
        launch=2.86, step=17.1, step_token=0.309, lone=1.36, copied=123e3, least_tokens=8, l2=22.7e6,
        memory=4.87e6, idle=0.123, fold=1.47e-4, add=5.13e-6, stored=62.5e3, crowded=1.0, again=0.644,
        refill=1.87, sharp=2.99,
    ),
}  # fmt: skip


def best_schedule(desc: GemmSparse24Descriptor, row: GemmRow) -> Schedule:
    """The row's schedule of the least predicted time."""
    return min(allowed_schedules(desc, row), key=lambda schedule: microseconds(schedule, desc))


class _Sizes(NamedTuple):
    """What the terms of the model share."""

    items: int
    blocks: int
    rows: int
    """Of W, and"""
    tokens: int
    """tokens of a block that there are;"""
    depth: float
    """columns of K that it sums."""
    row_bytes: float
    """Of W, for a dense column."""


def fit_of(desc: GemmSparse24Descriptor) -> Fit:
    """The constants for such a problem."""
    return _FITS[desc.n <= FEW, desc.element.itemsize]


def microseconds(schedule: Schedule, desc: GemmSparse24Descriptor, fit: Fit | None = None) -> float:
    """Predicted time of one launch, weights coming from memory; ``fit``: with other constants."""
    fit = fit or fit_of(desc)
    layout = layout_of(desc.element)
    items = schedule.items(desc.n, desc.m)
    sizes = _Sizes(
        items,
        items * schedule.cluster,
        schedule.rows,
        min(schedule.tokens, desc.n),
        desc.k / schedule.slices,
        layout.tile_bytes / (TILE_M * layout.tile_k),
    )
    terms = (
        _of_one(schedule, desc, sizes, fit),
        _of_l2(schedule, desc, sizes, fit),
        _of_memory(schedule, desc, sizes, fit),
    )
    longest = max(terms)
    shares = sum(math.pow(term / longest, fit.sharp) for term in terms)
    return fit.launch + longest * math.pow(shares, 1 / fit.sharp)


def _of_one(schedule: Schedule, desc: GemmSparse24Descriptor, sizes: _Sizes, fit: Fit) -> float:
    """Microseconds of one multiprocessor, or of a cluster of them."""
    itemsize, sums = desc.element.itemsize, sizes.rows * sizes.tokens
    steps = sizes.depth * itemsize / 64 * sizes.rows / TILE_M * (fit.lone if schedule.warpgroups == 1 else 1)
    multiply = steps * (fit.step + fit.step_token * schedule.tokens) * 1e-3
    source = itemsize * max(sizes.tokens, fit.least_tokens)
    copy = sizes.depth * (sizes.row_bytes * sizes.rows + source) / fit.copied
    each = math.sqrt(math.hypot(multiply**2, copy**2)) + fit.add * (schedule.parts - 1) * sums
    alone = schedule._replace(blocks_per_sm=1).resident_clusters(H200_MULTIPROCESSORS)
    waves = -(-sizes.items // schedule.resident_clusters(H200_MULTIPROCESSORS))
    folds = schedule.slices > 1
    out = fit.fold * sums if folds else desc.out_element.itemsize * sums / fit.stored
    if schedule.blocks_per_sm > 1 and sizes.items > alone:
        out *= fit.crowded
    again = (waves - 1) * (fit.again + (fit.refill if folds else 0.0))
    return -(-sizes.items // alone) * each + waves * out + again


def _of_l2(schedule: Schedule, desc: GemmSparse24Descriptor, sizes: _Sizes, fit: Fit) -> float:
    source = desc.element.itemsize * sizes.tokens / schedule.share
    return sizes.blocks * sizes.depth * (sizes.row_bytes * sizes.rows + source) / fit.l2


def _of_memory(schedule: Schedule, desc: GemmSparse24Descriptor, sizes: _Sizes, fit: Fit) -> float:
    n, m, k = desc.n, desc.m, desc.k
    moved = sizes.row_bytes * m * k + desc.element.itemsize * n * k + desc.out_element.itemsize * n * m
    places = H200_MULTIPROCESSORS * schedule.blocks_per_sm
    open_places = min(places, max(H200_MULTIPROCESSORS, sizes.blocks)) * -(-sizes.blocks // places)
    busy = min(1.0, sizes.blocks / open_places)
    return moved / fit.memory / math.pow(busy, fit.idle)
