"""The plugin for vLLM: matrices with stored zeros are packed where they are 2:4, and else stay dense."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.layers import linear as vllm_linear

from sparse24_plans import UnsupportedError
from sparse24_plans.torch import Sparse24Linear, Sparse24QuantizedLinear

from .vllm_models import (
    BF16,
    F8,
    HIDDEN,
    INNER,
    config_for,
    dense_of,
    load,
    own_part,
    saved,
    tensors_of_a_model,
)


def change(folder: Path, name: str, new) -> None:
    """Replace a tensor of a checkpoint by what a function makes of it."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: new(tensors[name])}, folder / "model.safetensors")


def ones_in(group: int):
    """Make a group of four columns of the first row have four non-zeros."""

    def changed(weight: torch.Tensor) -> torch.Tensor:
        weight[0, 4 * group : 4 * group + 4] = torch.ones(4).to(weight.dtype)
        return weight

    return changed


@pytest.mark.parametrize("element", [None, "fp8_e4m3", "s8"])
def test_matrix_with_zeros_that_is_not_2_4_stays_dense(tmp_path, at_rank, caplog, element):
    folder = saved(tmp_path, tensors_of_a_model(), "zeros", element)
    change(folder, "block.up_proj.weight", ones_in(3))
    change(folder, "block.o_proj.weight", ones_in(0))
    dense = dense_of(tmp_path / "sparse24")
    with caplog.at_level("INFO", "sparse24_plans.load"):
        model = load(folder)
    for name, line in (("up_proj", 3), ("o_proj", 0)):
        scale = dense.get(f"block.{name}.weight_scale", torch.ones(()))
        dense[f"block.{name}.weight"][0, 4 * line : 4 * line + 4] = 1.0 * scale.flatten()[0]
    levels = {one.levelname for one in caplog.records}
    assert levels == {"WARNING" if element else "INFO"}
    for row, name, group in ((INNER, "gate_up_proj", 3), (0, "o_proj", 0)):
        assert f"served dense: block.{name}: dense: expected at most 2" in caplog.text
        assert f"(row {row}, group {group})" in caplog.text
    kept = {name for name, layer in model.block.named_children() if layer.sparse24 is None}
    assert kept == {"gate_up_proj", "o_proj"}
    for name in kept:
        layer = model.block.get_submodule(name)
        weight, bias = own_part(dense, name, 0, 1)
        assert type(layer.weight) is nn.Parameter
        torch.testing.assert_close(layer.weight.double(), weight, rtol=2**-8, atol=0)
        x = torch.randn(5, weight.shape[1], dtype=BF16)
        for given in (layer.bias, None):
            wanted = x.double() @ weight.T + (0 if given is None else bias)
            y = layer.quant_method.apply(layer, x, given)
            assert (y.dtype, y.shape) == (BF16, wanted.shape)
            assert (y.double() - wanted).norm() < 0.006 * wanted.norm()


def test_a_matrix_with_zeros_that_no_kernel_serves_stays_dense(tmp_path, at_rank, monkeypatch, caplog):
    def refuse(self, *sizes):
        raise UnsupportedError("expected another GPU")

    folder = saved(tmp_path, tensors_of_a_model(), "zeros")
    monkeypatch.setattr(Sparse24Linear, "plan", refuse)
    with caplog.at_level("INFO", "sparse24_plans.load"):
        layer = load(folder).block.down_proj
    assert layer.sparse24 is None
    assert torch.equal(layer.weight.double(), dense_of(tmp_path / "sparse24")["block.down_proj.weight"])
    assert "served dense: block.down_proj: expected another GPU" in caplog.text


@pytest.mark.parametrize("minus", [False, True])
def test_zeros_with_a_sign_are_zeros(tmp_path, at_rank, minus):
    folder = saved(tmp_path, tensors_of_a_model(), "zeros", "fp8_e4m3")
    change(folder, "block.down_proj.weight", lambda one: (-one.float()).to(F8) if minus else one)
    assert type(load(folder).block.down_proj.sparse24) is Sparse24QuantizedLinear


def test_part_of_groups_is_no_reason_to_refuse_stored_zeros(tmp_path, at_rank):
    """Six columns a rank: what a rank has of a 2:4 matrix isn't 2:4, and stays dense."""
    config = config_for(saved(tmp_path, tensors_of_a_model(), "zeros"))
    at_rank(0, 64)
    layer = vllm_linear.RowParallelLinear(
        INNER, HIDDEN, quant_config=config, prefix="block.down_proj", params_dtype=BF16
    )
    layer.weight.data.fill_(1.0)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.sparse24 is None
    assert layer.weight.shape == (HIDDEN, 6)


def test_stored_16_bit_zeros_outside_linear_layers_stay_vllms(tmp_path, at_rank):
    for element in (None, "fp8_e4m3"):
        home = tmp_path / str(element)
        home.mkdir()
        config = config_for(saved(home, tensors_of_a_model(), "zeros", element))
        if element is None:
            assert config.get_quant_method(nn.Embedding(4, 4), "block") is None
            continue
        with pytest.raises(UnsupportedError, match=r"block\.\w+_proj: expected a 2:4 weight of a linear"):
            config.get_quant_method(nn.Embedding(4, 4), "block")


@pytest.mark.parametrize(
    "other", [torch.ones(4, dtype=BF16), torch.ones(4, 1, 8), torch.ones(4, 8, dtype=torch.int8)], ids=str
)
def test_tensors_of_no_linear_layer_are_not_checked_for_zeros(tmp_path, at_rank, other):
    folder = saved(tmp_path, tensors_of_a_model() | {"block.other.weight": other}, "zeros")
    config = config_for(folder)
    assert set(config.dense) - set(config.sparse) == {"block.other"}
    assert config.get_quant_method(nn.Embedding(4, 4), "block.other") is None
