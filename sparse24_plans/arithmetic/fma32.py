"""float32 fma, rounded once, which NumPy doesn't have."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """float32 fma(a, b, c), rounded once, elementwise on float32 arrays.

    The product is exact in float64. The float64 sum is rounded to odd, by its TwoSum error, so that the
    second rounding, to float32, gives what a single one would (Boldo and Melquiond 2008).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    away = (error > 0) == (total > 0)
    odd = bits + np.where(inexact, np.where(away, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32)
