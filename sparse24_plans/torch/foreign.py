"""Conversions between canonical weights and the parts of PyTorch's semi-structured tensors.

The ops ``from_cutlass`` and ``to_cutlass`` also work on tensors without values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..formats.convert import from_foreign, to_foreign
from ..vocab import ElementKind
from .elements import canonical_weight, element_of, tensor_of, tensors_of, weight_sizes
from .library import define
from .packed_weight_cache import cupy_on_torch_stream
from .prepare_ops import empty_canonical

_BLOBS = {8: "cusparselt_sm80", 9: "cusparselt_sm90"}


def is_canonical(packed: Tensor, meta: Tensor | None) -> bool:
    """Whether metadata has one word for eight columns, as ours. PyTorch's has one for 16 or 32, or is absent.

    For float32, PyTorch's metadata has as many words as ours, so nothing but its source tells them apart.
    """
    return meta is not None and packed.dim() == meta.dim() == 2 and 4 * meta.shape[1] == packed.shape[1]


def canonical_parts(
    packed: Tensor, meta: Tensor | None, shape: tuple[int, int], capability: int | None = None
) -> tuple[Tensor, Tensor]:
    """Values [M, K/2] and metadata int16 [M, K/8], in new memory, from the parts of PyTorch's two classes.

    ``shape`` is (M, K). :func:`from_semi_structured` describes ``capability`` and the errors.
    """
    packed, element = packed.detach(), element_of(packed.dtype, "packed")
    parts: dict[str, Any] = {"packed": packed, "meta": meta}
    if meta is None:
        name, parts = blob_format(packed, capability), {"packed": packed.reshape(-1)}
    else:
        name = "torch_cutlass" if meta.ndim == 2 else "torch_tile"
    options: dict[str, Any] = {} if name == "torch_cutlass" else {"shape": shape}
    with cupy_on_torch_stream(packed):
        values, words = tensors_of(from_foreign(name, parts, element=element, **options))
        return values.clone(), words.clone()


def from_bitmask(compressed: Tensor, bitmask: Tensor) -> tuple[Tensor, Tensor]:
    """Values [M, K/2] and metadata int16 [M, K/8] from compressed-tensors' parts. Raises FormatError."""
    element = element_of(compressed.dtype, "compressed")
    with cupy_on_torch_stream(compressed):
        parts = {"compressed": compressed, "bitmask": bitmask}
        return tensors_of(from_foreign("compressed_tensors", parts, element=element))


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
    """The parts ``packed`` and ``meta`` of the format ``name``, in new memory, from canonical ones.

    :func:`to_semi_structured` describes the errors.
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


def _from_cutlass(packed: Tensor, meta: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    return canonical_parts(packed, meta, (m, k))


def _fake_from_cutlass(packed: Tensor, meta: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    return empty_canonical(packed, m, k)


def _to_cutlass(values: Tensor, meta: Tensor) -> Tensor:
    if values.dtype == torch.float32:
        raise UnsupportedError(
            "values: expected 16 or 8 bits, got float32, which PyTorch stores as 1:2; use to_semi_structured"
        )
    _, words = foreign_parts("torch_cutlass", values, meta)
    assert words is not None
    return words


def _fake_to_cutlass(values: Tensor, meta: Tensor) -> Tensor:
    m, k = weight_sizes(values, meta, None, None)
    if values.element_size() == 1:
        return values.new_empty((m, k // 32), dtype=torch.int32)
    return values.new_empty((m, k // 16), dtype=torch.int16)


define(
    "from_cutlass(Tensor packed, Tensor meta, SymInt m, SymInt k) -> (Tensor, Tensor)",
    _from_cutlass,
    _fake_from_cutlass,
)
define("to_cutlass(Tensor values, Tensor meta) -> Tensor", _to_cutlass, _fake_to_cutlass)
