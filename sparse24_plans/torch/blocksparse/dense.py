"""Values and dense matrices of each other, by PyTorch's own operations: differentiable, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidProblemError
from .plan_dispatch import check_dims, shape_of, table


def _places(layout: Tensor, shape: Sequence[int]) -> Tensor:
    """Of each kept block, its place among all blocks of all heads."""
    across = shape_of(tuple(shape)).block_cols
    return table(layout, shape, "rows").long() * across + table(layout, shape, "columns")


def to_dense(values: Tensor, layout: Tensor, shape: Sequence[int]) -> Tensor:
    """``values`` [Z, blocks, block, block] as [Z, heads, rows, cols], zero elsewhere."""
    one = shape_of(tuple(shape))
    check_dims(values, "values", "Z, blocks, block, block")
    if tuple(values.shape[1:]) != (one.blocks, one.block, one.block):
        raise InvalidProblemError(
            f"values: expected [Z, {one.blocks}, {one.block}, {one.block}], got {list(values.shape)}"
        )
    if values.element_size() == 1 and values.dtype != torch.uint8:  # no gradients, and no indexing of fp8
        return to_dense(values.view(torch.uint8), layout, shape).view(values.dtype)
    batch, block = values.shape[0], one.block
    every = one.heads * one.block_rows * one.block_cols
    blocks = values.new_zeros(batch, every, block, block)
    blocks = blocks.index_copy(1, _places(layout, shape), values)
    tiles = blocks.view(batch, one.heads, one.block_rows, one.block_cols, block, block)
    return tiles.transpose(3, 4).reshape(batch, one.heads, one.rows, one.cols)


def kept_blocks(dense: Tensor, layout: Tensor, shape: Sequence[int]) -> Tensor:
    """The kept blocks of ``dense`` [Z, heads, rows, cols]; what lies outside of them is dropped."""
    one = shape_of(tuple(shape))
    check_dims(dense, "dense", "Z, heads, rows, cols")
    if tuple(dense.shape[1:]) != (one.heads, one.rows, one.cols):
        raise InvalidProblemError(
            f"dense: expected [Z, {one.heads}, {one.rows}, {one.cols}], got {list(dense.shape)}"
        )
    if dense.element_size() == 1 and dense.dtype != torch.uint8:
        return kept_blocks(dense.view(torch.uint8), layout, shape).view(dense.dtype)
    batch, block = dense.shape[0], one.block
    every = one.heads * one.block_rows * one.block_cols
    tiles = dense.reshape(batch, one.heads, one.block_rows, block, one.block_cols, block)
    blocks = tiles.transpose(3, 4).reshape(batch, every, block, block)
    return blocks.index_select(1, _places(layout, shape))
