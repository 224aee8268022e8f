"""Linear layers of transformers: Conv1D, which holds its weight as [in, out], and nn.Linear's subclasses."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from .origin import note_origin, noted_origin

_KNOWN_SUBCLASSES = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Subclasses of nn.Linear that hold what it holds, and whose own forward computes what its forward does."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D itself, and no subclass. Doesn't import transformers."""
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and type(module) is getattr(home, "Conv1D", None)


def is_linear(module: nn.Module) -> bool:
    """Whether the module is an nn.Linear, also of a subclass, or a Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_swappable(module: nn.Module) -> bool:
    """Whether a Sparse24Linear can replace the module: an nn.Linear or a Conv1D, but no unknown subclass."""
    kind = type(module)
    is_known = f"{kind.__module__}.{kind.__qualname__}" in _KNOWN_SUBCLASSES
    return kind is nn.Linear or is_known or is_conv1d(module)


def linear_of(module: Any) -> nn.Linear:
    """An nn.Linear as it stands; a Conv1D as one with the same bias, and a transposed view of its weight."""
    if isinstance(module, nn.Linear):
        return module
    k, m = module.weight.shape
    linear = nn.Linear(k, m, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=module.weight.requires_grad)
    linear.bias = module.bias
    note_origin(linear, noted_origin(module))
    return linear.train(module.training)
