"""A ``Sparse24Tensor`` that stands for a batch of copies of itself, which PyTorch's matmul asks for.

``torch.matmul`` makes one product of x [..., K] and a matrix where x can be folded without a copy. Otherwise
it expands the matrix to a batch and calls ``bmm``. No batch of copies has to exist: x is copied and folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .tensor import Sparse24Tensor

_aten = torch.ops.aten


def as_view_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """The context in which a view of a tensor is made: an inference tensor only if ``tensor`` is one."""
    inside = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if inside else nullcontext()


class Repeated(Tensor):
    """Copies [..., K, M] of a ``matrix``, as ``expand`` gives them to PyTorch's own matmul."""

    matrix: Sparse24Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Repeated], matrix: Sparse24Tensor, leading: Sequence[int]) -> Repeated:
        shape = (*leading, *matrix.shape)
        found: Repeated = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            shape,
            strides=(*[0] * len(leading), *matrix.stride()),
            dtype=matrix.dtype,
            device=matrix.device,
        )
        found.matrix = matrix
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Repeated(shape={list(self.shape)}, matrix={self.matrix!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first, *rest = args
        op = func._overloadpacket
        if func is _aten.bmm.default and isinstance(rest[0], Repeated) and not isinstance(first, Repeated):
            return _product(first, rest[0].matrix)
        if isinstance(first, Repeated):
            count, matrix = first.dim(), first.matrix
            with as_view_of(first):
                if op in (_aten.detach, _aten.alias):
                    return cls(matrix, first.shape[:-2])
                if op is _aten.view and tuple(rest[0][-2:]) == tuple(matrix.shape):
                    return cls(matrix, rest[0][:-2])
                if op is _aten.transpose and {one % count for one in rest} == {count - 1, count - 2}:
                    return cls(cast(Sparse24Tensor, matrix.t()), first.shape[:-2])
        raise UnsupportedError(
            "`SparseSemiStructuredTensor` matmul: Broadcasting is not implemented: expected a dense "
            f"x [..., K] times a matrix, got {func.__name__}"
        )


def _product(x: Tensor, matrix: Sparse24Tensor) -> Tensor:
    """x [batch, tokens, K] times each copy of a matrix [K, M], as one product."""
    batch, tokens, k = x.shape
    y: Tensor = torch.mm(x.reshape(batch * tokens, k), matrix)
    return y.view(batch, tokens, matrix.shape[1])
