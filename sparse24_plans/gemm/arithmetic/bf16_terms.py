"""float32 as a sum of bf16 terms (high, middle, low), each the bf16 nearest to the remainder."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...vocab import ElementKind
from ...weights import bf16_terms as in_memory

Array = np.ndarray[Any, Any]

MAX_TERMS = 3
SPLIT_TILE = 64
"""Columns of K whose products of split terms are added consecutively, small products first."""
SPLIT_SUM = {2: 4 * SPLIT_TILE, 3: SPLIT_TILE}
"""Columns of K whose products form one tensor-core sum, by the number of split terms of a float32."""
SPLIT_GROUP = {2: 0, 3: 64 * SPLIT_TILE}
"""Columns of K of one blocked sum, by the number of split terms of a float32; 0: a whole slice is one sum."""
_BF16 = ElementKind.BF16.dtype


def terms_of(values: Array) -> tuple[Array, ...]:
    """The three terms of float32 ``values``, as float32. A sum of fewer terms leaves the last ones out.

    Three terms hold every finite value of at least 2^-110 exactly. Inf, NaN and values that round to Inf have
    no finite terms: their terms include a NaN, or infinities that cancel.
    """
    found = []
    with np.errstate(all="ignore"):
        for _ in range(MAX_TERMS):
            found.append(values.astype(_BF16).astype(np.float32))
            values = values - found[-1]
    return tuple(found)


def weight_terms(values: Array, count: int) -> tuple[Array, ...]:
    """The terms of a weight. Two terms are those of the packed weight, finite for all finite values."""
    if count != in_memory.COUNT:
        return terms_of(values)[:count]
    found = in_memory.of(values.view(np.uint32))
    return tuple((term.astype(np.uint32) << 16).view(np.float32) for term in found)


def term_pairs(terms: int) -> tuple[tuple[int, int], ...]:
    """The terms (i of X, j of W) that are multiplied: all with i + j < ``terms``, the small products first.

    Term 0 is the high one.
    """
    return tuple((x, w) for x in reversed(range(terms)) for w in reversed(range(terms - x)))
