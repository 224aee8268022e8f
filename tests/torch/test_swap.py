"""``to_sparse24``: which layers of a model are swapped, and what the report says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import Sparse24Linear, Sparse24Recipe, to_sparse24

from .cases import DEVICE, pruned, randn
from .swap_models import model


def test_linear_layers_are_swapped_and_others_skipped_with_a_reason():
    m = model()
    m.eval()
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["body.0", "body.2"]
    assert all(type(m.get_submodule(layer.name)) is Sparse24Linear for layer in report.layers)
    assert not m.body[0].training
    reasons = {
        "tied": "shared",
        "own": "Hooked",
        "wide": "float64",
        "heard": "hooks",
        "embed": "embedding table",
    }
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
    assert "not included: body.2" in text
    assert "24576 -> 13824 bytes of weights; 37.1% of the model's bytes is 2:4" in text
    total = sum(p.nbytes for p in model().parameters())
    assert report.model_bytes == total
    assert report.sparse_share == pytest.approx(24576 / total)
    biases = sum(p.nbytes for p in model().parameters() if p.dim() == 1)
    assert sum(one.nbytes for one in report.left_dense) == total - 24576 - biases


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


def test_a_2_4_weight_keeps_its_cells_whatever_its_scores():
    m = model()
    sparse = pruned(m.body[0].weight.data)
    m.body[0].weight.data = sparse.clone()
    asked = []

    def backwards(name: str, linear: nn.Linear) -> torch.Tensor:
        asked.append(name)
        return -linear.weight.abs()

    first, second = to_sparse24(m, recipe=Sparse24Recipe(scores=backwards)).layers
    assert asked == ["body.2"]
    assert (first.was_sparse, first.kept_energy) == (True, 1.0)
    assert not second.was_sparse
    assert second.kept_energy < 0.5
    assert torch.equal(m.body[0].dense_weight(), sparse)


def test_a_swapped_model_is_counted_and_not_swapped_again():
    m = model()
    before = to_sparse24(m)
    body = m.body[0]
    again = to_sparse24(m)
    assert again.layers == ()
    assert m.body[0] is body
    assert again.earlier == {layer.name: layer.dense_bytes for layer in before.layers}
    assert (again.sparse_share, again.model_bytes) == (before.sparse_share, before.model_bytes)
    assert "2 layers were swapped before" in str(again)


def twice() -> nn.Sequential:
    """One layer under two names, in a container that has two names as well."""
    layer = nn.Linear(64, 64)
    body = nn.Sequential(layer, nn.ReLU(), layer)
    return nn.Sequential(body, body).to(DEVICE)


def test_layer_under_several_names_is_replaced_under_all_of_them():
    m = twice()
    dense = m[0][0].weight.detach().clone()
    report = to_sparse24(m)
    assert m[0][0] is m[0][2] is m[1][2]
    assert m[0] is m[1]
    assert torch.equal(m[0][2].dense_weight(), pruned(dense))
    assert [layer.name for layer in report.layers] == ["0.0"]
    assert report.skipped == {}
    assert report.sparse_share == pytest.approx(1 - 64 * 4 / report.model_bytes)


@pytest.mark.parametrize("name", ["0.0", "0.2", "1.2", "1.0.weight"])
def test_patterns_may_use_any_name_of_a_layer(name):
    m = twice()
    assert [layer.name for layer in to_sparse24(m, include=[name]).layers] == ["0.0"]
    assert type(m[0][0]) is type(m[0][2]) is Sparse24Linear
    assert to_sparse24(m := twice(), exclude=[name]).skipped == {"0.0": f"excluded by pattern {name!r}"}
    assert type(m[0][0]) is type(m[0][2]) is nn.Linear
    place = name.removesuffix(".weight")
    assert len(to_sparse24(twice(), recipe={place: Sparse24Recipe("tiles")}).layers) == 1


HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "forward before": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward before": nn.Module.register_full_backward_pre_hook,
    "state": nn.Module.register_state_dict_post_hook,
    "state before": nn.Module.register_state_dict_pre_hook,
    "load": nn.Module.register_load_state_dict_post_hook,
    "load before": nn.Module.register_load_state_dict_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_layers_with_any_kind_of_hook_are_skipped(kind):
    m = model()
    HOOKS[kind](m.body[0], lambda *_: None)
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["body.2"]
    assert report.skipped["body.0"] == "it has hooks, which a swap would lose"
    assert type(m.body[0]) is nn.Linear


HELD = {
    "buffer": lambda layer: layer.register_buffer("mask", torch.ones(1)),
    "module": lambda layer: layer.add_module("mask", nn.Linear(8, 8)),
    "parameter": lambda layer: layer.register_parameter("mask", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("kind", HELD)
def test_layers_that_hold_more_than_a_layer_does_are_skipped(kind):
    m = model()
    HELD[kind](m.body[0])
    report = to_sparse24(m, exclude=["*.mask"] if kind == "module" else [])
    assert [layer.name for layer in report.layers] == ["body.2"]
    assert report.skipped["body.0"] == "it holds mask, which a swap would lose"


@pytest.mark.parametrize("trainable", [False, True])
def test_a_bias_of_two_layers_is_not_trained_as_two(trainable):
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    m[1].bias = m[0].bias
    report = to_sparse24(m, recipe=Sparse24Recipe(trainable=trainable))
    shared = "its bias is shared with another module"
    assert report.skipped == (dict.fromkeys(("0", "1"), shared) if trainable else {})


def test_out_dtype_that_layer_cannot_give_leaves_it_dense():
    halves = Sparse24Recipe(out_dtype=torch.float16)

    def mixed() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64, dtype=torch.float16), nn.Linear(64, 64)).to(DEVICE)

    m, words = mixed(), "out_dtype: expected torch.float32, got torch.float16"
    report = to_sparse24(m, recipe=halves)
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.skipped == {"1": words}
    m = mixed()
    with pytest.raises(InvalidProblemError, match=f"1: expected a layer that can be swapped: {words}"):
        to_sparse24(m, include=["*"], recipe=halves)
    assert type(m[0]) is nn.Linear


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16))


def test_what_stays_dense_by_default_and_why():
    m = nn.ModuleDict(
        {
            "lm_head": nn.Linear(16, 32),
            "router": nn.Linear(16, 8),
            "lora_A": nn.Linear(16, 8),
            "embed": nn.Linear(16, 8),
            "conv": nn.Conv2d(8, 8, 3),
            "moe": nn.ModuleDict({"gate": Router()}),
            "odd": nn.Bilinear(8, 8, 8),
            "proj": nn.Linear(16, 8),
        }
    )
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["proj"]
    beginnings = {
        "lm_head": "output head, excluded by default ('*lm_head*')",
        "router": "router, excluded",
        "lora_A": "adapter, excluded",
        "embed": "embedding table, excluded",
        "conv": "convolution",
        "moe.gate": "router, excluded by default ('*.gate.weight')",
        "odd": "3-d",
    }
    assert report.skipped.keys() == beginnings.keys()
    assert all(report.skipped[name].startswith(text) for name, text in beginnings.items())
    assert {one.name: one.nbytes for one in report.left_dense}["odd"] == 8 * 8 * 8 * 4
    named = to_sparse24(m, include=["lm_head", "router.weight"])
    assert [layer.name for layer in named.layers] == ["lm_head", "router"]


def test_a_model_without_memory_is_swapped_and_its_energy_unknown():
    m = nn.Sequential(nn.Linear(64, 96, device="meta"), nn.Linear(96, 64, device="meta"))
    report = to_sparse24(m)
    assert all(math.isnan(layer.kept_energy) for layer in report.layers)
    assert [type(layer) for layer in m] == [Sparse24Linear] * 2
    assert all(layer.values.is_meta for layer in m)


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
