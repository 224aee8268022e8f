"""Softmax over the kept cells of rows, to the bit: docs/blocksparse.md has the definition."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arithmetic.epilogue import exponential
from ...vocab import AttentionMask

Array = np.ndarray[Any, Any]

_LEAST = -120.0
"""Of an exponent: what is below it is 0 in float32 too."""


def added(mask: Array, kind: AttentionMask) -> Array:
    """What a mask, float32, adds to scores."""
    if kind is AttentionMask.ADD:
        return mask
    return np.where(mask == 0, np.float32(-np.inf), np.float32(0))


def softmax(scores: Array) -> Array:
    """Of float32 [..., cells of a row], float32. A row of -Inf alone, or without cells, is zeros."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    nothing = top == -np.inf
    powers = exp32(scores - np.where(nothing, np.float32(0), top))
    found: Array = powers / in_order(powers)
    return np.where(nothing, np.float32(0), found)


def gradient(y: Array, dy: Array, scale: float) -> Array:
    """Of what softmax multiplied by ``scale``, float32."""
    product: Array = y * (dy - in_order(y * dy)) * np.float32(scale)
    return product


def in_order(terms: Array) -> Array:
    """Sums of float32 rows [..., 1], from +0 by one rounded addition a term, from the first to the last."""
    if terms.shape[-1] == 0:
        return np.zeros((*terms.shape[:-1], 1), np.float32)
    found: Array = np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1:] + np.float32(0)
    return found


def exp32(exponents: Array) -> Array:
    """exp of float32 that aren't positive: float64's, rounded once."""
    wide = np.clip(np.nan_to_num(exponents.astype(np.float64)), _LEAST, 0.0)
    return np.where(np.isnan(exponents), exponents, exponential(wide).astype(np.float32))
