"""The ops ``grouped_mm`` and ``experts_mm``: rows in groups, each multiplied by a 2:4 weight of its own.

A weight is that of all groups, stacked to [G*M, K], canonical or packed as elements.py describes, or
canonical and quantized. The groups are given by offsets, or by the experts that each row chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..vocab import GroupTokens
from . import stacked
from .elements import DTYPE_OF, weight_sizes
from .gemm_call import check_operands, fields_of, quantization_of
from .gemm_ops import stacked_autocast
from .library import define
from .plan_cache import descriptor, preference_of

_OPTIONS = (
    "Tensor? bias=None, Tensor? scale_x=None, Tensor? scale_w=None, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="", Tensor? scales=None, int group=0'
)


class Grouped(NamedTuple):
    """The operands and options of ``grouped_mm``, in the order of the op's arguments."""

    x: Tensor
    """X [N, K], with the rows of each group one after the other."""
    weight: Tensor
    meta: Tensor | None
    offsets: Tensor
    """int32 [G + 1]: group g has the rows from offsets[g] to below offsets[g + 1].

    It is a 0 and the ``offs`` of ``torch._grouped_mm``.
    """
    bias: Tensor | None = None
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None
    m: int | None = None
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    preference: str = ""
    scales: Tensor | None = None
    """Scales of a quantized weight's groups of columns."""
    group: int = 0
    """Columns of a quantized weight that share a scale; 0: the whole row."""

    @property
    def group_count(self) -> int:
        """G. Raises InvalidProblemError for other offsets."""
        offsets = self.offsets
        if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.dtype != torch.int32:
            raise InvalidProblemError(
                "offsets: expected torch.int32 [G + 1] with G from 1, "
                f"got {offsets.dtype} {list(offsets.shape)}"
            )
        groups: int = offsets.shape[0] - 1
        return groups

    @property
    def routing(self) -> dict[str, Any]:
        """The fields of the descriptor that say which rows a group has."""
        return {"n": self.x.shape[0]}

    @property
    def rows(self) -> Any:
        """Rows of the result."""
        return self.x.shape[0]


class Chosen(NamedTuple):
    """The operands and options of ``experts_mm``, in the order of the op's arguments."""

    x: Tensor
    """X [T, K] with ``gather``, else the rows of the sorted choices [T * top_k, K]."""
    weight: Tensor
    meta: Tensor | None
    experts: Tensor
    """int32 [T, top_k]: the groups that each of T rows chose. Any other number is no group."""
    groups: int
    """G."""
    y_weights: Tensor | None = None
    """float32 [T, top_k]: factors of the results that are added up."""
    gather: bool = False
    add_up: bool = False
    """Whether a row of the result [T, M] is the sum of its choices' results. Else results are sorted."""
    bias: Tensor | None = None
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None
    m: int | None = None
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    preference: str = ""
    scales: Tensor | None = None
    group: int = 0

    @property
    def group_count(self) -> int:
        """G. Raises InvalidProblemError for other experts, or rows of x that don't fit them."""
        experts, weights = self.experts, self.y_weights
        if self.groups < 1:
            raise InvalidProblemError(f"groups: expected a number of experts from 1, got {self.groups}")
        if experts.dim() != 2 or experts.dtype != torch.int32:
            raise InvalidProblemError(
                f"experts: expected torch.int32 [T, top_k], got {experts.dtype} {list(experts.shape)}"
            )
        rows = experts.shape[0] if self.gather else experts.shape[0] * experts.shape[1]
        if self.x.shape[0] != rows:
            raise InvalidProblemError(f"x: expected {rows} rows, got {self.x.shape[0]}")
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

    @property
    def routing(self) -> dict[str, Any]:
        """The fields of the descriptor that say which rows a group has."""
        rows, top_k = self.experts.shape
        return {
            "n": rows * top_k,
            "top_k": top_k,
            "group_tokens": GroupTokens.EXPERTS,
            "x_rows": rows if self.gather else None,
            "y_rows": rows if self.add_up else None,
        }

    @property
    def rows(self) -> Any:
        """Rows of the result."""
        rows, top_k = self.experts.shape
        return rows if self.add_up else rows * top_k


_Call = Grouped | Chosen


def _sizes(call: _Call) -> tuple[int, int, int]:
    """G, the rows of all weights, and K. Raises InvalidProblemError if the operands don't fit together."""
    x = call.x
    if x.dim() != 2:
        raise InvalidProblemError(f"x: expected a matrix [N, K], got {list(x.shape)}")
    groups = call.group_count
    by = quantization_of(call)
    rows, k = weight_sizes(call.weight, call.meta, call.m, x.shape[1], by)
    if rows % groups:
        raise InvalidProblemError(f"weight: expected rows in {groups} groups of one size, got {rows} rows")
    if call.bias is not None and tuple(call.bias.shape) != (rows,):
        raise InvalidProblemError(f"bias: expected [{rows}], got {list(call.bias.shape)}")
    own = ("offsets",) if isinstance(call, Grouped) else ("experts", "y_weights")
    check_operands(call, by, x.shape[0], rows, *own)
    return groups, rows, k


def _describe(call: _Call, groups: int, rows: int, k: int, routing: dict[str, Any]) -> GemmSparse24Descriptor:
    fields = {**fields_of(call), **routing}
    found: GemmSparse24Descriptor = descriptor(
        GemmSparse24Plan, m=rows // groups, k=k, groups=groups, **fields
    )
    return found


def _operands(call: _Call) -> stacked.Operands:
    scale_x, scale_w = (None if s is None else s.reshape(-1) for s in (call.scale_x, call.scale_w))
    common = {"x": call.x.contiguous(), "bias": call.bias, "scale_x": scale_x, "scale_w": scale_w}
    if isinstance(call, Grouped):
        return stacked.given(**common, offsets=call.offsets)
    weights = None if call.y_weights is None else call.y_weights.contiguous()
    return stacked.given(**common, experts=call.experts.contiguous(), y_weights=weights)


def _checked(call: _Call) -> stacked.CheckedStacked:
    groups, rows, k = _sizes(call)
    desc = _describe(call, groups, rows, k, call.routing)
    return stacked.CheckedStacked(call, desc, (rows, k), _operands(call))


def _fake(call: _Call) -> Tensor:
    preference_of(call.preference)
    groups, rows, _ = _sizes(call)
    desc = _describe(call, 1, 16, 8, {"n": 1})  # any sizes do for the dtypes; x may have symbols
    outputs = rows // groups // (2 if desc.epilogue.is_gated else 1)
    return call.x.new_empty((call.rows, outputs), dtype=DTYPE_OF[desc.out_element])


def _define(kind: type[Grouped] | type[Chosen], schema: str) -> None:
    """Define the op whose arguments are the fields of ``kind``."""

    def product(*args: Any, **kwargs: Any) -> Tensor:
        return stacked.run(kind(*args, **kwargs), _operands, _checked)

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        return _fake(kind(*args, **kwargs))

    define(f"{schema}, {_OPTIONS}) -> Tensor", product, fake, autocast=stacked_autocast(kind))


_define(Grouped, "grouped_mm(Tensor x, Tensor weight, Tensor? meta, Tensor offsets")
_define(
    Chosen,
    "experts_mm(Tensor x, Tensor weight, Tensor? meta, Tensor experts, int groups, Tensor? y_weights=None, "
    "bool gather=False, bool add_up=False",
)
