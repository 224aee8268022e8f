"""Layers and saved models say which of their weights ``calibrate`` made, and by which method."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse24_plans import verify_checkpoint
from sparse24_plans.torch import (
    Sparse24Experts,
    Sparse24Linear,
    Sparse24QuantizedLinear,
    Sparse24WeightOnlyLinear,
    calibrate,
    fuse_gated,
    linear,
    to_sparse24,
)
from sparse24_plans.torch.conv1d import linear_of

from .calibration_cases import token_batches, transformer


@pytest.mark.parametrize(
    ("name", "second"),
    [("LlamaForCausalLM", "layers.1."), ("MixtralForCausalLM", "layers.1."), ("GPT2LMHeadModel", ".h.1.")],
)
def test_a_saved_model_says_which_weights_were_calibrated(name, second, tmp_path):
    model = transformer(name)
    model.save_pretrained(tmp_path / "dense")
    calibrate(model, token_batches(), exclude=[f"*{second}*"])
    to_sparse24(model)
    model.save_pretrained(tmp_path / "sparse")
    found = verify_checkpoint(tmp_path / "sparse", tmp_path / "dense", device="host")
    assert found.passed, found
    marked = {layer.name: layer.calibrated for layer in found.layers}
    assert marked == {one: second not in one for one in marked}
    assert {*marked.values()} == {True, False}


@pytest.mark.parametrize("chosen", [[], ["*gate_proj", "*down_proj"]], ids=["all", "gates"])
def test_a_fused_model_says_which_weights_were_calibrated(chosen, tmp_path):
    model = transformer("LlamaForCausalLM")
    model.save_pretrained(tmp_path / "dense")
    report = calibrate(model, token_batches(1), include=chosen)
    assert all(block.fused for block in fuse_gated(model).values())
    to_sparse24(model)
    model.save_pretrained(tmp_path / "sparse")
    found = verify_checkpoint(tmp_path / "sparse", tmp_path / "dense", device="host")
    assert found.passed, found
    calibrated = {layer.name for layer in found.layers if layer.calibrated}
    assert calibrated >= {f"{layer.name}.weight" for layer in report.layers}


LAYERS = {
    "16 bits": lambda one: Sparse24Linear.from_linear(linear_of(one), method="compress"),
    "8 bits": lambda one: Sparse24QuantizedLinear.from_linear(linear_of(one), method="compress"),
    "stored": lambda one: Sparse24WeightOnlyLinear.from_linear(linear_of(one), method="compress"),
}


@pytest.mark.parametrize("made", LAYERS)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_layer_made_alone_says_that_its_weight_was_calibrated(name, made):
    model = transformer(name).bfloat16()
    report = calibrate(model, token_batches(1), method="wanda")
    layer = LAYERS[made](model.get_submodule(report.layers[0].name))
    other = Sparse24Linear.from_linear(nn.Linear(8, 8))
    assert (layer.origin, other.origin) == ({"calibrated": "wanda"}, {})


@pytest.mark.parametrize("made", LAYERS)
def test_mark_of_calibrated_weight_is_read_once_for_layer(made, monkeypatch):
    dense, read = nn.Linear(16, 16, dtype=torch.bfloat16), []
    dense.weight.data = torch.ops.sparse24.prune(dense.weight.data)
    monkeypatch.setattr(linear, "noted_origin", lambda module: read.append(module) or {"calibrated": "wanda"})
    assert LAYERS[made](dense).origin == {"calibrated": "wanda"}
    assert read == [dense]


CHANGED = {
    "a copy": (copy.deepcopy, {"calibrated": "wanda"}),
    "16 bits": (lambda model: model.bfloat16(), {"calibrated": "wanda"}),
    "its own state_dict": (lambda model: loaded(model, model.state_dict()), {"calibrated": "wanda"}),
    "another state_dict": (lambda model: loaded(model, transformer("GPT2LMHeadModel").state_dict()), {}),
    "another, assigned": (
        lambda model: loaded(model, transformer("GPT2LMHeadModel").state_dict(), assign=True),
        {},
    ),
}


def dense_state():
    return transformer("GPT2LMHeadModel").state_dict()


def loaded(model, state, **options):
    model.load_state_dict(state, **options)
    return model


@pytest.mark.parametrize(("change", "origin"), CHANGED.values(), ids=CHANGED)
def test_weight_that_calibrate_did_not_make_is_not_called_calibrated(change, origin):
    model = transformer("GPT2LMHeadModel")
    report = calibrate(model, token_batches(1), method="wanda")
    layer = linear_of(change(model).get_submodule(report.layers[0].name))
    assert Sparse24Linear.from_linear(layer).origin == origin


@pytest.mark.parametrize("stored", [None, "s8"])
def test_experts_made_alone_say_that_their_weights_were_calibrated(stored):
    model = transformer("MixtralForCausalLM").bfloat16()
    calibrate(model, token_batches(1), method="magnitude")
    experts = Sparse24Experts.from_experts(
        model.model.layers[0].mlp.experts, method="compress", stored=stored
    )
    origins = [experts.gate_up_proj.origin, experts.down_proj.origin]
    assert origins == [{"calibrated": "magnitude"}] * 2
