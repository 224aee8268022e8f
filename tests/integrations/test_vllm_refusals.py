"""The plugin for vLLM: what it refuses by name while a model is made, loaded and packed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.layers import linear as vllm_linear

from sparse24_plans import FormatError, PlanPreference, UnsupportedError

from .vllm_models import BF16, HIDDEN, INNER, Model, config_for, load, saved, tensors_of_a_model


def test_merged_matrices_of_different_forms_are_refused(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24"))
    del config.sparse["block.up_proj"]
    with pytest.raises(UnsupportedError, match=r"block\.gate_up_proj: expected one form"):
        Model(config)


def test_compressed_weights_outside_linear_layers_are_refused(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24"))
    assert config.get_quant_method(nn.Embedding(4, 4), "block.attn") is None
    with pytest.raises(UnsupportedError, match=r"block\.\w+_proj: expected a 2:4 weight of a linear layer"):
        config.get_quant_method(nn.Embedding(4, 4), "block")


def test_columns_that_cannot_be_cut_are_refused(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24"))
    at_rank(0, 64)
    with pytest.raises(UnsupportedError, match="expected a multiple of 8 columns on each rank, got 6 of 384"):
        vllm_linear.RowParallelLinear(INNER, HIDDEN, quant_config=config, prefix="block.down_proj")


def test_columns_that_share_scales_cannot_be_cut(tmp_path, at_rank):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24", weights="s4", group=128))
    at_rank(0, 2)
    with pytest.raises(UnsupportedError, match="a multiple of 128 columns on each rank, got 192 of 384"):
        vllm_linear.RowParallelLinear(INNER, HIDDEN, quant_config=config, prefix="block.down_proj")


def test_scales_of_no_known_groups_are_refused(tmp_path, at_rank):
    from safetensors.torch import load_file

    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights="s4", group=32)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["block.down_proj.weight.scales24"] = torch.ones(HIDDEN, 5)
    save_file(tensors, file, {"sparse24_format": "1"})
    with pytest.raises(UnsupportedError, match=r"block\.down_proj: expected scales24 of groups of 32 or 64"):
        config_for(folder)


@pytest.mark.parametrize("by", [{}, {"weights": "s4"}], ids=["bf16", "s4"])
def test_a_layer_that_no_kernel_serves_is_refused_by_name(tmp_path, at_rank, by):
    config = config_for(saved(tmp_path, tensors_of_a_model(), "sparse24", **by))
    wish = PlanPreference(prefer_kernel="wgmma_sp")
    config.sparse = {name: replace(one, preference=wish) for name, one in config.sparse.items()}
    layer = vllm_linear.RowParallelLinear(
        INNER, HIDDEN, quant_config=config, prefix="block.down_proj", params_dtype=BF16
    )
    layer.meta24.data.fill_(0x0404)
    with pytest.raises(UnsupportedError, match=r"block\.down_proj: .*wgmma_sp"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("by", [{}, {"weights": "s4"}], ids=["bf16", "s4"])
def test_a_group_without_two_positions_is_refused(tmp_path, at_rank, by):
    model = load(saved(tmp_path, tensors_of_a_model(), "sparse24", **by), process=False)
    layer = model.block.down_proj
    layer.meta24.data.view(torch.int16)[3, 2] = 0
    with pytest.raises(FormatError, match=r"(?s)block\.down_proj: .*\(row 3, group 4\)"):
        layer.quant_method.process_weights_after_loading(layer)
