"""Short forms of weights/ on a GPU: the kernels of the plans, with results allocated here.

Each works on CuPy's current stream (on the host in NumPy), and gives None where no kernel serves: elements
and scores that the array code of weights/ alone handles. What lies where a kernel can't read it is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device.install import import_cupy
from ..device.tensors import HOST, Device, TensorView
from ..errors import UnsupportedError
from ..plan.plan import Plan
from ..vocab import ElementKind
from ..weights.weight import PackedWeight, Sparse24Weight
from .args import CompressSparse24Args, DecompressSparse24Args, PackSparse24Args, PruneCompressSparse24Args
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
    (m, k), home = dense.shape, dense.device
    plan = _selected(CompressSparse24Plan, CompressSparse24Descriptor(m=m, k=k, element=dense.element), home)
    if plan is None:
        return None
    values, metadata = _results(plan.descriptor, home)
    status = _empty((8,), ElementKind.U8, home)
    args = CompressSparse24Args(_readable(dense), values, metadata, status)
    plan.run(args)
    plan.check(args)
    return values, metadata


def prune_compress(dense: TensorView, scores: TensorView | None) -> tuple[TensorView, TensorView] | None:
    """Return values and metadata."""
    ranked_by = None if scores is None else scores.element
    if dense.element not in ELEMENTS or ranked_by not in (None, *SCORE_ELEMENTS):
        return None
    (m, k), home = dense.shape, dense.device
    desc = PruneCompressSparse24Descriptor(m=m, k=k, element=dense.element, scores=ranked_by)
    plan = _selected(PruneCompressSparse24Plan, desc, home)
    if plan is None:
        return None
    values, metadata = _results(desc, home)
    ranks = None if scores is None else _readable(scores)
    plan.run(PruneCompressSparse24Args(_readable(dense), values, metadata, ranks))
    return values, metadata


def decompress(weight: Sparse24Weight) -> TensorView | None:
    """Return the dense matrix."""
    if weight.element not in ELEMENTS:
        return None
    desc = DecompressSparse24Descriptor(m=weight.m, k=weight.k, element=weight.element)
    plan = _selected(DecompressSparse24Plan, desc, weight.device)
    if plan is None:
        return None
    dense = _empty((weight.m, weight.k), weight.element, weight.device)
    plan.run(DecompressSparse24Args(_readable_weight(weight), dense))
    return dense


def pack(weight: Sparse24Weight) -> PackedWeight | None:
    """Return the weight in its element's tiles. Raises UnsupportedError for an element without any."""
    desc = PackSparse24Descriptor(m=weight.m, k=weight.k, element=weight.element)
    (packed,) = (one for one in desc.operands() if one.name == "packed")
    plan = _selected(PackSparse24Plan, desc, weight.device)
    if plan is None:
        return None
    args = PackSparse24Args(_readable_weight(weight), _empty(packed.shape, packed.element, weight.device))
    plan.run(args)
    found: PackedWeight = plan.weight(args)
    return found


# Parts --------------------------------------------------------------------------------------------


def _selected(plan: type[Any], desc: PrepareDescriptor, home: Device) -> Any:
    assert issubclass(plan, Plan)
    try:
        return plan.select(desc, device=home)
    except UnsupportedError:  # a GPU older than the kernels
        return None


def _empty(shape: tuple[int, ...], element: ElementKind, home: Device) -> TensorView:
    xp: Any = np if home == HOST else import_cupy()
    return TensorView.of(xp.empty(shape, element.bits_dtype), element=element)


def _results(desc: PrepareDescriptor, home: Device) -> tuple[TensorView, TensorView]:
    operands = {operand.name: operand for operand in desc.operands()}
    values, metadata = (operands[name] for name in ("values", "metadata"))
    return _empty(values.shape, values.element, home), _empty(metadata.shape, metadata.element, home)


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
