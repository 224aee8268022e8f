"""Attention as the ops come to it: what it asks of a plan, and the same by products and softmax.

A fused plan reads Q, K and V once. Where the device has none for the problem, the unfused form stands in,
with scores and probabilities in float32, as many as there are kept cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...blocksparse.plan import BlockSparseAttentionPlan
from ..elements import element_of
from .plan_dispatch import Operands, Problem, check_dims, shape_of, table

_HEADS = "Z, H, tokens, head_size"


class Attention(NamedTuple):
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

    def problem(self, op: str = "forward") -> tuple[Problem, Operands]:
        """Raises InvalidProblemError."""
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
        }
        sizes = {"batch": self.q.shape[0]}
        given = {"q": self.q, "k": self.k, "v": self.v}
        for name in ("q_lengths", "kv_lengths"):
            if (lengths := getattr(self, name)) is not None:
                given[name] = lengths
        shape = tuple(self.shape)
        return Problem(BlockSparseAttentionPlan, shape, sizes, fields, self.preference), given

    def gradient_problem(self, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Problem, Operands]:
        """Raises InvalidProblemError."""
        problem, operands = self.problem("backward")
        return problem, operands | {"o": o, "lse": lse, "do": do}


class Unfused:
    """The same by other plans. ``matmul``, ``softmax``, ``softmax_backward`` are the kernels of those ops."""

    def __init__(
        self,
        call: Attention,
        matmul: Callable[..., Tensor],
        softmax: Callable[..., Tensor],
        softmax_backward: Callable[..., Tensor],
    ) -> None:
        self._call, self._shape = call, shape_of(tuple(call.shape))
        self._matmul, self._softmax, self._softmax_backward = matmul, softmax, softmax_backward
        self._scale = call.q.shape[3] ** -0.5 if call.scale is None else call.scale
        self._group = self._shape.heads // max(call.k.shape[1], 1)
        self._q = self._cleared(call.q, call.q_lengths)
        self._k, self._v = (
            self._cleared(one, call.kv_lengths).repeat_interleave(self._group, 1) for one in (call.k, call.v)
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """O and the logarithm of the sum of each row's exponentials."""
        scores, found = self._probabilities()
        o = self._product("dsd", found.to(self._q.dtype), self._v)
        lse = self._logsumexp(scores, found)
        if (lengths := self._call.q_lengths) is not None:
            beyond = self._beyond(lengths, self._shape.rows)
            o, lse = o.masked_fill(beyond[:, None, :, None], 0), lse.masked_fill(beyond[:, None], -torch.inf)
        return o, lse

    def backward(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV. Probabilities are computed again rather than kept."""
        do = self._cleared(do, self._call.q_lengths)
        _, found = self._probabilities()
        dp = self._product("sdd", do, self._v, trans_b=True, out_dtype=torch.float32)
        ds = self._softmax_backward(
            found, dp, self._call.layout, self._call.shape, self._scale, self._call.preference
        )
        found, ds = found.to(do.dtype), ds.to(do.dtype)
        dq = self._product("dsd", ds, self._k)
        dk, dv = (
            self._product("dsd", one, other, trans_a=True, out_dtype=torch.float32)
            for one, other in ((ds, self._q), (found, do))
        )
        return dq, self._over_groups(dk), self._over_groups(dv)

    def _product(self, op: str, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        call = self._call
        return self._matmul(a, b, call.layout, call.shape, op, preference=call.preference, **options)

    def _probabilities(self) -> tuple[Tensor, Tensor]:
        """Scores before they are scaled, and their softmax."""
        call = self._call
        scores = self._product("sdd", self._q, self._k, trans_b=True, out_dtype=torch.float32)
        kept = None
        if call.kv_lengths is not None:
            kept = (~self._beyond(call.kv_lengths, self._shape.cols)).float()
        found = self._softmax(
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

    def _logsumexp(self, scores: Tensor, found: Tensor) -> Tensor:
        """Of a row, its largest score less the logarithm of its largest probability."""
        seen = (scores * self._scale).masked_fill(found == 0, -torch.inf)
        most = self._largest(found)
        return torch.where(most == 0, -torch.inf, self._largest(seen) - most.log())

    def _largest(self, values: Tensor) -> Tensor:
        """Of each row of each head [Z, H, rows]; 0 where it has no block."""
        one, call = self._shape, self._call
        of_blocks = values.amax(3)
        lines = one.heads * one.block_rows
        found = values.new_zeros(values.shape[0], lines, one.block)
        rows = table(call.layout, call.shape, "rows").long()[None, :, None].expand_as(of_blocks)
        found = found.scatter_reduce(1, rows, of_blocks, "amax", include_self=False)
        return found.view(values.shape[0], one.heads, one.rows)

    def _over_groups(self, gradient: Tensor) -> Tensor:
        """Summed over the heads that share a K, in the operands' type."""
        batch, _, tokens, width = gradient.shape
        shared = gradient.view(batch, self._call.k.shape[1], self._group, tokens, width)
        return shared.sum(2).to(self._q.dtype)

    def _cleared(self, tensor: Tensor, lengths: Tensor | None) -> Tensor:
        """Zero beyond the lengths, where nothing may be read: it may be NaN."""
        if lengths is None:
            return tensor
        return tensor.masked_fill(self._beyond(lengths, tensor.shape[2])[:, None, :, None], 0)

    @staticmethod
    def _beyond(lengths: Tensor, tokens: int) -> Tensor:
        """[Z, tokens]: whether a token is beyond its batch's length."""
        return torch.arange(tokens, device=lengths.device) >= lengths[:, None]
