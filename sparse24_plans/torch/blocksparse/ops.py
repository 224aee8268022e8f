"""The ops ``torch.ops.sparse24.blocksparse_*``: products, softmax and attention of block-sparse matrices.

``layout`` is the look-up tables, int32, and ``shape`` their BlockSparseShape's integers, both of a Layout.
Which blocks are kept is read from the tables at run time and isn't checked there: they must be a Layout's
own. Results are contiguous. docs/blocksparse.md is the guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...blocksparse.plan import BlockSparseMatmulPlan, BlockSparseSoftmaxPlan
from ...errors import InvalidProblemError, UnsupportedError
from ...vocab import ElementKind, InnerPattern
from ..activations import GRADIENTS, epilogue_of
from ..elements import element_of
from ..gemm_ops import autocast_tensor
from ..library import define
from .attending import Attention, Unfused
from .dense import to_dense
from .plan_dispatch import Operands, Problem, check_dims, fake_results, run

_ops: Any = torch.ops.sparse24
_BLOCKS = "Z, blocks, block, block"


# Products -----------------------------------------------------------------------------------------


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
) -> tuple[Problem, Operands]:
    """Raises InvalidProblemError."""
    if op not in ("sdd", "dsd", "dds"):
        raise InvalidProblemError(f"op: expected sdd, dsd or dds, got {op!r}")
    check_dims(a, "a", _BLOCKS if op == "dsd" else "Z, H, rows, cols")
    check_dims(b, "b", _BLOCKS if op == "dds" else "Z, H, rows, cols")
    n = {
        "sdd": a.shape[2 if trans_a else 3],
        "dsd": b.shape[2 if trans_b else 3],
        "dds": a.shape[3 if trans_a else 2],
    }[op]
    epilogue = epilogue_of(activation, bias is not None)
    no_bias = ElementKind.F32 if epilogue.has_bias else None  # which every result takes
    fields = {
        "op": op,
        "element": element_of(a.dtype, "a"),
        "trans_a": trans_a,
        "trans_b": trans_b,
        "epilogue": epilogue,
        "alpha": alpha,
        "out_element": None if out_dtype is None else element_of(out_dtype, "out_dtype"),
        "bias_element": no_bias if bias is None else element_of(bias.dtype, "bias"),
        "inner": InnerPattern.DENSE if metadata is None else InnerPattern.SPARSE24,
    }
    sizes = {"batch": a.shape[0], "n": n}
    problem = Problem(BlockSparseMatmulPlan, tuple(shape), sizes, fields, preference)
    operands = {"a": a, "b": b}
    if metadata is not None:
        operands["metadata"] = metadata
    if bias is not None:
        operands["bias"] = bias
    elif epilogue.has_bias:
        operands["bias"] = _no_bias(problem, layout)
    return problem, operands


def _no_bias(problem: Problem, layout: Tensor) -> Tensor:
    """Zeros, for an activation without a bias."""
    wanted = next(one for one in problem.wanted() if one.name == "bias")
    sizes = tuple(int(size) for size in wanted.shape)
    if type(layout) is not Tensor or layout.is_meta:  # beside a fake, a fake
        return layout.new_zeros(sizes, dtype=torch.float32)
    return _zeros(sizes, layout.device)


@lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.zeros(shape, device=device)


def matmul(a: Tensor, b: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The kernel of the op."""
    problem, operands = _product(a, b, layout, *args, **kwargs)
    return run(problem, operands, layout)[0]


def _fake_matmul(a: Tensor, b: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    problem, operands = _product(a, b, layout, *args, **kwargs)
    return fake_results(problem, operands, layout)[0]


def _matmul_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, layout, ctx.shape, ctx.op, ctx.trans_a, ctx.trans_b, bias, ctx.activation = inputs[:9]
    ctx.alpha, ctx.out_dtype, ctx.preference, metadata = inputs[9:]
    if metadata is not None and any(ctx.needs_input_grad):
        raise UnsupportedError(
            "metadata: expected operands without a gradient: it would sum over the other side of the blocks, "
            "along which they aren't 2:4"
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
    shape, (of_c, of_a, of_b), rest = ctx.shape, ctx.op, {"alpha": ctx.alpha, "preference": ctx.preference}
    if ctx.activation != "none":  # its argument is computed again rather than kept
        before = _ops.blocksparse_matmul(
            a, b, layout, shape, ctx.op, ctx.trans_a, ctx.trans_b, bias, out_dtype=ctx.out_dtype, **rest
        )
        dc = GRADIENTS[ctx.activation](dc, before)
    da = db = d_bias = None
    if ctx.needs_input_grad[0]:
        d = dc.to(ctx.a_dtype)
        if ctx.trans_a:  # stored as op(B) dC^T
            da = _ops.blocksparse_matmul(b, d, layout, shape, of_a + of_b + of_c, ctx.trans_b, True, **rest)
        else:
            da = _ops.blocksparse_matmul(
                d, b, layout, shape, of_a + of_c + of_b, False, not ctx.trans_b, **rest
            )
    if ctx.needs_input_grad[1]:
        d = dc.to(ctx.b_dtype)
        if ctx.trans_b:
            db = _ops.blocksparse_matmul(d, a, layout, shape, of_b + of_c + of_a, True, ctx.trans_a, **rest)
        else:
            db = _ops.blocksparse_matmul(
                a, d, layout, shape, of_b + of_a + of_c, not ctx.trans_a, False, **rest
            )
    if bias is not None and ctx.needs_input_grad[7]:
        d_bias = dc.sum((0, 3) if ctx.op == "dsd" else (0, 2)).to(bias.dtype)
    return da, db, None, None, None, None, None, d_bias, None, None, None, None, None


def _matmul_autocast(
    wanted: torch.dtype, a: Tensor, b: Tensor, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    at = 5  # of the bias, behind a and b
    if len(args) > at:
        args = (*args[:at], autocast_tensor(args[at], wanted), *args[at + 1 :])
    elif "bias" in kwargs:
        kwargs = kwargs | {"bias": autocast_tensor(kwargs["bias"], wanted)}
    return (autocast_tensor(a, wanted), autocast_tensor(b, wanted), *args), kwargs


# Softmax ------------------------------------------------------------------------------------------


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
) -> tuple[Problem, Operands]:
    check_dims(x, "x", _BLOCKS)
    for name, mode in (("key_padding_mask", key_padding_mask_mode), ("attn_mask", attn_mask_mode)):
        if mode not in ("add", "mul"):
            raise InvalidProblemError(f"{name}_mode: expected add or mul, got {mode!r}")
    fields = {
        "element": element_of(x.dtype, "x"),
        "scale": scale,
        "rpe": rpe is not None,
        "key_padding_mask": "none" if key_padding_mask is None else key_padding_mask_mode,
        "attn_mask": "none" if attn_mask is None else attn_mask_mode,
        "causal": causal,
    }
    given = {"x": x, "rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    problem = Problem(BlockSparseSoftmaxPlan, tuple(shape), {"batch": x.shape[0]}, fields, preference)
    return problem, {name: tensor for name, tensor in given.items() if tensor is not None}


def softmax(x: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The kernel of the op."""
    problem, operands = _softmax(x, layout, *args, **kwargs)
    return run(problem, operands, layout)[0]


def _fake_softmax(x: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    problem, operands = _softmax(x, layout, *args, **kwargs)
    return fake_results(problem, operands, layout)[0]


def _softmax_gradient(
    y: Tensor,
    dy: Tensor,
    layout: Tensor,
    shape: Sequence[int],
    scale: float = 1.0,
    preference: str = "",
) -> tuple[Problem, Operands]:
    check_dims(y, "y", _BLOCKS)
    fields = {"element": element_of(y.dtype, "y"), "op": "backward", "scale": scale}
    problem = Problem(BlockSparseSoftmaxPlan, tuple(shape), {"batch": y.shape[0]}, fields, preference)
    return problem, {"y": y, "dy": dy}


def softmax_backward(y: Tensor, dy: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The kernel of the op."""
    problem, operands = _softmax_gradient(y, dy, layout, *args, **kwargs)
    return run(problem, operands, layout)[0]


def _fake_softmax_backward(y: Tensor, dy: Tensor, layout: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    problem, operands = _softmax_gradient(y, dy, layout, *args, **kwargs)
    return fake_results(problem, operands, layout)[0]


_RPE, _KEY_PADDING, _ATTN = 4, 5, 6  # among the op's arguments


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, layout, ctx.shape, ctx.scale = inputs[:4]
    ctx.preference = inputs[-1]
    ctx.wanted = {at for at, needed in enumerate(ctx.needs_input_grad) if needed}
    for at, mode, name in (
        (_KEY_PADDING, inputs[7], "key_padding_mask"),
        (_ATTN, inputs[8], "attn_mask"),
    ):
        if at in ctx.wanted and mode == "mul":
            raise UnsupportedError(f"{name}: expected no gradient in mode mul, which drops cells")
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
        dv = back(1.0)  # of what is added to scale * x
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


# Attention ----------------------------------------------------------------------------------------


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = Attention(*args, **kwargs)
    problem, operands = call.problem()
    try:
        return run(problem, operands, call.layout)
    except UnsupportedError:  # no kernel fuses it here; where none multiplies, that error stands
        return Unfused(call, matmul, softmax, softmax_backward).forward()


def _attention_gradients(do: Tensor, o: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = Attention(*args, **kwargs)
    problem, operands = call.gradient_problem(o, lse, do)
    try:
        return run(problem, operands, call.layout)
    except UnsupportedError:
        return Unfused(call, matmul, softmax, softmax_backward).backward(do)


def _fake_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = Attention(*args, **kwargs)
    problem, operands = call.problem()
    return fake_results(problem, operands, call.layout)


def _fake_attention_gradients(
    do: Tensor, o: Tensor, lse: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    call = Attention(*args, **kwargs)
    problem, operands = call.gradient_problem(o, lse, do)
    return fake_results(problem, operands, call.layout)


def _attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, layout, ctx.shape, ctx.scale, ctx.causal, q_lengths, kv_lengths, ctx.preference = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, layout, q_lengths, kv_lengths, o, lse)


def _attention_backward(ctx: Any, do: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, layout, q_lengths, kv_lengths, o, lse = ctx.saved_tensors
    options = ctx.shape, ctx.scale, ctx.causal, q_lengths, kv_lengths, ctx.preference
    found = _ops.blocksparse_attention_backward(do.to(q.dtype), o, lse, q, k, v, layout, *options)
    return (*found, *[None] * 7)


def _attention_autocast(
    wanted: torch.dtype, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*(autocast_tensor(one, wanted) for one in (q, k, v)), *args), kwargs


# The ops ------------------------------------------------------------------------------------------


_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor layout, int[] shape, float? scale=None, bool causal=False, "
    'Tensor? q_lengths=None, Tensor? kv_lengths=None, str preference=""'
)

define(
    "blocksparse_matmul(Tensor a, Tensor b, Tensor layout, int[] shape, str op, bool trans_a=False, "
    'bool trans_b=False, Tensor? bias=None, str activation="none", float alpha=1.0, '
    'ScalarType? out_dtype=None, str preference="", Tensor? metadata=None) -> Tensor',
    matmul,
    _fake_matmul,
    backward=_matmul_backward,
    setup_context=_matmul_context,
    autocast=_matmul_autocast,
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
    _fake_softmax_backward,
)
define(
    f"blocksparse_attention({_ATTENTION}) -> (Tensor, Tensor)",
    _attention,
    _fake_attention,
    backward=_attention_backward,
    setup_context=_attention_context,
    autocast=_attention_autocast,
)
define(
    f"blocksparse_attention_backward(Tensor do, Tensor o, Tensor lse, {_ATTENTION}) -> "
    "(Tensor, Tensor, Tensor)",
    _attention_gradients,
    _fake_attention_gradients,
)
