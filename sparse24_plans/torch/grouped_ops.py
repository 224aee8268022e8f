"""The op ``grouped_mm``: groups of rows, each multiplied by a 2:4 weight of its own, as experts are.

A weight is that of all groups, stacked to [G*M, K], canonical or packed as elements.py describes, or
canonical and quantized.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from . import stacked
from .activations import epilogue_of
from .elements import DTYPE_OF, element_of, weight_sizes
from .gemm_call import check_devices, check_dtypes, check_scale, quantization_of, scale_kind
from .gemm_ops import stacked_autocast
from .library import define
from .plan_cache import descriptor, preference_of

_ROUTING = "x_index", "y_index", "y_weights"


class Grouped(NamedTuple):
    """The operands and options of a grouped product, in the order of the op's arguments."""

    x: Tensor
    """X [N, K], with the rows of each group one after the other."""
    weight: Tensor
    meta: Tensor | None
    offsets: Tensor
    """int32 [G + 1]: group g has the rows from offsets[g] to below offsets[g + 1]."""
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
    x_index: Tensor | None = None
    """int32 [N]: the row of X of each place in the groups; None: place i has row i."""
    y_index: Tensor | None = None
    """int32 [T, top_k]: the places whose results are added up to each row of the result [T, M]."""
    y_weights: Tensor | None = None
    """float32 [T, top_k]: factors of these results."""

    @property
    def places(self) -> Any:
        """Number of rows of the groups."""
        return (self.x if self.x_index is None else self.x_index).shape[0]


def _sizes(call: Grouped) -> tuple[int, int, int]:
    """G, the rows of all weights, and K. Raises InvalidProblemError if the operands don't fit together."""
    x, offsets = call.x, call.offsets
    if x.dim() != 2:
        raise InvalidProblemError(f"x: expected a matrix [N, K], got {list(x.shape)}")
    if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.dtype != torch.int32:
        raise InvalidProblemError(
            f"offsets: expected torch.int32 [G + 1] with G from 1, got {offsets.dtype} {list(offsets.shape)}"
        )
    groups = offsets.shape[0] - 1
    by = quantization_of(call.weight.dtype, call.scales, call.group)
    rows, k = weight_sizes(call.weight, call.meta, call.m, x.shape[1], by)
    if rows % groups:
        raise InvalidProblemError(f"weight: expected rows in {groups} groups of one size, got {rows} rows")
    check_dtypes(x.dtype, call.weight.dtype, None if call.scales is None else call.scales.dtype)
    if call.bias is not None and tuple(call.bias.shape) != (rows,):
        raise InvalidProblemError(f"bias: expected [{rows}], got {list(call.bias.shape)}")
    for name, scale, count in (("scale_x", call.scale_x, x.shape[0]), ("scale_w", call.scale_w, rows)):
        if scale is not None:
            check_scale(scale, count, name)
    _check_routing(call)
    check_devices(call, "weight", "offsets", "bias", "scale_x", "scale_w", "scales", *_ROUTING)
    return groups, rows, k


def _check_routing(call: Grouped) -> None:
    for name, dtype, dim in zip(_ROUTING, (torch.int32, torch.int32, torch.float32), (1, 2, 2), strict=True):
        one = getattr(call, name)
        if one is not None and (one.dim() != dim or one.dtype != dtype):
            wanted = f"{dtype} [{'N' if dim == 1 else 'T, top_k'}]"
            raise InvalidProblemError(f"{name}: expected {wanted}, got {one.dtype} {list(one.shape)}")
    if call.y_weights is not None and (call.y_index is None or call.y_weights.shape != call.y_index.shape):
        wanted = "None without y_index" if call.y_index is None else str(list(call.y_index.shape))
        raise InvalidProblemError(f"y_weights: expected {wanted}, got {list(call.y_weights.shape)}")


def _describe(
    call: Grouped, n: int, groups: int, rows: int, k: int, **routing: int
) -> GemmSparse24Descriptor:
    by = quantization_of(call.weight.dtype, call.scales, call.group)
    found: GemmSparse24Descriptor = descriptor(
        GemmSparse24Plan,
        n=n,
        m=rows // groups,
        k=k,
        element=element_of((call.weight if by is None else call.x).dtype, "weight"),
        x_element=element_of(call.x.dtype, "x"),
        epilogue=epilogue_of(call.activation, call.bias is not None, gates=True),
        out_element=None if call.out_dtype is None else element_of(call.out_dtype, "out_dtype"),
        bias_element=None if call.bias is None else element_of(call.bias.dtype, "bias"),
        scale_x=scale_kind(call.scale_x),
        scale_w=scale_kind(call.scale_w),
        groups=groups,
        **routing,
        **({} if by is None else by.problem),
    )
    return found


def _operands(call: Grouped) -> stacked.Operands:
    scale_x, scale_w = (None if s is None else s.reshape(-1) for s in (call.scale_x, call.scale_w))
    return stacked.given(
        x=call.x.contiguous(),
        bias=call.bias,
        scale_x=scale_x,
        scale_w=scale_w,
        offsets=call.offsets,
        **{name: one if one is None else one.contiguous() for name, one in _routing_of(call).items()},
    )


def _routing_of(call: Grouped) -> dict[str, Tensor | None]:
    return {name: getattr(call, name) for name in _ROUTING}


def _checked(call: Grouped) -> stacked.CheckedStacked:
    groups, rows, k = _sizes(call)
    routing: dict[str, int] = {} if call.x_index is None else {"x_rows": call.x.shape[0]}
    if call.y_index is not None:
        routing |= {"y_rows": call.y_index.shape[0], "top_k": call.y_index.shape[1]}
    desc = _describe(call, call.places, groups, rows, k, **routing)
    return stacked.CheckedStacked(call, desc, (rows, k), _operands(call))


def _grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    return stacked.run(Grouped(*args, **kwargs), _operands, _checked)


def _fake_grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    call = Grouped(*args, **kwargs)
    preference_of(call.preference)
    groups, rows, _ = _sizes(call)
    desc = _describe(call, 1, 1, 16, 8)  # any sizes do for the dtypes; x may have symbols
    outputs = rows // groups // (2 if desc.epilogue.is_gated else 1)
    count = call.places if call.y_index is None else call.y_index.shape[0]
    return call.x.new_empty((count, outputs), dtype=DTYPE_OF[desc.out_element])


define(
    "grouped_mm(Tensor x, Tensor weight, Tensor? meta, Tensor offsets, Tensor? bias=None, "
    "Tensor? scale_x=None, Tensor? scale_w=None, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="", Tensor? scales=None, int group=0, '
    "Tensor? x_index=None, Tensor? y_index=None, Tensor? y_weights=None) -> Tensor",
    _grouped_mm,
    _fake_grouped_mm,
    autocast=stacked_autocast(Grouped),
)
