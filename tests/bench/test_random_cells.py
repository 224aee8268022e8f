"""The benchmark of random problems: what a seed draws, and what is said of a record."""

from __future__ import annotations

import pytest

from benchmarks.models import MODELS
from benchmarks.random_cells import drawn, steps
from benchmarks.random_figures import random_summary
from sparse24_plans import ElementKind
from sparse24_plans.bench.scope import ELEMENTS, SHAPES

# Drawing ------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_problems_and_another_draws_others():
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert [one for one in drawn(7) if one.element == "s8"] == drawn(7, [ElementKind.S8])


def test_every_element_is_drawn():
    assert {one.element for one in drawn(7)} == set(ELEMENTS)


def test_no_matrix_of_a_model_is_the_records():
    assert len(MODELS) >= 12
    assert not {shape for its in MODELS.values() for shape in its.values()} & set(SHAPES)


@pytest.mark.parametrize("seed", [1, 20260101])
def test_shapes_are_ragged_and_of_many_models_n_is_anything(seed):
    some = [one for one in drawn(seed) if one.element == "bf16"]
    models = {one.shape.rsplit(" ", 1)[0] for one in some} - {"ragged"}
    tokens = [n for one in some for n in one.tokens]
    assert len(models) >= 12
    assert any(one.m % 8 for one in some)
    assert any(one.k % 128 for one in some)
    assert 1 <= min(tokens) <= 4
    assert 4096 <= max(tokens) <= 8192
    assert sum(n % 8 != 0 for n in tokens) > 0.7 * len(tokens)


# Summaries of records -----------------------------------------------------------------------------


def test_each_range_of_n_has_means_and_worst_cells():
    cell = {"shape": "ragged", "m": 600, "k": 64, "element": "bf16", "dense_us": 3.0}
    chosen = [{"n": 1, "us": 2.0, "best_us": 1.0}, {"n": 64, "us": 2.0, "best_us": 2.0}, {"n": 65, "us": 4.0}]
    auto = [{**cell, "best_us": None, **one, "backend": "auto"} for one in chosen]
    invariant = [{**one, "backend": "invariant", "us": one["us"] * 1.5 ** one["n"]} for one in auto[:1]]
    few, some, many = random_summary({"gemm": auto + invariant + [{**auto[1], "backend": "invariant"}]})
    assert (few["cells"], few["mean"], few["worst"], few["at"]) == (2, 1.5, 1.5, "600x64, 1")
    assert (few["invariant"], few["invariant_worst"]) == (pytest.approx(1.5**0.5), 1.5)
    assert (few["best"], few["best_worst"]) == (pytest.approx(2**0.5), 2.0)
    assert (some["worst"], some["invariant_worst"], some["best_worst"]) == (0.75, None, None)
    assert (many["cells"], many["mean"], many["at"]) == (0, None, None)


def test_rows_of_each_matrix_and_n_finish_a_step():
    made = {"gemm": [dict(step.fields) for step in steps(7)]}
    assert all(step.is_done(made) for step in steps(7))
    assert not all(step.is_done(made) for step in steps(8))
    assert sum(step.is_done({"gemm": made["gemm"][:1]}) for step in steps(7)) == 1
