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


@dataclass(frozen=True, slots=True)
class BlockSparseSoftmaxArgs(Args):
    """Operands of a ``forward`` softmax; ``layout`` is what ``plan.pack`` returned.

    Tensors of any framework, contiguous, on the plan's device, all of the element. ``x`` [Z, blocks, block,
    block] is read, ``y`` like it is written and may be x itself. ``rpe`` [H, rows, cols],
    ``key_padding_mask`` [Z, cols] and ``attn_mask`` [rows, cols] exactly when the descriptor has them.
    """

    layout: BlockSparseTables
    x: Any
    y: Any
    rpe: Any = None
    key_padding_mask: Any = None
    attn_mask: Any = None


@dataclass(frozen=True, slots=True)
class BlockSparseSoftmaxBackwardArgs(Args):
    """Operands of a ``backward`` softmax: ``y`` and ``dy`` are read, ``dx`` is written and may be dy itself.

    All are [Z, blocks, block, block] of the element; ``layout`` is what ``plan.pack`` returned.
    """

    layout: BlockSparseTables
    y: Any
    dy: Any
    dx: Any
