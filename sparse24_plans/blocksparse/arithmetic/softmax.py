"""Softmax over the kept cells of rows. This module defines the bits of ``host_strict``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arithmetic.epilogue import exponential
from ...vocab import AttentionMask

Array = np.ndarray[Any, Any]

_MIN_EXPONENT = -120.0
"""Least exponent: the exponential of anything below is 0 in float32, too."""


def added(mask: Array, kind: AttentionMask) -> Array:
    """Return what a mask, as float32, adds to scores."""
    if kind is AttentionMask.ADD:
        return mask
    return np.where(mask == 0, np.float32(-np.inf), np.float32(0))


class Softmax(NamedTuple):
    """The softmax of float32 rows [..., cells]. A row of -Inf alone, or without cells, becomes zeros."""

    probabilities: Array
    logsumexp: Array
    """Logarithm of each row's sum of exponentials [..., 1]; -Inf for a row of zeros."""


def softmax(scores: Array) -> Softmax:
    """Compute in float32; the logarithm is computed in float64 and rounded once."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    nothing = top == -np.inf
    powers = exp32(scores - np.where(nothing, np.float32(0), top))
    total = in_order(powers)
    probabilities = np.where(nothing, np.float32(0), powers / total)
    return Softmax(probabilities, np.where(nothing, top, (top + _log(total)).astype(np.float32)))


def gradient(y: Array, dy: Array, scale: float) -> Array:
    """Return the gradient of a softmax whose input was multiplied by ``scale``, a float32."""
    product: Array = y * (dy - in_order(y * dy)) * np.float32(scale)
    return product


def in_order(terms: Array) -> Array:
    """Sum float32 rows [..., 1] from +0, one rounded addition a term, from the first to the last."""
    if terms.shape[-1] == 0:
        return np.zeros((*terms.shape[:-1], 1), np.float32)
    found: Array = np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1:] + np.float32(0)
    return found


def exp32(exponents: Array) -> Array:
    """exp of float32 that are not positive: computed in float64, rounded once."""
    wide = np.clip(np.nan_to_num(exponents.astype(np.float64)), _MIN_EXPONENT, 0.0)
    return np.where(np.isnan(exponents), exponents, exponential(wide).astype(np.float32))


_LN2, _SQRT_HALF = 0.6931471805599453, 0.7071067811865476


def _log(values: Array) -> Array:
    """Return the logarithm of float32 from 1 on, as float64.

    For m * 2^e with m between sqrt(1/2) and sqrt(2) it is e * ln 2 + 2 * atanh((m - 1) / (m + 1)), where
    atanh is its series in odd powers, to the 23rd.
    """
    mantissa, exponent = np.frexp(values.astype(np.float64))
    low = mantissa < _SQRT_HALF
    mantissa, exponent = np.where(low, 2 * mantissa, mantissa), exponent - low
    z = (mantissa - 1) / (mantissa + 1)
    square, series = z * z, np.zeros_like(z)
    for power in range(23, 0, -2):
        series = series * square + 1 / power
    found: Array = exponent * _LN2 + 2 * z * series
    return found
