"""Positions in foreign metadata: nibbles, codes, and float32 as 1:2.

*Nibbles* uint8 [M, groups]: one for each group of four, bits 1:0 are the first position, 3:2 the second.
Formats with float32 hold it 1:2 sparse, like the hardware: a nibble for each pair, 0x4 if the even element is
kept, 0xE if the odd one is. *Codes* uint8 [M, K/4] always stand for groups of four.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._vendor import nibbles
from ..errors import FormatError
from ..vocab import ElementKind
from ..weights import canonical
from ..weights.weight import Sparse24Weight
from .base import Outgoing, WeightShape

PAD_NIBBLES = 0x44
"""A byte of padding: positions 0 and 1 (or even elements), which are legal to the hardware."""
EVEN, ODD = 0x4, 0xE
"""Nibbles of a pair of float32 that keep the even or the odd element."""


def packed_nibbles(found: Any) -> Any:
    """Nibbles [rows, G] -> contiguous bytes [rows, G/2]."""
    return canonical.array_module(found).ascontiguousarray(nibbles.pack(found))


def unpacked_nibbles(words: Any, rows: int, groups: int) -> Any:
    """Words in row-major order -> nibbles [rows, groups]."""
    xp = canonical.array_module(words)
    packed = xp.ascontiguousarray(words).reshape(-1).view(np.uint8)
    return nibbles.unpack(packed.reshape(rows, groups // 2), xp.empty)


def codes_in(found: Any, values: Any, shape: WeightShape) -> Any:
    """Nibbles [m, shape.nibbles] -> codes [m, k/4]. Invalid nibbles of zeros are taken for even.

    Raises FormatError, with row and group, for an invalid nibble of a non-zero float32.
    """
    if shape.element is not ElementKind.F32:
        return found
    odd = found == np.uint8(ODD)
    bad = ~odd & (found != np.uint8(EVEN)) & (values != 0)
    if bool(bad.any()):
        row, pair = divmod(int(bad.argmax()), shape.nibbles)
        raise FormatError(
            f"meta: expected 0x4 or 0xe for a pair of float32, got {int(found[row, pair]):#x}",
            row=row,
            group=pair // 2,
        )
    position = odd.view(np.uint8)
    return position[:, 0::2] | (position[:, 1::2] | np.uint8(2)) << np.uint8(2)


_NEGATIVE_ZERO = np.uint32(1 << 31)
_ONE_A_PAIR = np.array(
    [
        canonical.IMPOSSIBLE if mask & 3 == 3 or mask & 12 == 12 else (mask >> 1 & 1) | (2 | mask >> 3) << 2
        for mask in range(16)
    ],
    np.uint8,
)
"""The code with one position in each pair, indexed by the mask of a group's occupied positions."""


def nibbles_out(out: Outgoing) -> tuple[Any, Any]:
    """Values [m, k/2] and nibbles [m, shape.nibbles] of a weight; float32 becomes 1:2.

    A ``-0.0`` beside another value of its pair has no place in a 1:2 format, and becomes one of its zeros.
    Raises FormatError, with row and group, if a pair of float32 has two non-zeros.
    """
    shape = out.shape
    if shape.element is not ElementKind.F32:
        return out.values, out.codes
    values, codes = canonical.relocate(
        _without_crowded_zeros(out),
        out.codes.reshape(-1),
        ElementKind.F32,
        _ONE_A_PAIR,
        0,
        "weight: expected one non-zero in each pair of float32 (the format is 1:2), got two",
    )
    xp = canonical.array_module(values)
    flags = xp.stack([codes & np.uint8(1), codes >> np.uint8(2) & np.uint8(1)], axis=1)
    found = xp.where(flags != 0, np.uint8(ODD), np.uint8(EVEN)).astype(np.uint8)
    return values, found.reshape(shape.m, shape.nibbles)


def _without_crowded_zeros(out: Outgoing) -> Any:
    """Bits [m, k/2] of float32, with +0 for each ``-0.0`` that shares a pair with another value."""
    pairs = canonical.array_module(out.values).ascontiguousarray(out.values).copy().reshape(-1, 2)
    codes = out.codes.reshape(-1)
    together = (codes >> np.uint8(1) & np.uint8(1)) == codes >> np.uint8(3)
    for slot in (1, 0):
        crowded = together & (pairs[:, slot] == _NEGATIVE_ZERO) & (pairs[:, 1 - slot] != 0)
        pairs[crowded, slot] = 0
    return pairs.reshape(out.values.shape)


def canonical_weight(values: Any, codes: Any, element: ElementKind) -> Sparse24Weight:
    """The weight of bits [m, k/2] and codes uint8 [m, k/4] of any positions.

    Raises FormatError, with row and group, if two non-zeros have one position.
    """
    xp = canonical.array_module(values)
    m, width = values.shape
    kept = xp.empty((m, width), values.dtype)
    metadata = xp.empty((m, width // 4), np.uint16)
    for rows in canonical.row_steps(m, 2 * width, xp is np):
        flat = xp.ascontiguousarray(codes[rows]).reshape(-1)
        part, moved = canonical.normalise(values[rows], flat, element, rows.start)
        kept[rows] = part
        metadata[rows] = canonical.to_metadata(moved, part.shape[0], 2 * width)
    return Sparse24Weight(kept, metadata, element=element, validate=False)
