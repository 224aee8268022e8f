"""The layout of the host's BLAS, ``dense_f32``: the dense matrix, float32 [M, K], row-major.

float32 holds all elements of weights exactly. The layout takes 4 bytes per cell, the canonical form of a
16-bit weight 1.25.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from ..device.tensors import HOST, TensorView
from ..vocab import DENSE_F32_LAYOUT, ElementKind
from . import canonical, groups, threads
from .packed_layouts import Quantization
from .weight import CanonicalWeight, PackedWeight

Array: TypeAlias = "np.ndarray[Any, Any]"


def pack(weight: CanonicalWeight, quantization: Quantization | None = None) -> PackedWeight:
    """A weight on the host as dense float32. ``quantization`` is that of the weight it was made from."""
    dense = np.empty((weight.m, weight.k), np.float32)
    values, metadata = (view.bits() for view in weight.views)
    inflate(values, metadata, weight.element, dense)
    buffers = (TensorView.of(dense),)
    return PackedWeight(DENSE_F32_LAYOUT, weight.m, weight.k, weight.element, HOST, buffers, quantization)


def matrix(packed: TensorView, m: int, k: int) -> Array:
    """The matrix float32 [m, k] in a packed weight's buffer of any type."""
    view = TensorView(packed.address, (m, k), ElementKind.F32, HOST, readonly=packed.readonly, owner=packed)
    found: Array = view.array()
    return found


def inflate(values: Array, metadata: Array, element: ElementKind, out: Array) -> None:
    """Expand bits of values [rows, K/2] and metadata [rows, K/8] to contiguous float32 ``out`` [rows, K]."""

    def fill(rows: slice) -> None:
        codes = canonical.from_metadata(metadata[rows])
        if element is ElementKind.F32:
            groups.scatter(values[rows], codes, out[rows].view(np.uint32))
            return
        with groups.scratch() as space:
            cells = out[rows]
            bits = space.array("cells", cells.size, values.dtype).reshape(cells.shape)
            groups.scatter(values[rows], codes, bits)
            widen(bits, element, cells)

    threads.for_each(fill, canonical.row_steps(out.shape[0], out.shape[1], True))


def widened(bits: Array, element: ElementKind) -> Array:
    """Elements, given as bits, as float32. Elements f32 stay in the same memory."""
    if element is ElementKind.F32:
        return bits.view(np.float32)
    wide = np.empty(bits.shape, np.float32)
    widen(bits, element, wide)
    return wide


def widen(bits: Array, element: ElementKind, out: Array) -> None:
    """Write elements, given as bits, to float32 ``out``."""
    if element is ElementKind.BF16:
        wide = out.view(np.uint32)
        np.copyto(wide, bits)
        np.left_shift(wide, np.uint32(16), out=wide)
    elif element.itemsize == 1:
        out[...] = _of_bytes(element)[bits]
    else:
        out[...] = bits.view(element.dtype)


@cache
def _of_bytes(element: ElementKind) -> Array:
    """The float32 value of every byte."""
    return np.arange(256, dtype=np.uint8).view(element.dtype).astype(np.float32)
