"""The operands of block-sparse plans, as callers give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.operands import Args
from .tables import BlockSparseTables


@dataclass(frozen=True, slots=True)
class BlockSparseMatmulArgs(Args):
    """Operands of a product; ``layout`` is what ``plan.pack`` returned.

    Tensors of any framework, contiguous, on the plan's device. A sparse matrix is its values [Z, blocks,
    block, block], a dense one [Z, H, rows, columns]. ``a`` and ``b`` are of the element and are read, ``c``
    of ``out_element`` is written. ``bias`` [H, rows of C], for ``dds`` [H, columns of C], of
    ``bias_element``, exactly when the epilogue has one.
    """

    layout: BlockSparseTables
    a: Any
    b: Any
    c: Any
    bias: Any = None
