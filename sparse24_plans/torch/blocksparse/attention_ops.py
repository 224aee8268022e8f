"""The ops blocksparse_attention and blocksparse_attention_backward.

A fused plan reads Q, K and V once. If the device has no such plan for the problem, products and softmax
stand in, with the scores and probabilities of all kept cells in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...blocksparse.dropout import dropped
from ...blocksparse.plan import BlockSparseAttentionPlan
from ...errors import InvalidProblemError, UnsupportedError
from ..elements import element_of
from ..gemm_ops import autocast_tensor
from ..library import define
from ..plan_cache import preference_of
from .matmul_ops import matmul, softmax, softmax_backward
from .plan_dispatch import Problem, check_dims, fake_results, run, shape_of, table

_ops: Any = torch.ops.sparse24

_HEADS = "Z, H, tokens, head_size"


class _Attention(NamedTuple):
    """The operands and options of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Tensor
    shape: Sequence[int]
    scale: float | None = None
    causal: bool = False
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    preference: str = ""
    dropout_p: float = 0.0
    seed_offset: Tensor | None = None

    def problem(self, op: str = "forward", **more: Tensor) -> Problem:
        """The problem of a fused plan, with ``more`` operands. Raises InvalidProblemError."""
        for name in ("q", "k", "v"):
            check_dims(getattr(self, name), name, _HEADS)
        fields = {
            "op": op,
            "element": element_of(self.q.dtype, "q"),
            "head_size": int(self.q.shape[3]),
            "kv_heads": int(self.k.shape[1]),
            "scale": self.scale,
            "causal": self.causal,
            "lengths": self.q_lengths is not None or self.kv_lengths is not None,
            "dropout": self.dropout_p,
        }
        operands = {name: getattr(self, name) for name in ("q", "k", "v", "q_lengths", "kv_lengths")} | more
        operands["seed_offset"] = self.words()
        sizes, shape = {"batch": self.q.shape[0]}, tuple(self.shape)
        return Problem(BlockSparseAttentionPlan, shape, sizes, fields, self.preference, operands, self.layout)

    def words(self) -> Tensor | None:
        """Seed and offset as four int32. Raises InvalidProblemError."""
        given = self.seed_offset
        if given is None and not self.dropout_p:
            return None
        if given is None or given.dtype != torch.int64 or given.shape != (2,):
            got = None if given is None else f"{given.dtype} {list(given.shape)}"
            raise InvalidProblemError(f"seed_offset: expected torch.int64 [2], got {got}")
        return given.contiguous().view(torch.int32)


class _Unfused:
    """Attention by the kernels of products and softmax."""

    def __init__(self, call: _Attention) -> None:
        self._call, self._shape = call, shape_of(tuple(call.shape))
        self._scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
        self._group = self._shape.heads // max(call.k.shape[1], 1)
        self._q = self._cleared(call.q, call.q_lengths)
        self._k, self._v = (
            self._cleared(one, call.kv_lengths).repeat_interleave(self._group, 1) for one in (call.k, call.v)
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """O, and for each row the logarithm of the sum of its exponentials."""
        scores, found = self._probabilities()
        o = self._product("dsd", (found * self._kept()).to(self._q.dtype), self._v)
        lse = self._logsumexp(scores, found)
        if (lengths := self._call.q_lengths) is not None:
            beyond = self._beyond(lengths, self._shape.rows)
            o, lse = o.masked_fill(beyond[:, None, :, None], 0), lse.masked_fill(beyond[:, None], -torch.inf)
        return o, lse

    def backward(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV. The probabilities are computed again rather than kept."""
        do = self._cleared(do, self._call.q_lengths)
        _, found = self._probabilities()
        kept = self._kept()
        dp = self._product("sdd", do, self._v, trans_b=True, out_dtype=torch.float32) * kept
        ds = softmax_backward(
            found, dp, self._call.layout, self._call.shape, self._scale, self._call.preference
        )
        found, ds = (found * kept).to(do.dtype), ds.to(do.dtype)
        dq = self._product("dsd", ds, self._k)
        dk, dv = (
            self._product("dsd", one, other, trans_a=True, out_dtype=torch.float32)
            for one, other in ((ds, self._q), (found, do))
        )
        return dq, self._over_groups(dk), self._over_groups(dv)

    def _product(self, op: str, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        call = self._call
        return matmul(a, b, call.layout, call.shape, op, preference=call.preference, **options)

    def _probabilities(self) -> tuple[Tensor, Tensor]:
        """The scores before they are scaled, and their softmax."""
        call = self._call
        scores = self._product("sdd", self._q, self._k, trans_b=True, out_dtype=torch.float32)
        kept = None
        if call.kv_lengths is not None:
            kept = (~self._beyond(call.kv_lengths, self._shape.cols)).float()
        found = softmax(
            scores,
            call.layout,
            call.shape,
            self._scale,
            key_padding_mask=kept,
            key_padding_mask_mode="mul",
            causal=call.causal,
            preference=call.preference,
        )
        return scores, found

    def _kept(self) -> Tensor | float:
        """Dropout's factors of the kept blocks' cells, 0 or 1 / (1 - p): [Z, blocks, block, block]."""
        call, one, p = self._call, self._shape, self._call.dropout_p
        words = call.words()
        if not p or words is None:
            return 1.0
        preference = preference_of(call.preference)
        if preference is not None and preference.require.batch_invariant:
            raise UnsupportedError("preference: dropout is not batch invariant")
        within = torch.arange(one.block, device=words.device)
        block_rows, block_cols = (table(call.layout, call.shape, name).long() for name in ("rows", "columns"))
        heads, across = block_rows // one.block_rows, block_rows % one.block_rows
        batches = torch.arange(call.q.shape[0], device=words.device)
        out = dropped(
            words.long(),
            p,
            batches[:, None, None, None] * one.heads + heads[:, None, None],
            across[:, None, None] * one.block + within[:, None],
            block_cols[:, None, None] * one.block + within,
        )
        kept: Tensor = (~out).float() / (1 - p)
        return kept

    def _logsumexp(self, scores: Tensor, found: Tensor) -> Tensor:
        """Each row's largest score minus the logarithm of its largest probability."""
        seen = (scores * self._scale).masked_fill(found == 0, -torch.inf)
        most = self._largest(found)
        return torch.where(most == 0, -torch.inf, self._largest(seen) - most.log())

    def _largest(self, values: Tensor) -> Tensor:
        """The largest value of each row, [Z, H, rows]; 0 for a row without a block."""
        one, call = self._shape, self._call
        of_blocks = values.amax(3)
        block_rows = one.heads * one.block_rows
        found = values.new_zeros(values.shape[0], block_rows, one.block)
        rows = table(call.layout, call.shape, "rows").long()[None, :, None].expand_as(of_blocks)
        found = found.scatter_reduce(1, rows, of_blocks, "amax", include_self=False)
        return found.view(values.shape[0], one.heads, one.rows)

    def _over_groups(self, gradient: Tensor) -> Tensor:
        """The gradient summed over the heads that share a K, in the operands' dtype."""
        batch, _, tokens, width = gradient.shape
        shared = gradient.view(batch, self._call.k.shape[1], self._group, tokens, width)
        return shared.sum(2).to(self._q.dtype)

    def _cleared(self, tensor: Tensor, lengths: Tensor | None) -> Tensor:
        """The tensor with zeros beyond the lengths, since it may hold NaN there that nothing may read."""
        if lengths is None:
            return tensor
        return tensor.masked_fill(self._beyond(lengths, tensor.shape[2])[:, None, :, None], 0)

    @staticmethod
    def _beyond(lengths: Tensor, tokens: int) -> Tensor:
        """Whether each token is beyond its batch's length, [Z, tokens]."""
        return torch.arange(tokens, device=lengths.device) >= lengths[:, None]


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = _Attention(*args, **kwargs)
    try:
        return run(call.problem())
    except UnsupportedError:  # no kernel fuses it here; if none multiplies either, that error is raised
        return _Unfused(call).forward()


def _attention_gradients(do: Tensor, o: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = _Attention(*args, **kwargs)
    try:
        return run(call.problem("backward", o=o, lse=lse, do=do))
    except UnsupportedError:
        return _Unfused(call).backward(do)


def _fake_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return fake_results(_Attention(*args, **kwargs).problem())


def _fake_attention_gradients(
    do: Tensor, o: Tensor, lse: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    return fake_results(_Attention(*args, **kwargs).problem("backward", o=o, lse=lse, do=do))


def _attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, layout, ctx.shape, ctx.scale, ctx.causal, q_lengths, kv_lengths, *rest = inputs
    ctx.preference, ctx.dropout_p, seed_offset = rest
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, layout, q_lengths, kv_lengths, seed_offset, o, lse)


def _attention_backward(ctx: Any, do: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, layout, q_lengths, kv_lengths, seed_offset, o, lse = ctx.saved_tensors
    options = (
        ctx.shape,
        ctx.scale,
        ctx.causal,
        q_lengths,
        kv_lengths,
        ctx.preference,
        ctx.dropout_p,
        seed_offset,
    )
    found = _ops.blocksparse_attention_backward(do.to(q.dtype), o, lse, q, k, v, layout, *options)
    return (*found, *[None] * 9)


def _attention_autocast(
    wanted: torch.dtype, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*(autocast_tensor(one, wanted) for one in (q, k, v)), *args), kwargs


_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor layout, int[] shape, float? scale=None, bool causal=False, "
    'Tensor? q_lengths=None, Tensor? kv_lengths=None, str preference="", float dropout_p=0.0, '
    "Tensor? seed_offset=None"
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
