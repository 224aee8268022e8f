"""float32 fma, rounded once, which NumPy doesn't have."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


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
    bits = total.view(np.int64)
    # Subnormal results lack more bits. Less 1, zero is the largest of the magnitudes.
    halfway = (bits & _BELOW_F32) == _TIE
    halfway |= ((bits & _MAGNITUDE) - 1).view(np.uint64) < _NORMAL
    if halfway.any():
        parts = (
            (one if one.shape == total.shape else np.broadcast_to(one, total.shape))[halfway]
            for one in (total, product, c)
        )
        total[halfway] = _rounded_to_odd(*parts)
    return total.astype(np.float32)


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
