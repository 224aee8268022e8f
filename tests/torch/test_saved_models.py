"""Swapped models of many architectures, saved and loaded again by every loader: the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import nn

from sparse24_plans import (
    InvalidProblemError,
    compress_checkpoint,
    convert_checkpoint,
    verify_checkpoint,
)
from sparse24_plans.torch import (
    Sparse24Linear,
    Sparse24Recipe,
    from_pretrained,
    fuse_gated,
    load_sparse24,
    to_sparse24,
)
from sparse24_plans.torch.elements import element_of

from .cases import DEVICE

transformers = pytest.importorskip("transformers", minversion="5.8")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_key_value_heads": 4,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
}
VIT = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 3}
NARROW = {"hidden_size": 40, "head_dim": 8}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


class Case(NamedTuple):
    """An architecture: its configuration, its auto class, and how many layers and blocks become 2:4."""

    config: str
    options: dict[str, Any]
    layers: int
    fused: int
    auto: Any = transformers.AutoModelForCausalLM
    inputs: str = "input_ids"
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None

    @property
    def recipe(self) -> Sparse24Recipe:
        return Sparse24Recipe(weight_dtype=self.weight_dtype)


CASES = {
    "Llama": Case("LlamaConfig", UNTIED, layers=12, fused=2),
    "Llama, tied": Case("LlamaConfig", TIED, layers=12, fused=2, dtype=torch.bfloat16),
    "Qwen3": Case("Qwen3Config", {"head_dim": 8, **TIED}, layers=12, fused=2),
    "Mistral": Case("MistralConfig", UNTIED, layers=12, fused=2, dtype=torch.float16),
    "Gemma3": Case("Gemma3TextConfig", {"head_dim": 8, **TIED}, layers=14, fused=0),
    "Phi-3": Case("Phi3Config", UNTIED, layers=8, fused=2),
    "Mixtral": Case("MixtralConfig", {**EXPERTS, **UNTIED}, layers=8, fused=0),
    "Qwen3-MoE": Case("Qwen3MoeConfig", {"head_dim": 8, **EXPERTS, **UNTIED}, layers=8, fused=0),
    "DeepSeek-V3": Case("DeepseekV3Config", {**EXPERTS, **DEEPSEEK, **UNTIED}, layers=14, fused=2),
    "ViT": Case(
        "ViTConfig",
        VIT,
        layers=12,
        fused=0,
        auto=transformers.AutoModelForImageClassification,
        inputs="pixel_values",
    ),
    "Whisper": Case(
        "WhisperConfig",
        WHISPER,
        layers=22,
        fused=0,
        auto=transformers.AutoModelForSpeechSeq2Seq,
        inputs="input_features",
    ),
    "GPT-2": Case("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, layers=8, fused=0),
}
FP8 = {"weight_dtype": torch.float8_e4m3fn}
QUANTIZED = {
    "Llama, fp8": Case("LlamaConfig", {**NARROW, **TIED}, 12, 2, dtype=torch.bfloat16, **FP8),
    "Phi-3, int8": Case("Phi3Config", UNTIED, 8, 2, weight_dtype=torch.int8),
    "GPT-2, fp8": Case("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, 8, 0, **FP8),
    "ViT, int8": Case(**CASES["ViT"]._asdict() | {"weight_dtype": torch.int8}),
}
"""Models whose 2:4 layers have 8 bits. Those of the first have a K that is padded to 16."""


class Saved(NamedTuple):
    """A folder with the dense model, and one with its 2:4 form, which is in memory too."""

    case: Case
    model: nn.Module
    unpruned: Path
    folder: Path


def dense_model(case: Case) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**SMALL, **case.options})
    return case.auto.from_config(config, dtype=case.dtype).eval()


def result(model: Any, case: Case) -> torch.Tensor:
    """What the model makes of fixed inputs."""
    tokens, generator = torch.arange(1, 9)[None], torch.Generator().manual_seed(1)
    inputs = {
        "input_ids": {"input_ids": tokens},
        "pixel_values": {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)},
        "input_features": {
            "input_features": torch.randn(1, 8, 16, generator=generator),
            "decoder_input_ids": tokens,
        },
    }[case.inputs]
    with torch.no_grad():
        return model(**{name: one.to(model.device) for name, one in inputs.items()}).logits


def sparse_of(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one, Sparse24Linear)]


def assert_same(model: Any, saved: Saved) -> None:
    """The model has the modules, the state and the results of the one that was saved."""
    assert [(n, type(m)) for n, m in model.named_modules()] == [
        (n, type(m)) for n, m in saved.model.named_modules()
    ]
    state, wanted = model.state_dict(), saved.model.state_dict()
    assert state.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(bits(state[key]), bits(tensor)), key
    assert torch.equal(result(model, saved.case), result(saved.model, saved.case))
    assert not model.training


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def contents(folder: Path) -> dict[str, Any]:
    """The configuration, the files' common metadata, and the tensors' bytes."""
    found: dict[str, Any] = {"": json.loads((folder / "config.json").read_text())}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert found.setdefault("metadata", file.metadata()) == file.metadata()
            found |= {name: bits(file.get_tensor(name)).tolist() for name in file.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory) -> Saved:
    """A fused and swapped model, saved in shards by its own ``save_pretrained``."""
    case, folder = {**CASES, **QUANTIZED}[request.param], tmp_path_factory.mktemp("models")
    model = dense_model(case)
    model.save_pretrained(folder / "unpruned")
    fused = fuse_gated(model, case.recipe)
    assert sum(block.fused for block in fused.values()) == case.fused
    to_sparse24(model, recipe=case.recipe)
    assert len(sparse_of(model)) == case.layers
    model.to(DEVICE).save_pretrained(folder / "saved", max_shard_size="12KB")
    assert len(list((folder / "saved").glob("*.safetensors"))) > 1
    return Saved(case, model, folder / "unpruned", folder / "saved")


EVERY = pytest.mark.parametrize("saved", [*CASES, *QUANTIZED], indirect=True)


def by_transformers(saved: Saved, **options: Any) -> Any:
    model, report = saved.case.auto.from_pretrained(
        saved.folder, dtype="auto", output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model.to(DEVICE)


def by_load_sparse24(saved: Saved) -> Any:
    model = dense_model(saved.case)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    report = load_sparse24(model, saved.folder)
    assert len(report.sparse) == saved.case.layers
    assert report.unexpected == ()
    return model.to(DEVICE)


LOADERS = {
    "transformers": by_transformers,
    "from_pretrained": lambda saved: from_pretrained(saved.folder, device=DEVICE),
    "load_sparse24": by_load_sparse24,
}


@EVERY
@pytest.mark.parametrize("loader", LOADERS)
def test_a_saved_model_is_loaded_bit_for_bit(saved, loader):
    assert_same(LOADERS[loader](saved), saved)


@EVERY
def test_a_loaded_model_is_saved_again_as_it_was(saved, tmp_path):
    by_transformers(saved).save_pretrained(tmp_path / "again", max_shard_size="12KB")
    assert contents(tmp_path / "again") == contents(saved.folder)


@EVERY
def test_the_command_line_knows_a_saved_model(saved, tmp_path):
    """The folder is that of the dense model, compressed: verified against it, and converted back."""
    found = verify_checkpoint(saved.folder, saved.unpruned, device="host")
    assert found.passed, found
    assert len(found.layers) >= saved.case.layers
    convert_checkpoint(saved.folder, tmp_path / "dense", from_format="sparse24", to_format="dense")
    if saved.case.weight_dtype is not None:
        check_stored_zeros(tmp_path / "dense", saved)
        return
    dense = type(saved.model).from_pretrained(tmp_path / "dense", dtype="auto")
    assert sparse_of(dense) == []
    assert not hasattr(dense.config, "quantization_config")
    for name in sparse_of(saved.model):
        if "gate_up_proj" not in name:
            layer, own = saved.model.get_submodule(name), dense.get_submodule(name).weight
            assert torch.equal(own.T if layer.transposed else own, layer.dense_weight().cpu())
    torch.testing.assert_close(
        result(dense, saved.case), result(saved.model, saved.case).cpu(), rtol=2e-2, atol=2e-2
    )


def check_stored_zeros(folder: Path, saved: Saved) -> None:
    """Quantized matrices whose zeros are stored become the same layers, unless they are [in, out]."""
    if saved.case.config == "GPT2Config":
        with pytest.raises(InvalidProblemError, match="expected a checkpoint with 2:4 weights"):
            from_pretrained(folder)
        return
    loaded = from_pretrained(folder)
    for name in sparse_of(saved.model):
        if "gate_up_proj" not in name:
            own, wanted = (model.get_submodule(name).state_dict() for model in (loaded, saved.model))
            assert own.keys() == wanted.keys()
            assert all(torch.equal(bits(own[key]), bits(wanted[key])) for key in own)
    wanted = result(saved.model, saved.case).cpu()
    torch.testing.assert_close(result(loaded, saved.case), wanted, rtol=5e-2, atol=5e-2)


@EVERY
def test_compress_checkpoint_makes_a_folder_that_every_loader_takes(saved, tmp_path):
    """The folder has no word on fused blocks; experts are 2:4 in it, and dense in the model."""
    dtype = saved.case.weight_dtype
    element = None if dtype is None else element_of(dtype, "weight_dtype")
    compress_checkpoint(saved.unpruned, tmp_path / "ours", element=element, device="host")
    other = Saved(saved.case, saved.model, saved.unpruned, tmp_path / "ours")
    ours, theirs = from_pretrained(other.folder), by_transformers(other).cpu()
    assert type(ours) is type(saved.model)
    assert sparse_of(ours) == sparse_of(theirs)
    assert len(sparse_of(ours)) == saved.case.layers + saved.case.fused * (saved.case.config != "Phi3Config")
    loaded = dense_model(saved.case)
    assert load_sparse24(loaded, other.folder).unexpected == ()
    for model in (theirs, loaded):
        assert ours.state_dict().keys() == model.state_dict().keys()
        for key, tensor in ours.state_dict().items():
            assert torch.equal(bits(model.state_dict()[key]), bits(tensor)), key
        assert torch.equal(result(model, saved.case), result(ours, saved.case))
    if dtype is not None:
        return
    convert_checkpoint(other.folder, tmp_path / "dense", from_format="sparse24", to_format="dense")
    dense = type(ours).from_pretrained(tmp_path / "dense", dtype="auto")
    for key, tensor in dense.state_dict().items():
        name = key.removesuffix(".weight")
        if name not in sparse_of(ours):
            assert torch.equal(bits(ours.state_dict()[key]), bits(tensor)), key
