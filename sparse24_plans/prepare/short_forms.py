"""Short forms of weights/ on a GPU: the kernels of the plans, with results allocated here.

Each works on CuPy's current stream (on the host in NumPy), and gives None where no kernel serves: elements
and scores that the array code of weights/ alone handles. Operands that a kernel can't read in place are
copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..device.install import import_cupy
from ..device.tensors import HOST, Device, TensorView
from ..errors import UnsupportedError
from ..plan.operands import Role
from ..plan.plan import Plan
from ..vocab import ElementKind
from ..weights.packed_layouts import layout_of
from ..weights.weight import PackedWeight, Sparse24Weight
from .descriptor import (
    ELEMENTS,
    SCORE_ELEMENTS,
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    PackSparse24Descriptor,
    PrepareDescriptor,
    PruneCompressSparse24Descriptor,
)
from .plan import CompressSparse24Plan, DecompressSparse24Plan, PackSparse24Plan, PruneCompressSparse24Plan

_ALIGNMENT = 16
"""Bytes that the address of every operand is a multiple of."""


def compress(dense: TensorView) -> tuple[TensorView, TensorView] | None:
    """Return values and metadata. Raises FormatError, with row and group, for a matrix that is not 2:4."""
    if dense.element not in ELEMENTS:
        return None
    m, k = dense.shape
    desc = CompressSparse24Descriptor(m=m, k=k, element=dense.element)
    if (run := _run(CompressSparse24Plan, desc, dense.device, dense=_readable(dense))) is None:
        return None
    run.plan.check(run.args)
    return run.args.values, run.args.metadata


def prune_compress(dense: TensorView, scores: TensorView | None) -> tuple[TensorView, TensorView] | None:
    """Return values and metadata."""
    ranked_by = None if scores is None else scores.element
    if dense.element not in ELEMENTS or ranked_by not in (None, *SCORE_ELEMENTS):
        return None
    m, k = dense.shape
    desc = PruneCompressSparse24Descriptor(m=m, k=k, element=dense.element, scores=ranked_by)
    given = {"dense": _readable(dense), "scores": None if scores is None else _readable(scores)}
    run = _run(PruneCompressSparse24Plan, desc, dense.device, **given)
    return None if run is None else (run.args.values, run.args.metadata)


def decompress(weight: Sparse24Weight) -> TensorView | None:
    """Return the dense matrix."""
    if weight.element not in ELEMENTS:
        return None
    desc = DecompressSparse24Descriptor(m=weight.m, k=weight.k, element=weight.element)
    run = _run(DecompressSparse24Plan, desc, weight.device, weight=_readable_weight(weight))
    return None if run is None else run.args.dense


def pack(weight: Sparse24Weight) -> PackedWeight | None:
    """Return the weight in its element's tiles. Raises UnsupportedError for an element without any."""
    layout_of(weight.element)
    desc = PackSparse24Descriptor(m=weight.m, k=weight.k, element=weight.element)
    run = _run(PackSparse24Plan, desc, weight.device, weight=_readable_weight(weight))
    return None if run is None else run.plan.weight(run.args)


# Parts --------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    plan: Any
    args: Any


def _run(kind: type[Plan], desc: PrepareDescriptor, home: Device, **given: Any) -> _Run | None:
    """Run a plan with new memory for its results; None if no kernel serves."""
    try:
        plan = kind.select(desc, device=home)
    except UnsupportedError:  # a GPU older than the kernels
        return None
    written = (one for one in desc.operands() if one.role is Role.OUT)
    results = {one.argument: _empty(one.shape, one.element, home) for one in written}
    args: Any = kind.args_type(desc)(**given, **results)
    plan.run(args)
    return _Run(plan, args)


def _empty(shape: tuple[int, ...], element: ElementKind, home: Device) -> TensorView:
    xp: Any = np if home == HOST else import_cupy()
    return TensorView.of(xp.empty(shape, element.bits_dtype), element=element)


def _readable(view: TensorView) -> TensorView:
    if view.is_contiguous and view.address % _ALIGNMENT == 0:
        return view
    return view.owned_copy()


def _readable_weight(weight: Sparse24Weight) -> Sparse24Weight:
    parts = weight.values_view, weight.metadata_view
    ready = [_readable(part) for part in parts]
    if ready[0] is parts[0] and ready[1] is parts[1]:
        return weight
    return Sparse24Weight(*ready, element=weight.element, validate=False)
