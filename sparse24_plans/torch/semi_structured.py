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

from ..errors import InvalidProblemError
from .foreign import blob_format, canonical_parts, foreign_parts
from .functions import FUNCTIONS
from .tensor import Sparse24Tensor

_PLACES = ("SparseSemiStructuredTensorCUTLASS", "SparseSemiStructuredTensorCUSPARSELT")


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
    m, k = tensor.shape
    values, meta = canonical_parts(tensor.packed, tensor.meta, (m, k), capability)
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
    assert tensor.meta is not None
    if backend not in ("cutlass", "cusparselt"):
        raise InvalidProblemError(f"backend: expected cutlass or cusparselt, got {backend!r}")
    if backend == "cutlass":
        values, meta = foreign_parts("torch_cutlass", tensor.packed, tensor.meta)
        return _made(SparseSemiStructuredTensorCUTLASS, tensor, values, meta)
    blob, _ = foreign_parts(blob_format(tensor.packed, capability), tensor.packed, tensor.meta)
    rows = tensor.shape[0]
    in_rows = blob.view(rows, -1) if blob.numel() % rows == 0 else blob
    return _made(SparseSemiStructuredTensorCUSPARSELT, tensor, in_rows, None)


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


# In PyTorch's place ---------------------------------------------------------------------------------


def cut(dense: torch.Tensor) -> torch.Tensor:
    """A matrix [M, K] with at most two non-zeros in every four of a row: those that PyTorch's class keeps.

    It looks at which are zero, not at magnitudes: of [a, b, c, d] without a zero it keeps a and b. Where
    there are no more than two, it keeps both.
    """
    groups = dense.reshape(dense.shape[0], -1, 4)
    a, b, _, d = (groups != 0).unbind(-1)
    first = torch.where(a, 0, torch.where(b, 1, 2))
    second = torch.where(~a & b, 2, 0) + torch.where(b, 0, 2)
    second = (second > 0) * 2 + ((a & b) | (~a & ~b) | d).to(first.dtype)
    kept = torch.zeros_like(groups, dtype=torch.bool)
    for position in (first, second):
        kept.scatter_(-1, position.unsqueeze(-1), True)
    return torch.where(kept, groups, torch.zeros_like(groups)).reshape(dense.shape)


class _CuttingSparse24Tensor(Sparse24Tensor):
    """Stands in PyTorch's place where matrices that aren't 2:4 are to be cut."""

    @classmethod
    def from_dense(cls, original_tensor: torch.Tensor, alg_id: int = 0) -> Sparse24Tensor:
        Sparse24Tensor._validate_device_dim_dtype_shape(original_tensor)
        with torch.no_grad():
            matrix = cut(original_tensor)
        matrix.requires_grad_(original_tensor.requires_grad)
        return Sparse24Tensor.from_dense(matrix, alg_id)


@contextmanager
def _restoring(before: list[tuple[Any, str, Any]]) -> Iterator[None]:
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def use_as_default(*, functions: bool = False, cut: bool = False) -> Any:
    """Let ``torch.sparse.to_sparse_semi_structured`` give a Sparse24Tensor, on any device.

    It stands where PyTorch looks for its two backends: code that imports their names from ``torch.sparse``
    afterwards gets it too. What this returns may be used in a ``with`` statement, after which PyTorch's own
    are back.

    Parameters
    ----------
    functions : bool
        Also put ours in place of ``torch._sparse_semi_structured_tile``, ``_apply``, ``_apply_dense``,
        ``_linear``, ``_mm`` and ``_addmm``, of which PyTorch has the products for compute capability 8 alone.
        They take metadata as ours or as CUTLASS's, and give ours.
    cut : bool
        A matrix that isn't 2:4 is cut as PyTorch cuts it, without a word, instead of refused: by position,
        not by magnitude.
    """
    kind: Any = _CuttingSparse24Tensor if cut else Sparse24Tensor
    ours: list[tuple[Any, str, Any]] = [(torch.sparse, name, kind) for name in _PLACES]
    if functions:
        ours += [(torch, name, function) for name, function in FUNCTIONS.items()]
    before = [(module, name, getattr(module, name)) for module, name, _ in ours]
    for module, name, value in ours:
        setattr(module, name, value)
    return _restoring(before)
