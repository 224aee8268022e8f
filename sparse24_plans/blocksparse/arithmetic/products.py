"""Products with block-sparse matrices in NumPy, a line of blocks at a time.

A line is a row of blocks of op(S). Its blocks side by side are a dense strip, and so are the rows of the
other matrix that they meet: one product of two dense matrices, whose sums run over kept blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...arithmetic.fma32 import fma_f32
from ..lookup_tables import LookUp
from ..shape import BlockSparseShape

Array = np.ndarray[Any, Any]
Multiply = Callable[[Array, Array], Array]
"""[Z, m, k], [Z, k, n], float32 -> their product [Z, m, n], float32; of integers float64, exact."""


class Line(NamedTuple):
    """A row of blocks of op(S)."""

    head: int
    cells: slice
    """The rows of op(S) that it stands for."""
    across: Array
    """Its blocks' columns in op(S), rising."""
    places: Array
    """Its blocks among the values."""

    def met(self, block: int) -> Array:
        """The columns of op(S), in cells, that its blocks cover."""
        cells: Array = self.across[:, None] * block + np.arange(block)
        return cells.reshape(-1)


def lines(shape: BlockSparseShape, tables: LookUp, *, transposed: bool) -> Iterator[Line]:
    """Those of S, or of S transposed."""
    pointers, inner, count = tables.row_pointers, tables.columns, shape.block_rows
    order: Array = np.arange(shape.blocks)
    if transposed:
        pointers, inner, count = tables.column_pointers, tables.column_rows, shape.block_cols
        order = tables.column_order
    for at in range(shape.heads * count):
        head, line = divmod(at, count)
        part = slice(pointers[at], pointers[at + 1])
        cells = slice(line * shape.block, (line + 1) * shape.block)
        yield Line(head, cells, inner[part], order[part])


def blas(left: Array, right: Array) -> Array:
    """In whatever order BLAS likes."""
    product: Array = left @ right
    return product


def exact(left: Array, right: Array) -> Array:
    """Of 8-bit integers: float64 holds every sum of fewer than 2^39 products."""
    product: Array = left.astype(np.float64) @ right.astype(np.float64)
    return product


def in_order(left: Array, right: Array) -> Array:
    """One float32 fma a product, in increasing k, from +0."""
    acc = np.zeros((left.shape[0], left.shape[1], right.shape[2]), np.float32)
    for k in range(left.shape[2]):
        acc = fma_f32(left[:, :, k, None], right[:, k, None, :], acc)
    return acc


def sparse_times_dense(
    line: Line, values: Array, dense: Array, multiply: Multiply, *, transposed: bool
) -> Array:
    """The sums [Z, block, n] of one line of op(S) [Z, ...] times ``dense`` [Z, H, K, n]."""
    tiles = values[:, line.places]
    strip = side_by_side(tiles.swapaxes(2, 3) if transposed else tiles)
    return multiply(strip, dense[:, line.head][:, line.met(tiles.shape[2])])


def kept_times_dense(line: Line, values: Array, dense: Array, *, columns: Array) -> Array:
    """The same of 2:4 blocks' kept values [Z, blocks, block, block/2], which lie in ``columns`` of theirs.

    One float32 fma a kept value, in increasing k, from +0.
    """
    block = values.shape[2]
    kept = side_by_side(values[:, line.places])
    across = np.repeat(line.across * block, block // 2)
    met = side_by_side(columns[:, line.places]) + across
    right = dense[:, line.head]
    batch = np.arange(kept.shape[0])[:, None]
    acc = np.zeros((kept.shape[0], block, right.shape[2]), np.float32)
    for k in range(kept.shape[2]):
        acc = fma_f32(kept[:, :, k, None], right[batch, met[:, :, k]], acc)
    return acc


def dense_times_dense(line: Line, left: Array, right: Array, multiply: Multiply, block: int) -> Array:
    """The line's blocks [Z, ..., block, block] of ``left`` [Z, H, M, n] @ ``right`` [Z, H, n, N]."""
    return in_blocks(multiply(left[:, line.head, line.cells], right[:, line.head][:, :, line.met(block)]))


def side_by_side(tiles: Array) -> Array:
    """The blocks [Z, count, block, width] of a line as a strip [Z, block, count * width]."""
    batch, count, block, width = tiles.shape
    return tiles.swapaxes(1, 2).reshape(batch, block, count * width)


def in_blocks(strip: Array) -> Array:
    """What :func:`side_by_side` was made of."""
    batch, block, width = strip.shape
    return strip.reshape(batch, block, width // block, block).swapaxes(1, 2)
