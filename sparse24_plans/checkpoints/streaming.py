"""Tensors of a model, a piece at a time: memory stays bounded by the piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..vocab import ElementKind
from .folder import ModelReader
from .safetensors_file import SafetensorsWriter, TensorInfo

DTYPES = {
    ElementKind.F32: "F32",
    ElementKind.F16: "F16",
    ElementKind.BF16: "BF16",
    ElementKind.S8: "I8",
    ElementKind.FP8_E4M3: "F8_E4M3",
    ElementKind.FP8_E5M2: "F8_E5M2",
}
"""The safetensors type of the elements that a weight can be stored with."""
ELEMENTS = {dtype: element for element, dtype in DTYPES.items()}

_BLOCK_ELEMENTS = 1 << 20
_COPY_BYTES = 4 << 20


def row_blocks(model: ModelReader, name: str) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """The rows of a dense tensor [M, K] of :data:`ELEMENTS`, about a million elements at a time."""
    info = model.tensors[name]
    (m, k), element = info.shape, ELEMENTS[info.dtype]
    step = max(1, _BLOCK_ELEMENTS // max(k, 1))
    row_bytes = k * element.itemsize
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        raw = model.read(name, rows.start * row_bytes, rows.stop * row_bytes)
        yield rows, raw.view(element.dtype).reshape(-1, k)


def copy_tensor(model: ModelReader, info: TensorInfo, writer: SafetensorsWriter) -> None:
    """Copy a tensor of any type, byte for byte."""
    for start, stop in _pieces(info):
        writer.write(info.name, model.read(info.name, start, stop))


def same_tensor(a: ModelReader, b: ModelReader, name: str) -> bool:
    """Whether two models hold a tensor ``name`` of the same type, shape and bytes."""
    info = a.tensors[name]
    if b.tensors.get(name) != info:
        return False
    return all(np.array_equal(a.read(name, *piece), b.read(name, *piece)) for piece in _pieces(info))


def _pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Start and stop of the pieces that a tensor is copied in, in bytes."""
    for start in range(0, info.nbytes, _COPY_BYTES):
        yield start, min(start + _COPY_BYTES, info.nbytes)
