"""Rows that a router sends to groups: rows of X by an index, and results that are added up to rows of Y.

The functions here compute on the host what ``gemm/gather_rows.cu`` and ``gemm/combine_rows.cu`` compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arithmetic.epilogue import encoded
from ..device.tensors import TensorView
from ..plan.kernel import Choice, align_up
from ..plan.operands import Views
from ..vocab import ElementKind, GroupTokens, ScaleKind
from ..weights.dense import widened
from .descriptor import GemmSparse24Descriptor

VECTOR_BYTES = 16
"""Rows of places begin at multiples of this number of bytes."""
_BLOCK = 1 << 20
"""Cells of Y that the host adds up at a time."""
_OF_PLACES = ("experts", "x_index", "y_index", "y_weights")


class Regions(NamedTuple):
    """Bytes of the workspace for a product's places: where they are, rows of X, their scales, and results."""

    offsets: int
    x_index: int
    y_index: int
    source: int
    scales: int
    results: int

    @classmethod
    def of(cls, desc: GemmSparse24Descriptor) -> Regions:
        """The regions of the problem's rows; 0 for what lies in the caller's operands."""
        gathers, adds = desc.x_rows is not None, desc.y_rows is not None
        scaled, i32 = gathers and desc.scale_x is ScaleKind.ROW, ElementKind.I32.itemsize
        sorts = desc.group_tokens is GroupTokens.EXPERTS
        index = align_up(desc.n * i32) if sorts else 0
        return cls(
            align_up((desc.groups + 1) * i32) if sorts else 0,
            index,
            index,
            align_up(desc.n * gathered_bytes(desc)) if gathers else 0,
            align_up(desc.n * ElementKind.F32.itemsize) if scaled else 0,
            align_up(desc.n * row_bytes(desc.outputs, desc.out_element)) if adds else 0,
        )


def row_bytes(columns: int, element: ElementKind) -> int:
    """Bytes from the row of one place to the next."""
    return align_up(columns * element.itemsize, VECTOR_BYTES)


def gathered_bytes(desc: GemmSparse24Descriptor) -> int:
    """Bytes from one gathered row of X to the next: at least a vector, with which its scale is copied."""
    return row_bytes(max(desc.reduction, 1), desc.x_element)


def placed_choice(choice: Choice) -> Choice:
    """The choice for the product of the places, which leaves their rows' part of the workspace."""
    wishes, own = choice.preference, sum(Regions.of(choice.descriptor))
    if wishes.max_workspace_bytes is not None:
        left = max(wishes.max_workspace_bytes - own, 0)
        wishes = wishes.model_copy(update={"max_workspace_bytes": left})
    return choice._replace(descriptor=choice.descriptor.placed, preference=wishes)


# On the host --------------------------------------------------------------------------------------


def indexed_views(desc: GemmSparse24Descriptor, views: Views) -> Views:
    """The operands of the ``indexed`` product: offsets and indices in place of ``experts``."""
    if desc.group_tokens is not GroupTokens.EXPERTS:
        return views
    chosen = views["experts"].array().reshape(-1)
    buckets = np.clip(chosen, -1, desc.groups)
    order = np.argsort(buckets, kind="stable")
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    found = {
        "offsets": np.searchsorted(buckets[order], np.arange(desc.groups + 1)).astype(np.int32),
        "x_index": (order // max(desc.top_k, 1)).astype(np.int32),
        "y_index": places.reshape(-1, max(desc.top_k, 1)),
    }
    own = {name: TensorView.of(one, argument=name) for name, one in found.items()}
    return {**{name: view for name, view in views.items() if name != "experts"}, **own}


def placed_views(desc: GemmSparse24Descriptor, views: Views) -> Views:
    """The operands of the product of the places: X's rows gathered, and room for the results."""
    found = {name: view for name, view in views.items() if name not in _OF_PLACES}
    if desc.x_rows is not None:
        rows = np.clip(views["x_index"].array(), 0, max(desc.x_rows - 1, 0))
        names = ("source", "scale_x") if desc.scale_x is ScaleKind.ROW else ("source",)
        found |= {name: _own(views[name].bits()[rows], views[name]) for name in names}
    if desc.y_rows is not None:
        result = views["result"]
        found["result"] = _own(np.empty((desc.n, desc.outputs), result.element.bits_dtype), result)
    return found


def placed(desc: GemmSparse24Descriptor, views: Views, places: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of the places, which may be any numbers, has a result that is added to a row of Y."""
    inside = (places >= 0) & (places < desc.n)
    given = views[desc.group_tokens].array().astype(np.int64)
    found: NDArray[np.bool_]
    if desc.group_tokens is GroupTokens.OFFSETS:
        found = inside & (places >= given[0]) & (places < given[-1])
        return found
    group, at = np.divmod(np.where(inside, places, 0), max(desc.n // desc.groups, 1))
    found = inside & (at < given[group])
    return found


def add_up(desc: GemmSparse24Descriptor, views: Views, results: NDArray[Any]) -> None:
    """Write the rows of Y. ``results`` are the bits of all places' results [N, outputs]."""
    out, index = views["result"].bits(), views["y_index"].array()
    step = max(_BLOCK // max(desc.outputs, 1), 1)
    for first in range(0, len(out), step):
        rows = np.arange(first, min(first + step, len(out)))
        places = np.where(placed(desc, views, index[rows]), index[rows], -1)
        own = (results[np.maximum(places[:, j], 0)] for j in range(desc.top_k)) if desc.n else ()
        out[rows] = sums_of(desc, views, rows, places, own)


def sums_of(
    desc: GemmSparse24Descriptor, views: Views, rows: NDArray[Any], places: NDArray[Any], results: Any
) -> NDArray[Any]:
    """The bits of results of these rows of Y: [rows] or [rows, columns].

    ``results`` gives the bits of the places' results, one column of ``places`` [rows, top_k] after the other.
    Places below 0 add nothing. Every product with a weight and every sum is rounded to float32.
    """
    weights = views["y_weights"].array() if "y_weights" in views else None
    total: NDArray[Any] | None = None
    with np.errstate(all="ignore"):  # overflow, Inf and NaN are results here
        for j, bits in enumerate(results):
            values, shape = widened(bits, desc.out_element), (-1,) + (1,) * (bits.ndim - 1)
            total = np.zeros(bits.shape, np.float32) if total is None else total
            if weights is not None:
                values = values * weights[rows, j].reshape(shape)
            total = np.where((places[:, j] >= 0).reshape(shape), total + values, total)
        return encoded(np.zeros((len(rows), 1), np.float32) if total is None else total, desc.out_element)


def _own(bits: NDArray[Any], like: TensorView) -> TensorView:
    """A view of memory of the host's own, which holds these bits of the view's element."""
    address = bits.ctypes.data if bits.size else like.address
    return TensorView(address, bits.shape, like.element, like.device, owner=bits)
