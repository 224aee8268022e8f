"""Layouts and operands that the tests of block-sparse matrices in PyTorch share; references are dense."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparse24_plans import BlockSparseLayout
from sparse24_plans.torch.blocksparse import Layout

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LOSS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SPARSE = {"sdd": "c", "dsd": "a", "dds": "b"}

BITMAPS = {
    "two heads": [[[1, 0, 1], [0, 1, 0]], [[1, 1, 0], [1, 0, 1]]],
    "empty rows and columns": [[[0, 0, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]]],
    "all blocks": [[[1, 1], [1, 1]]],
    "no blocks": [[[0, 0], [0, 0]], [[0, 0], [0, 0]]],
}


def layout_of(name: str = "two heads", block: int = 16) -> Layout:
    return Layout(BlockSparseLayout(BITMAPS[name], block))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers for every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def dense_of(values: Tensor, layout: Layout) -> Tensor:
    """[Z, heads, rows, cols] in float64, block by block: independent of the package but for the bitmap."""
    one = layout.shape
    rows = []
    places = {at: i for i, at in enumerate(zip(*np.nonzero(layout.layout.bitmap), strict=True))}
    zero = values.new_zeros(values.shape[0], one.block, one.block, dtype=torch.float64)
    for head in range(one.heads):
        for row in range(one.block_rows):
            kept = [places.get((head, row, column)) for column in range(one.block_cols)]
            parts = [zero if at is None else values[:, at].double() for at in kept]
            rows.append(torch.cat(parts, 2))
    return torch.cat(rows, 1).view(values.shape[0], one.heads, one.rows, one.cols)


def mask_of(layout: Layout) -> Tensor:
    """Bool [heads, rows, cols]: which cells are kept."""
    block = layout.shape.block
    return torch.from_numpy(np.kron(layout.layout.bitmap, np.ones((1, block, block), bool)))


def close(result: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """``dtype``: of the computation, where the result was widened."""
    loss = LOSS.get(dtype or result.dtype, LOSS[torch.float32])
    torch.testing.assert_close(result.double(), exact.double(), rtol=loss, atol=loss * 10)


def operands(
    mode: str,
    layout: Layout,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    batch: int = 2,
    n: int = 20,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """a and b of a product as they are stored."""
    one = layout.shape
    is_transposed = {"sdd": False, "dsd": trans_a, "dds": trans_b}[mode]
    rows, cols = (one.cols, one.rows) if is_transposed else (one.rows, one.cols)
    values = randn(batch, one.blocks, one.block, one.block, dtype=dtype, seed=1)
    sides = {
        "sdd": ((rows, n), (n, cols)),
        "dsd": (None, (cols, n)),
        "dds": ((n, rows), None),
    }[mode]
    found = []
    for seed, (pair, trans) in enumerate(zip(sides, (trans_a, trans_b), strict=True)):
        if pair is None:
            found.append(values)
        else:
            shape = pair[::-1] if trans else pair
            found.append(randn(batch, one.heads, *shape, dtype=dtype, seed=5 + seed))
    return found[0], found[1]


def product(a: Tensor, b: Tensor, layout: Layout, mode: str, trans_a: bool, trans_b: bool) -> Tensor:
    """Dense, in float64; of ``sdd`` zero outside of the kept blocks."""
    left = dense_of(a, layout) if mode == "dsd" else a.double()
    right = dense_of(b, layout) if mode == "dds" else b.double()
    found = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    return found * mask_of(layout) if mode == "sdd" else found
