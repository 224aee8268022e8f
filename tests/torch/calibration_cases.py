"""Small models, and inputs, that the tests of ``calibrate`` share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans.torch.conv1d import linear_of

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 96, "max_position_embeddings": 64}
LLAMA = {**SMALL, "num_key_value_heads": 2}
MODELS = {
    "BertModel": SMALL,
    "LlamaForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {
        **LLAMA,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "head_dim": 16,
    },
    "Gemma3ForCausalLM": {**LLAMA, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
    "GPT2LMHeadModel": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def transformer(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**MODELS[name])).eval()


def token_batches(count: int = 3, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return [{"input_ids": torch.randint(1, 128, (4, 24))} for _ in range(count)]


def stack(width: int = 32, depth: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*layers)


def inputs(width: int = 32, count: int = 4, seed: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(16, width) @ torch.randn(width, width) for _ in range(count)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def weight_of(model: nn.Module, name: str) -> torch.Tensor:
    """The weight [M, K] of a layer, or of a stack of experts."""
    if ".experts." in name:
        return model.get_parameter(name).flatten(0, 1)
    return linear_of(model.get_submodule(name)).weight


class Twice(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = self.blocks[index](x)
        return x
