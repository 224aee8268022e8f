"""The parts of PyTorch's semi-structured tensors, read as canonical ones and written from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..formats.convert import from_foreign, to_foreign
from ..vocab import ElementKind
from .elements import canonical_weight, element_of, tensor_of
from .layouts import cupy_on_torch_stream

_BLOBS = {8: "cusparselt_sm80", 9: "cusparselt_sm90"}


def is_canonical(packed: Tensor, meta: Tensor | None) -> bool:
    """Whether metadata has a word for eight columns, as ours; PyTorch's has one for 16 or 32, or is none."""
    return meta is not None and packed.dim() == 2 and 4 * meta.shape[-1] == packed.shape[-1]


def canonical_parts(
    packed: Tensor, meta: Tensor | None, shape: tuple[int, int] | None, capability: int | None = None
) -> tuple[Tensor, Tensor]:
    """Values [M, K/2] and metadata int16 [M, K/8], in new memory, of what PyTorch's two classes hold.

    ``shape`` is (M, K); None takes it from the values, where they have no padding. ``capability`` is the
    major compute capability that a blob of cuSPARSELt was compressed for.

    Raises InvalidProblemError for sizes that don't fit; UnsupportedError for a blob of an unknown device;
    FormatError for metadata that can't be meant.
    """
    packed, element = packed.detach(), element_of(packed.dtype, "packed")
    parts: dict[str, Any] = {"packed": packed, "meta": meta}
    if meta is None:
        name, parts = blob_format(packed, capability), {"packed": packed.reshape(-1)}
    else:
        name = "torch_cutlass" if meta.ndim == 2 else "torch_tile"
    options: dict[str, Any] = {} if name == "torch_cutlass" else {"shape": shape}
    with cupy_on_torch_stream(packed):
        weight = from_foreign(name, parts, element=element, **options)
        values = tensor_of(weight.values, element).clone()
        return values, tensor_of(weight.metadata, ElementKind.U16).clone()


def blob_format(packed: Tensor, capability: int | None) -> str:
    """The format of cuSPARSELt's compressed matrices. Raises UnsupportedError for an unknown device."""
    if capability is None and packed.is_cuda:
        capability = torch.cuda.get_device_capability(packed.device)[0]
    if capability not in _BLOBS:
        raise UnsupportedError(
            f"capability: expected the major compute capability that cuSPARSELt compressed for, 8 or 9, got "
            f"{capability}"
        )
    return _BLOBS[capability]


def foreign_parts(name: str, packed: Tensor, meta: Tensor) -> tuple[Tensor, Tensor | None]:
    """``packed`` and ``meta`` in the format ``name``, in new memory, of canonical ones.

    Raises InvalidProblemError for shapes that the format doesn't hold; UnsupportedError for its elements;
    FormatError where a float32 weight isn't 1:2, as CUTLASS has it.
    """
    packed = packed.detach()
    element = element_of(packed.dtype, "packed")
    with cupy_on_torch_stream(packed):
        parts = to_foreign(name, canonical_weight(packed, meta))
        values, words = tensor_of(parts["packed"], element).clone(), parts.get("meta")
        if words is None:
            return values, None
        kind = ElementKind.I32 if words.dtype.itemsize == 4 else ElementKind.U16
        return values, tensor_of(words.view("i4" if words.dtype.itemsize == 4 else "u2"), kind).clone()
