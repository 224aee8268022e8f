"""The ops that multiply by a 2:4 weight: linear, linear_out, scaled_linear, weight_only_linear, dgrad and mm.

docs/pytorch.md says what each takes and gives. A weight is canonical (``weight`` and ``meta``) or packed
(``weight`` alone, with ``m``), as elements.py describes. Results are contiguous. Ops raise the package's
errors before they write anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError, UnsupportedError
from ..vocab import FP8, ElementKind
from . import activations, gemm_dispatch
from .elements import element_of
from .gemm_call import Call, fake_result
from .gemm_dispatch import linear_out_call, mm_call
from .library import define
from .prepare_ops import kept_values
from .product_op import ProductOp

_ops: Any = torch.ops.sparse24


def _fake_linear_out(x: Tensor, weight: Tensor, meta: Any, bias: Any, out: Tensor, *options: Any) -> None:
    wanted = fake_result(linear_out_call(x, weight, meta, bias, out, *options))
    if out.shape != wanted.shape:
        raise InvalidProblemError(f"out: expected {list(wanted.shape)}, got {list(out.shape)}")


def _fake_mm(*args: Any, **kwargs: Any) -> Tensor:
    return fake_result(mm_call(*args, **kwargs))


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _weight_gradient(ctx: Any, dy: Tensor, x: Tensor, values: Tensor, meta: Tensor | None) -> Tensor | None:
    """The gradient of the kept values: dY^T X at their positions."""
    if not ctx.needs_input_grad[ctx.weight_at]:
        return None
    if meta is None:
        raise UnsupportedError("weight: a packed weight has no gradient; train the canonical values")
    dense = torch.mm(_rows(dy).t().to(values.dtype), _rows(x))
    return kept_values(dense, meta)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, meta, bias, ctx.m, ctx.activation, ctx.out_dtype, ctx.preference, residual, ctx.beta = inputs
    ctx.weight_at, is_activated = 1, ctx.activation != "none"
    needed = ctx.needs_input_grad[1] or is_activated
    ctx.width, ctx.x_dtype = x.shape[-1], x.dtype
    ctx.residual = None if residual is None else (residual.shape, residual.dtype)
    ctx.save_for_backward(x if needed else None, weight, meta, bias, residual if is_activated else None)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, meta, bias, residual = ctx.saved_tensors
    if ctx.activation != "none":  # the activation's argument is computed again rather than kept
        options = {"out_dtype": ctx.out_dtype, "preference": ctx.preference, "beta": ctx.beta}
        before = _ops.linear(x, weight, meta, bias, ctx.m, residual=residual, **options)
        dy = activations.GRADIENTS[ctx.activation](dy, before)
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _ops.dgrad(dy.to(weight.dtype), weight, meta, ctx.m, ctx.width)
    dw = _weight_gradient(ctx, dy, x, weight, meta)
    db = None
    if bias is not None and ctx.needs_input_grad[3]:
        db = _rows(dy).sum(0).to(bias.dtype)
    dr = None
    if ctx.residual is not None and ctx.needs_input_grad[8]:
        shape, dtype = ctx.residual
        dr = dy.new_zeros(shape) if ctx.beta == 0 else dy if ctx.beta == 1 else dy * ctx.beta
        dr = dr.to(dtype)
    return dx, dw, None, db, None, None, None, None, dr, None


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


def _weight_only_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, meta, scales, bias, ctx.group, ctx.activation, ctx.out_dtype, ctx.preference = inputs[:9]
    residual = inputs[-1]
    is_activated = ctx.activation != "none"
    ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
    kept = (x, residual) if is_activated else (None, None)
    ctx.save_for_backward(*kept, weight, meta, scales, bias)


def _weight_only_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, residual, values, meta, scales, bias = ctx.saved_tensors
    if meta is None:
        raise UnsupportedError(
            "weight: expected stored values, meta and scales for gradients, got a packed weight"
        )
    if ctx.activation != "none":  # the activation's argument is computed again rather than kept
        options = {"out_dtype": ctx.out_dtype, "preference": ctx.preference}
        before = _ops.weight_only_linear(
            x, values, meta, scales, bias, ctx.group, residual=residual, **options
        )
        dy = activations.GRADIENTS[ctx.activation](dy, before)
    dx = db = dr = None
    if ctx.needs_input_grad[0]:
        dx = _ops.weight_only_dgrad(dy.to(ctx.x_dtype), values, meta, scales, ctx.group)
    if bias is not None and ctx.needs_input_grad[4]:
        db = _rows(dy).sum(0).to(bias.dtype)
    if ctx.residual_dtype is not None and ctx.needs_input_grad[-1]:
        dr = dy.to(ctx.residual_dtype)
    return dx, None, None, None, db, *[None] * 6, dr


def autocast_tensor(tensor: Any, dtype: torch.dtype) -> Any:
    """The tensor as autocast converts it: only floating point of 16 bits or more changes."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.element_size() > 1
    return tensor.to(dtype) if is_float else tensor


def autocast_rule(bias_at: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """An autocast rule for two operands and a bias, the op's argument at ``bias_at``."""

    def rule(wanted: torch.dtype, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cast = (0, 1, bias_at)
        args = tuple(autocast_tensor(one, wanted) if at in cast else one for at, one in enumerate(args))
        if "bias" in kwargs:
            kwargs = kwargs | {"bias": autocast_tensor(kwargs["bias"], wanted)}
        return args, kwargs

    return rule


def in_one_dtype(
    wanted: torch.dtype,
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None,
    bias: Tensor | None = None,
    scales: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Any]:
    """x, weight and bias in one dtype: autocast's for a canonical float32 weight, else the weight's.

    ``scales`` is the dtype of a quantized weight's scales, which is the weight's if it has 16 bits. With
    float32 scales the weight takes any x of 16 bits. A weight of 8 bits without ``scales`` changes nothing.
    """
    if scales is not None:
        known = scales if scales.itemsize == 2 else x.dtype
        dtype = known if known.itemsize == 2 else wanted
    elif weight.element_size() == 1:
        return x, weight, bias
    else:
        if weight.dtype == torch.float32 and meta is not None:
            weight = weight.to(wanted)
        dtype = weight.dtype
    return autocast_tensor(x, dtype), weight, autocast_tensor(bias, dtype)


def autocast_of(op: ProductOp) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """An autocast rule for an op: x, weight and bias come in one dtype."""

    def rule(wanted: torch.dtype, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = op.named(*args, **kwargs)
        scales = given.get("scales")
        scale_dtype = given.get("scale_dtype") if scales is None else scales.dtype
        of_one = in_one_dtype(
            wanted, given["x"], given["weight"], given.get("meta"), given.get("bias"), scale_dtype
        )
        cast = dict(zip(("x", "weight", "bias"), of_one, strict=True))
        return tuple(cast.get(name, one) for name, one in zip(op.names, args, strict=False)), kwargs

    return rule


def _linear_out_autocast(
    wanted: torch.dtype, x: Tensor, weight: Tensor, meta: Any, bias: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, weight, bias = in_one_dtype(wanted, x, weight, meta, bias)
    return (x, weight, meta, bias, *args), kwargs


def _mm_autocast(
    wanted: torch.dtype, weight: Tensor, meta: Any, b: Tensor, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    b, weight, _ = in_one_dtype(wanted, b, weight, meta)
    return (weight, meta, b, *args), kwargs


def _scaled(call: Call) -> Call:
    """Raise InvalidProblemError for elements that have no scales."""
    if element_of(call.weight.dtype, "weight") not in (ElementKind.S8, *FP8):
        raise InvalidProblemError(
            f"weight: expected int8, float8_e4m3fn or float8_e5m2, got {call.weight.dtype}"
        )
    return call


def _weight_only(call: Call) -> Call:
    """Raise InvalidProblemError for a weight that is neither canonical nor packed."""
    is_packed = call.scale_dtype is not None
    if (call.scales is None) != is_packed or (call.meta is None) != is_packed:
        raise InvalidProblemError(
            "scales: expected meta and scales of stored values, or scale_dtype alone of a packed weight, got "
            f"meta {_named(call.meta)}, scales {_named(call.scales)} and scale_dtype {call.scale_dtype}"
        )
    return call


def _named(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


_OPTIONS = 'str activation="none", ScalarType? out_dtype=None, str preference=""'

LINEAR = ProductOp(
    "linear(Tensor x, Tensor weight, Tensor? meta=None, Tensor? bias=None, SymInt? m=None, "
    f"{_OPTIONS}, Tensor? residual=None, float beta=1.0) -> Tensor"
)
SCALED_LINEAR = ProductOp(
    "scaled_linear(Tensor x, Tensor weight, Tensor? meta, Tensor? scale_x=None, Tensor? scale_w=None, "
    f"Tensor? bias=None, SymInt? m=None, {_OPTIONS}, Tensor? residual=None) -> Tensor",
    completed=_scaled,
)
WEIGHT_ONLY_LINEAR = ProductOp(
    "weight_only_linear(Tensor x, Tensor weight, Tensor? meta, Tensor? scales, Tensor? bias=None, "
    f"int group=0, {_OPTIONS}, SymInt? m=None, ScalarType? scale_dtype=None, Tensor? residual=None) "
    "-> Tensor",
    completed=_weight_only,
)
_WEIGHT_ONLY_DGRAD = ProductOp(
    "weight_only_dgrad(Tensor dy, Tensor values, Tensor meta, Tensor scales, int group=0, "
    'str preference="") -> Tensor',
    dgrad=True,
)
_DGRAD = ProductOp(
    "dgrad(Tensor dy, Tensor weight, Tensor? meta=None, SymInt? m=None, SymInt? k=None, "
    'ScalarType? out_dtype=None, str preference="") -> Tensor',
    dgrad=True,
)

LINEAR.define(
    gemm_dispatch.linear,
    backward=_linear_backward,
    setup_context=_linear_context,
    autocast=autocast_of(LINEAR),
    call=LINEAR.call,
)
define(
    "linear_out(Tensor x, Tensor weight, Tensor? meta, Tensor? bias, Tensor(a!) out, SymInt? m=None, "
    'str activation="none", str preference="") -> ()',
    gemm_dispatch.linear_out,
    _fake_linear_out,
    autocast=_linear_out_autocast,
)
SCALED_LINEAR.define(call=SCALED_LINEAR.call)
WEIGHT_ONLY_LINEAR.define(
    backward=_weight_only_backward,
    setup_context=_weight_only_context,
    autocast=autocast_of(WEIGHT_ONLY_LINEAR),
    call=WEIGHT_ONLY_LINEAR.call,
)
_WEIGHT_ONLY_DGRAD.define()
_DGRAD.define(
    backward=_dgrad_backward,
    setup_context=_dgrad_context,
    autocast=autocast_of(_DGRAD),
    call=_DGRAD.call,
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
