"""Arguments of block-sparse plans: the operands that callers pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.operands import Args
from .lookup_tables import BlockSparseTables


@dataclass(frozen=True, slots=True)
class BlockSparseMatmulArgs(Args):
    """Operands of a product; ``layout`` is what ``plan.pack`` returned.

    Tensors of any framework, contiguous, on the plan's device. A sparse matrix is its values [Z, blocks,
    block, block], a dense one [Z, H, rows, columns]. ``a`` and ``b`` are of the element and are read, ``c``
    of ``out_element`` is written. ``bias`` [H, rows of C], for ``dds`` [H, columns of C], of
    ``bias_element``, exactly when the epilogue has one. For a descriptor with inner ``sparse24``, the sparse
    matrix is values [Z, blocks, block, block/2] and ``metadata`` in uint8 [Z, blocks, block, block/8]: what
    ``compress_blocks`` gives. For a descriptor with ``packed``, the sparse matrix is a PackedBlocks, and
    ``layout`` is None.
    """

    layout: BlockSparseTables | None
    a: Any
    b: Any
    c: Any
    bias: Any = None
    metadata: Any = None


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


@dataclass(frozen=True, slots=True)
class BlockSparseAttentionArgs(Args):
    """Operands of a ``forward`` attention; ``layout`` is what ``plan.pack`` returned.

    Tensors of any framework, contiguous, on the plan's device. Read: ``q`` [Z, H, rows, head_size], ``k`` and
    ``v`` [Z, kv_heads, cols, head_size] of the element. Written: ``o`` like q, and ``lse`` [Z, H, rows] in
    float32. ``q_lengths`` and ``kv_lengths`` [Z] in int32, exactly when the descriptor has lengths.
    ``seed_offset`` [4] in int32, exactly when it has dropout: the 32-bit words of two 64-bit integers, the
    seed and the offset, low word first. It is read when the work runs, so a captured graph takes new numbers.
    """

    layout: BlockSparseTables
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    q_lengths: Any = None
    kv_lengths: Any = None
    seed_offset: Any = None


@dataclass(frozen=True, slots=True)
class BlockSparseAttentionBackwardArgs(Args):
    """Operands of a ``backward`` attention; ``layout`` is what ``plan.pack`` returned.

    Read: ``q``, ``k``, ``v``, ``q_lengths``, ``kv_lengths`` and ``seed_offset`` of the forward pass, its
    results ``o`` and ``lse``, and ``do`` like o. Written: ``dq`` like q, ``dk`` and ``dv`` like k.
    """

    layout: BlockSparseTables
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    do: Any
    dq: Any
    dk: Any
    dv: Any
    q_lengths: Any = None
    kv_lengths: Any = None
    seed_offset: Any = None


@dataclass(frozen=True, slots=True)
class BlockSparseConv2dArgs(Args):
    """Operands of a ``forward`` convolution; ``layout`` is what ``plan.pack`` returned.

    Tensors of any framework, contiguous, on the plan's device. Read: ``x`` [N, height, width, C] and
    ``filter``, its values [1, blocks, block, block], of the element; ``bias`` [K] of
    ``bias_element``, exactly when the epilogue has one. Written: ``y`` [N, rows, columns, K] of
    ``out_element``.
    """

    layout: BlockSparseTables
    x: Any
    filter: Any
    y: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class BlockSparseConv2dDgradArgs(Args):
    """Operands of a ``dgrad``: ``dy`` like y and ``filter`` are read, ``dx`` like x is written.

    ``layout`` is what ``plan.pack`` returned.
    """

    layout: BlockSparseTables
    dy: Any
    filter: Any
    dx: Any


@dataclass(frozen=True, slots=True)
class BlockSparseConv2dWgradArgs(Args):
    """Operands of a ``wgrad``: ``x`` and ``dy`` like y are read, ``dfilter`` like filter is written.

    ``layout`` is what ``plan.pack`` returned.
    """

    layout: BlockSparseTables
    x: Any
    dy: Any
    dfilter: Any
