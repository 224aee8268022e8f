"""float32 fma, rounded once, which NumPy doesn't have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_MIN_AHEAD, _MAX_AHEAD, _CELLS_AHEAD = 4, 16, 1 << 14
"""Steps of a chain that are checked together, and most results of all of them: they stay in the cache."""
_LONGEST_WAIT = 32
"""Most times that a chain's steps are checked one by one before they are checked together again."""

_BELOW_F32, _TIE = np.int64((1 << 29) - 1), np.int64(1 << 28)
"""The bits of a float64 that a float32 of the same exponent lacks, and their value halfway between two."""
_MAGNITUDE, _NORMAL = np.int64((1 << 63) - 1), np.uint64((1023 - 126) << 52)
"""The bits without the sign, and the least normal float32 as a float64."""


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """float32 fma(a, b, c), rounded once, elementwise on float32 arrays.

    The product is exact in float64, and rounding the float64 sum to float32 gives what a single rounding
    would, unless that sum lies halfway between two float32: they are float64, so no rounding passes one.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(np.add(product, c, dtype=np.float64))
    halfway = _halfway(total)
    if halfway.any():
        parts = (
            (one if one.shape == total.shape else np.broadcast_to(one, total.shape))[halfway]
            for one in (total, product, c)
        )
        total[halfway] = _rounded_to_odd(*parts)
    return total.astype(np.float32)


def fma_chain(steps: int, factors: Callable[[slice], tuple[Array, Array]], acc: Array) -> Array:
    """``acc`` after ``acc = fma_f32(a, b, acc)`` for the factors of each step in order.

    ``factors`` gives those of some steps: the first axis of both arrays counts steps, and the others
    broadcast to the shape of ``acc``. If there are few results, several steps are added at once and checked
    together. A sum halfway between two float32 is soon followed by others: the next steps are then checked
    one by one, for longer each time that happens.
    """
    width = min(_CELLS_AHEAD // max(acc.size, 1), _MAX_AHEAD)
    width = width if width >= _MIN_AHEAD else 1
    one_by_one, wait = 0, 1
    for begin in range(0, steps, width):
        a, b = factors(slice(begin, min(begin + width, steps)))
        done = 0
        if width > 1 and not one_by_one:
            acc, done = _fma_ahead(a, b, acc)
            one_by_one, wait = (0, 1) if done == len(a) else (wait, min(2 * wait, _LONGEST_WAIT))
        else:
            one_by_one -= 1
        for step in range(done, len(a)):
            acc = fma_f32(a[step], b[step], acc)
        del a, b  # before the next ones are made: large arrays then take their memory
    return acc


def _fma_ahead(a: Array, b: Array, acc: Array) -> tuple[Array, int]:
    """The accumulator before the first step with a sum halfway between two float32, and its number."""
    products = np.multiply(a, b, dtype=np.float64, order="C")
    totals, found = np.empty_like(products), acc
    for product, total in zip(products, totals, strict=True):
        np.add(product, found, out=total)
        found = total.astype(np.float32)
    halfway = _halfway(totals)
    if not halfway.any():
        return found, len(totals)
    step = int(halfway.reshape(len(totals), -1).any(axis=1).argmax())
    return (totals[step - 1].astype(np.float32) if step else acc), step


def _halfway(total: Array) -> Array:
    """Masks of float64 sums: those halfway between two float32, and those subnormal as float32."""
    bits = total.view(np.int64)
    # Subnormal results lack more bits. Less 1, zero is the largest of the magnitudes.
    halfway: Array = (bits & _BELOW_F32) == _TIE
    halfway |= ((bits & _MAGNITUDE) - 1).view(np.uint64) < _NORMAL
    return halfway


def _rounded_to_odd(total: Array, product: Array, addend: Array) -> Array:
    """The sum rounded to odd, by its TwoSum error: the rounding that follows is then right.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008.
    """
    part, addend = total - product, addend.astype(np.float64)
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    away = (error > 0) == (total > 0)
    odd: Array = (bits + np.where(inexact, np.where(away, 1, -1), 0)).view(np.float64)
    return odd
