"""The ops ``torch.ops.sparse24.*``. docs/pytorch.md has what each takes and gives.

Weights come canonical (``weight`` and ``meta``) or packed (``weight`` alone, with ``m``); see elements.py.
Every result is contiguous. Errors are those of the package, raised before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError, UnsupportedError
from ..prepare.descriptor import (
    MaskSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    TilePruneSparse24Descriptor,
)
from . import activations, gemm_dispatch, preparing
from .elements import weight_sizes
from .gemm_dispatch import Call, dgrad_call, fake_result, linear_call, mm_call, product_of, scaled_call
from .library import define
from .preparing import kept_values

_ops: Any = torch.ops.sparse24


# Products: fakes ----------------------------------------------------------------------------------


def _fake_linear_out(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    m: int | None = None,
    activation: str = "none",
    preference: str = "",
) -> None:
    wanted = fake_result(linear_call(x, weight, meta, bias, m, activation, out.dtype, preference))
    if out.shape != wanted.shape:
        raise InvalidProblemError(f"out: expected {list(wanted.shape)}, got {list(out.shape)}")


def _fake_of(call: Callable[..., Call]) -> Callable[..., Tensor]:
    def fake(*args: Any, **kwargs: Any) -> Tensor:
        return fake_result(call(*args, **kwargs))

    return fake


def _fake_mm(
    weight: Tensor,
    meta: Tensor | None,
    b: Tensor,
    m: int | None = None,
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    may_transpose: bool = False,
) -> Tensor:
    return fake_result(mm_call(weight, meta, b, m, out_dtype, preference))


# Products: gradients ------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(ctx: Any, dy: Tensor, x: Tensor, values: Tensor, meta: Tensor | None) -> Tensor | None:
    """Of the kept values: the dense product dY^T X, at their positions. Pruned cells get none."""
    if not ctx.needs_input_grad[ctx.weight_at]:
        return None
    if meta is None:
        raise UnsupportedError("weight: a packed weight has no gradient; train the canonical values")
    dense = torch.mm(_rows(dy).t().to(values.dtype), _rows(x))
    return kept_values(dense, meta)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, meta, bias, ctx.m, ctx.activation, ctx.out_dtype, ctx.preference = inputs
    ctx.weight_at = 1
    needed = ctx.needs_input_grad[1] or ctx.activation != "none"
    ctx.width, ctx.x_dtype = x.shape[-1], x.dtype
    ctx.save_for_backward(x if needed else None, weight, meta, bias)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, meta, bias = ctx.saved_tensors
    if ctx.activation != "none":  # its argument is computed again rather than kept
        before = _ops.linear(x, weight, meta, bias, ctx.m, out_dtype=ctx.out_dtype, preference=ctx.preference)
        dy = activations.GRADIENTS[ctx.activation](dy, before)
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _ops.dgrad(dy.to(weight.dtype), weight, meta, ctx.m, ctx.width)
    dw = _weight_gradient(ctx, dy, x, weight, meta)
    db = None
    if bias is not None and ctx.needs_input_grad[3]:
        db = _rows(dy).sum(0).to(bias.dtype)
    return dx, dw, None, db, None, None, None, None


def _dgrad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, weight, meta, ctx.m, _, _, _ = inputs
    ctx.weight_at = 1
    ctx.rows = dy.shape[-1]
    ctx.save_for_backward(dy if ctx.needs_input_grad[1] else None, weight, meta)


def _dgrad_backward(ctx: Any, ddx: Tensor) -> tuple[Any, ...]:
    dy, weight, meta = ctx.saved_tensors
    back = (
        _ops.linear(ddx.to(weight.dtype), weight, meta, None, ctx.rows) if ctx.needs_input_grad[0] else None
    )
    dw = None if dy is None else _weight_gradient(ctx, dy, ddx.to(weight.dtype), weight, meta)
    return back, dw, None, None, None, None, None


def _mm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, meta, b, ctx.m = inputs[:4]
    ctx.weight_at = 0
    ctx.width = b.shape[0]
    ctx.save_for_backward(weight, meta, b if ctx.needs_input_grad[0] else None)


def _mm_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    weight, meta, b = ctx.saved_tensors
    db = None
    if ctx.needs_input_grad[2]:
        db = _ops.dgrad(dy.t().to(weight.dtype), weight, meta, ctx.m, ctx.width).t()
    dw = None if b is None else _weight_gradient(ctx, dy.t(), b.t(), weight, meta)
    return dw, None, db, None, None, None, None


# Autocast -----------------------------------------------------------------------------------------


def autocast_tensor(tensor: Any, dtype: torch.dtype) -> Any:
    """What autocast moves: floating point of 16 bits and more."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.element_size() > 1
    return tensor.to(dtype) if is_float else tensor


def _to_one_dtype(
    wanted: torch.dtype, x: Tensor, weight: Tensor, meta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One dtype for both: a canonical float32 weight goes to autocast's, else x to the weight's."""
    if weight.dtype == torch.float32 and meta is not None:
        weight = weight.to(wanted)
    return (autocast_tensor(x, weight.dtype) if weight.element_size() > 1 else x), weight


def _linear_autocast(
    wanted: torch.dtype,
    x: Tensor,
    weight: Tensor,
    meta: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, weight = _to_one_dtype(wanted, x, weight, meta)
    return (x, weight, meta, autocast_tensor(bias, weight.dtype), *args), kwargs


def _dgrad_autocast(
    wanted: torch.dtype, dy: Tensor, weight: Tensor, meta: Any = None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dy, weight = _to_one_dtype(wanted, dy, weight, meta)
    return (dy, weight, meta, *args), kwargs


def _mm_autocast(
    wanted: torch.dtype, weight: Tensor, meta: Any, b: Tensor, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    b, weight = _to_one_dtype(wanted, b, weight, meta)
    return (weight, meta, b, *args), kwargs


# Preparing: fakes and gradients -------------------------------------------------------------------


def _check(kind: Any, fields: dict[str, Any]) -> None:
    """Raise what the real op would, where the sizes are known."""
    if all(isinstance(value, (int, str)) for value in fields.values()):
        preparing.describe(kind, **fields)


def _fake_prune(dense: Tensor, scores: Tensor | None = None) -> Tensor:
    fields = preparing.matrix_fields(dense) | preparing.scores_field(dense, scores)
    _check(PruneSparse24Descriptor, fields)
    return torch.empty_like(dense, memory_format=torch.contiguous_format)


def _fake_compress(dense: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    fields = preparing.matrix_fields(dense) | preparing.scores_field(dense, scores)
    _check(PruneCompressSparse24Descriptor, fields)
    return preparing.empty_canonical(dense, *dense.shape)


def _fake_decompress(values: Tensor, meta: Tensor) -> Tensor:
    return values.new_empty(weight_sizes(values, meta, None, None))


def _fake_pack(values: Tensor, meta: Tensor) -> Tensor:
    m, k = weight_sizes(values, meta, None, None)
    return values.new_empty(preparing.packed_shape(values, m, k))


def _fake_unpack(packed: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    weight_sizes(packed, None, m, k)
    return preparing.empty_canonical(packed, m, k)


def _fake_tile_prune(dense: Tensor, rule: str = "greedy_magnitude") -> tuple[Tensor, ...]:
    _check(TilePruneSparse24Descriptor, preparing.tile_fields(dense, rule))
    return preparing.empty_tiles(dense)


def _fake_apply_mask(dense: Tensor, mask: Tensor) -> Tensor:
    _check(MaskSparse24Descriptor, preparing.mask_fields(dense, mask))
    return torch.empty_like(dense, memory_format=torch.contiguous_format)


def _prune_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, scores = inputs
    ctx.save_for_backward(dense, scores)


def _prune_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dense, scores = ctx.saved_tensors
    _, meta = _ops.prune_compress(dense.detach(), scores)
    return _ops.decompress(kept_values(grad, meta), meta), None


def _compress_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.inputs = len(inputs)
    ctx.save_for_backward(output[1])


def _compress_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    (meta,) = ctx.saved_tensors
    return (_ops.decompress(grad.contiguous(), meta), *[None] * (ctx.inputs - 1))


def _decompress_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _decompress_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (meta,) = ctx.saved_tensors
    return kept_values(grad, meta), None


def _tile_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[3], output[4])


def _tile_backward(ctx: Any, grad: Any, _: Any, grad_t: Any, __: Any, ___: Any) -> tuple[Any, ...]:
    meta, meta_t, mask = ctx.saved_tensors
    parts = []
    if grad is not None:
        parts.append(_ops.decompress(grad.contiguous(), meta))
    if grad_t is not None:
        parts.append(_ops.decompress(grad_t.contiguous(), meta_t).t())
    return (_ops.apply_mask(sum(parts), mask) if parts else None), None  # spare slots hold no cell


def _mask_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _mask_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return _ops.apply_mask(grad.contiguous(), mask), None


# The ops ------------------------------------------------------------------------------------------

_OPTIONS = 'str activation="none", ScalarType? out_dtype=None, str preference=""'

define(
    "linear(Tensor x, Tensor weight, Tensor? meta=None, Tensor? bias=None, SymInt? m=None, "
    f"{_OPTIONS}) -> Tensor",
    gemm_dispatch.linear,
    _fake_of(linear_call),
    backward=_linear_backward,
    setup_context=_linear_context,
    autocast=_linear_autocast,
    call=linear_call,
)
define(
    "linear_out(Tensor x, Tensor weight, Tensor? meta, Tensor? bias, Tensor(a!) out, SymInt? m=None, "
    'str activation="none", str preference="") -> ()',
    gemm_dispatch.linear_out,
    _fake_linear_out,
)
define(
    "scaled_linear(Tensor x, Tensor weight, Tensor? meta, Tensor? scale_x=None, Tensor? scale_w=None, "
    f"Tensor? bias=None, SymInt? m=None, {_OPTIONS}) -> Tensor",
    product_of(scaled_call),
    _fake_of(scaled_call),
    call=scaled_call,
)
define(
    "dgrad(Tensor dy, Tensor weight, Tensor? meta=None, SymInt? m=None, SymInt? k=None, "
    'ScalarType? out_dtype=None, str preference="") -> Tensor',
    product_of(dgrad_call),
    _fake_of(dgrad_call),
    backward=_dgrad_backward,
    setup_context=_dgrad_context,
    autocast=_dgrad_autocast,
    call=dgrad_call,
)
define(
    "mm(Tensor weight, Tensor? meta, Tensor b, SymInt? m=None, ScalarType? out_dtype=None, "
    'str preference="", bool may_transpose=False) -> Tensor',
    gemm_dispatch.mm,
    _fake_mm,
    backward=_mm_backward,
    setup_context=_mm_context,
    autocast=_mm_autocast,
)
define(
    "prune(Tensor dense, Tensor? scores=None) -> Tensor",
    preparing.prune,
    _fake_prune,
    backward=_prune_backward,
    setup_context=_prune_context,
)
define(
    "compress(Tensor dense) -> (Tensor, Tensor)",
    preparing.compress,
    _fake_compress,
    backward=_compress_backward,
    setup_context=_compress_context,
)
define(
    "prune_compress(Tensor dense, Tensor? scores=None) -> (Tensor, Tensor)",
    preparing.prune_compress,
    _fake_compress,
    backward=_compress_backward,
    setup_context=_compress_context,
)
define(
    "decompress(Tensor values, Tensor meta) -> Tensor",
    preparing.decompress,
    _fake_decompress,
    backward=_decompress_backward,
    setup_context=_decompress_context,
)
define("pack(Tensor values, Tensor meta) -> Tensor", preparing.pack, _fake_pack)
define("unpack(Tensor packed, SymInt m, SymInt k) -> (Tensor, Tensor)", preparing.unpack, _fake_unpack)
define(
    'tile_prune(Tensor dense, str rule="greedy_magnitude") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    preparing.tile_prune,
    _fake_tile_prune,
    backward=_tile_backward,
    setup_context=_tile_context,
)
define(
    "apply_mask(Tensor dense, Tensor mask) -> Tensor",
    preparing.apply_mask,
    _fake_apply_mask,
    backward=_mask_backward,
    setup_context=_mask_context,
)
