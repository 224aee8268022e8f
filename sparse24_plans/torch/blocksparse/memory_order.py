"""Torch-Blocksparse's modules that don't multiply: ``Permute``, ``ReLU`` and ``BatchNorm2d``.

Images are [N, C, height, width]; an order such as ``CHWN`` says how they lie in memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidProblemError, check_choice, shown
from .plan_dispatch import check_dims

_DIMS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}
"""Dimensions in their order in memory, the outermost first."""


def checked_order(name: str, order: str) -> str:
    """``order``, or InvalidProblemError naming the argument."""
    check_choice(name, order, _DIMS)
    return order


def permuted(x: Tensor, order: str) -> Tensor:
    """x with its shape and values, in memory as ``order`` says; x itself if it lies so."""
    check_dims(x, "x", "N, C, height, width")
    dims = _DIMS[order]
    return x.permute(dims).contiguous().permute([dims.index(one) for one in range(4)])


def one_element(name: str, given: Any) -> Tensor:
    """A number for all images, or InvalidProblemError naming it: more would be broadcast over columns."""
    if not isinstance(given, Tensor) or given.numel() != 1:
        raise InvalidProblemError(f"{name}: expected a tensor of one element, got {shown(given)}")
    return given.reshape(())


class Permute(nn.Module):
    """Changes how images lie in memory, not their shape. ``in_order`` is read off the tensor itself."""

    def __init__(self, in_order: str, out_order: str) -> None:
        super().__init__()
        self.in_order = checked_order("in_order", in_order)
        self.out_order = checked_order("out_order", out_order)

    def forward(self, x: Tensor) -> Tensor:
        return permuted(x, self.out_order)


class PermuteFunction:
    """Torch-Blocksparse's ``_permute``, which is called by ``apply``."""

    @staticmethod
    def strides(N: int, C: int, H: int, W: int, order: str) -> list[int]:  # noqa: N803 - Torch-Blocksparse's
        """The strides of images [N, C, H, W] that lie in memory in this order."""
        dims, sides = _DIMS[checked_order("order", order)], (N, C, H, W)
        inner = [dims[dims.index(dim) + 1 :] for dim in range(4)]
        return [math.prod(sides[one] for one in each) for each in inner]

    @staticmethod
    def apply(x: Tensor, in_order: str, out_order: str) -> Tensor:
        return Permute(in_order, out_order).forward(x)


class ReLU(nn.Module):
    """max(0, scale * x + bias + residual), with ``scale`` and ``bias`` of one element."""

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return torch.relu(x * one_element("scale", scale) + one_element("bias", bias) + residual)


class BatchNorm2d(nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, whose result lies in memory with images adjacent (``CHWN``)."""

    def forward(self, input: Tensor) -> Tensor:
        normal: Tensor = super().forward(input)
        return permuted(normal, "CHWN")
