"""Codes of kept positions, and small tables of codes.

A *code* is the low nibble of a metadata byte: bits 1:0 the first kept position of the group of four, bits 3:2
the second, strictly increasing.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np


def code_of(first: int, second: int) -> int:
    return first | second << 2


PAIRS = tuple(combinations(range(4), 2))
VALID_CODES = tuple(code_of(first, second) for first, second in PAIRS)

CROWDED = 0x10
"""Flag beside the code of a group with more than two non-zeros. The code is that of the first two."""


def _ranking_table() -> np.ndarray:
    """``>=`` for i < j breaks ties toward the lower index."""
    table = np.zeros(64, np.uint8)
    for outcome in range(64):
        wins = [0] * 4
        for bit, (i, j) in enumerate(PAIRS):
            wins[i if outcome >> bit & 1 else j] += 1
        first, second = sorted(sorted(range(4), key=lambda i: (-wins[i], i))[:2])
        table[outcome] = code_of(first, second)
    return table


def _occupancy_table() -> np.ndarray:
    table = np.zeros(16, np.uint8)
    for mask in range(16):
        used = [i for i in range(4) if mask >> i & 1]
        spare = [i for i in range(4) if i not in used]
        first, second = sorted((used + spare)[:2])
        table[mask] = code_of(first, second) | (CROWDED if len(used) > 2 else 0)
    return table


RANKING = _ranking_table()
"""Six comparisons ``key[i] >= key[j]`` (i < j, bit order of PAIRS) -> code of the two largest."""
OCCUPANCY = _occupancy_table()
"""Bit mask of a group's non-zero positions -> code. Spare slots take the lowest free positions."""
