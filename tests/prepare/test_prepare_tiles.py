"""Transposable 2:4: the four rules against slow models of their definition, one 4x4 tile after the other."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import ElementKind, InvalidProblemError, TilePruneSparse24Descriptor, TileRule
from sparse24_plans.weights.tiles import PATTERNS, mask_of

from .models import WAYS, bitmask, compressed, kept_cells
from .prepare_cases import ELEMENTS, MOODS, PrepareCase, matrix, run

every_element = pytest.mark.parametrize("element", ELEMENTS)
every_mood = pytest.mark.parametrize("mood", MOODS)
every_rule = pytest.mark.parametrize("rule", TileRule)
M, K = 16, 24


@every_mood
@every_rule
@every_element
def test_tiles_are_pruned_by_their_rule(element, rule, mood, device):
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
def test_rows_and_columns_of_a_tile_keep_two_at_most(rule, device):
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


def test_row_of_causal_rule_depends_on_no_later_one(device):
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
def test_empty_matrices_have_empty_results(m, k, device):
    dense = np.zeros((m, k), np.uint16)
    found = run(TilePruneSparse24Descriptor(m=m, k=k, element="f16"), device, dense=dense)
    assert all(bits.size == 0 for bits in found.values())
