"""The op ``bmm``: batches of rows, each multiplied by a 2:4 weight of its own.

A weight is that of all batches, stacked to [B*M, K], canonical or packed as elements.py describes, or
canonical and quantized. Batches of one weight are a product of ``linear``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from . import stacked
from .elements import DTYPE_OF, weight_sizes
from .gemm_call import beta_of, check_operands, fields_of, quantization_of, residual_element
from .gemm_ops import stacked_autocast
from .library import define
from .plan_cache import descriptor, preference_of

_VECTOR = 16
"""Strides of x must be multiples of this number of bytes."""


class Batched(NamedTuple):
    """The operands and options of a batched product, in the order of the op's arguments."""

    x: Tensor
    """X [B, N, K]."""
    weight: Tensor
    meta: Tensor | None
    bias: Tensor | None = None
    """[B, M], or [M] for all batches."""
    scale_x: Tensor | None = None
    """One element, or one for each row of all batches."""
    scale_w: Tensor | None = None
    residual: Tensor | None = None
    """Tensor [B, N, M] that is added to the product before the bias, ``beta`` times."""
    beta: float = 1.0
    m: int | None = None
    """Rows of all weights, of a packed weight."""
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    preference: str = ""
    scales: Tensor | None = None
    """Scales of a quantized weight's groups of columns."""
    group: int = 0
    """Columns of a quantized weight that share a scale; 0: the whole row."""


def _sizes(call: Batched) -> tuple[int, int, int]:
    """B, M and K. Raises InvalidProblemError if the operands don't fit together."""
    x = call.x
    if x.dim() != 3 or x.shape[0] < 1:
        raise InvalidProblemError(f"x: expected batches [B, N, K] with B from 1, got {list(x.shape)}")
    batches, n, width = x.shape
    by = quantization_of(call)
    rows, k = weight_sizes(call.weight, call.meta, call.m, width, by)
    if rows % batches:
        raise InvalidProblemError(f"weight: expected rows in {batches} batches of one size, got {rows} rows")
    m = rows // batches
    if call.bias is not None and tuple(call.bias.shape) not in ((batches, m), (m,)):
        raise InvalidProblemError(f"bias: expected [{batches}, {m}] or [{m}], got {list(call.bias.shape)}")
    if call.residual is not None and tuple(call.residual.shape) != (batches, n, m):
        raise InvalidProblemError(f"residual: expected {[batches, n, m]}, got {list(call.residual.shape)}")
    check_operands(call, by, batches * n, rows, "residual")
    return batches, m, k


def _describe(call: Batched, batches: int, n: int, m: int, k: int) -> GemmSparse24Descriptor:
    fields = fields_of(call)
    found: GemmSparse24Descriptor = descriptor(
        GemmSparse24Plan,
        n=n,
        m=m,
        k=k,
        beta=beta_of(call.residual, call.beta),
        c_element=residual_element(call.residual if call.beta else None, fields),
        batches=batches,
        **fields,
    )
    return found


def _operands(call: Batched) -> stacked.Operands:
    """The operands as kernels take them: scales and the bias in batches, lines contiguous."""
    x = call.x
    batches = x.shape[0]

    def in_batches(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if tensor.numel() == 1:
            return tensor.reshape(1, 1).expand(batches, 1)
        return tensor.reshape(batches, -1).contiguous()

    bias = call.bias
    if bias is not None:
        bias = bias.contiguous() if bias.dim() == 2 else bias.contiguous().expand(batches, -1)
    residual = call.residual if call.beta else None
    return stacked.given(
        x=_with_lines(x, _VECTOR),
        bias=bias,
        scale_x=in_batches(call.scale_x),
        scale_w=in_batches(call.scale_w),
        c=None if residual is None else _with_lines(residual, 1),
    )


def _with_lines(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor, copied unless its rows are contiguous and begin at multiples of ``alignment`` bytes."""
    batch, row, step = tensor.stride()
    aligned = (batch * tensor.element_size()) % alignment == (row * tensor.element_size()) % alignment == 0
    fits = step == 1 and row >= tensor.shape[2] and aligned
    return tensor if fits else tensor.contiguous()


def _checked(call: Batched) -> stacked.CheckedStacked:
    batches, m, k = _sizes(call)
    desc = _describe(call, batches, call.x.shape[1], m, k)
    return stacked.CheckedStacked(call, desc, (batches * m, k), _operands(call))


def _bmm(*args: Any, **kwargs: Any) -> Tensor:
    call = Batched(*args, **kwargs)
    if 0 in (*call.x.shape[:2], call.weight.shape[0]):  # the result is empty, or the operands don't fit
        return _fake_bmm(*args, **kwargs)
    return stacked.run(call, _operands, _checked)


def _fake_bmm(*args: Any, **kwargs: Any) -> Tensor:
    call = Batched(*args, **kwargs)
    preference_of(call.preference)
    batches, m, _ = _sizes(call)
    desc = _describe(call, 1, 1, 16, 8)  # any sizes do for the dtypes; x may have symbols
    outputs = m // 2 if desc.epilogue.is_gated else m
    return call.x.new_empty((batches, call.x.shape[1], outputs), dtype=DTYPE_OF[desc.out_element])


define(
    "bmm(Tensor x, Tensor weight, Tensor? meta, Tensor? bias=None, Tensor? scale_x=None, "
    "Tensor? scale_w=None, Tensor? residual=None, float beta=1.0, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="", Tensor? scales=None, int group=0) '
    "-> Tensor",
    _bmm,
    _fake_bmm,
    autocast=stacked_autocast(Batched),
)
