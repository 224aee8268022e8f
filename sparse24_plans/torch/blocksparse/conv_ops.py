"""The ops ``torch.ops.sparse24.blocksparse_conv2d*``: convolution with a block-sparse filter, its gradients.

Images are [N, height, width, channels], contiguous: what ``channels_last`` tensors are in memory. ``layout``
and ``shape`` are those of the filter's Layout, as of the other ops. Where the device has no kernel for a
problem, and nothing is preferred, PyTorch convolves with the filter as a dense one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from ...blocksparse.plan import BlockSparseConv2dPlan
from ...errors import InvalidProblemError, UnsupportedError
from ..activations import epilogue_of
from ..elements import element_of
from ..gemm_ops import autocast_tensor
from ..library import define
from .dense import kept_blocks, to_dense
from .plan_dispatch import Operands, Problem, check_dims, fake_results, run

_ops: Any = torch.ops.sparse24
_IMAGES = "N, height, width, channels"


class Walk(NamedTuple):
    """How a filter goes over images."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Raises InvalidProblemError."""
        found = {name: tuple(map(int, pair)) for name, pair in self._asdict().items()}
        for name, pair in found.items():
            if len(pair) != 2:
                raise InvalidProblemError(f"{name}: expected two integers, got {list(pair)}")
        return found


def _problem(
    op: str,
    operands: Operands,
    size: Sequence[Any],
    shape: Sequence[int],
    walk: Walk,
    preference: str,
    **more: Any,
) -> tuple[Problem, Operands]:
    """``size``: N, height and width of the input. A graph is traced for its own height and width."""
    first = next(iter(operands))
    fields = {
        "op": op,
        "element": element_of(operands[first].dtype, first),
        "height": int(size[1]),
        "width": int(size[2]),
        **walk.fields(),
        **more,
    }
    return Problem(BlockSparseConv2dPlan, tuple(shape), {"batch": size[0]}, fields, preference), operands


def _run(problem: Problem, operands: Operands, layout: Tensor) -> Tensor:
    try:
        return run(problem, operands, layout)[0]
    except UnsupportedError:
        if problem.preference:  # which PyTorch's own wouldn't keep
            raise
        return _dense(problem, operands, layout)


# Without a kernel -----------------------------------------------------------------------------------


def filter_of(values: Tensor, layout: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """``values`` [1, blocks, block, block] as a dense filter [K, C, R, S], zero elsewhere; differentiable."""
    block, (rows, columns) = shape[3], kernel
    tiles: Tensor = to_dense(values, layout, shape)[0, 0].unflatten(1, (-1, rows, columns, block))
    return tiles.permute(0, 1, 4, 2, 3).flatten(1, 2)


def values_of_filter(filter: Tensor, layout: Tensor, shape: Sequence[int]) -> Tensor:
    """The kept blocks [1, blocks, block, block] of a dense filter [K, C, R, S]; the others are dropped."""
    tiles: Tensor = filter.unflatten(1, (-1, shape[3])).permute(0, 1, 3, 4, 2)
    return kept_blocks(tiles.flatten(1)[None, None], layout, shape)


def _dense(problem: Problem, operands: Operands, layout: Tensor) -> Tensor:
    """By PyTorch, with the filter as a dense one."""
    fields, shape = problem.fields, problem.shape
    images = {
        name: one.permute(0, 3, 1, 2) for name, one in operands.items() if one.dim() == 4 and name != "filter"
    }
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


# The convolution ------------------------------------------------------------------------------------


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
) -> tuple[Problem, Operands]:
    check_dims(x, "x", _IMAGES)
    operands = {"x": x, "filter": filter} | ({} if bias is None else {"bias": bias})
    more = {
        "epilogue": epilogue_of("none", bias is not None),
        "bias_element": None if bias is None else element_of(bias.dtype, "bias"),
    }
    walk = Walk(kernel, stride, padding, dilation)
    return _problem("forward", operands, x.shape[:3], shape, walk, preference, **more)


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
) -> tuple[Problem, Operands]:
    check_dims(dy, "dy", _IMAGES)
    if len(size) != 2:
        raise InvalidProblemError(f"size: expected height and width, got {list(size)}")
    walk = Walk(kernel, stride, padding, dilation)
    whole = dy.shape[0], *size
    return _problem("dgrad", {"dy": dy, "filter": filter}, whole, shape, walk, preference)


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
) -> tuple[Problem, Operands]:
    check_dims(x, "x", _IMAGES)
    walk = Walk(kernel, stride, padding, dilation)
    return _problem("wgrad", {"x": x, "dy": dy}, x.shape[:3], shape, walk, preference)


def _kernel_of(describe: Any) -> Any:
    def kernel(first: Tensor, second: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        problem, operands = describe(first, second, layout, *args, **kwargs)
        return _run(problem, operands, layout)

    return kernel


def _fake_of(describe: Any) -> Any:
    def fake(first: Tensor, second: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        problem, operands = describe(first, second, layout, *args, **kwargs)
        return fake_results(problem, operands, layout)[0]

    return fake


# Gradients: each op is linear in both operands, and the other two are its gradients ------------------


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, filter, layout, ctx.shape, *ctx.walk = inputs[:8]
    bias, ctx.preference = inputs[8:]
    needs_x, needs_filter = ctx.needs_input_grad[:2]
    ctx.size = x.shape[1:3]
    ctx.save_for_backward(x if needs_filter else None, filter if needs_x else None, layout, bias)
    ctx.dtype = filter.dtype


def _forward_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, filter, layout, bias = ctx.saved_tensors
    dx = dfilter = d_bias = None
    d = dy.to(ctx.dtype)
    if ctx.needs_input_grad[0]:
        dx = _ops.blocksparse_conv2d_input(
            d, filter, layout, ctx.shape, ctx.size, *ctx.walk, preference=ctx.preference
        )
    if ctx.needs_input_grad[1]:
        dfilter = _ops.blocksparse_conv2d_filter(
            x, d, layout, ctx.shape, *ctx.walk, preference=ctx.preference
        )
    if bias is not None and ctx.needs_input_grad[8]:
        d_bias = dy.sum((0, 1, 2)).to(bias.dtype)
    return dx, dfilter, *[None] * 6, d_bias, None


def _input_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, filter, layout, ctx.shape, _, *ctx.walk = inputs[:9]
    ctx.preference = inputs[9]
    ctx.save_for_backward(dy, filter, layout)


def _input_backward(ctx: Any, ddx: Tensor) -> tuple[Any, ...]:
    dy, filter, layout = ctx.saved_tensors
    ddy = dfilter = None
    if ctx.needs_input_grad[0]:
        ddy = _ops.blocksparse_conv2d(ddx, filter, layout, ctx.shape, *ctx.walk, preference=ctx.preference)
    if ctx.needs_input_grad[1]:
        dfilter = _ops.blocksparse_conv2d_filter(
            ddx, dy, layout, ctx.shape, *ctx.walk, preference=ctx.preference
        )
    return ddy, dfilter, *[None] * 8


def _filter_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dy, layout, ctx.shape, *ctx.walk = inputs[:8]
    ctx.preference = inputs[8]
    ctx.size = x.shape[1:3]
    ctx.save_for_backward(x, dy, layout)


def _filter_backward(ctx: Any, dd: Tensor) -> tuple[Any, ...]:
    x, dy, layout = ctx.saved_tensors
    dx = ddy = None
    if ctx.needs_input_grad[0]:
        dx = _ops.blocksparse_conv2d_input(
            dy, dd, layout, ctx.shape, ctx.size, *ctx.walk, preference=ctx.preference
        )
    if ctx.needs_input_grad[1]:
        ddy = _ops.blocksparse_conv2d(x, dd, layout, ctx.shape, *ctx.walk, preference=ctx.preference)
    return dx, ddy, *[None] * 7


def _autocast(
    wanted: torch.dtype, x: Tensor, filter: Tensor, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    at = 6  # of the bias, behind x and filter
    if len(args) > at:
        args = (*args[:at], autocast_tensor(args[at], wanted), *args[at + 1 :])
    elif "bias" in kwargs:
        kwargs = kwargs | {"bias": autocast_tensor(kwargs["bias"], wanted)}
    return (autocast_tensor(x, wanted), autocast_tensor(filter, wanted), *args), kwargs


_WALK = "int[] kernel, int[] stride, int[] padding, int[] dilation"

define(
    f"blocksparse_conv2d(Tensor x, Tensor filter, Tensor layout, int[] shape, {_WALK}, Tensor? bias=None, "
    'str preference="") -> Tensor',
    _kernel_of(_forward),
    _fake_of(_forward),
    backward=_forward_backward,
    setup_context=_forward_context,
    autocast=_autocast,
)
define(
    f"blocksparse_conv2d_input(Tensor dy, Tensor filter, Tensor layout, int[] shape, int[] size, {_WALK}, "
    'str preference="") -> Tensor',
    _kernel_of(_input_gradient),
    _fake_of(_input_gradient),
    backward=_input_backward,
    setup_context=_input_context,
)
define(
    f"blocksparse_conv2d_filter(Tensor x, Tensor dy, Tensor layout, int[] shape, {_WALK}, "
    'str preference="") -> Tensor',
    _kernel_of(_filter_gradient),
    _fake_of(_filter_gradient),
    backward=_filter_backward,
    setup_context=_filter_context,
)
