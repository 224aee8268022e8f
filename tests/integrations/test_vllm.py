"""The plugin in vLLM's own layers and loaders, on CPU tensors: what it loads, and what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
import vllm.envs as envs
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.quantization import (
    _CUSTOMIZED_METHOD_TO_QUANT_CONFIG,
    QUANTIZATION_METHODS,
)

from sparse24_plans.torch import (
    Sparse24Linear,
    Sparse24QuantizedLinear,
    Sparse24Recipe,
    save_sparse24,
    to_sparse24,
)

from .vllm_models import (
    BF16,
    GROUP,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    SIZES,
    Sparse24VllmConfig,
    dense_of,
    load,
    own_part,
    saved,
    tensors_of_a_model,
)

FORMATS = ("sparse24", "compressed_tensors", "zeros")
"""Our form, theirs, and theirs with the zeros of the matrices stored."""


def test_the_entry_point_registers_the_method():
    assert "sparse24" in QUANTIZATION_METHODS
    assert _CUSTOMIZED_METHOD_TO_QUANT_CONFIG["sparse24"] is Sparse24VllmConfig


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("element", [None, "fp8_e4m3", "s8"])
def test_each_rank_computes_with_its_part_of_the_weight(tmp_path, at_rank, form, rank, size, element):
    folder = saved(tmp_path, tensors_of_a_model(), form, element)
    if form != "sparse24" and element:
        kind = {"type": "int" if element == "s8" else "float"}
        add_groups(folder, {part: GROUP[part] | kind for part in ("weights", "input_activations")})
    at_rank(rank, size)
    model, dense = load(folder), dense_of(tmp_path / "sparse24")
    for name, layer in model.block.named_children():
        assert type(layer.sparse24) is (Sparse24QuantizedLinear if element else Sparse24Linear)
        loaded = {"values24", "meta24", "compressed", "bitmask", "weight", "weight_scale"}
        assert not loaded & set(dict(layer.named_parameters(recurse=False)))
        weight, bias = own_part(dense, name, rank, size)
        torch.testing.assert_close(layer.sparse24.dense_weight().double(), weight, rtol=1e-6, atol=0)
        x = torch.randn(7, weight.shape[1], dtype=BF16)
        for given in (layer.bias, None):
            y = layer.quant_method.apply(layer, x, given)
            wanted = x.double() @ weight.T + (0 if given is None else bias)
            assert (y.dtype, y.shape) == (BF16, wanted.shape)
            off = (y.double() - wanted).norm() / wanted.norm()
            assert off < (0.05 if element else 0.004)


def add_groups(folder: Path, group: dict, **more) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= {"config_groups": {"group_0": group}, **more}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("static", [False, True])
def test_one_scale_for_each_merged_matrix(tmp_path, at_rank, static):
    """Scales of whole matrices stay those of their rows, and the inputs' scale is the largest."""
    from safetensors.torch import load_file

    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", "fp8_e4m3")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    places = [name.removesuffix(".weight.values24") for name in tensors if name.endswith(".weight.values24")]
    for at, place in enumerate(places):
        tensors[f"{place}.weight_scale"] = torch.tensor([0.01 * (at + 1)])
        if static:
            tensors[f"{place}.input_scale"] = torch.tensor(0.02 * (at + 1))
    save_file(tensors, file, {"sparse24_format": "1"})
    model = load(folder)
    qkv = model.block.qkv_proj.sparse24
    wanted = [tensors[f"block.{part}.weight_scale"].expand(rows) for part, rows in SIZES["qkv_proj"].items()]
    assert torch.equal(qkv.weight_scale.flatten(), torch.cat(wanted))
    if static:
        largest = max(tensors[f"block.{part}.input_scale"] for part in SIZES["qkv_proj"])
        assert torch.equal(qkv.input_scale, largest[None])
    else:
        assert qkv.input_scale is None


@pytest.mark.parametrize("by", [{}, {"stored": "s8", "group": 32}], ids=["bf16", "s8"])
def test_a_saved_model_with_layers_left_dense(tmp_path, at_rank, by):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict(
                {part: nn.Linear(HIDDEN, rows) for parts in SIZES.values() for part, rows in parts.items()}
                | {"o_proj": nn.Linear(HEADS * HEAD, HIDDEN), "down_proj": nn.Linear(INNER, HIDDEN)}
            )

    whole = Whole().to(BF16)
    to_sparse24(whole, exclude=["*.o_proj"], recipe=Sparse24Recipe(**by))
    save_sparse24(whole, tmp_path / "saved")
    model = load(tmp_path / "saved", process=False)
    assert type(model.block.o_proj.quant_method) is vllm_linear.UnquantizedLinearMethod
    assert torch.equal(model.block.o_proj.weight, whole.block["o_proj"].weight)
    layer = model.block.down_proj
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, INNER, dtype=BF16)
    assert torch.equal(layer(x), whole.block["down_proj"](x))


@pytest.mark.parametrize("by", [{}, {"element": "fp8_e4m3"}, {"weights": "s4"}], ids=["bf16", "fp8", "s4"])
def test_batch_invariance_is_required_of_the_kernels(tmp_path, at_rank, monkeypatch, by):
    folder = saved(tmp_path, tensors_of_a_model(), "sparse24", **by)
    assert not load(folder).block.qkv_proj.sparse24.preference.require.batch_invariant
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    layer = load(folder).block.qkv_proj
    assert layer.sparse24.preference.require.batch_invariant
    assert layer.sparse24.plan(8).guarantee.batch_invariant
    x = torch.randn(33, HIDDEN, dtype=BF16)
    assert torch.equal(layer(x)[:1], layer(x[:1]))


@pytest.mark.parametrize("by", [{}, {"weights": "s4"}], ids=["bf16", "s4"])
def test_a_compiled_graph_holds_the_op(tmp_path, at_rank, by):
    layer = load(saved(tmp_path, tensors_of_a_model(), "sparse24", **by)).block.down_proj
    x = torch.randn(5, INNER, dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x), layer(x))
