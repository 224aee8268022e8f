"""The plugin for vLLM: weights stored in 4 or 8 bits are cut, packed and computed with as they stand for."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file

from sparse24_plans import Sparse24QuantizedWeight, Sparse24Weight, convert_checkpoint, to_foreign
from sparse24_plans.torch import Sparse24WeightOnlyLinear

from .vllm_models import BF16, INNER, dense_of, load, own_part, saved, tensors_of_a_model

STORED = pytest.mark.parametrize("stored", ["s4", "s8", "fp8_e4m3"])
PARTS = {"values24", "meta24", "scales24"}
"""Parameters of a layer while a weight with scales of groups is loaded."""


@STORED
@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_each_rank_has_its_part_of_stored_values(tmp_path, at_rank, stored, group, rank, size):
    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights=stored, group=group)
    at_rank(rank, size)
    model, dense = load(folder), dense_of(folder)
    for name, layer in model.block.named_children():
        assert type(layer.sparse24) is Sparse24WeightOnlyLinear
        assert layer.sparse24.weight_element == stored
        assert not PARTS & set(dict(layer.named_parameters(recurse=False)))
        weight, bias = own_part(dense, name, rank, size)
        assert torch.equal(layer.sparse24.dense_weight().double(), weight)
        groups = -(-weight.shape[1] // group) if group else 1
        assert layer.sparse24.quantization.scales_of_a_row(weight.shape[1]) == groups
        x = torch.randn(7, weight.shape[1], dtype=BF16)
        for given in (layer.bias, None):
            y = layer.quant_method.apply(layer, x, given)
            wanted = x.double() @ weight.T + (0 if given is None else bias)
            assert (y.dtype, y.shape) == (BF16, wanted.shape)
            assert (y.double() - wanted).norm() < 0.004 * wanted.norm()


@STORED
@pytest.mark.parametrize("group", [0, 128])
def test_stored_values_are_held_packed_where_kernels_read_them_so(
    tmp_path, at_rank, monkeypatch, stored, group
):
    """The layer holds a packed weight, as on a GPU. The CPU's kernels read the canonical weight, which the op
    makes from the packed one."""
    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights=stored, group=group)
    plain = load(folder).block
    monkeypatch.setattr(Sparse24WeightOnlyLinear, "hold_packed", Sparse24WeightOnlyLinear._pack)
    for layer, other in zip(load(folder).block.children(), plain.children(), strict=True):
        held = layer.sparse24
        assert (held.values, held.metadata, held.scales) == (None, None, None)
        assert held.weight_bytes == held.packed.nbytes
        x = torch.randn(5, held.in_features, dtype=BF16)
        assert torch.equal(layer(x), other(x))


def test_group_scales_stay_exact_in_models_of_another_dtype(tmp_path, at_rank):
    from safetensors.torch import load_file

    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", weights="s4", group=64)
    stored = load_file(folder / "model.safetensors")["block.down_proj.weight.scales24"]
    layer = load(folder, torch.float16).block.down_proj
    assert (stored.dtype, layer.sparse24.scales.dtype) == (BF16, torch.float32)
    assert torch.equal(layer.sparse24.scales, stored.float())
    assert layer(torch.randn(3, INNER, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_a_converted_marlin_24_checkpoint_is_served(tmp_path, at_rank, dtype):
    theirs, tensors = tmp_path / "theirs", tensors_of_a_model(torch.float16)
    theirs.mkdir()
    for name in [name for name in tensors if name.endswith(".weight")]:
        weight = Sparse24Weight.prune_compress(tensors.pop(name))
        group = 128 if weight.k == INNER else 0
        parts = to_foreign("marlin_24", Sparse24QuantizedWeight.quantize(weight, stored="s4", group=group))
        home = name.removesuffix("weight")
        tensors |= {f"{home}{part}": torch.from_numpy(array) for part, array in parts.items()}
    save_file(tensors, theirs / "model.safetensors")
    section = {"quant_method": "compressed-tensors", "format": "marlin-24"}
    config = {"torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": section}
    (theirs / "config.json").write_text(json.dumps(config))
    ours = tmp_path / "ours"
    convert_checkpoint(theirs, ours, from_format="marlin_24", to_format="sparse24")
    dense = dense_of(ours)
    for name, layer in load(ours, dtype).block.named_children():
        weight, bias = own_part(dense, name, 0, 1)
        assert layer.sparse24.weight_element == "s4"
        assert torch.equal(layer.sparse24.dense_weight().double(), weight)
        x = torch.randn(3, weight.shape[1], dtype=dtype)
        wanted = x.double() @ weight.T + bias
        assert (layer(x).double() - wanted).norm() < 0.004 * wanted.norm()
