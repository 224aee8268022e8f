"""The op ``bmm``: batches of rows, each multiplied by a 2:4 weight of its own.

A weight is that of all batches, stacked to [B*M, K], canonical or packed as elements.py describes, or
canonical and quantized. x is [B, N, K], a bias [B, M], or [M] for all batches, and a residual [B, N, M]. A
scale has one element, or one for each row of all batches. Batches of one weight are a product of ``linear``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import InvalidProblemError
from .gemm_call import Call, Kind
from .gemm_ops import autocast_of
from .product_op import ProductOp

_VECTOR = 16
"""Strides of x must be multiples of this number of bytes."""


class Batched(Kind):
    """A product for each batch of x."""

    stacked = "batches"

    def weight_count(self, call: Call) -> Any:
        x = call.x
        if x.dim() != 3 or x.shape[0] < 1:
            raise InvalidProblemError(f"x: expected batches [B, N, K] with B from 1, got {list(x.shape)}")
        return x.shape[0]

    def fields(self, call: Call) -> dict[str, Any]:
        return {"n": call.x.shape[1]}

    def operands(self, call: Call) -> dict[str, Tensor | None]:
        """Scales and the bias are in batches, and lines are contiguous."""
        batches, bias = call.x.shape[0], call.bias

        def in_batches(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.numel() == 1:
                return tensor if tensor is None else tensor.reshape(1, 1).expand(batches, 1)
            return tensor.reshape(batches, -1).contiguous()

        if bias is not None:
            bias = bias.contiguous() if bias.dim() == 2 else bias.contiguous().expand(batches, -1)
        residual = call.residual if call.beta else None
        return {
            "x": _with_lines(call.x, _VECTOR),
            "bias": bias,
            "scale_x": in_batches(call.scale_x),
            "scale_w": in_batches(call.scale_w),
            "c": None if residual is None else _with_lines(residual, 1),
        }


def _with_lines(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor, copied unless its rows are contiguous and begin at multiples of ``alignment`` bytes."""
    batch, row, step = tensor.stride()
    aligned = (batch * tensor.element_size()) % alignment == (row * tensor.element_size()) % alignment == 0
    fits = step == 1 and row >= tensor.shape[2] and aligned
    return tensor if fits else tensor.contiguous()


_op = ProductOp(
    "bmm(Tensor x, Tensor weight, Tensor? meta, Tensor? bias=None, Tensor? scale_x=None, "
    "Tensor? scale_w=None, Tensor? residual=None, float beta=1.0, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="", Tensor? scales=None, int group=0) '
    "-> Tensor",
    Batched,
)


def _bmm(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    if 0 in (*x.shape[:2], weight.shape[0]):  # the result is empty, or the operands don't fit
        return _op.fake(x, weight, *others)
    return _op.kernel(x, weight, *others)


_op.define(_bmm, autocast=autocast_of(_op))
