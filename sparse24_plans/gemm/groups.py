"""Products of several weights on the host: each group of tokens, or each batch, as a problem of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device.tensors import TensorView
from ..plan.operands import Views
from ..vocab import ElementKind, GroupTokens, ScaleKind
from ..weights.quantized_weight import write_dequantized
from .descriptor import GemmSparse24Descriptor

_OF_WEIGHT = ("values", "metadata", "scales")
_PER_WEIGHT_ROW = (*_OF_WEIGHT, "bias", "scale_w")
_OF_ALL = ("scale_y", "amax")
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
    """The first row and the end of the rows of each part: int64 [parts, 2].

    Parts are batches, or groups, whose rows are clamped as the kernels do; or the product itself. Rows of
    batches follow each other.
    """
    if not desc.groups:
        begin = np.arange(desc.batch_count, dtype=np.int64) * desc.n
        return np.stack([begin, begin + desc.n], axis=1)
    given = views[desc.group_tokens].array().astype(np.int64)
    if desc.group_tokens is GroupTokens.OFFSETS:
        begin = np.clip(given[:-1], 0, desc.n)
        end = np.clip(given[1:], begin, desc.n)
    else:
        places = desc.n // desc.groups
        begin = np.arange(desc.groups, dtype=np.int64) * places
        end = begin + np.clip(given, 0, places)
    return np.stack([begin, end], axis=1)


def part_of_tokens(desc: GemmSparse24Descriptor, views: Views) -> NDArray[np.int64]:
    """The part of each row of X, or -1 for a row in no group: int64 [tokens]."""
    found = np.full(desc.tokens, -1, np.int64)
    for part, (begin, end) in enumerate(token_ranges(desc, views)):
        found[begin:end] = part
    return found


def part_problems(
    desc: GemmSparse24Descriptor, views: Views
) -> Iterator[tuple[GemmSparse24Descriptor, Views]]:
    """Each part that has tokens, as a product of one weight, and its operands."""
    for part, (begin, end) in enumerate(token_ranges(desc, views).tolist()):
        if begin < end:
            yield one_group(desc, end - begin), views_of_part(desc, views, part, begin, end)


def views_of_part(desc: GemmSparse24Descriptor, views: Views, part: int, begin: int, end: int) -> Views:
    """The operands of a part of the problem, whose rows are from ``begin`` to below ``end``."""
    if desc.groups:
        return views_of_group(desc, views, part, begin, end)
    return views_of_batch(desc, views, part) if desc.is_batched else views


def one_group(desc: GemmSparse24Descriptor, n: int) -> GemmSparse24Descriptor:
    """The product of a group, or of a batch, of n tokens."""
    return desc.one_batch.model_copy(update={"n": n, "groups": 0, "group_tokens": GroupTokens.OFFSETS})


def views_of_group(desc: GemmSparse24Descriptor, views: Views, group: int, begin: int, end: int) -> Views:
    """The group's operands within those of all groups."""
    kinds = ("scale_x", "scale_w")
    shared = {*_OF_ALL, *(name for name in kinds if getattr(desc, name) is ScaleKind.TENSOR)}
    rows = slice(group * desc.m, (group + 1) * desc.m)
    found = {}
    for name, view in views.items():
        if name in shared:
            found[name] = view
        elif name in _PER_WEIGHT_ROW:
            found[name] = lines_of(view, rows)
        elif name in PER_TOKEN:
            found[name] = lines_of(view, slice(begin, end))
        elif name == "packed":
            found[name] = _dense_rows(view, rows, desc.k)
    return found


def views_of_batch(desc: GemmSparse24Descriptor, views: Views, batch: int) -> Views:
    """The batch's operands within those of all batches."""
    rows = slice(0, desc.m) if desc.shared_weight else slice(batch * desc.m, (batch + 1) * desc.m)
    found = {}
    for name, view in views.items():
        if name in _OF_WEIGHT:
            found[name] = lines_of(view, rows)
        elif name == "packed":
            found[name] = _dense_rows(view, rows, desc.k)
        else:
            found[name] = view if name in _OF_ALL else view_of_batch(view, batch)
    return found


def batches_of(desc: GemmSparse24Descriptor, views: Views, packed_bytes: int) -> Iterator[Views]:
    """The operands of each batch for a kernel of one batch, whose packed weight has ``packed_bytes``."""
    if not desc.is_batched:
        yield views
        return
    packed, apart = views["packed"], 0 if desc.shared_weight else packed_bytes
    tensors = {name: view for name, view in views.items() if name != "packed"}
    for batch in range(desc.batch_count):
        address = packed.address + batch * apart
        weight = TensorView(address, (packed_bytes,), packed.element, packed.device, owner=packed.owner)
        yield {**views_of_batch(desc, tensors, batch), "packed": weight}


def view_of_batch(view: TensorView, batch: int) -> TensorView:
    """One batch of an operand."""
    address = view.address + batch * view.strides[0] * view.element.itemsize
    return TensorView(
        address,
        view.shape[1:],
        view.element,
        view.device,
        strides=view.strides[1:],
        readonly=view.readonly,
        owner=view.owner,
    )


def _dense_rows(view: TensorView, rows: slice, k: int) -> TensorView:
    """Some rows of a dense weight in float32."""
    at, shape = view.address + 4 * rows.start * k, (rows.stop - rows.start, k)
    return TensorView(at, shape, ElementKind.F32, view.device, owner=view.owner)


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
