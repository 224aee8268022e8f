"""Recipes, patterns and models that mean nothing to ``to_sparse24`` are refused before any swap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Linear, Sparse24Recipe, to_sparse24

from .swap_models import Experts, model


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"trainable": 1}, InvalidProblemError, "trainable: expected"),
        ({"trainable": True, "stored": "s4"}, UnsupportedError, "trainable: expected False"),
        ({"trainable": True, "weight_dtype": torch.int8}, UnsupportedError, "trainable: expected False"),
        ({"out_dtype": torch.int8}, InvalidProblemError, "out_dtype: expected one of torch.float32"),
        ({"out_dtype": "float16"}, InvalidProblemError, "out_dtype: expected one of torch.float32"),
        ({"rule": "best"}, InvalidProblemError, "rule: expected one of .*optimal, got 'best'"),
        (
            {"rule": "greedy_value"},
            InvalidProblemError,
            "rule: expected optimal, .* for method prune, got greedy_value: method tiles alone",
        ),
        ({"require": {"fast": True}}, InvalidProblemError, "require: expected fields of"),
        ({"preference": 3}, InvalidProblemError, "preference: expected PlanPreference or a mapping"),
        ({"group": 32}, InvalidProblemError, "group: expected 128, the default, without stored, got 32"),
        (
            {"group": "32", "weight_dtype": torch.int8},
            InvalidProblemError,
            "group: expected 128, .* got '32'",
        ),
        (
            {"method": "tiles", "scores": lambda name, linear: None},
            InvalidProblemError,
            "scores: expected None for tiles, which are pruned by rule, got a function",
        ),
    ],
)
def test_recipes_that_no_layer_takes_are_refused_at_once(fields, error, message):
    with pytest.raises(error, match=message):
        Sparse24Recipe(**fields)


def test_scores_are_a_function():
    with pytest.raises(InvalidProblemError, match="scores: expected a callable, got 3"):
        Sparse24Recipe(scores=3)


@pytest.mark.parametrize(
    ("found", "got"),
    [
        (lambda weight: weight.numpy(), "ndarray"),
        (lambda weight: 3, "int"),
        (lambda weight: weight[:8], r"torch.float32 \[8, 64\]"),
        (lambda weight: weight.double(), r"torch.float64 \[96, 64\]"),
    ],
    ids=["numpy", "int", "rows", "dtype"],
)
def test_wrong_scores_are_refused_with_the_layers_name(found, got):
    recipe = Sparse24Recipe(scores=lambda name, linear: found(linear.weight.detach().cpu()))
    message = rf"scores: expected None or a tensor \[96, 64\] of one of .* for body.0, got {got}"
    with pytest.raises(InvalidProblemError, match=message):
        to_sparse24(model(), recipe=recipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["bdy*"]}, "include: pattern 'bdy\\*' matches no linear layer and no experts"),
        ({"exclude": "body*"}, "exclude: expected a sequence"),
        ({"include": ["tied"]}, "tied: expected a layer that can be swapped: its weight is shared"),
        ({"include": ["body.2"], "recipe": "compress"}, "body.2: expected a layer that can be swapped"),
        ({"recipe": "magnitude"}, "recipe: expected one of"),
        ({"recipe": 3}, "recipe: expected a Sparse24Recipe"),
        (
            {"recipe": {"bdy.0": "compress", "*": "prune"}},
            "recipe: pattern 'bdy.0' matches no linear layer and no experts",
        ),
        ({"recipe": {"body.0.weight": "prune", "*": "prune"}}, "recipe: pattern 'body.0.weight' matches no"),
        ({"recipe": {3: "prune"}}, "recipe: expected a sequence of patterns"),
        ({"include": 3}, "include: expected a sequence of patterns, got 3"),
        ({"include": [3]}, "include: expected a sequence"),
    ],
)
def test_impossible_requests_are_refused_before_any_swap(arguments, message):
    m = model()
    with pytest.raises((InvalidProblemError, FormatError), match=message):
        to_sparse24(m, **arguments)
    assert not any(isinstance(one, Sparse24Linear) for one in m.modules())


def test_layers_without_sizes_are_refused():
    m = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(InvalidProblemError, match=r"model: expected sizes .* 1\.weight of a LazyLinear"):
        to_sparse24(m)
    assert type(m[0]) is nn.Linear
    m(torch.ones(1, 64))
    assert len(to_sparse24(m).layers) == 2


@pytest.mark.parametrize("bare", [nn.Linear(64, 96), Experts()], ids=["linear", "experts"])
def test_a_bare_layer_has_no_place_to_be_swapped_in(bare):
    with pytest.raises(InvalidProblemError, match="model: expected a module that holds"):
        to_sparse24(bare)
