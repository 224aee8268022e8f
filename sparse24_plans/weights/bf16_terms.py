"""float32 values split into two bf16 terms, as a packed weight stores them.

The high term is the bf16 nearest to the value, the low term the bf16 nearest to the remainder. Finite values
have finite terms: if the nearest bf16 is infinite, the high term is the largest finite one. Inf and NaN have
themselves as high term, and a low term of zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import canonical

COUNT = 2
_FRACTION, _MIN_EXPONENT, _LARGEST = 7, -126, 0x7F7F
"""Bits of bf16's fraction, the exponent of its smallest normal number, the bits of its largest number."""
_AT_ONCE = 1 << 23
"""Values that are split at a time, which takes some gigabytes on a GPU."""


def of(bits: Any) -> tuple[Any, Any]:
    """The high and low terms, uint16, of float32 values given as uint32 of the same shape.

    The computation uses integers and float64, because CuPy's float32 may flush subnormals.
    """
    xp = canonical.array_module(bits)
    sign = (bits >> 16 & 0x8000).astype(np.uint16)
    magnitude = bits & 0x7FFFFFFF
    field = (magnitude >> 23).astype(np.int64)
    fraction = (magnitude & 0x7FFFFF) | (field > 0).astype(np.uint32) << 23
    exact = xp.ldexp(fraction.astype(np.float64), xp.maximum(field, 1).astype(np.int32) - 150)
    high = xp.minimum(_nearest(exact), _LARGEST)
    low = _nearest(exact - _value(high))
    special = field == 255
    nan = special & (fraction != 1 << 23)
    high = xp.where(special, (magnitude >> 16).astype(np.uint16) | nan.astype(np.uint16) << 6, high)
    low = xp.where(special, 0, low ^ sign)
    return (high | sign).astype(np.uint16), low.astype(np.uint16)


def in_rows(bits: Any, kt: int) -> Any:
    """Values uint32 [rows, K/2] -> uint16 [rows, 64 kt]: 32 high terms, their 32 low terms, and so on."""
    xp = canonical.array_module(bits)
    rows, width = bits.shape
    found = xp.zeros((rows, kt, COUNT, 32), np.uint16)
    step = max(1, _AT_ONCE // (kt * 32))
    for start in range(0, rows, step):
        padded = xp.zeros((min(step, rows - start), kt * 32), np.uint32)
        padded[:, :width] = bits[start : start + step]
        for number, part in enumerate(of(padded)):
            found[start : start + step, :, number] = part.reshape(-1, kt, 32)
    return found.reshape(rows, kt * 64)


def _nearest(values: Any) -> Any:
    """The bf16 nearest to finite float64 values, ties to even, as uint16."""
    xp = canonical.array_module(values)
    negative = values < 0
    field = (xp.abs(values).view(np.int64) >> 52) - 1023
    exponent = xp.maximum(field, _MIN_EXPONENT)
    units = xp.rint(xp.ldexp(xp.abs(values), (_FRACTION - exponent).astype(np.int32))).astype(np.int64)
    found = ((exponent - _MIN_EXPONENT) << _FRACTION) + units
    return (found | negative.astype(np.int64) << 15).astype(np.uint16)


def _value(bits: Any) -> Any:
    """The float64 value of unsigned bf16 bits."""
    xp = canonical.array_module(bits)
    field = (bits >> _FRACTION).astype(np.int32)
    units = (bits & 0x7F).astype(np.int32) | (field > 0).astype(np.int32) << _FRACTION
    return xp.ldexp(units.astype(np.float64), xp.maximum(field, 1) + _MIN_EXPONENT - 1 - _FRACTION)
