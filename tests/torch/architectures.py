"""Tiny random models of many architectures, and what becomes of each: the table in docs/pytorch.md.

``python -m tests.torch.architectures`` writes the table anew.
"""

from __future__ import annotations

import re
import tempfile
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from sparse24_plans.torch import Sparse24Experts, Sparse24Linear, Sparse24Recipe, fuse_gated, to_sparse24

from ..documents import ROOT

PAGE = ROOT / "docs" / "pytorch.md"
_TABLE = re.compile(r"(<!-- table: architectures -->\n).*?(<!-- end -->)", re.DOTALL)
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
# GPUs multiply the experts of models in 16 bits.
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}
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
    include: tuple[str, ...] = ()
    """Patterns for ``compress_checkpoint``, which leaves stacks dense that none matches."""
    stored: str | None = None
    group: int = 32

    @property
    def recipe(self) -> Sparse24Recipe:
        group = {} if self.stored is None else {"group": self.group}
        return Sparse24Recipe(weight_dtype=self.weight_dtype, stored=self.stored, **group)


CASES = {
    "Llama": Case("LlamaConfig", UNTIED, layers=12, fused=2),
    "Llama, tied": Case("LlamaConfig", TIED, layers=12, fused=2, dtype=torch.bfloat16),
    "Qwen3": Case("Qwen3Config", {"head_dim": 8, **TIED}, layers=12, fused=2),
    "Mistral": Case("MistralConfig", UNTIED, layers=12, fused=2, dtype=torch.float16),
    "Gemma3": Case("Gemma3TextConfig", {"head_dim": 8, **TIED}, layers=12, fused=2),
    "Phi-3": Case("Phi3Config", UNTIED, layers=8, fused=2),
    "Mixtral": Case("MixtralConfig", {**EXPERTS, **UNTIED}, layers=12, fused=0, dtype=torch.bfloat16),
    "Qwen3-MoE": Case(
        "Qwen3MoeConfig", {"head_dim": 8, **EXPERTS, **UNTIED}, layers=12, fused=0, dtype=torch.bfloat16
    ),
    "DeepSeek-V3": Case(
        "DeepseekV3Config", {**EXPERTS, **DEEPSEEK, **UNTIED}, layers=16, fused=2, dtype=torch.bfloat16
    ),
    "Granite-MoE": Case(
        "GraniteMoeConfig",
        {**EXPERTS, **TIED},
        layers=12,
        fused=0,
        dtype=torch.bfloat16,
        include=("*_proj.weight", "*_linear.weight"),
    ),
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
    "Falcon": Case("FalconConfig", {"bias": True, "parallel_attn": False}, layers=8, fused=0),
}


def dense_model(case: Case) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**SMALL, **case.options})
    return case.auto.from_config(config, dtype=case.dtype).eval()


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """Fixed inputs of a model."""
    tokens, generator = torch.arange(1, 9)[None], torch.Generator().manual_seed(1)
    return {
        "input_ids": {"input_ids": tokens},
        "pixel_values": {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)},
        "input_features": {
            "input_features": torch.randn(1, 8, 16, generator=generator),
            "decoder_input_ids": tokens,
        },
        "input_values": {"input_values": torch.randn(2, 64, generator=generator)},
    }[case.inputs]


def result(model: Any, case: Case) -> torch.Tensor:
    """Return the model's outputs."""
    with torch.no_grad():
        return model(**{name: one.to(model.device) for name, one in inputs(case).items()}).logits


def sparse_of(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one, Sparse24Linear)]


def dense_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The dense matrices that the model's 2:4 weights stand for, by their names, but for fused blocks."""
    found: dict[str, torch.Tensor] = {}
    for name, one in model.named_modules():
        if isinstance(one, Sparse24Experts):
            found |= {f"{name}.{own}": stack for own, stack in one.dense_weights().items()}
        elif isinstance(one, Sparse24Linear) and "gate_up_proj" not in name and ".experts." not in name:
            dense = one.dense_weight()
            found[f"{name}.weight"] = dense.T if one.transposed else dense
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


# The table ----------------------------------------------------------------------------------------


def table(page: str) -> str:
    """The page with the table as the models make it."""
    lines = [
        "|architecture|2:4 layers|2:4 bytes|fused blocks|loaded alike|generates alike|",
        "|---|---|---|---|---|---|",
        *(_line(name, case) for name, case in CASES.items()),
    ]
    found, count = _TABLE.subn("\n".join((r"\1" + lines[0], *lines[1:], r"\2")), page)
    assert count == 1, "the page has the marks of the table once"
    return found


def _line(name: str, case: Case) -> str:
    """The model is swapped, fused and swapped, saved, and loaded by transformers."""
    layers, share = len((report := to_sparse24(dense_model(case))).layers), report.sparse_share
    model = dense_model(case)
    fused = sum(block.fused for block in fuse_gated(model).values())
    to_sparse24(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = case.auto.from_pretrained(folder, dtype="auto")
    state, wanted = loaded.state_dict(), model.state_dict()
    alike = state.keys() == wanted.keys() and torch.equal(result(loaded, case), result(model, case))
    alike = alike and all(torch.equal(bits(state[key]), bits(one)) for key, one in wanted.items())
    generates = "-"
    if model.can_generate():
        generates = _word(torch.equal(_generated(loaded, case), _generated(model, case)))
    return f"|{name}|{layers}|{share:.0%}|{fused}|{_word(alike)}|{generates}|"


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


def _generated(model: Any, case: Case) -> torch.Tensor:
    """Eight tokens, the likeliest each."""
    given = inputs(case)
    given.pop("decoder_input_ids", None)
    found: torch.Tensor = model.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert found.shape[1] >= 8
    return found


if __name__ == "__main__":
    PAGE.write_text(table(PAGE.read_text()))
