"""Slow models of what the plans compute, from docs/formats.md: one group, or tile, after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from sparse24_plans import (
    DequantizeSparse24Descriptor,
    ElementKind,
    PruneQuantizeSparse24Descriptor,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TileRule,
)


def numbers(bits: np.ndarray, element: ElementKind) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return bits.view(element.dtype).astype(np.float64)


def largest(keys: list[float]) -> list[int]:
    """Positions of the two largest of four: NaN before all, then by value, then by position."""
    order = sorted(
        range(4), key=lambda i: (not math.isnan(keys[i]), -keys[i] if keys[i] == keys[i] else 0, i)
    )
    return sorted(order[:2])


def model(bits: np.ndarray, choose: Callable[[int, int], list[int]]) -> dict[str, np.ndarray]:
    """Every result that follows from the positions ``choose(row, group)``, one group after the other."""
    m, k = bits.shape
    pruned, values = np.zeros_like(bits), np.zeros((m, k // 2), bits.dtype)
    mask, codes = np.zeros((m, k), np.uint8), np.zeros((m, k // 4), np.uint8)
    for row in range(m):
        for group in range(k // 4):
            first, second = choose(row, group)
            codes[row, group] = first + 4 * second
            for slot, position in enumerate((first, second)):
                cell = 4 * group + position
                pruned[row, cell] = values[row, 2 * group + slot] = bits[row, cell]
                mask[row, cell] = 1
    metadata = codes[:, 0::2] + codes[:, 1::2].astype(np.uint16) * 256
    packed = sum(mask[:, i::8] << i for i in range(8)).astype(np.uint8)
    return {"pruned": pruned, "mask": packed, "values": values, "metadata": metadata}


def cover(values: np.ndarray) -> list[int]:
    """The non-zeros' positions, spare slots at the lowest free ones; of too many the first two."""
    used = [i for i in range(4) if values[i] != 0][:2]
    spare = [i for i in range(4) if i not in used]
    return sorted((used + spare)[:2])


# Tiles --------------------------------------------------------------------------------------------


def rank(key: float) -> tuple[bool, float]:
    """Larger sorts first: NaN before all."""
    return (not math.isnan(key), 0.0 if math.isnan(key) else -key)


def greedy(tile: np.ndarray) -> set[tuple[int, int]]:
    """Cells from the largest, of equal ones in row-major order, each that has room in its row and column."""
    kept: set[tuple[int, int]] = set()
    for cell in sorted(itertools.product(range(4), range(4)), key=lambda at: (rank(tile[at]), at)):
        in_row = sum(row == cell[0] for row, _ in kept)
        in_column = sum(column == cell[1] for _, column in kept)
        if in_row < 2 and in_column < 2:
            kept.add(cell)
    return kept


def causal(tile: np.ndarray) -> set[tuple[int, int]]:
    """Row after row, its largest 1, 1, 2, 2 among the columns that hold fewer than two."""
    kept: set[tuple[int, int]] = set()
    for row, most in enumerate((1, 1, 2, 2)):
        room = [column for column in range(4) if sum(c == column for _, c in kept) < 2]
        for column in sorted(room, key=lambda c: (rank(tile[row, c]), c))[:most]:
            kept.add((row, column))
    return kept


PAIRS = list(itertools.combinations(range(4), 2))
WAYS = [
    [(row, column) for row, pair in enumerate(rows) for column in pair]
    for rows in itertools.product(PAIRS, repeat=4)
    if all(sum(column in pair for pair in rows) == 2 for column in range(4))
]


def optimal(tile: np.ndarray) -> set[tuple[int, int]]:
    """The first of the ways with the largest sum; NaN weighs more than Inf, Inf more than all finite."""
    weight = [[2.0**300 if math.isnan(v) else 2.0**200 if math.isinf(v) else v for v in row] for row in tile]

    def total(way: list[tuple[int, int]]) -> float:
        rows = [weight[a[0]][a[1]] + weight[b[0]][b[1]] for a, b in zip(way[::2], way[1::2], strict=True)]
        return (rows[0] + rows[1]) + (rows[2] + rows[3])

    best = max(total(way) for way in WAYS)
    return set(next(way for way in WAYS if total(way) == best))


def kept_cells(dense: np.ndarray, element: ElementKind, rule: TileRule) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        values = dense.view(element.dtype).astype(np.float64)
    if rule in (TileRule.GREEDY_MAGNITUDE, TileRule.OPTIMAL):
        values = np.abs(values)
    choose = {TileRule.OPTIMAL: optimal, TileRule.CAUSAL_1122: causal}.get(rule, greedy)
    keep = np.zeros(dense.shape, bool)
    for row, column in itertools.product(range(0, dense.shape[0], 4), range(0, dense.shape[1], 4)):
        for r, c in choose(values[row : row + 4, column : column + 4]):
            keep[row + r, column + c] = True
    return keep


def compressed(dense: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and metadata: positions of the mask, then the lowest free ones, which hold +0."""
    m, k = dense.shape
    values = np.zeros((m, k // 2), dense.dtype)
    codes = np.zeros((m, k // 4), np.uint16)
    for row, group in itertools.product(range(m), range(k // 4)):
        used = [i for i in range(4) if keep[row, 4 * group + i]]
        spare = [i for i in range(4) if i not in used]
        for slot, position in enumerate(sorted((used + spare)[:2])):
            codes[row, group] |= position << 2 * slot
            if position in used:
                values[row, 2 * group + slot] = dense[row, 4 * group + position]
    return values, codes[:, 0::2] | codes[:, 1::2] << 8


def bitmask(keep: np.ndarray) -> np.ndarray:
    mask = np.zeros((keep.shape[0] // 8, keep.shape[1] // 8, 8), np.uint8)
    for row, column in np.argwhere(keep):
        bit = 16 * (2 * (row % 8 // 4) + column % 8 // 4) + column % 4 + 4 * (row % 4)
        mask[row // 8, column // 8, bit // 8] |= 1 << bit % 8
    return mask


# Quantizing ---------------------------------------------------------------------------------------

LARGEST = {"fp8_e4m3": 448.0, "s8": 127.0}
_E4M3 = np.arange(127, dtype=np.uint8).view(ElementKind.FP8_E4M3.dtype).astype(np.float64)
"""The values of the codes 0 to 126: 0 to 448."""


def _code_of(quotient: np.float32, out: str) -> int:
    """The byte of a quotient: the nearest value, of two the even code."""
    if np.isnan(quotient):
        return 0x7F if out == "fp8_e4m3" else 0
    size = min(float(abs(quotient)), LARGEST[out])
    if out == "s8":
        return int(np.rint(size)) * (-1 if quotient < 0 else 1) & 0xFF
    away = np.abs(_E4M3 - size)
    nearest = np.flatnonzero(away == away.min())
    return (
        int(next(code for code in nearest if len(nearest) == 1 or code % 2 == 0))
        | int(np.signbit(quotient)) << 7
    )


def quantized_rows(x: np.ndarray, out: str, given: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one number after the other."""
    scales, codes = np.empty(len(x), np.float32), np.zeros(x.shape, np.uint8)
    with np.errstate(all="ignore"):
        for row, cells in enumerate(x.astype(np.float32)):
            most = np.float32(np.nan if np.isnan(cells).any() else np.abs(cells).max(initial=0))
            scale = most / np.float32(LARGEST[out]) if given is None else np.float32(given)
            if given is None and scale < 2.0**-100:
                scale = np.float32(2.0**-100)
            scales[row] = scale
            codes[row] = [_code_of(cell / scale, out) for cell in cells]
    scales.view(np.uint32)[np.isnan(scales)] = 0x7FFFFFFF
    return codes, scales


# Quantized weights --------------------------------------------------------------------------------


def quantized_parts(
    desc: PruneQuantizeSparse24Descriptor, values: np.ndarray, metadata: np.ndarray
) -> dict[str, np.ndarray]:
    """Bits of the parts of kept bits [m, k/2], as Sparse24QuantizedWeight gives them (tests/weights)."""
    found = Sparse24QuantizedWeight.quantize(
        Sparse24Weight(values, metadata, element=desc.dense_element),
        stored=desc.stored,
        group=desc.group,
        scale_element=desc.scale_element,
        rule=desc.rule,
        element=desc.element,
    )
    names = ("values", "metadata", "scales")
    return {name: view.bits() for name, view in zip(names, found.views, strict=True)}


def dequantized(desc: DequantizeSparse24Descriptor, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Bits of the kept values [m, k/2], one number after the other; NaN is numpy.nan in the element."""
    scales, kept = numbers(parts["scales"], desc.scale_element), np.zeros((desc.m, desc.k // 2))
    for row, at in np.ndindex(kept.shape):
        scale = scales[row, 2 * at // desc.group if desc.group else 0]
        if desc.stored == "s4":
            nibble = int(parts["values"][row, at // 2]) >> 4 * (at % 2) & 15
            number = float(nibble - 16 * (nibble > 7))
        else:
            number = float(parts["values"][row, at : at + 1].view(desc.stored.dtype)[0])
        kept[row, at] = number * float(scale)  # Python's product of 0 and Inf is NaN, without a warning
    kept[np.isnan(kept)] = np.nan
    with np.errstate(all="ignore"):
        return kept.astype(np.float32).astype(desc.element.dtype).view(desc.element.bits_dtype)
