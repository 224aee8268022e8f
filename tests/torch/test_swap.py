"""``to_sparse24``: which layers of a model are swapped, and what the report says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError
from sparse24_plans.torch import Sparse24Linear, Sparse24Recipe, to_sparse24

from .cases import DEVICE, pruned, randn


class Hooked(nn.Linear):
    """A class of its own: what it does beside, nobody knows."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 64)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight
        self.own = Hooked(64, 8)
        self.wide = nn.Linear(64, 8, dtype=torch.float64)
        self.heard = nn.Linear(64, 8)
        self.heard.register_forward_hook(lambda *_: None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def model() -> Model:
    return Model().to(DEVICE)


def test_linear_layers_are_swapped_and_others_skipped_with_a_reason():
    m = model()
    m.eval()
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["body.0", "body.2"]
    assert all(type(m.get_submodule(layer.name)) is Sparse24Linear for layer in report.layers)
    assert not m.body[0].training
    reasons = {"head": "shared", "own": "Hooked", "wide": "float64", "heard": "hooks"}
    assert report.skipped.keys() == reasons.keys()
    assert all(word in report.skipped[name] for name, word in reasons.items())
    assert m(torch.arange(5, device=DEVICE)).shape == (5, 32)


def test_the_report_counts_energy_and_bytes():
    m = model()
    weight = m.body[0].weight.detach().double()
    report = to_sparse24(m, include=["body.0"])
    (layer,) = report.layers
    kept = pruned(weight.float()).double().square().sum() / weight.square().sum()
    assert layer.kept_energy == pytest.approx(kept.item(), rel=1e-6)
    assert (layer.dense_bytes, layer.sparse_bytes) == (96 * 64 * 4, 96 * 32 * 4 + 96 * 8 * 2)
    assert (layer.m, layer.k, layer.padded_k) == (96, 64, 64)
    assert report.least_kept_energy == layer.kept_energy
    text = str(report)
    assert "body.0: [96, 64] float32, kept" in text
    assert "body.2: skipped, not included" in text
    assert "24576 -> 13824 bytes" in text


def test_patterns_choose_and_recipes_go_by_pattern():
    m = model()
    recipes = {"body.0": Sparse24Recipe("tiles", trainable=True), "body.*": "prune"}
    to_sparse24(m, include=["body*"], exclude=["*.7", "*.2"][1:], recipe=recipes)
    assert type(m.body[2]) is nn.Linear
    assert m.body[0].values.requires_grad
    other = model()
    to_sparse24(other, recipe={"body.2": "prune"})
    assert type(other.body[0]) is nn.Linear
    assert type(other.body[2]) is Sparse24Linear


def test_scores_are_asked_for_by_name():
    m = model()
    weight, scores = m.body[0].weight.detach().clone(), randn(96, 64, seed=5)
    to_sparse24(m, include=["body.0"], recipe=Sparse24Recipe(scores=lambda name, linear: scores))
    assert torch.equal(m.body[0].dense_weight(), torch.ops.sparse24.prune(weight, scores))


def test_compress_takes_what_is_2_4_and_skips_the_rest():
    m = model()
    m.body[0].weight.data = pruned(m.body[0].weight.data)
    report = to_sparse24(m, recipe="compress")
    assert [layer.name for layer in report.layers] == ["body.0"]
    assert report.layers[0].kept_energy == 1
    assert "row" in report.skipped["body.2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["bdy*"]}, "include: pattern 'bdy\\*' matches no linear layer"),
        ({"exclude": "body*"}, "exclude: expected a sequence"),
        ({"include": ["head"]}, "head: expected a layer that can be swapped: its weight is shared"),
        ({"include": ["body.2"], "recipe": "compress"}, "body.2: expected a layer that can be swapped"),
        ({"recipe": "magnitude"}, "recipe: expected one of"),
        ({"recipe": 3}, "recipe: expected a Sparse24Recipe"),
        ({"include": 3}, "include: expected a sequence of patterns, got 3"),
        ({"include": [3]}, "include: expected a sequence"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused_before_any_swap(arguments, message):
    m = model()
    with pytest.raises((InvalidProblemError, FormatError), match=message):
        to_sparse24(m, **arguments)
    assert not any(isinstance(one, Sparse24Linear) for one in m.modules())


def test_a_model_without_memory_is_swapped_and_its_energy_unknown():
    m = nn.Sequential(nn.Linear(64, 96, device="meta"), nn.Linear(96, 64, device="meta"))
    report = to_sparse24(m)
    assert all(math.isnan(layer.kept_energy) for layer in report.layers)
    assert [type(layer) for layer in m] == [Sparse24Linear] * 2
    assert all(layer.values.is_meta for layer in m)


def test_scores_are_a_function():
    with pytest.raises(InvalidProblemError, match="scores: expected a callable, got 3"):
        Sparse24Recipe(scores=3)


def test_a_bare_linear_layer_has_no_place_to_be_swapped_in():
    with pytest.raises(InvalidProblemError, match="model: expected a module that holds"):
        to_sparse24(nn.Linear(64, 96))


def test_a_progress_bar_is_shown_where_it_is_asked_for(capsys):
    to_sparse24(model(), progress=False)
    assert capsys.readouterr().err == ""
    to_sparse24(model(), progress=True)
    assert "2:4" in capsys.readouterr().err


def test_a_swapped_model_keeps_its_state_and_compiles():
    m = model()
    to_sparse24(m)
    other = model()
    to_sparse24(other)
    other.load_state_dict(m.state_dict())
    tokens = torch.arange(5, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tokens), m(tokens))
