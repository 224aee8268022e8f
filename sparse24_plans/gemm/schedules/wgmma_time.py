"""A model of the time that ``wgmma_sp`` takes with a schedule. Fitted to an H200; it ranks, no more.

It knows the shape alone, not the device at hand: another number of multiprocessors must not mean another
schedule, since a schedule's slices of K fix the bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...weights.layouts import TILE_M, layout_of
from ..descriptor import GemmSparse24Descriptor
from ..table import GemmRow
from .mma_sp import H200_MULTIPROCESSORS
from .wgmma_sp import FEW, Schedule, allowed_schedules


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Constants of the model, for one multiprocessor where nothing else is said."""

    products_per_us: float
    """Multiplications of kept values, times the bytes of an element."""
    copied_per_us: float
    """Bytes into shared memory."""
    moved_per_us: float
    """Bytes of the whole device's memory."""
    launch_us: float
    fold_us: float
    """To add up one sum of a cluster's slices."""
    again_us: float
    """To start a further cluster on the same multiprocessors."""
    stored_per_us: float
    """Bytes of results, while nothing is multiplied."""
    one_tile: float
    """What copying takes where a block has one row tile, relative to more of them."""


_FEW_FIT = _Fit(
    products_per_us=7.4e6,
    copied_per_us=140e3,
    moved_per_us=4.0e6,
    launch_us=3.0,
    fold_us=2.1e-4,
    again_us=3.6,
    stored_per_us=math.inf,
    one_tile=0.87,
)
_MANY_FIT = _Fit(
    products_per_us=7.6e6,
    copied_per_us=129e3,
    moved_per_us=3.9e6,
    launch_us=1.3,
    fold_us=1.6e-4,
    again_us=2.8,
    stored_per_us=60e3,
    one_tile=1.0,
)
_WIDEST_FIT = replace(_MANY_FIT, products_per_us=9.1e6)


def best_schedule(desc: GemmSparse24Descriptor, row: GemmRow) -> Schedule:
    """The row's schedule of the least predicted time."""
    return min(allowed_schedules(desc, row), key=lambda schedule: microseconds(schedule, desc))


def microseconds(schedule: Schedule, desc: GemmSparse24Descriptor) -> float:
    """Predicted time of one launch, weights coming from memory."""
    n, m, k, layout = desc.n, desc.m, desc.k, layout_of(desc.element)
    fit = _FEW_FIT if schedule.tokens <= FEW else _MANY_FIT if schedule.tokens < 256 else _WIDEST_FIT
    depth = k / schedule.slices
    row_bytes = layout.tile_bytes / (TILE_M * layout.tile_k)  # of W, a dense column
    multiply = layout.itemsize * schedule.rows * schedule.tokens * depth / fit.products_per_us
    source_rows = max(16, schedule.tokens)  # fewer take as long
    copy = depth * (row_bytes * schedule.rows + layout.itemsize * source_rows) / fit.copied_per_us
    if schedule.rows == TILE_M:
        copy *= fit.one_tile
    each = _soft_max(multiply, copy)
    resident, items = schedule.resident_clusters(H200_MULTIPROCESSORS), schedule.items(n, m)
    out_bytes = desc.out_element.itemsize
    if schedule.slices > 1:  # they fold, and what follows starts afresh
        fold = fit.fold_us * schedule.rows * schedule.tokens + (fit.again_us if items > resident else 0)
        each += fold / schedule.blocks_per_sm
    else:
        each += out_bytes * schedule.rows * schedule.tokens / fit.stored_per_us
    waves = -(-items // max(1, resident // schedule.blocks_per_sm))
    memory = (row_bytes * m * k + layout.itemsize * n * k + out_bytes * n * m) / fit.moved_per_us
    return fit.launch_us + _soft_max(waves * each, memory)


def _soft_max(a: float, b: float) -> float:
    """The time of two things that overlap, nearly."""
    return math.sqrt(math.hypot(a * a, b * b))
