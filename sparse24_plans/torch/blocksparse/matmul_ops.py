"""The ops blocksparse_matmul, blocksparse_softmax and blocksparse_softmax_backward.

``layout`` and ``shape`` are a Layout's ``tables`` and ``sizes``. Kernels read from the tables which blocks
are kept and don't check them, so tables must come from a Layout. Results are contiguous. docs/blocksparse.md
is the guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...blocksparse.plan import BlockSparseMatmulPlan, BlockSparseSoftmaxPlan
from ...errors import InvalidProblemError, UnsupportedError
from ...vocab import InnerPattern
from ..activations import GRADIENTS, epilogue_of
from ..elements import element_of
from ..gemm_ops import autocast_rule
from ..library import define
from .layout_buffers import to_dense
from .plan_dispatch import Problem, check_dims, fake_of, kernel_of
from .rule_checks import check_mask_modes

_ops: Any = torch.ops.sparse24
_BLOCKS = "Z, blocks, block, block"


def _product(
    a: Tensor,
    b: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    op: str,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    metadata: Tensor | None = None,
    panels: Sequence[int] = (),
) -> Problem:
    """The problem of blocksparse_matmul. Raises InvalidProblemError."""
    if op not in ("sdd", "dsd", "dds"):
        raise InvalidProblemError(f"op: expected sdd, dsd or dds, got {op!r}")
    if len(panels) not in (0, 2):
        raise InvalidProblemError(f"panels: expected Layout.panels or [], got {list(panels)}")
    check_dims(a, "a", _BLOCKS if op == "dsd" else "Z, H, rows, cols")
    check_dims(b, "b", _BLOCKS if op == "dds" else "Z, H, rows, cols")
    n = {
        "sdd": a.shape[2 if trans_a else 3],
        "dsd": b.shape[2 if trans_b else 3],
        "dds": a.shape[3 if trans_a else 2],
    }[op]
    fields = {
        "op": op,
        "element": element_of(a.dtype, "a"),
        "trans_a": trans_a,
        "trans_b": trans_b,
        "epilogue": epilogue_of(activation, bias is not None),
        "alpha": alpha,
        "out_element": None if out_dtype is None else element_of(out_dtype, "out_dtype"),
        "bias_element": None if bias is None else element_of(bias.dtype, "bias"),
        "inner": InnerPattern.DENSE if metadata is None else InnerPattern.SPARSE24,
    }
    if panels and op != "sdd":
        fields["longest_panel"] = panels[not trans_b if op == "dds" else trans_a]
    sizes = {"batch": a.shape[0], "n": n}
    operands = {"a": a, "b": b, "metadata": metadata, "bias": bias}
    return Problem(BlockSparseMatmulPlan, tuple(shape), sizes, fields, preference, operands, layout)


matmul, _fake_matmul = kernel_of(_product), fake_of(_product)


def _matmul_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, layout, ctx.shape, ctx.op, ctx.trans_a, ctx.trans_b, bias, ctx.activation = inputs[:9]
    ctx.alpha, ctx.out_dtype, ctx.preference, metadata, ctx.panels = inputs[9:]
    if metadata is not None and any(ctx.needs_input_grad):
        raise UnsupportedError(
            "metadata: expected operands that need no gradient, which would sum over the side of the blocks "
            "along which they aren't 2:4; call it under torch.no_grad()"
        )
    recomputed = ctx.activation != "none"
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.a_dtype, ctx.b_dtype = a.dtype, b.dtype
    ctx.save_for_backward(
        a if needs_b or recomputed else None, b if needs_a or recomputed else None, layout, bias
    )


def _matmul_backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    """The gradients of a product are the other two products of the same layout."""
    a, b, layout, bias = ctx.saved_tensors
    of_c, of_a, of_b = ctx.op

    def product(one: Tensor, other: Tensor, op: str, *options: Any, **more: Any) -> Any:
        more |= {"alpha": ctx.alpha, "preference": ctx.preference, "panels": ctx.panels}
        return _ops.blocksparse_matmul(one, other, layout, ctx.shape, op, *options, **more)

    if ctx.activation != "none":  # the activation's argument is computed again rather than kept
        before = product(a, b, ctx.op, ctx.trans_a, ctx.trans_b, bias, out_dtype=ctx.out_dtype)
        dc = GRADIENTS[ctx.activation](dc, before)
    da = db = d_bias = None
    if ctx.needs_input_grad[0]:
        d = dc.to(ctx.a_dtype)
        if ctx.trans_a:  # dA is stored transposed: op(B) dC^T
            da = product(b, d, of_a + of_b + of_c, ctx.trans_b, True)
        else:
            da = product(d, b, of_a + of_c + of_b, False, not ctx.trans_b)
    if ctx.needs_input_grad[1]:
        d = dc.to(ctx.b_dtype)
        if ctx.trans_b:
            db = product(d, a, of_b + of_c + of_a, True, ctx.trans_a)
        else:
            db = product(a, d, of_b + of_a + of_c, not ctx.trans_a, False)
    if bias is not None and ctx.needs_input_grad[7]:
        d_bias = dc.sum((0, 3) if ctx.op == "dsd" else (0, 2)).to(bias.dtype)
    return da, db, None, None, None, None, None, d_bias, None, None, None, None, None, None


def _softmax(
    x: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    scale: float = 1.0,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
    causal: bool = False,
    preference: str = "",
) -> Problem:
    check_dims(x, "x", _BLOCKS)
    check_mask_modes(key_padding_mask_mode, attn_mask_mode)
    fields = {
        "element": element_of(x.dtype, "x"),
        "scale": scale,
        "rpe": rpe is not None,
        "key_padding_mask": "none" if key_padding_mask is None else key_padding_mask_mode,
        "attn_mask": "none" if attn_mask is None else attn_mask_mode,
        "causal": causal,
    }
    operands = {"x": x, "rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    sizes = {"batch": x.shape[0]}
    return Problem(BlockSparseSoftmaxPlan, tuple(shape), sizes, fields, preference, operands, layout)


softmax, _fake_softmax = kernel_of(_softmax), fake_of(_softmax)


def _softmax_gradient(
    y: Tensor,
    dy: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    scale: float = 1.0,
    preference: str = "",
) -> Problem:
    check_dims(y, "y", _BLOCKS)
    fields = {"element": element_of(y.dtype, "y"), "op": "backward", "scale": scale}
    sizes, operands = {"batch": y.shape[0]}, {"y": y, "dy": dy}
    return Problem(BlockSparseSoftmaxPlan, tuple(shape), sizes, fields, preference, operands, layout)


softmax_backward = kernel_of(_softmax_gradient)

_RPE, _KEY_PADDING, _ATTN = 4, 5, 6  # positions among the op's arguments


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, layout, ctx.shape, ctx.scale = inputs[:4]
    ctx.preference = inputs[-1]
    ctx.wanted = {at for at, needed in enumerate(ctx.needs_input_grad) if needed}
    for at, mode, name in (
        (_KEY_PADDING, inputs[7], "key_padding_mask"),
        (_ATTN, inputs[8], "attn_mask"),
    ):
        if at in ctx.wanted and mode == "mul":
            raise UnsupportedError(f"{name}: expected a mask that needs no gradient in mode mul")
    ctx.save_for_backward(output, layout)


def _softmax_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    y, layout = ctx.saved_tensors
    found: list[Tensor | None] = [None] * 11

    def back(scale: float) -> Tensor:
        made: Tensor = _ops.blocksparse_softmax_backward(
            y, dy.to(y.dtype), layout, ctx.shape, scale, ctx.preference
        )
        return made

    if 0 in ctx.wanted:
        found[0] = back(ctx.scale)
    if ctx.wanted & {_RPE, _KEY_PADDING, _ATTN}:
        dv = back(1.0)  # the gradient of what is added to scale * x
        over_batches = to_dense(dv.sum(0, keepdim=True), layout, ctx.shape)[0]
        if _RPE in ctx.wanted:
            found[_RPE] = over_batches
        if _ATTN in ctx.wanted:
            found[_ATTN] = over_batches.sum(0)
        if _KEY_PADDING in ctx.wanted:
            heads, rows = ctx.shape[:2]
            ones = dv.new_ones(dv.shape[0], heads, 1, rows)
            columns = _ops.blocksparse_matmul(ones, dv, layout, ctx.shape, "dds")
            found[_KEY_PADDING] = columns.sum((1, 2))
    return tuple(found)


define(
    "blocksparse_matmul(Tensor a, Tensor b, Tensor layout, int[] shape, str op, bool trans_a=False, "
    'bool trans_b=False, Tensor? bias=None, str activation="none", float alpha=1.0, '
    'ScalarType? out_dtype=None, str preference="", Tensor? metadata=None, int[] panels=[]) -> Tensor',
    matmul,
    _fake_matmul,
    backward=_matmul_backward,
    setup_context=_matmul_context,
    autocast=autocast_rule(7),
)
define(
    "blocksparse_softmax(Tensor x, Tensor layout, int[] shape, float scale=1.0, Tensor? rpe=None, "
    'Tensor? key_padding_mask=None, Tensor? attn_mask=None, str key_padding_mask_mode="add", '
    'str attn_mask_mode="add", bool causal=False, str preference="") -> Tensor',
    softmax,
    _fake_softmax,
    backward=_softmax_backward,
    setup_context=_softmax_context,
)
define(
    "blocksparse_softmax_backward(Tensor y, Tensor dy, Tensor layout, int[] shape, float scale=1.0, "
    'str preference="") -> Tensor',
    softmax_backward,
    fake_of(_softmax_gradient),
)
