"""Groups of tokens on the host: which rows each group has, and its product as a problem of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device.tensors import TensorView
from ..plan.operands import Views
from ..vocab import ElementKind, GroupTokens, ScaleKind
from ..weights.quantized import write_dequantized
from .descriptor import GemmSparse24Descriptor

_PER_WEIGHT_ROW = ("values", "metadata", "scales", "bias", "scale_w")
PER_TOKEN = ("source", "result", "scale_x", "c")


def kept_bits(desc: GemmSparse24Descriptor, views: Views) -> NDArray[Any]:
    """The kept values [M, K/2] of W as bits of the element, dequantized if W is quantized."""
    if desc.quantization is None:
        found: NDArray[Any] = views["values"].bits()
        return found
    kept = np.empty((views["metadata"].shape[0], desc.k // 2), desc.element.bits_dtype)
    write_dequantized(views["values"], views["scales"], desc.quantization, desc.element, kept)
    return kept


def token_ranges(desc: GemmSparse24Descriptor, views: Views) -> NDArray[np.int64]:
    """The first row and the end of the rows of each group, clamped as the kernels do: int64 [G, 2]."""
    given = views[desc.group_tokens].array().astype(np.int64)
    if desc.group_tokens is GroupTokens.OFFSETS:
        begin = np.clip(given[:-1], 0, desc.n)
        end = np.clip(given[1:], begin, desc.n)
    else:
        places = desc.n // desc.groups
        begin = np.arange(desc.groups, dtype=np.int64) * places
        end = begin + np.clip(given, 0, places)
    return np.stack([begin, end], axis=1)


def group_of_tokens(desc: GemmSparse24Descriptor, views: Views) -> NDArray[np.int64]:
    """The group of each row of X, or -1 for a row in no group: int64 [N]."""
    found = np.full(desc.n, -1, np.int64)
    for group, (begin, end) in enumerate(token_ranges(desc, views)):
        found[begin:end] = group
    return found


def group_problems(
    desc: GemmSparse24Descriptor, views: Views
) -> Iterator[tuple[int, GemmSparse24Descriptor, Views]]:
    """Each group that has tokens: its first row, its product without groups, and its operands."""
    for group, (begin, end) in enumerate(token_ranges(desc, views).tolist()):
        if begin < end:
            yield begin, one_group(desc, end - begin), views_of_group(desc, views, group, begin, end)


def one_group(desc: GemmSparse24Descriptor, n: int) -> GemmSparse24Descriptor:
    """The product of a group of n tokens."""
    return desc.model_copy(update={"n": n, "groups": 0, "group_tokens": GroupTokens.OFFSETS})


def views_of_group(desc: GemmSparse24Descriptor, views: Views, group: int, begin: int, end: int) -> Views:
    """The group's operands within those of all groups."""
    kinds = ("scale_x", "scale_w", "scale_y")
    shared = {name for name in kinds if getattr(desc, name) is ScaleKind.TENSOR} | {"amax"}
    rows = slice(group * desc.m, (group + 1) * desc.m)
    found = {}
    for name, view in views.items():
        if name in shared:
            found[name] = view
        elif name in _PER_WEIGHT_ROW:
            found[name] = lines_of(view, rows)
        elif name in PER_TOKEN:
            found[name] = lines_of(view, slice(begin, end))
        elif name == "packed":  # dense float32
            at = view.address + 4 * rows.start * desc.k
            found[name] = TensorView(at, (desc.m, desc.k), ElementKind.F32, view.device, owner=view.owner)
    return found


def lines_of(view: TensorView, rows: slice) -> TensorView:
    """A view of some rows of a matrix, or of some cells of a vector."""
    if rows.stop - rows.start == view.shape[0]:
        return view
    address = view.address + rows.start * view.strides[0] * view.element.itemsize
    shape = (rows.stop - rows.start, *view.shape[1:])
    readonly, owner = view.readonly, view.owner
    return TensorView(
        address, shape, view.element, view.device, strides=view.strides, readonly=readonly, owner=owner
    )
