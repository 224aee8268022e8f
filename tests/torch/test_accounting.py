"""Every matrix of transformers' models is swapped or named, and models in memory and in files agree."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from sparse24_plans import InvalidProblemError, compress_checkpoint
from sparse24_plans.checkpoints.selection import CONV1D_LAYERS, CONV1D_MODELS
from sparse24_plans.torch import (
    Sparse24Experts,
    Sparse24Linear,
    Sparse24Recipe,
    from_pretrained,
    load_sparse24,
    to_sparse24,
)

from .cases import pruned

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # noqa: E402

TOKENS = torch.arange(8)[None]
DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**DECODER, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 8}
BERT = {key: DECODER[key] for key in list(DECODER)[:5]}
WHISPER = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_mel_bins": 16,
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MODELS = {
    "LlamaForCausalLM": DECODER,
    "LlamaForSequenceClassification": {**DECODER, "num_labels": 8},
    "Qwen3ForCausalLM": {**DECODER, "head_dim": 16, "tie_word_embeddings": True},
    "Phi3ForCausalLM": {**DECODER, "pad_token_id": 0},
    "GPT2LMHeadModel": GPT2,
    "GPTNeoXForCausalLM": BERT,
    "OPTForCausalLM": {**BERT, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "T5ForConditionalGeneration": T5,
    "BertForMaskedLM": BERT,
    "BertForSequenceClassification": {**BERT, "num_labels": 8},
    "ViTForImageClassification": {**BERT, "image_size": 32, "patch_size": 8, "num_labels": 8},
    "WhisperForConditionalGeneration": WHISPER,
    "MambaForCausalLM": {"vocab_size": 128, "hidden_size": 64, "time_step_rank": 8, "num_hidden_layers": 2},
}
MIXTURES = {
    "MixtralForCausalLM": {**DECODER, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": EXPERTS,
    "OlmoeForCausalLM": EXPERTS,
}


def built(name: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_memory_and_its_checkpoint_are_compressed_alike(name, tmp_path):
    model = built(name, MODELS[name])
    model.save_pretrained(tmp_path / "dense")
    reports = compress_checkpoint(tmp_path / "dense", tmp_path / "ours", device="host")
    held = dict(model.named_parameters())
    matrices = {p for p, tensor in held.items() if tensor.dim() > 1}
    report = to_sparse24(model)
    swapped = {f"{layer.name}.weight" for layer in report.layers}
    assert swapped
    in_file = {one.name for one in reports if one.action == "compressed"}
    if name == "ViTForImageClassification":  # transformers saves it under other names
        assert len(in_file) == len(swapped)
    else:
        assert in_file == swapped
    left = {one.name for one in report.left_dense}
    assert matrices == swapped | {one if one in held else f"{one}.weight" for one in left} & matrices
    assert not isinstance(model.get_output_embeddings(), Sparse24Linear)
    assert report.sparse_share == pytest.approx(reports.sparse_share, abs=0.02)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_swapped_with_their_bytes_and_routers_stay_dense(name):
    model = built(name, MIXTURES[name])
    whole = sum(p.nbytes for p in model.parameters())
    stacked = {key: p.nbytes for key, p in model.named_parameters() if p.dim() == 3}
    report = to_sparse24(model)
    swapped = {layer.name: layer.dense_bytes for layer in report.layers}
    assert {key: swapped[key] for key in stacked} == stacked
    assert all("gate" not in name.split(".")[-1] or "gate_up" in name for name in swapped)
    assert not any("head" in name for name in swapped)
    assert any(one.reason.startswith("router") for one in report.left_dense)
    assert report.model_bytes == whole
    assert report.sparse_share == pytest.approx(sum(swapped.values()) / whole)
    kinds = {type(one.mlp.experts) for one in model.model.layers}
    assert kinds == {Sparse24Experts}


@pytest.mark.parametrize("name", MIXTURES)
def test_swapped_mixtures_give_what_dense_ones_with_pruned_weights_give(name):
    model, dense = (built(name, MIXTURES[name]) for _ in range(2))
    report = to_sparse24(model)
    weights = {layer.name: layer for layer in report.layers}
    for key, parameter in dense.named_parameters():
        if key.removesuffix(".weight") in weights:
            flat = parameter.data.flatten(0, -2)
            parameter.data = pruned(flat).view(parameter.shape)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-4)


UNLIKE = {
    "GptOssForCausalLM": (
        EXPERTS | {"num_local_experts": 4},
        "expected no other parameters, got gate_up_proj_bias",
    ),
    "AriaTextForCausalLM": (DECODER | {"moe_num_experts": 4}, "expected is_transposed=False"),
    "OlmoeForCausalLM": (
        EXPERTS | {"intermediate_size": 80},
        "expected 2I and H in multiples of 64, got 160",
    ),
    "Qwen3MoeForCausalLM": (EXPERTS | {"hidden_act": "relu"}, "its activation is neither SiLU nor GELU"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_experts_that_compute_otherwise_stay_dense_with_the_reason(name):
    sizes, reason = UNLIKE[name]
    model = built(name, sizes)
    stacked = {
        key: p.nbytes for key, p in model.named_parameters() if key.endswith(("gate_up_proj", "down_proj"))
    }
    listed = {one.name: one for one in to_sparse24(model).left_dense}
    assert stacked
    for key, nbytes in stacked.items():
        assert reason in listed[key].reason
        assert listed[key].nbytes == nbytes


def test_experts_with_a_gate_of_their_own_stay_dense():
    home = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": home.DeepseekV4Experts(transformers.DeepseekV4Config())})
    report = to_sparse24(model)
    assert "DeepseekV4Experts has a gate of its own" in report.skipped["experts.gate_up_proj"]


# GPT-2 --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    built("GPT2LMHeadModel", GPT2).save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """The dense model with each Conv1D pruned along its inputs, by code that isn't the package's."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    for module in model.modules():
        if isinstance(module, Conv1D):
            module.weight.data = pruned(module.weight.data.T.contiguous()).T.contiguous()
    return model


def test_conv1d_layers_are_swapped_and_pruned_along_their_inputs(gpt2):
    expected = reference(gpt2)
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2).eval()
    report = to_sparse24(model)
    assert len(report.layers) == 8
    first = report.layers[0]
    assert (first.name, first.m, first.k) == ("transformer.h.0.attn.c_attn", 192, 64)
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    for name, module in expected.named_modules():
        if isinstance(module, Conv1D):
            layer = model.get_submodule(name)
            assert torch.equal(layer.dense_weight(), module.weight.T)
            assert torch.equal(layer.bias, module.bias)
            assert layer.transposed
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_gpt2_from_compressed_checkpoint_has_bits_of_swapped_one(gpt2, tmp_path):
    compress_checkpoint(gpt2, tmp_path / "ours", device="host")
    swapped = transformers.GPT2LMHeadModel.from_pretrained(gpt2).eval()
    to_sparse24(swapped)
    blank = built("GPT2LMHeadModel", GPT2)
    report = load_sparse24(blank, tmp_path / "ours")
    assert len(report.sparse) == 8
    again = load_sparse24(blank, tmp_path / "ours")
    assert again.sparse == report.sparse
    with torch.no_grad():
        for model in (blank, from_pretrained(tmp_path / "ours")):
            assert type(model.transformer.h[0].mlp.c_proj) is Sparse24Linear
            assert torch.equal(model(TOKENS).logits, swapped(TOKENS).logits)


@pytest.mark.parametrize("swapped", [False, True])
def test_square_weight_that_was_compressed_along_its_outputs_is_refused(gpt2, tmp_path, swapped):
    """Nothing but the note in the file tells it from a right one."""
    compress_checkpoint(gpt2, tmp_path / "ours", device="host")
    file = tmp_path / "ours" / "model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    name = "transformer.h.0.attn.c_proj.weight"
    note = json.loads(metadata[f"sparse24.{name}"])
    assert note.pop("transposed")
    metadata[f"sparse24.{name}"] = json.dumps(note)
    safetensors.torch.save_file(tensors, file, metadata)
    model = built("GPT2LMHeadModel", GPT2)
    if swapped:
        to_sparse24(model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        InvalidProblemError, match=r"c_proj\.weight: expected groups of four along the inputs.* \[in, out\]"
    ):
        load_sparse24(model, tmp_path / "ours")
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_scores_see_a_conv1d_as_a_linear_layer():
    model = nn.Sequential(Conv1D(24, 16))
    dense = model[0].weight.detach().T.clone()
    seen: list[tuple[str, nn.Linear]] = []

    def scores(name: str, linear: nn.Linear) -> torch.Tensor:
        seen.append((name, linear))
        return -linear.weight.abs()

    to_sparse24(model, recipe=Sparse24Recipe(scores=scores))
    [(name, linear)] = seen
    assert (name, linear.in_features, linear.out_features) == ("0", 16, 24)
    assert torch.equal(linear.weight, dense)
    assert torch.equal(model[0].dense_weight(), torch.ops.sparse24.prune(dense, -dense.abs()))


def test_conv1d_swaps_obey_the_options_of_linear_swaps():
    model = nn.Sequential(Conv1D(24, 16), Conv1D(20, 16), Conv1D(24, 16))
    model[2].register_forward_hook(lambda *_: None)
    report = to_sparse24(copy.deepcopy(model), exclude=["0"], recipe="tiles")
    assert report.skipped["0"] == "excluded by pattern '0'"
    assert "multiples of 8, got 20" in report.skipped["1"]
    assert "hooks" in report.skipped["2"]


def test_the_table_of_models_with_conv1d_is_that_of_transformers():
    home = Path(transformers.__file__).parent / "models"
    models, layers = set(), set()
    for file in home.glob("*/modeling_*.py"):
        for line in file.read_text().splitlines():
            name, equals, _ = line.partition(" = Conv1D(")
            if equals:
                models.add(file.parent.name)
                layers.add(name.rpartition(".")[2])
    assert {"openai-gpt" if one == "openai" else one for one in models} == set(CONV1D_MODELS)
    assert layers == set(CONV1D_LAYERS)
