"""Transposable 2:4: the four rules against slow models of their definition, one 4x4 tile after the other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sparse24_plans import ElementKind, InvalidProblemError, TilePruneSparse24Descriptor, TileRule
from sparse24_plans.weights.tiles import PATTERNS, mask_of

from .prepare_cases import ELEMENTS, MOODS, PrepareCase, matrix, run

every_element = pytest.mark.parametrize("element", ELEMENTS)
every_mood = pytest.mark.parametrize("mood", MOODS)
every_rule = pytest.mark.parametrize("rule", TileRule)
M, K = 16, 24


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


@every_mood
@every_rule
@every_element
def test_tiles(element, rule, mood, device):
    dense = matrix(np.random.default_rng(0), (M, K), element, mood)
    keep = kept_cells(dense, element, rule)
    case = PrepareCase(
        TilePruneSparse24Descriptor(m=M, k=K, element=element, rule=rule), device, {"dense": dense}
    )
    found = case.run()
    assert np.array_equal(found["mask"], bitmask(keep))
    for suffix, cells, kept in (("", dense, keep), ("_t", dense.T, keep.T)):
        values, metadata = compressed(cells, kept)
        assert np.array_equal(found["values" + suffix], values)
        assert np.array_equal(found["metadata" + suffix], metadata)
    weight, transposed = case.plan.weights(case.args)
    weight.validate()
    transposed.validate()
    shapes = [(w.m, w.k, w.element) for w in (weight, transposed)]
    assert shapes == [(M, K, element), (K, M, element)]


@every_rule
def test_no_row_and_no_column_of_a_tile_keeps_more_than_two(rule, device):
    m = k = 64
    dense = matrix(np.random.default_rng(1), (m, k), ElementKind.F32, "normal")
    case = PrepareCase(
        TilePruneSparse24Descriptor(m=m, k=k, element="f32", rule=rule), device, {"dense": dense}
    )
    case.run()
    weight, transposed = (w.to("host").decompress() for w in case.plan.weights(case.args))
    assert np.array_equal(weight, transposed.T)
    tiles = (weight != 0).reshape(m // 4, 4, k // 4, 4)
    assert tiles.sum(axis=3).max() == tiles.sum(axis=1).max() == 2
    count = tiles.sum(axis=(1, 3))
    assert count.max() <= 8
    assert (count == 8).all() == (rule is TileRule.OPTIMAL)
    kept = np.abs(weight).sum()
    if rule is not TileRule.OPTIMAL:
        best = run(TilePruneSparse24Descriptor(m=m, k=k, element="f32", rule="optimal"), device, dense=dense)
        assert np.abs(best["values"].view(np.float32)).sum() >= kept


def test_there_are_90_ways():
    assert len(PATTERNS) == len(WAYS) == 90
    want = [sum(1 << 4 * row + column for row, column in way) for way in WAYS]
    assert [mask_of(pattern) for pattern in PATTERNS] == want


def test_a_row_of_the_causal_rule_depends_on_no_later_one(device):
    rng = np.random.default_rng(2)
    dense = matrix(rng, (8, 64), ElementKind.F32, "normal")
    desc = TilePruneSparse24Descriptor(m=8, k=64, element="f32", rule="causal_1122")
    first = run(desc, device, dense=dense)
    for row in range(1, 4):
        other = dense.copy()
        other[row:4] = matrix(rng, (4 - row, 64), ElementKind.F32, "normal")
        second = run(desc, device, dense=other)
        assert np.array_equal(first["values"][:row], second["values"][:row])
        assert np.array_equal(first["metadata"][:row], second["metadata"][:row])


@pytest.mark.parametrize(("m", "k"), [(4, 8), (12, 8), (8, 4), (8, 12), (-8, 8), (8.0, 8)])
def test_whole_squares_only(m, k):
    with pytest.raises(InvalidProblemError, match="m:" if k == 8 else "k:"):
        TilePruneSparse24Descriptor(m=m, k=k, element="f32")


@pytest.mark.parametrize(("m", "k"), [(0, 8), (8, 0)])
def test_empty(m, k, device):
    dense = np.zeros((m, k), np.uint16)
    found = run(TilePruneSparse24Descriptor(m=m, k=k, element="f16"), device, dense=dense)
    assert all(bits.size == 0 for bits in found.values())
