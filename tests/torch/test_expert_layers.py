"""The benchmark of layers of experts, on layers small enough for a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import check, expert_layers
from benchmarks.bounds import BOUNDS
from benchmarks.expert_layers import LISTS, Layer
from benchmarks.judging import judged
from sparse24_plans import UnsupportedError
from sparse24_plans.bench import record
from sparse24_plans.torch import Sparse24Experts

from .cases import DEVICE

ABOUT = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "versions": {}, "seed": 1}
SMALL = Layer("small", 4, 128, 64, 2), Layer("one choice", 3, 64, 64, 1)
BLOCK_US = 2000.0


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(expert_layers, "LAYERS", SMALL)
    monkeypatch.setattr(expert_layers, "TOKENS", (1, 7))
    monkeypatch.setattr(expert_layers, "_RANDOM", 0)
    monkeypatch.setattr(expert_layers, "_ROUNDS", 1)
    if DEVICE == "cpu":  # its compiled code is not what is measured
        monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    yield
    expert_layers._modules.cache_clear()


def steps() -> list[record.Step]:
    return expert_layers.steps(1, DEVICE, block_us=BLOCK_US, short_block_us=BLOCK_US)


def test_record_has_row_of_each_layer_and_number_of_tokens(small):
    found = record.take(steps(), ABOUT, LISTS)
    assert check.faults("experts", found) == []
    assert [(row["model"], row["tokens"]) for row in found["layers"]] == [
        (layer.model, tokens) for layer in SMALL for tokens in (1, 7)
    ]
    assert all(row["us"] > 0 and row["dense_us"] > 0 for row in found["layers"])
    assert all(step.is_done(found) for step in steps())
    assert bool(found["kernel_files"]) == (DEVICE == "cuda")


@pytest.mark.parametrize("layer", SMALL, ids=lambda layer: layer.model)
def test_the_dense_layer_computes_what_its_pruned_weights_say(layer, small):
    sparse, dense = expert_layers._modules(layer, torch.device(DEVICE))
    x, index, weights = expert_layers._routed(layer, 9, 0, torch.device(DEVICE))
    with torch.inference_mode():
        got = dense(x, index, weights).double()
    wanted = torch.zeros_like(got)
    for token in range(len(x)):
        for expert, factor in zip(index[token].tolist(), weights[token].double(), strict=True):
            gate, up = (dense.gate_up_proj[expert].double() @ x[token].double()).chunk(2)
            wanted[token] += factor * (dense.down_proj[expert].double() @ (gate * gate.sigmoid() * up))
    assert (got - wanted).norm() < 0.02 * wanted.norm()
    for name, weight in sparse.dense_weights().items():
        assert torch.equal(weight, getattr(dense, name))
        assert (weight.reshape(-1, 4) == 0).sum(-1).min() >= 2


def test_a_wrong_result_is_not_timed(small, monkeypatch):
    monkeypatch.setattr(Sparse24Experts, "forward", lambda self, x, index, weights: -x)
    with pytest.raises(UnsupportedError, match="expected a relative error"):
        record.take(steps(), ABOUT, LISTS)


def test_random_layers_follow_from_the_seed_and_are_served():
    drawn = list(expert_layers.drawn(20261128))
    assert drawn == list(expert_layers.drawn(20261128)) != list(expert_layers.drawn(1))
    for layer, tokens in drawn:
        assert layer.top_k <= layer.experts
        assert tokens
        for rows, columns in ((2 * layer.features, layer.hidden), (layer.hidden, layer.features)):
            assert rows % 64 == columns % 64 == 0


@pytest.mark.parametrize(("us", "missed"), [(70.0, 0), (76.0, 0), (77.0, 1), (104.0, 2)])
def test_layers_are_held_against_dense_ones(us, missed):
    row = {**SMALL[0]._asdict(), "tokens": 1, "us": us, "dense_us": 100.0}
    assert sum(judged(one, {"layers": [row]}).is_missed for one in BOUNDS["experts"]) == missed
