"""Stands in for the dense weight that a Sparse24Linear doesn't hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError


class NoDenseWeightError(UnsupportedError, AttributeError):
    """Code asked a Sparse24Linear's weight for something that only a tensor has. ``hasattr`` answers no."""


class LayerWeight:
    """Stands in for a linear layer's ``weight`` in code that reads its shape. It holds no dense matrix."""

    def __init__(self, layer: Any) -> None:
        object.__setattr__(self, "_layer", layer)

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]"""
        return torch.Size((self._layer.out_features, self._layer.in_features))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._layer.weight_dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._layer._weight.device
        return device

    @property
    def values24(self) -> Tensor:
        """The values [M, K/2] that a state_dict holds."""
        values: Tensor = self._layer.canonical()[0]
        return values

    @property
    def meta24(self) -> Tensor:
        """The metadata uint16 [M, K/8] that a state_dict holds."""
        meta: Tensor = self._layer.canonical()[1].view(torch.uint16)
        return meta

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be used as a tensor. PyTorch's fast paths skip weights with this method."""
        raise UnsupportedError(
            f"weight: expected a tensor for {getattr(func, '__name__', func)}, got a Sparse24Linear; "
            "call the layer, or take its dense_weight()"
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse what only a tensor has, so that code which changes the weight (PEFT's merge) says why."""
        raise NoDenseWeightError(
            f"weight.{name}: a Sparse24Linear holds no dense weight to read or change; take its "
            "dense_weight(). An adapter stays beside the layer, or is merged before the model is swapped"
        )

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse changes. They would be lost, because the layer makes a new object at each access."""
        raise NoDenseWeightError(
            f"weight.{name}: a Sparse24Linear holds no dense weight to change; change its values"
        )

    def __repr__(self) -> str:
        return f"LayerWeight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"
