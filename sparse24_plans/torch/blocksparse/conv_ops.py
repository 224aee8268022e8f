"""The ops blocksparse_conv2d, blocksparse_conv2d_input and blocksparse_conv2d_filter.

Images are [N, height, width, channels] and contiguous, which is how ``channels_last`` tensors lie in memory.
``layout`` and ``shape`` are the ``tables`` and ``sizes`` of the filter's Layout. If the device has no kernel
for a problem and the caller prefers nothing, PyTorch convolves with a dense filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from ...blocksparse.plan import BlockSparseConv2dPlan
from ...errors import InvalidProblemError, UnsupportedError
from ..activations import epilogue_of
from ..elements import element_of
from ..gemm_ops import autocast_rule
from ..library import define
from .layout_buffers import kept_blocks, to_dense
from .plan_dispatch import Operands, Problem, check_dims, fake_of, run

_ops: Any = torch.ops.sparse24
_IMAGES = "N, height, width, channels"
_WALK = ("kernel", "stride", "padding", "dilation")


def _problem(
    op: str,
    operands: Operands,
    size: Sequence[Any],
    layout: Tensor,
    shape: Sequence[int],
    walk: Sequence[Sequence[int]],
    preference: str,
    **more: Any,
) -> Problem:
    """``size`` is N, height and width of the input, ``walk`` the values of ``_WALK``.

    A graph is traced for one height and width. Raises InvalidProblemError.
    """
    walks = {name: tuple(map(int, pair)) for name, pair in zip(_WALK, walk, strict=True)}
    for name, pair in walks.items():
        if len(pair) != 2:
            raise InvalidProblemError(f"{name}: expected two integers, got {list(pair)}")
    name, first = next(iter(operands.items()))
    assert first is not None
    sizes, about = {"batch": size[0]}, {"op": op, "element": element_of(first.dtype, name)}
    fields = {**about, "height": int(size[1]), "width": int(size[2]), **walks, **more}
    return Problem(BlockSparseConv2dPlan, tuple(shape), sizes, fields, preference, operands, layout)


def _kernel_of(describe: Callable[..., Problem]) -> Callable[..., Tensor]:
    """The kernel of an op whose arguments ``describe`` turns into a Problem."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        problem = describe(*args, **kwargs)
        try:
            return run(problem)[0]
        except UnsupportedError:
            if problem.preference:  # PyTorch's convolution wouldn't respect it
                raise
            return _dense(problem)

    return kernel


# Without a kernel -----------------------------------------------------------------------------------


def filter_of(values: Tensor, layout: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """``values`` [1, blocks, block, block] as a dense filter [K, C, R, S] else zeros; differentiable."""
    block, (rows, columns) = shape[3], kernel
    tiles: Tensor = to_dense(values, layout, shape)[0, 0].unflatten(1, (-1, rows, columns, block))
    return tiles.permute(0, 1, 4, 2, 3).flatten(1, 2)


def values_of_filter(filter: Tensor, layout: Tensor, shape: Sequence[int]) -> Tensor:
    """The kept blocks [1, blocks, block, block] of a dense filter [K, C, R, S]; the others are dropped."""
    tiles: Tensor = filter.unflatten(1, (-1, shape[3])).permute(0, 1, 3, 4, 2)
    return kept_blocks(tiles.flatten(1)[None, None], layout, shape)


def _dense(problem: Problem) -> Tensor:
    """The result by PyTorch's convolution with a dense filter."""
    fields, shape, layout = problem.fields, problem.shape, problem.layout
    operands = {name: one for name, one in problem.operands.items() if one is not None}
    images = {name: operands[name].permute(0, 3, 1, 2) for name in ("x", "dy") if name in operands}
    walk = {name: fields[name] for name in ("stride", "padding", "dilation")}
    if fields["op"] == "wgrad":
        sides = shape[1], shape[2] // (fields["kernel"][0] * fields["kernel"][1]), *fields["kernel"]
        found = conv2d_weight(images["x"], sides, images["dy"], **walk)
        return values_of_filter(found, layout, shape).contiguous()
    dense = filter_of(operands["filter"], layout, shape, fields["kernel"])
    if fields["op"] == "dgrad":
        size = problem.sizes["batch"], dense.shape[1], fields["height"], fields["width"]
        found = conv2d_input(size, dense, images["dy"], **walk)
    else:
        bias = operands.get("bias")
        bias = None if bias is None else bias.to(dense.dtype)
        found = torch.nn.functional.conv2d(images["x"], dense, bias, **walk)
    result: Tensor = found.permute(0, 2, 3, 1).contiguous()
    return result


def _forward(
    x: Tensor,
    filter: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    bias: Tensor | None = None,
    preference: str = "",
) -> Problem:
    check_dims(x, "x", _IMAGES)
    operands = {"x": x, "filter": filter, "bias": bias}
    more = {
        "epilogue": epilogue_of("none", bias is not None),
        "bias_element": None if bias is None else element_of(bias.dtype, "bias"),
    }
    walk = kernel, stride, padding, dilation
    return _problem("forward", operands, x.shape[:3], layout, shape, walk, preference, **more)


def _input_gradient(
    dy: Tensor,
    filter: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    preference: str = "",
) -> Problem:
    check_dims(dy, "dy", _IMAGES)
    if len(size) != 2:
        raise InvalidProblemError(f"size: expected height and width, got {list(size)}")
    walk, whole = (kernel, stride, padding, dilation), (dy.shape[0], *size)
    return _problem("dgrad", {"dy": dy, "filter": filter}, whole, layout, shape, walk, preference)


def _filter_gradient(
    x: Tensor,
    dy: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    preference: str = "",
) -> Problem:
    check_dims(x, "x", _IMAGES)
    walk = kernel, stride, padding, dilation
    return _problem("wgrad", {"x": x, "dy": dy}, x.shape[:3], layout, shape, walk, preference)


# Gradients: each op is linear in both operands, so the other two ops are its gradients ---------------


def _gradient(ctx: Any, at: int, op: Any, one: Tensor, other: Tensor, layout: Tensor, *size: Any) -> Any:
    """The gradient of the argument ``at``, by another of the ops; None if it isn't needed."""
    if not ctx.needs_input_grad[at]:
        return None
    return op(one, other, layout, ctx.shape, *size, *ctx.walk, preference=ctx.preference)


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, filter, layout, ctx.shape, *ctx.walk = inputs[:8]
    bias, ctx.preference = inputs[8:]
    needs_x, needs_filter = ctx.needs_input_grad[:2]
    ctx.size = x.shape[1:3]
    ctx.save_for_backward(x if needs_filter else None, filter if needs_x else None, layout, bias)
    ctx.dtype = filter.dtype


def _forward_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, filter, layout, bias = ctx.saved_tensors
    d, d_bias = dy.to(ctx.dtype), None
    dx = _gradient(ctx, 0, _ops.blocksparse_conv2d_input, d, filter, layout, ctx.size)
    dfilter = _gradient(ctx, 1, _ops.blocksparse_conv2d_filter, x, d, layout)
    if bias is not None and ctx.needs_input_grad[8]:
        d_bias = dy.sum((0, 1, 2)).to(bias.dtype)
    return dx, dfilter, *[None] * 6, d_bias, None


def _input_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, filter, layout, ctx.shape, _, *ctx.walk = inputs[:9]
    ctx.preference = inputs[9]
    ctx.save_for_backward(dy, filter, layout)


def _input_backward(ctx: Any, ddx: Tensor) -> tuple[Any, ...]:
    dy, filter, layout = ctx.saved_tensors
    ddy = _gradient(ctx, 0, _ops.blocksparse_conv2d, ddx, filter, layout)
    dfilter = _gradient(ctx, 1, _ops.blocksparse_conv2d_filter, ddx, dy, layout)
    return ddy, dfilter, *[None] * 8


def _filter_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dy, layout, ctx.shape, *ctx.walk = inputs[:8]
    ctx.preference = inputs[8]
    ctx.size = x.shape[1:3]
    ctx.save_for_backward(x, dy, layout)


def _filter_backward(ctx: Any, dd: Tensor) -> tuple[Any, ...]:
    x, dy, layout = ctx.saved_tensors
    dx = _gradient(ctx, 0, _ops.blocksparse_conv2d_input, dy, dd, layout, ctx.size)
    ddy = _gradient(ctx, 1, _ops.blocksparse_conv2d, x, dd, layout)
    return dx, ddy, *[None] * 7


_SCHEMA = ", ".join(f"int[] {name}" for name in _WALK)

define(
    f"blocksparse_conv2d(Tensor x, Tensor filter, Tensor layout, int[] shape, {_SCHEMA}, Tensor? bias=None, "
    'str preference="") -> Tensor',
    _kernel_of(_forward),
    fake_of(_forward),
    backward=_forward_backward,
    setup_context=_forward_context,
    autocast=autocast_rule(8),
)
define(
    f"blocksparse_conv2d_input(Tensor dy, Tensor filter, Tensor layout, int[] shape, int[] size, {_SCHEMA}, "
    'str preference="") -> Tensor',
    _kernel_of(_input_gradient),
    fake_of(_input_gradient),
    backward=_input_backward,
    setup_context=_input_context,
)
define(
    f"blocksparse_conv2d_filter(Tensor x, Tensor dy, Tensor layout, int[] shape, {_SCHEMA}, "
    'str preference="") -> Tensor',
    _kernel_of(_filter_gradient),
    fake_of(_filter_gradient),
    backward=_filter_backward,
    setup_context=_filter_context,
)
