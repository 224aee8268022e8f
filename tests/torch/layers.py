"""Layers of every kind for tests, and how to compare them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans.torch import Sparse24Linear, Sparse24QuantizedLinear, Sparse24WeightOnlyLinear

from .cases import DEVICE, randn

KINDS = {
    "plain": (Sparse24Linear, {}),
    "stored": (Sparse24WeightOnlyLinear, {"group": 32}),
    "quantized": (Sparse24QuantizedLinear, {}),
    "quantized by a given scale": (Sparse24QuantizedLinear, {"input_scale": 0.5}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def filled(kind: str) -> Sparse24Linear:
    torch.manual_seed(1)
    cls, options = KINDS[kind]
    return cls.from_linear(nn.Linear(64, 96, dtype=torch.bfloat16), **options)


def dense_layer(k: int = 64, m: int = 96, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(k, m, bias, device=DEVICE, dtype=dtype)


def state(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def same(one: nn.Module, other: nn.Module) -> bool:
    x = randn(5, one.in_features, dtype=one.state_dict()["weight.values24"].dtype)
    return torch.equal(one(x), other(x))
