"""float32 in parts of bf16: high, middle and low, each the one nearest to what those before it leave."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...vocab import ElementKind
from ...weights import bf16_terms as in_memory

Array = np.ndarray[Any, Any]

MOST_PARTS = 3
SPLIT_TILE = 64
"""Columns of K whose products of split terms are added consecutively, small products first."""
SPLIT_SUM = {2: 4 * SPLIT_TILE, 3: SPLIT_TILE}
"""Columns of K whose products form one tensor-core sum, by the number of split terms of a float32."""
SPLIT_GROUP = {2: 0, 3: 64 * SPLIT_TILE}
"""Columns of K of one blocked sum, by the number of split terms of a float32; 0: a whole slice is one sum."""
_BF16 = ElementKind.BF16.dtype


def parts_of(values: Array) -> tuple[Array, ...]:
    """All that there are of float32 ``values``, as float32; fewer leave the last ones out.

    Three hold every finite value of at least 2^-110 exactly. What has no finite parts (Inf, NaN, values that
    round to Inf) has NaN among them, or infinities that cancel.
    """
    found = []
    with np.errstate(all="ignore"):
        for _ in range(MOST_PARTS):
            found.append(values.astype(_BF16).astype(np.float32))
            values = values - found[-1]
    return tuple(found)


def weight_parts(values: Array, count: int) -> tuple[Array, ...]:
    """Of a weight: two are what memory holds (weights/parts.py); there finite values have finite parts."""
    if count != in_memory.COUNT:
        return parts_of(values)[:count]
    found = in_memory.of(values.view(np.uint32))
    return tuple((part.astype(np.uint32) << 16).view(np.float32) for part in found)


def pairs(parts: int) -> tuple[tuple[int, int], ...]:
    """Which parts of X and of W are multiplied, in their order: the small products first.

    Parts count from the high one. Of i and j those with i + j < parts.
    """
    return tuple((x, w) for x in reversed(range(parts)) for w in reversed(range(parts - x)))
