"""The ops ``grouped_mm`` and ``experts_mm``: rows in groups, each multiplied by a 2:4 weight of its own.

A weight is that of all groups, stacked to [G*M, K], canonical or packed as elements.py describes, or
canonical and quantized. The groups are given by offsets, or by the experts that each row chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..vocab import GroupTokens
from .gemm_call import Call, Kind, Operands
from .gemm_ops import autocast_of
from .product_op import ProductOp


class _Groups(Kind):
    """Rows of a matrix x in groups."""

    stacked = "groups"

    def weight_count(self, call: Call) -> Any:
        if call.x.dim() != 2:
            raise InvalidProblemError(f"x: expected a matrix [N, K], got {list(call.x.shape)}")
        return self.groups_of(call.x)

    def groups_of(self, x: Tensor) -> int:
        """G. Raises InvalidProblemError for an x or operands that don't fit together."""
        raise NotImplementedError

    def operands(self, call: Call) -> dict[str, Tensor | None]:
        own = {name: None if one is None else one.contiguous() for name, one in self.own_operands().items()}
        return {**super().operands(call), "x": call.x.contiguous(), **own}


@dataclass(frozen=True, eq=False)
class Grouped(_Groups):
    """The groups of ``grouped_mm``: x is [N, K], with the rows of each group one after the other."""

    offsets: Tensor
    """int32 [G + 1]: group g has the rows from offsets[g] to below offsets[g + 1].

    It is a 0 and the ``offs`` of ``torch._grouped_mm``.
    """

    def own_operands(self) -> Operands:
        return {"offsets": self.offsets}

    def groups_of(self, x: Tensor) -> int:
        offsets = self.offsets
        if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.dtype != torch.int32:
            raise InvalidProblemError(
                "offsets: expected torch.int32 [G + 1] with G from 1, "
                f"got {offsets.dtype} {list(offsets.shape)}"
            )
        groups: int = offsets.shape[0] - 1
        return groups

    def fields(self, call: Call) -> dict[str, Any]:
        return {"n": call.x.shape[0]}


@dataclass(frozen=True, eq=False)
class Chosen(_Groups):
    """The groups of ``experts_mm``: x is [T, K] with ``gather``, else the rows of the sorted choices."""

    experts: Tensor
    """int32 [T, top_k]: the groups that each of T rows chose. Any other number is no group."""
    groups: int
    """G."""
    y_weights: Tensor | None = None
    """float32 [T, top_k]: factors of the results that are added up."""
    gather: bool = False
    add_up: bool = False
    """Whether a row of the result [T, M] is the sum of its choices' results. Else results are sorted."""

    def own_operands(self) -> Operands:
        return {"experts": self.experts, "y_weights": self.y_weights}

    def groups_of(self, x: Tensor) -> int:
        experts, weights = self.experts, self.y_weights
        if self.groups < 1:
            raise InvalidProblemError(f"groups: expected a number of experts from 1, got {self.groups}")
        if experts.dim() != 2 or experts.dtype != torch.int32:
            raise InvalidProblemError(
                f"experts: expected torch.int32 [T, top_k], got {experts.dtype} {list(experts.shape)}"
            )
        rows = experts.shape[0] if self.gather else experts.shape[0] * experts.shape[1]
        if x.shape[0] != rows:
            raise InvalidProblemError(f"x: expected {rows} rows, got {x.shape[0]}")
        if weights is None:
            return self.groups
        if not self.add_up:
            raise InvalidProblemError(f"y_weights: expected None without add_up, got {list(weights.shape)}")
        if weights.shape != experts.shape or weights.dtype != torch.float32:
            raise InvalidProblemError(
                f"y_weights: expected torch.float32 {list(experts.shape)}, "
                f"got {weights.dtype} {list(weights.shape)}"
            )
        return self.groups

    def outer(self, call: Call) -> tuple[Any, ...]:
        rows, top_k = self.experts.shape
        return (rows if self.add_up else rows * top_k,)

    def fields(self, call: Call) -> dict[str, Any]:
        rows, top_k = self.experts.shape
        return {
            "n": rows * top_k,
            "top_k": top_k,
            "group_tokens": GroupTokens.EXPERTS,
            "x_rows": rows if self.gather else None,
            "y_rows": rows if self.add_up else None,
        }


_OPTIONS = (
    "Tensor? bias=None, Tensor? scale_x=None, Tensor? scale_w=None, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="", Tensor? scales=None, int group=0'
)
_OPS = (
    ProductOp(
        f"grouped_mm(Tensor x, Tensor weight, Tensor? meta, Tensor offsets, {_OPTIONS}) -> Tensor", Grouped
    ),
    ProductOp(
        "experts_mm(Tensor x, Tensor weight, Tensor? meta, Tensor experts, int groups, "
        f"Tensor? y_weights=None, bool gather=False, bool add_up=False, {_OPTIONS}) -> Tensor",
        Chosen,
    ),
)
for _op in _OPS:
    _op.define(autocast=autocast_of(_op))
