"""PyTorch's functions of semi-structured parts, with its names and arguments, on this package's ops.

Metadata comes as ours or, of 16 and 8 bits, as CUTLASS's, which is converted at each call; what is returned
is ours. So tensors that PyTorch's own classes made, and code that calls these functions, work on devices that
CUTLASS's kernels refuse. ``use_as_default(functions=True)`` puts them into PyTorch's place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError, UnsupportedError
from .activations import check_activation
from .elements import in_dtype
from .foreign import is_canonical
from .prepare_ops import kept_values
from .tensor import tile_rule

_ops: Any = torch.ops.sparse24
_EXACT = torch.float64
"""Has every sum of an int32 and another."""


def sparse_semi_structured_tile(
    input: Tensor, algorithm: str = "", use_cutlass: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values and metadata of a matrix [M, K] whose 4x4 tiles are pruned and of its transpose, and the mask.

    ``use_cutlass`` chooses between PyTorch's two layouts and so means nothing here. Raises
    InvalidProblemError.
    """
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _ops.tile_prune(
        input.detach(), tile_rule(algorithm).value
    )
    return parts


def sparse_semi_structured_apply(input: Tensor, thread_masks: Tensor) -> tuple[Tensor, Tensor]:
    """Values [M, K/2] and [K, M/2] of a matrix [M, K] and of its transpose, where the mask has ones.

    They stand where the metadata of the matrix that the mask is of has them. Raises InvalidProblemError;
    FormatError for a mask that isn't of tiles.
    """
    ones = torch.ones_like(input, memory_format=torch.contiguous_format)
    kept, masked = _ops.apply_mask(ones, thread_masks), _ops.apply_mask(input.detach(), thread_masks)
    _, meta = _ops.compress(kept)
    _, meta_t = _ops.compress(kept.t().contiguous())
    return kept_values(masked, meta), kept_values(masked.t().contiguous(), meta_t)


def sparse_semi_structured_apply_dense(input: Tensor, thread_masks: Tensor) -> Tensor:
    """The matrix [M, K] where the mask has ones. Raises InvalidProblemError."""
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

    The result is of the input's dtype where ``out_dtype`` is None; what an integer doesn't hold is clamped.
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
    """``W @ mat2``, mat2 [K, N]; dtypes and errors as of :func:`sparse_semi_structured_linear`."""
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

    Dtypes and errors as of :func:`sparse_semi_structured_linear`.
    """
    if input.dim() != 1 or input.shape[0] != mat1.shape[0]:
        raise InvalidProblemError(f"input: expected [{mat1.shape[0]}], got {list(input.shape)}")
    values, words = _canonical(mat1, mat1_meta, mat2.shape[0])
    whole = mat2.dtype == torch.int8
    summed, wide = (torch.int32, _EXACT) if whole else (torch.float32, torch.float32)
    product = _ops.mm(values, words, mat2, out_dtype=summed, may_transpose=True).to(wide)
    return in_dtype(alpha * product + beta * input.to(wide)[:, None], out_dtype or mat2.dtype)


def _canonical(packed: Tensor, meta: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Of parts that PyTorch's functions take, W [M, columns]."""
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
"""By their names in the module ``torch``."""
