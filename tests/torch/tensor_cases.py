"""2:4 matrices of the tests of ``Sparse24Tensor``: dense, and as that tensor."""

from __future__ import annotations

import torch

from sparse24_plans.torch import Sparse24Tensor

from .cases import pruned, randn


def dense(m: int = 64, k: int = 128, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pruned(randn(m, k, dtype=dtype, seed=3))


def sparse(m: int = 64, k: int = 128, dtype: torch.dtype = torch.float32) -> Sparse24Tensor:
    return Sparse24Tensor.from_dense(dense(m, k, dtype))
