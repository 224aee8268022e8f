"""What measurements of block-sparse matrices share: the element, random operands, the check of results."""

from __future__ import annotations

from typing import Any

from ..blocksparse.layout import BlockSparseLayout
from ..errors import UnsupportedError
from ..vocab import ElementKind
from .peers import torch

ELEMENT = ElementKind.BF16
_WORST_ERROR = 5e-3
"""Relative error above which a time is not recorded: the result is wrong."""


def random(shape: tuple[int, ...]) -> Any:
    """A tensor of the element on PyTorch's GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def dense_of(layout: BlockSparseLayout, values: Any) -> Any:
    """The matrix of ``values`` [blocks, block, block], with its zeros; of a layout of one head."""
    one = layout.shape
    kept = torch.from_numpy(layout.bitmap[0].copy()).to(values.device)
    dense = values.new_zeros(one.block_rows, one.block_cols, one.block, one.block)
    dense[kept] = values
    return dense.transpose(1, 2).reshape(one.rows, one.cols)


def check(what: object, got: Any, exact: Any) -> None:
    """Raise UnsupportedError where results in float32 aren't nearly the exact ones."""
    error = float(torch.linalg.norm(got - exact) / torch.linalg.norm(exact))
    if not error <= _WORST_ERROR:
        raise UnsupportedError(f"{what}: relative error {error:.3g}, not recorded")
