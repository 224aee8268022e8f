"""Models whose layers the tests of ``to_sparse24`` swap, and those that it leaves dense."""

from __future__ import annotations

import torch
from torch import nn

from .cases import DEVICE


class Hooked(nn.Linear):
    """A class of its own: what it does beside, nobody knows."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 64)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        self.tied = nn.Linear(64, 32, bias=False)
        self.tied.weight = self.embed.weight
        self.own = Hooked(64, 8)
        self.wide = nn.Linear(64, 8, dtype=torch.float64)
        self.heard = nn.Linear(64, 8)
        self.heard.register_forward_hook(lambda *_: None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tied(self.body(self.embed(tokens)))


def model() -> Model:
    return Model().to(DEVICE)


class Experts(nn.Module):
    """Gated experts as transformers holds them: three of them, of 64 features and a width of 32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("gate_up_proj", (3, 64, 64)), ("down_proj", (3, 64, 32))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) / 8))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for place in range(top_k_index.shape[1]):
            index = top_k_index[:, place]
            gate, up = (self.gate_up_proj[index] @ hidden_states[..., None])[..., 0].chunk(2, -1)
            each = (self.down_proj[index] @ (self.act_fn(gate) * up)[..., None])[..., 0]
            result += top_k_weights[:, place, None] * each
        return result
