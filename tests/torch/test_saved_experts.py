"""Experts in a saved model: what a folder keeps of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError, compress_checkpoint
from sparse24_plans.torch import (
    Sparse24Experts,
    Sparse24Recipe,
    from_pretrained,
    load_sparse24,
    save_sparse24,
    to_sparse24,
)

from .saved_models import INVARIANT, changed, logits, metadata_of, same_state

transformers = pytest.importorskip("transformers", minversion="5.8")
AutoModelForCausalLM = transformers.AutoModelForCausalLM


class Experts(nn.Module):
    """Gated experts of any module, none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 128, 64) / 8)
        self.down_proj = nn.Parameter(torch.randn(3, 64, 64) / 8)
        self.act_fn = nn.GELU()

    def forward(self, x, index, weights):
        gate, up = (self.gate_up_proj[index[:, 0]] @ x[..., None])[..., 0].chunk(2, -1)
        return (self.down_proj[index[:, 0]] @ (self.act_fn(gate) * up)[..., None])[..., 0] * weights


def mixture() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Experts())


def routed(model: nn.Module) -> torch.Tensor:
    index = torch.tensor([[0], [2], [1], [2]])
    with torch.no_grad():
        return model[1](torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), index, index + 1.0)


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(10**9, 1), (30000, 4)])
@pytest.mark.parametrize("build", ["dense", "on meta", "2:4"])
def test_experts_of_any_module_are_saved_as_stacks(tmp_path, max_shard_bytes, files, build):
    model = mixture()
    to_sparse24(model, recipe=Sparse24Recipe(require=INVARIANT))
    save_sparse24(model, tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    stored = {k: v for file in (tmp_path / "saved").glob("*.safetensors") for k, v in load_file(file).items()}
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == files
    assert stored["1.gate_up_proj.values24"].shape == (3, 128, 32)
    with torch.device("meta" if build == "on meta" else "cpu"):
        loaded = mixture()
    if build == "2:4":
        torch.nn.init.zeros_(loaded[1].down_proj)
        to_sparse24(loaded, recipe=Sparse24Recipe(require=INVARIANT))
    report = load_sparse24(loaded, tmp_path / "saved")
    assert report.sparse == ("0", "1.gate_up_proj", "1.down_proj")
    assert (report.dense, report.unexpected) == (("0.bias",), ())
    assert same_state(loaded, model)
    assert torch.equal(routed(loaded), routed(model))
    assert loaded[1].activation == "geglu"
    assert loaded[1].down_proj.preference == model[1].down_proj.preference


def test_experts_that_must_train_are_loaded_dense(tmp_path):
    model, loaded = mixture(), mixture()
    to_sparse24(model)
    save_sparse24(model, tmp_path / "saved")
    report = load_sparse24(loaded, tmp_path / "saved", trainable=True)
    assert report.sparse == ("0",)
    for name, weight in model[1].dense_weights().items():
        assert torch.equal(getattr(loaded[1], name), weight)


def test_dense_experts_are_not_loaded_into_24_ones(tmp_path):
    model, dense = mixture(), mixture()
    to_sparse24(model)
    to_sparse24(dense, exclude=["1"])
    save_sparse24(dense, tmp_path / "saved")
    with pytest.raises(InvalidProblemError, match=r"1\.\w+: expected a 2:4 weight, as the layer's is"):
        load_sparse24(model, tmp_path / "saved")


def mixtral_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**{**sizes, **changes})


def mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(mixtral_config()).eval()


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory) -> Path:
    """A Mixtral whose experts are 2:4, but for those of the first layer."""
    model, path = mixtral(), tmp_path_factory.mktemp("saved") / "mixtral"
    to_sparse24(model, exclude=["*layers.0.mlp.experts"])
    save_sparse24(model, path)
    return path


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_experts_that_were_left_dense_stay_so(mixtral_folder, loader):
    model, wanted = loader(mixtral_folder), mixtral()
    to_sparse24(wanted, exclude=["*layers.0.mlp.experts"])
    assert [type(layer.mlp.experts) is Sparse24Experts for layer in model.model.layers] == [False, True]
    assert same_state(model, wanted)
    assert torch.equal(logits(model), logits(wanted))


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_experts_take_the_dtype_that_is_asked_for(mixtral_folder, loader):
    model = loader(mixtral_folder, dtype=torch.bfloat16)
    wanted = from_pretrained(mixtral_folder).to(torch.bfloat16)
    assert model.model.layers[1].mlp.experts.down_proj.weight.dtype == torch.bfloat16
    assert same_state(model, wanted)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_24_experts_serve_whatever_implementation_is_configured(mixtral_folder, implementation):
    wanted = logits(from_pretrained(mixtral_folder))
    model = AutoModelForCausalLM.from_pretrained(
        mixtral_folder, dtype="auto", experts_implementation=implementation
    )
    assert model.config._experts_implementation == implementation
    assert type(model.model.layers[1].mlp.experts) is Sparse24Experts
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_a_device_map_is_followed_for_experts(mixtral_folder, device_map):
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(mixtral_folder, device_map=device_map).cpu()
    assert same_state(model, from_pretrained(mixtral_folder))


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"model.layers.1.mlp": {"activation": "swiglu"}},
            "experts: model.layers.1.mlp: expected gate_up_proj",
        ),
        (
            {"model.layers.0.mlp.experts": {"activation": "swiglu"}},
            "layers.0.mlp.experts: expected 2:4 weights",
        ),
        (
            {"model.layers.1.mlp.experts": {"activation": "relu"}},
            "expected a gated activation and no out_dtype",
        ),
        (
            {"model.layers.1.mlp.experts": {"activation": "swiglu", "out_dtype": "float32"}},
            "expected a gated activation and no out_dtype",
        ),
    ],
)
def test_a_wrong_entry_on_experts_is_refused(mixtral_folder, tmp_path, loader, entry, message):
    changes = {"quantization_config": {"quant_method": "sparse24", "experts": entry}}
    with pytest.raises(InvalidProblemError, match=message):
        loader(changed(mixtral_folder, tmp_path, **changes))


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_bad_metadata_of_an_expert_is_found(mixtral_folder, tmp_path, loader):
    copy = changed(mixtral_folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight.meta24"].fill_(0x0F0F)
    save_file(tensors, copy / "model.safetensors", metadata_of(mixtral_folder / "model.safetensors"))
    with pytest.raises(FormatError, match="row"):
        loader(copy)


def test_experts_without_a_kernel_on_their_gpu_stay_dense(tmp_path, monkeypatch, caplog):
    from sparse24_plans.checkpoints.folder import ModelReader
    from sparse24_plans.torch.checkpoint_source import Source
    from sparse24_plans.torch.experts import ExpertsWeight
    from sparse24_plans.torch.loading import Load

    def no_kernel(self, device, n=1):
        assert device == 3
        raise UnsupportedError("needs compute capability 9.0")

    config = mixtral_config(num_hidden_layers=1, intermediate_size=128, num_local_experts=2)
    model, other = (transformers.MixtralForCausalLM(config) for _ in range(2))
    to_sparse24(model)
    save_sparse24(model, tmp_path / "saved")
    monkeypatch.setattr(ExpertsWeight, "plan_on", no_kernel)
    with ModelReader(tmp_path / "saved") as reader, caplog.at_level("WARNING", "sparse24_plans.load"):
        load = Load(other, Source(reader, None), None, {"device": torch.device("cuda", 3)})
        load.check()
        load.swap()
        load.fill()
    experts = other.model.layers[0].mlp.experts
    assert not isinstance(experts, Sparse24Experts)
    assert "experts stay dense: model.layers.0.mlp.experts: needs compute capability 9.0" in caplog.text
    wanted = model.model.layers[0].mlp.experts.dense_weights()
    assert all(torch.equal(getattr(experts, name), weight) for name, weight in wanted.items())


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_compressed_experts_that_stay_dense_are_named(tmp_path, loader, caplog):
    """Their rows are too few for any kernel."""
    config = mixtral_config(num_hidden_layers=1, intermediate_size=40, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "sparse")
    with caplog.at_level("WARNING", "sparse24_plans.load"):
        experts = loader(tmp_path / "sparse").model.layers[0].mlp.experts
    assert type(experts) is type(model.model.layers[0].mlp.experts)
    said = [one.getMessage() for one in caplog.records if one.name == "sparse24_plans.load"]
    assert len(said) == 1
    assert said[0].startswith("experts stay dense: model.layers.0.mlp.experts: expected")
