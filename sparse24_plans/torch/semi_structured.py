"""Between Sparse24Tensor and PyTorch's own two classes, and in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.sparse.semi_structured import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from ..errors import InvalidProblemError, UnsupportedError
from ..formats.convert import from_foreign, to_foreign
from ..vocab import ElementKind
from .elements import canonical_weight, element_of, tensor_of
from .layouts import cupy_on_torch_stream
from .tensor import Sparse24Tensor

_PLACES = ("SparseSemiStructuredTensorCUTLASS", "SparseSemiStructuredTensorCUSPARSELT")
_BLOBS = {8: "cusparselt_sm80", 9: "cusparselt_sm90"}


def from_semi_structured(
    tensor: SparseSemiStructuredTensor, *, capability: int | None = None
) -> Sparse24Tensor:
    """A Sparse24Tensor of one of PyTorch's: the same matrix, bit for bit, in memory of its own.

    ``capability`` is the major compute capability of the device that cuSPARSELt compressed for, 8 or 9; by
    default that of the tensor's device.

    Raises InvalidProblemError for anything else; UnsupportedError for a blob of an unknown device;
    FormatError for metadata that can't be meant.
    """
    if isinstance(tensor, Sparse24Tensor) or not isinstance(tensor, SparseSemiStructuredTensor):
        raise InvalidProblemError(
            f"tensor: expected one of PyTorch's semi-structured tensors, got {type(tensor).__name__}"
        )
    if tensor.packed is None:
        turned: Any = tensor.t()
        back: Any = from_semi_structured(turned, capability=capability).t()
        made: Sparse24Tensor = back
        return made
    name, parts = _parts_of(tensor, capability)
    element, shape = element_of(tensor.dtype, "tensor"), tuple(tensor.shape)
    options: dict[str, Any] = {} if name == "torch_cutlass" else {"shape": shape}
    with cupy_on_torch_stream(tensor.packed):
        weight = from_foreign(name, parts, element=element, **options)
        values = tensor_of(weight.values, element).clone()
        meta = tensor_of(weight.metadata, ElementKind.U16).clone()
    return Sparse24Tensor(
        tensor.shape,
        values,
        meta,
        None,
        None,
        None,
        tensor.fuse_transpose_cusparselt,
        tensor.alg_id_cusparselt,
        tensor.requires_grad,
    )


def _parts_of(tensor: SparseSemiStructuredTensor, capability: int | None) -> tuple[str, dict[str, Any]]:
    """The format's name and the parts of a weight in it."""
    assert tensor.packed is not None
    packed = tensor.packed.detach()
    if tensor.meta is None:
        return _blob(packed, capability), {"packed": packed.reshape(-1)}
    if tensor.meta.ndim == 2:
        return "torch_cutlass", {"packed": packed, "meta": tensor.meta}
    return "torch_tile", {"packed": packed, "meta": tensor.meta}


def _blob(packed: torch.Tensor, capability: int | None) -> str:
    if capability is None and packed.is_cuda:
        capability = torch.cuda.get_device_capability(packed.device)[0]
    if capability not in _BLOBS:
        raise UnsupportedError(
            f"capability: expected the major compute capability that cuSPARSELt compressed for, 8 or 9, got "
            f"{capability}"
        )
    return _BLOBS[capability]


def to_semi_structured(
    tensor: Sparse24Tensor, backend: str = "cutlass", *, capability: int | None = None
) -> SparseSemiStructuredTensor:
    """One of PyTorch's own tensors of a Sparse24Tensor: the same matrix in new memory.

    ``backend`` is ``cutlass`` or ``cusparselt``, ``capability`` as of :func:`from_semi_structured`. Raises
    InvalidProblemError for other backends, and for shapes that the format doesn't hold; UnsupportedError for
    its elements; FormatError where a float32 weight isn't 1:2, as CUTLASS has it.
    """
    if not isinstance(tensor, Sparse24Tensor) or tensor.packed is None:
        raise InvalidProblemError("tensor: expected a Sparse24Tensor that isn't transposed")
    packed, element = tensor.packed.detach(), element_of(tensor.dtype, "tensor")
    assert tensor.meta is not None
    if backend not in ("cutlass", "cusparselt"):
        raise InvalidProblemError(f"backend: expected cutlass or cusparselt, got {backend!r}")
    name = "torch_cutlass" if backend == "cutlass" else _blob(packed, capability)
    with cupy_on_torch_stream(packed):
        parts = to_foreign(name, canonical_weight(packed, tensor.meta))
        values = tensor_of(parts["packed"], element).clone()
        if backend == "cusparselt":
            blob = values.view(tensor.shape[0], -1) if values.numel() % tensor.shape[0] == 0 else values
            return _made(SparseSemiStructuredTensorCUSPARSELT, tensor, blob, None)
        words = parts["meta"]
        kind = ElementKind.I32 if words.dtype.itemsize == 4 else ElementKind.U16
        meta = tensor_of(words.view("i4" if words.dtype.itemsize == 4 else "u2"), kind)
        return _made(SparseSemiStructuredTensorCUTLASS, tensor, values, meta.clone())


def _made(
    kind: Any, like: Sparse24Tensor, packed: torch.Tensor, meta: torch.Tensor | None
) -> SparseSemiStructuredTensor:
    made: SparseSemiStructuredTensor = kind(
        like.shape,
        packed,
        meta,
        None,
        None,
        None,
        like.fuse_transpose_cusparselt,
        like.alg_id_cusparselt,
        like.requires_grad,
    )
    return made


@contextmanager
def _restoring(before: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for name, kind in before.items():
            setattr(torch.sparse, name, kind)


def use_as_default() -> Any:
    """Let ``torch.sparse.to_sparse_semi_structured`` give a Sparse24Tensor, on any device.

    It stands where PyTorch looks for its two backends. What this returns may be used in a ``with`` statement,
    after which PyTorch's own are back.
    """
    before = {name: getattr(torch.sparse, name) for name in _PLACES}
    for name in _PLACES:
        setattr(torch.sparse, name, Sparse24Tensor)
    return _restoring(before)
