"""Products with block-sparse matrices in NumPy, one block row at a time.

The blocks of a block row of op(S) side by side are a dense matrix, and so are the rows of the other matrix at
their columns. This makes one product of two dense matrices, whose sums run over kept blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...arithmetic.fma32 import fma_chain
from ..lookup_tables import LookUp
from ..shape import BlockSparseShape

Array = np.ndarray[Any, Any]
Multiply = Callable[[Array, Array], Array]
"""Multiplies [Z, m, k] by [Z, k, n] into [Z, m, n]: float32, or for integers exactly in float64."""
blas: Multiply = np.matmul
"""Multiplies in the order that BLAS chooses."""


class BlockRow(NamedTuple):
    """A block row of op(S)."""

    head: int
    cells: slice
    """Rows of op(S) that the block row covers."""
    across: Array
    """Columns of its blocks in op(S), increasing."""
    places: Array
    """Places of its blocks among the values."""

    def cells_across(self, block: int) -> Array:
        """Columns of op(S), in cells, that the blocks cover."""
        cells: Array = self.across[:, None] * block + np.arange(block)
        return cells.reshape(-1)


def block_rows(shape: BlockSparseShape, tables: LookUp, *, transposed: bool) -> Iterator[BlockRow]:
    """The block rows of S, or of S transposed."""
    pointers, inner, count = tables.row_pointers, tables.columns, shape.block_rows
    order: Array = np.arange(shape.blocks)
    if transposed:
        pointers, inner, count = tables.column_pointers, tables.column_rows, shape.block_cols
        order = tables.column_order
    for at in range(shape.heads * count):
        head, row = divmod(at, count)
        part = slice(pointers[at], pointers[at + 1])
        cells = slice(row * shape.block, (row + 1) * shape.block)
        yield BlockRow(head, cells, inner[part], order[part])


def exact(left: Array, right: Array) -> Array:
    """Multiply 8-bit integers: float64 holds every sum of fewer than 2^39 products."""
    product: Array = left.astype(np.float64) @ right.astype(np.float64)
    return product


def in_order(left: Array, right: Array) -> Array:
    """Add one float32 fma for each product, in increasing k, from +0."""
    by_k = left.transpose(2, 0, 1)[..., None], right.swapaxes(0, 1)[:, :, None]
    acc = np.zeros((left.shape[0], left.shape[1], right.shape[2]), np.float32)
    return fma_chain(left.shape[2], lambda steps: (by_k[0][steps], by_k[1][steps]), acc)


def sparse_times_dense(
    row: BlockRow, values: Array, dense: Array, multiply: Multiply, *, transposed: bool
) -> Array:
    """Return the sums [Z, block, n] of a block row of op(S) [Z, ...] times ``dense`` [Z, H, K, n]."""
    tiles = values[:, row.places]
    joined = side_by_side(tiles.swapaxes(2, 3) if transposed else tiles)
    return multiply(joined, dense[:, row.head][:, row.cells_across(tiles.shape[2])])


def kept_times_dense(row: BlockRow, values: Array, dense: Array, *, columns: Array) -> Array:
    """Return the sums of a block row of 2:4 blocks.

    The kept values [Z, blocks, block, block/2] lie in ``columns`` of their blocks. Each adds one float32 fma,
    in increasing k, from +0.
    """
    block = values.shape[2]
    kept = side_by_side(values[:, row.places])
    across = np.repeat(row.across * block, block // 2)
    columns_read = side_by_side(columns[:, row.places]) + across
    right = dense[:, row.head]
    batch = np.arange(kept.shape[0])[:, None]

    def factors(steps: slice) -> tuple[Array, Array]:
        some = kept[:, :, steps].transpose(2, 0, 1)
        return some[..., None], right[batch, columns_read[:, :, steps].transpose(2, 0, 1)]

    return fma_chain(kept.shape[2], factors, np.zeros((kept.shape[0], block, right.shape[2]), np.float32))


def dense_times_dense(row: BlockRow, left: Array, right: Array, multiply: Multiply, block: int) -> Array:
    """Return the row's blocks [Z, ..., block, block] of ``left`` [Z, H, M, n] @ ``right`` [Z, H, n, N]."""
    return in_blocks(
        multiply(left[:, row.head, row.cells], right[:, row.head][:, :, row.cells_across(block)])
    )


def side_by_side(tiles: Array) -> Array:
    """Join the blocks [Z, count, block, width] of a block row into [Z, block, count * width]."""
    batch, count, block, width = tiles.shape
    return tiles.swapaxes(1, 2).reshape(batch, block, count * width)


def in_blocks(joined: Array) -> Array:
    """Undo :func:`side_by_side`."""
    batch, block, width = joined.shape
    return joined.reshape(batch, block, width // block, block).swapaxes(1, 2)
