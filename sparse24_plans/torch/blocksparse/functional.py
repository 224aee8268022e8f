"""Products, softmax and attention of block-sparse matrices as functions of tensors and a Layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidProblemError
from .layout_buffers import Layout

_ops: Any = torch.ops.sparse24


def matmul(
    a: Tensor,
    b: Tensor,
    layout: Layout,
    mode: str,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    metadata: Tensor | None = None,
) -> Tensor:
    """``activation(alpha * op(a) @ op(b) + bias)``, of which one matrix is block-sparse.

    Parameters
    ----------
    a, b : Tensor
        Dense ones [Z, H, rows, columns], the sparse one its values [Z, blocks, block, block], of one dtype:
        float32, float16, bfloat16, int8 or float8_e4m3fn.
    layout : Layout
        Of the sparse matrix, as it is stored.
    mode : str
        ``sdd``: the result is sparse, only its kept blocks are computed. ``dsd``: a is. ``dds``: b is.
    trans_a, trans_b : bool
        Whether the operand is stored transposed.
    bias : Tensor, optional
        [H, rows] for ``dsd``, [H, columns] for ``dds``, of the result; of its dtype or float32.
    activation : str
        ``none``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``; not for ``sdd``.
    out_dtype : torch.dtype, optional
        That of a by default (int8: see docs/concepts.md), or float32.
    preference : str
        JSON of a PlanPreference, for the gradients too.
    metadata : Tensor, optional
        uint8 [Z, blocks, block, block/8]: of a sparse matrix whose blocks are 2:4 along the sums, beside its
        values [Z, blocks, block, block/2]; both are what ``compress_blocks`` gives. Not for ``sdd``.

    The gradients of a and b are products of the other two modes, by the same tables; with metadata
    there are none. Raises InvalidProblemError naming the argument, UnsupportedError where no kernel serves.
    """
    return _ops.blocksparse_matmul(  # type: ignore[no-any-return]
        a,
        b,
        layout.tables,
        layout.sizes,
        mode,
        trans_a,
        trans_b,
        bias,
        activation,
        alpha,
        out_dtype,
        preference,
        metadata,
    )


def softmax(
    x: Tensor,
    layout: Layout,
    scale: float = 1.0,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
    *,
    causal: bool = False,
    preference: str = "",
) -> Tensor:
    """The softmax of ``scale * x + rpe + masks`` over the kept cells of each row; x is left as it is.

    Parameters
    ----------
    x : Tensor
        Values [Z, blocks, block, block] of float32, float16 or bfloat16.
    rpe : Tensor, optional
        A relative position embedding [heads, rows, cols], or [1, heads, rows, cols]. Has a gradient.
    key_padding_mask : Tensor, optional
        [Z, cols]. Mode ``add``: added, and has a gradient; ``mul``: cells are dropped where it is 0.
    attn_mask : Tensor, optional
        [rows, cols], likewise.
    causal : bool
        Whether cells whose column is beyond their row are dropped.

    Masks may be of another dtype, bools in mode ``mul`` alone. A row without a cell left is zeros. Raises
    InvalidProblemError naming the argument, UnsupportedError where no kernel serves.
    """
    if rpe is not None and rpe.dim() == 4 and rpe.shape[0] == 1:
        rpe = rpe[0]
    return _ops.blocksparse_softmax(  # type: ignore[no-any-return]
        x,
        layout.tables,
        layout.sizes,
        scale,
        None if rpe is None else _added(rpe, "rpe", "add", x),
        None
        if key_padding_mask is None
        else _added(key_padding_mask, "key_padding_mask", key_padding_mask_mode, x),
        None if attn_mask is None else _added(attn_mask, "attn_mask", attn_mask_mode, x),
        key_padding_mask_mode,
        attn_mask_mode,
        causal,
        preference,
    )


def _added(mask: Tensor, argument: str, mode: str, x: Tensor) -> Tensor:
    """In x's dtype. What a bool would add isn't what anyone means by one."""
    if mask.dtype == torch.bool and mode == "add":
        raise InvalidProblemError(f"{argument}: expected numbers to add, got torch.bool; mode mul takes it")
    if mode == "mul" and mask.dtype != torch.bool:
        mask = mask != 0 if not mask.requires_grad else mask  # which a narrower dtype may round to 0
    return mask.to(x.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    causal: bool = False,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    return_lse: bool = False,
    preference: str = "",
) -> Any:
    """``softmax(scale * q @ k^T) @ v`` over the kept cells of each head's scores.

    Parameters
    ----------
    q : Tensor
        [Z, H, rows, head_size] of float32, float16 or bfloat16.
    k, v : Tensor
        [Z, kv_heads, cols, head_size]; H / kv_heads neighbouring heads share theirs.
    layout : Layout
        Of the scores: H heads, [rows, cols].
    scale : float, optional
        1 / sqrt(head_size) by default.
    causal : bool
        Whether cells whose column is beyond their row are dropped.
    q_lengths, kv_lengths : Tensor, optional
        Int32 [Z], both or neither: tokens beyond them are dropped, and not read.
    return_lse : bool
        Whether to return the logarithm of the sum of each row's exponentials too, float32 [Z, H, rows],
        which has no gradient.

    By the device's fused kernel, or where it has none by products and softmax. Raises InvalidProblemError
    naming the argument, UnsupportedError where neither can be had.
    """
    o, lse = _ops.blocksparse_attention(
        q, k, v, layout.tables, layout.sizes, scale, causal, q_lengths, kv_lengths, preference
    )
    return (o, lse) if return_lse else o
