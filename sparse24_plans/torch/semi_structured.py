"""PyTorch's semi-structured classes and functions: conversions to and from them, and replacements for them.

The functions here have PyTorch's names and arguments. They take metadata as ours or, for 16 and 8 bits, as
CUTLASS's, which is converted at each call; they return ours. Tensors of PyTorch's own classes, and code that
calls these functions, thus work on devices that CUTLASS's kernels refuse.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.sparse.semi_structured import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from ..errors import InvalidProblemError, UnsupportedError
from .activations import check_activation
from .elements import in_dtype
from .foreign import blob_format, canonical_parts, foreign_parts, is_canonical
from .prepare_ops import kept_values
from .tensor import Sparse24Tensor, tile_rule

_ops: Any = torch.ops.sparse24
_EXACT = torch.float64
"""Holds the sum of any int32 and any other integer bias exactly."""
_CLASSES = ("SparseSemiStructuredTensorCUTLASS", "SparseSemiStructuredTensorCUSPARSELT")


def from_semi_structured(
    tensor: SparseSemiStructuredTensor, *, capability: int | None = None
) -> Sparse24Tensor:
    """A Sparse24Tensor with the matrix of one of PyTorch's tensors, bit for bit, in new memory.

    ``capability`` is the major compute capability of the device that cuSPARSELt compressed for, 8 or 9; the
    default is that of the tensor's device.

    Raises InvalidProblemError for anything else; UnsupportedError for a blob of an unknown device;
    FormatError for invalid metadata.
    """
    if isinstance(tensor, Sparse24Tensor) or not isinstance(tensor, SparseSemiStructuredTensor):
        raise InvalidProblemError(
            f"tensor: expected one of PyTorch's semi-structured tensors, got {type(tensor).__name__}"
        )
    if tensor.packed is None:
        back: Any = from_semi_structured(tensor.t(), capability=capability)  # type: ignore[arg-type]
        made: Sparse24Tensor = back.t()
        return made
    m, k = tensor.shape
    values, meta = canonical_parts(tensor.packed, tensor.meta, (m, k), capability)
    options = tensor.fuse_transpose_cusparselt, tensor.alg_id_cusparselt, tensor.requires_grad
    return Sparse24Tensor(tensor.shape, values, meta, None, None, None, *options)


def to_semi_structured(
    tensor: Sparse24Tensor, backend: str = "cutlass", *, capability: int | None = None
) -> SparseSemiStructuredTensor:
    """One of PyTorch's own tensors with the matrix of a Sparse24Tensor, in new memory.

    ``backend`` is ``cutlass`` or ``cusparselt``; :func:`from_semi_structured` describes ``capability``.
    Raises InvalidProblemError for other backends and for shapes that the format can't hold; UnsupportedError
    for elements that it can't hold; FormatError for a float32 weight that isn't 1:2, which CUTLASS wants.
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


def _made(kind: Any, like: Sparse24Tensor, packed: Tensor, meta: Tensor | None) -> SparseSemiStructuredTensor:
    options = like.fuse_transpose_cusparselt, like.alg_id_cusparselt, like.requires_grad
    made: SparseSemiStructuredTensor = kind(like.shape, packed, meta, None, None, None, *options)
    return made


# PyTorch's functions ----------------------------------------------------------------------------------


def sparse_semi_structured_tile(
    input: Tensor, algorithm: str = "", use_cutlass: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values and metadata of a matrix [M, K] with pruned 4x4 tiles and of its transpose, and the mask.

    ``use_cutlass`` chooses between PyTorch's two layouts, so it has no effect. Raises InvalidProblemError.
    """
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _ops.tile_prune(
        input.detach(), tile_rule(algorithm).value
    )
    return parts


def sparse_semi_structured_apply(input: Tensor, thread_masks: Tensor) -> tuple[Tensor, Tensor]:
    """Values [M, K/2] of a matrix [M, K] and [K, M/2] of its transpose, at the ones of the mask.

    Their positions are those of the metadata that was returned with the mask. Raises InvalidProblemError;
    FormatError for a mask that isn't of tiles.
    """
    ones = torch.ones_like(input, memory_format=torch.contiguous_format)
    kept, masked = _ops.apply_mask(ones, thread_masks), _ops.apply_mask(input.detach(), thread_masks)
    _, meta = _ops.compress(kept)
    _, meta_t = _ops.compress(kept.t().contiguous())
    return kept_values(masked, meta), kept_values(masked.t().contiguous(), meta_t)


def sparse_semi_structured_apply_dense(input: Tensor, thread_masks: Tensor) -> Tensor:
    """The matrix [M, K] with zeros where the mask has zeros. Raises InvalidProblemError."""
    masked: Tensor = _ops.apply_mask(input, thread_masks)
    return masked


def sparse_semi_structured_linear(
    input: Tensor,
    weight: Tensor,
    meta: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(input W^T + bias)``, input [..., K]; ``activation`` None, relu, silu, gelu or gelu_tanh.

    The result has the input's dtype if ``out_dtype`` is None. Values beyond an integer dtype are clamped.
    An integer bias is added exactly, and then relu is the only activation. Raises InvalidProblemError,
    UnsupportedError, FormatError.
    """
    check_activation(activation or "none", gates=False)
    values, words = _canonical(weight, meta, input.shape[-1])
    out = out_dtype or input.dtype
    if bias is None or bias.is_floating_point():
        options = {"activation": activation or "none", "out_dtype": out_dtype}
        return in_dtype(_ops.linear(input, values, words, bias, **options), out)
    if activation not in (None, "relu"):
        raise UnsupportedError(
            f"activation: expected None or relu with a bias of integers, got {activation!r}"
        )
    total = _ops.linear(input, values, words, out_dtype=torch.int32).to(_EXACT) + bias
    return in_dtype(total if activation is None else total.relu(), out)


def sparse_semi_structured_mm(
    mat1: Tensor, mat1_meta: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``W @ mat2``, mat2 [K, N]; :func:`sparse_semi_structured_linear` says its dtypes and errors."""
    values, words = _canonical(mat1, mat1_meta, mat2.shape[0])
    product = _ops.mm(values, words, mat2, out_dtype=out_dtype, may_transpose=True)
    return in_dtype(product, out_dtype or mat2.dtype)


def sparse_semi_structured_addmm(
    input: Tensor,
    mat1: Tensor,
    mat1_meta: Tensor,
    mat2: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``alpha * (W @ mat2) + beta * input[:, None]``, input [M], mat2 [K, N]; the sum is rounded once.

    :func:`sparse_semi_structured_linear` says its dtypes and errors.
    """
    if input.dim() != 1 or input.shape[0] != mat1.shape[0]:
        raise InvalidProblemError(f"input: expected [{mat1.shape[0]}], got {list(input.shape)}")
    values, words = _canonical(mat1, mat1_meta, mat2.shape[0])
    is_int8 = mat2.dtype == torch.int8
    summed, wide = (torch.int32, _EXACT) if is_int8 else (torch.float32, torch.float32)
    product = _ops.mm(values, words, mat2, out_dtype=summed, may_transpose=True).to(wide)
    return in_dtype(alpha * product + beta * input.to(wide)[:, None], out_dtype or mat2.dtype)


def _canonical(packed: Tensor, meta: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Canonical values and metadata of W [M, columns], from the parts that PyTorch's functions take."""
    if is_canonical(packed, meta):
        return packed, meta
    parts: tuple[Tensor, Tensor] = _ops.from_cutlass(packed.detach(), meta, packed.shape[0], columns)
    return parts


FUNCTIONS = {
    "_" + function.__name__: function
    for function in (
        sparse_semi_structured_tile,
        sparse_semi_structured_apply,
        sparse_semi_structured_apply_dense,
        sparse_semi_structured_linear,
        sparse_semi_structured_mm,
        sparse_semi_structured_addmm,
    )
}
"""The functions by their names in the module ``torch``."""


# Replacements --------------------------------------------------------------------------------------


def cut(dense: Tensor) -> Tensor:
    """The matrix [M, K] with those two non-zeros in every four of a row that PyTorch's class keeps.

    PyTorch chooses by position, not by magnitude: it keeps a and b of [a, b, c, d] without a zero. If at most
    two of the four are non-zero, it keeps both.
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
    """A Sparse24Tensor whose ``from_dense`` cuts a matrix that isn't 2:4."""

    @classmethod
    def from_dense(cls, original_tensor: Tensor, alg_id: int = 0) -> Sparse24Tensor:
        Sparse24Tensor._validate_device_dim_dtype_shape(original_tensor)
        with torch.no_grad():
            matrix = cut(original_tensor)
        matrix.requires_grad_(original_tensor.requires_grad)
        return Sparse24Tensor.from_dense(matrix, alg_id)


def use_as_default(*, functions: bool = False, cut: bool = False) -> Any:
    """Let ``torch.sparse.to_sparse_semi_structured`` return a Sparse24Tensor on any device.

    Sparse24Tensor then stands where PyTorch looks for its two classes, so code that imports their names from
    ``torch.sparse`` afterwards gets it too. The result may be used in a ``with`` statement, which restores
    PyTorch's own at its end.

    Parameters
    ----------
    functions : bool
        Also replace ``torch._sparse_semi_structured_tile``, ``_apply``, ``_apply_dense``, ``_linear``,
        ``_mm`` and ``_addmm``. PyTorch has their products for compute capability 8 alone. The replacements
        take metadata as ours or as CUTLASS's, and return ours.
    cut : bool
        Cut a matrix that isn't 2:4 the way PyTorch does, by position and without a warning, instead of
        refusing it.
    """
    kind: Any = _CuttingSparse24Tensor if cut else Sparse24Tensor
    ours: list[tuple[Any, str, Any]] = [(torch.sparse, name, kind) for name in _CLASSES]
    if functions:
        ours += [(torch, name, function) for name, function in FUNCTIONS.items()]
    restoring = ExitStack()
    for module, name, value in ours:
        restoring.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)
    return restoring
