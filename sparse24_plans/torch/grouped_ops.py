"""The op ``grouped_mm``: groups of rows, each multiplied by a 2:4 weight of its own, as experts are.

A weight is that of all groups, stacked to [G*M, K], canonical or packed as elements.py describes, or
canonical and quantized.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..gemm.args import GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from . import packed_weight_cache
from .activations import epilogue_of
from .elements import DTYPE_OF, allocation, element_of, plan_device, weight_sizes
from .gemm_call import check_dtypes, check_scale, quantization_of, scale_kind
from .gemm_dispatch import about
from .library import define
from .plan_cache import CheckedCall, descriptor, plans, preference_of


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
    for name in ("weight", "offsets", "bias", "scale_x", "scale_w", "scales"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.device != x.device:
            raise InvalidProblemError(f"{name}: expected a tensor on {x.device}, got {tensor.device}")
    return groups, rows, k


def _describe(call: Grouped, n: int, groups: int, rows: int, k: int) -> GemmSparse24Descriptor:
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
        **({} if by is None else by.problem),
    )
    return found


class _CheckedGrouped(CheckedCall):
    """The plan of one form of a grouped product's operands."""

    def __init__(self, call: Grouped) -> None:
        groups, self._rows, self._k = _sizes(call)
        desc = _describe(call, call.x.shape[0], groups, self._rows, self._k)
        preference = preference_of(call.preference)
        self._plan = plan = GemmSparse24Plan.select(desc, preference=preference, device=plan_device(call.x))
        shape = (desc.n, desc.outputs)
        self._empty = allocation(shape, DTYPE_OF[desc.out_element], call.x.device)
        self._as_it_is = packed_weight_cache.fits(plan, call.weight, call.meta)
        scale_x, scale_w = (None if s is None else s.reshape(-1) for s in (call.scale_x, call.scale_w))
        args = GemmSparse24Args(
            weight=self._weight(call),
            x=call.x.contiguous(),
            y=self._empty(),
            bias=call.bias,
            scale_x=scale_x,
            scale_w=scale_w,
            offsets=call.offsets,
        )
        super().__init__(plan, plan.caller(args), call.x.device)
        self._alignment = self._caller.alignment("x")

    def _weight(self, call: Grouped) -> Any:
        found = packed_weight_cache.as_it_is if self._as_it_is else packed_weight_cache.converted
        return found(self._plan, call.weight, call.meta, self._rows, self._k, call.scales)

    def run(self, call: Grouped) -> Tensor:
        x = call.x.contiguous()
        if x.data_ptr() % self._alignment:
            x = x.clone()
        y = self._empty()
        if self._as_it_is:
            found = (call.weight, call.meta, call.scales)
            weight = tuple(one.data_ptr() for one in found if one is not None)
        else:
            weight = tuple(view.address for view in self._weight(call).buffers)
        others = (call.bias, call.scale_x, call.scale_w, call.offsets)
        addresses = (one.data_ptr() for one in others if one is not None)
        self._launch((*weight, x.data_ptr(), y.data_ptr(), *addresses))
        return y


def _grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    call = Grouped(*args, **kwargs)
    form = (Grouped, *(about(one) if isinstance(one, Tensor) else one for one in call))
    found = plans.get(form)
    if found is None:
        found = plans.keep(form, _CheckedGrouped(call))
    y: Tensor = found.run(call)
    return y


def _fake_grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    call = Grouped(*args, **kwargs)
    preference_of(call.preference)
    groups, rows, _ = _sizes(call)
    desc = _describe(call, 1, 1, 16, 8)  # any sizes do for the dtypes; x may have symbols
    outputs = rows // groups // (2 if desc.epilogue.is_gated else 1)
    return call.x.new_empty((call.x.shape[0], outputs), dtype=DTYPE_OF[desc.out_element])


define(
    "grouped_mm(Tensor x, Tensor weight, Tensor? meta, Tensor offsets, Tensor? bias=None, "
    "Tensor? scale_x=None, Tensor? scale_w=None, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="", Tensor? scales=None, int group=0) '
    "-> Tensor",
    _grouped_mm,
    _fake_grouped_mm,
)
