"""Products, softmax, attention and convolution as functions of tensors and a Layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...blocksparse.descriptor import FLOATS
from ...errors import InvalidProblemError, shown
from ...vocab import integer
from ..elements import DTYPE_OF
from .layout_buffers import Layout
from .plan_dispatch import check_dims

_ops: Any = torch.ops.sparse24
_SOFTMAX_DTYPES = tuple(DTYPE_OF[element] for element in FLOATS)


def _tables_of(layout: Layout, device: torch.device) -> Tensor:
    """The layout's tables on the device. Raises InvalidProblemError for anything but a Layout."""
    if not isinstance(layout, Layout):
        raise InvalidProblemError(
            f"layout: expected a Layout, got a {type(layout).__name__}; Layout(bitmap, block) makes one"
        )
    return layout.tables_on(device)


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
    """``activation(alpha * op(a) @ op(b) + bias)``, in which one matrix is block-sparse.

    Parameters
    ----------
    a, b : Tensor
        A dense operand [Z, H, rows, columns]; a sparse one as its values [Z, blocks, block, block]. Both have
        one dtype: float32, float16, bfloat16, int8 or float8_e4m3fn.
    layout : Layout
        The layout of the sparse matrix as it is stored.
    mode : str
        The sparse matrix: the result for ``sdd``, whose kept blocks alone are computed, a for ``dsd``, b for
        ``dds``.
    trans_a, trans_b : bool
        Whether the operand is stored transposed.
    bias : Tensor, optional
        [H, rows of the result] for ``dsd``, [H, columns of the result] for ``dds``, in the result's dtype or
        float32.
    activation : str
        ``none``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``; not for ``sdd``.
    out_dtype : torch.dtype, optional
        The dtype of a by default (docs/concepts.md has int8's), or float32.
    preference : str
        JSON of a PlanPreference, which holds for the gradients too.
    metadata : Tensor, optional
        The metadata uint8 [Z, blocks, block, block/8] of a sparse matrix whose blocks are 2:4 along the sums.
        Its values are [Z, blocks, block, block/2]; ``compress_blocks`` returns both. Not for ``sdd``.

    The gradients of a and b are products of the other two modes by the same tables. With metadata there are
    no gradients. Raises InvalidProblemError naming the argument, UnsupportedError if no kernel serves.
    """
    tables = _tables_of(layout, a.device)
    # A compiled graph would be compiled anew where a new mask has other panels.
    panels = () if torch.compiler.is_compiling() else layout.panels
    options = bias, activation, alpha, out_dtype, preference, metadata, panels
    c: Tensor = _ops.blocksparse_matmul(a, b, tables, layout.sizes, mode, trans_a, trans_b, *options)
    return c


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
        A relative position embedding [heads, rows, cols], or [Z, heads, rows, cols] as in Torch-Blocksparse;
        Z may be 1. It has a gradient. One for each batch is added to x in float32 before the kernel runs.
    key_padding_mask : Tensor, optional
        [Z, cols]. In mode ``add`` it is added and has a gradient. In mode ``mul`` its zeros drop cells.
    attn_mask : Tensor, optional
        [rows, cols], in the same two modes.
    causal : bool
        Whether cells whose column is beyond their row are dropped.

    Masks may have another dtype than x, but bool in mode ``mul`` alone. A row without a cell left is zeros.
    Raises InvalidProblemError naming the argument, UnsupportedError if no kernel serves.
    """
    tables, dtype = _tables_of(layout, x.device), x.dtype
    if rpe is not None and rpe.dim() == 4:
        if rpe.shape[0] == 1:
            rpe = rpe[0]
        else:
            x, scale, rpe = _with_rpe_of_batches(x, rpe, layout, scale), 1.0, None
    key_padding = _added(key_padding_mask, "key_padding_mask", key_padding_mask_mode, x)
    added = _added(rpe, "rpe", "add", x), key_padding, _added(attn_mask, "attn_mask", attn_mask_mode, x)
    options = scale, *added, key_padding_mask_mode, attn_mask_mode, causal, preference
    y: Tensor = _ops.blocksparse_softmax(x, tables, layout.sizes, *options)
    return y.to(dtype)


def _with_rpe_of_batches(x: Tensor, rpe: Tensor, layout: Layout, scale: float) -> Tensor:
    """``scale * x + rpe`` in float32, because no kernel adds an embedding of each batch."""
    check_dims(x, "x", "Z, blocks, block, block")
    heads, rows, cols, block, blocks = layout.sizes
    wanted, values = (len(x), heads, rows, cols), (len(x), blocks, block, block)
    if rpe.shape != wanted or rpe.dtype == torch.bool or rpe.device != x.device:
        raise InvalidProblemError(
            f"rpe: expected numbers {list(wanted)} on {x.device}, got {rpe.dtype} {list(rpe.shape)} on "
            f"{rpe.device}"
        )
    if x.shape != values or x.dtype not in _SOFTMAX_DTYPES:
        raise InvalidProblemError(
            f"x: expected float32, float16 or bfloat16 {list(values)}, got {x.dtype} {list(x.shape)}"
        )
    return scale * x.float() + layout.kept_blocks(rpe.float())


def _added(mask: Tensor | None, argument: str, mode: str, x: Tensor) -> Tensor | None:
    """The mask in the dtype of x. Raises InvalidProblemError for a bool that would be added."""
    if mask is None:
        return None
    if mask.dtype == torch.bool and mode == "add":
        remedy = "" if argument == "rpe" else "; pass mode mul"
        raise InvalidProblemError(f"{argument}: expected numbers to add, got torch.bool{remedy}")
    if mode == "mul" and mask.dtype != torch.bool:
        mask = mask != 0 if not mask.requires_grad else mask  # a narrower dtype may round it to 0
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
    dropout_p: float = 0.0,
    seed_offset: Tensor | None = None,
) -> Any:
    """``softmax(scale * q @ k^T) @ v`` over the kept cells of each head's scores.

    Parameters
    ----------
    q : Tensor
        [Z, H, rows, head_size] of float32, float16 or bfloat16.
    k, v : Tensor
        [Z, kv_heads, cols, head_size]. H / kv_heads neighbouring heads of q share one head of k and v.
    layout : Layout
        The layout of the scores: H heads of [rows, cols].
    scale : float, optional
        1 / sqrt(head_size) by default.
    causal : bool
        Whether cells whose column is beyond their row are dropped.
    q_lengths, kv_lengths : Tensor, optional
        Int32 [Z], both or neither. Tokens beyond these lengths are dropped and not read.
    return_lse : bool
        Whether to return also the logarithm of the sum of each row's exponentials, float32 [Z, H, rows]. It
        has no gradient.
    dropout_p : float
        Probability that a cell of the softmax is dropped, as in ``scaled_dot_product_attention``.
    seed_offset : Tensor, optional
        Int64 [2] on q's device, which decides what is dropped. By default PyTorch's generator of the device
        draws it; a captured graph draws anew at each replay.

    A fused kernel computes it, or products and softmax if the device has no such kernel. Raises
    InvalidProblemError naming the argument, UnsupportedError if neither serves.
    """
    tables = _tables_of(layout, q.device)
    if dropout_p and seed_offset is None:
        seed_offset = torch.randint(-(2**63), 2**63 - 1, (2,), device=q.device)
    options = scale, causal, q_lengths, kv_lengths, preference, dropout_p, seed_offset
    o, lse = _ops.blocksparse_attention(q, k, v, tables, layout.sizes, *options)
    return (o, lse) if return_lse else o


def conv2d(
    x: Tensor,
    filter: Tensor,
    layout: Layout,
    kernel_size: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    *,
    preference: str = "",
) -> Tensor:
    """The convolution of images with a block-sparse filter.

    Parameters
    ----------
    x : Tensor
        [N, C, height, width] of float32, float16 or bfloat16. A ``channels_last`` tensor is read as it is;
        any other is copied.
    filter : Tensor
        The filter's values [blocks, block, block] or [1, blocks, block, block]. A block holds out by in
        channels of one tap.
    layout : Layout
        The filter's layout: one head of [K, C * R * S]. A bitmap [K/block, C/block, R, S] is reshaped to
        [1, K/block, C/block * R * S].
    kernel_size, stride, padding, dilation : int or (int, int)
        The arguments of ``torch.nn.functional.conv2d``. Padding is zeros.
    bias : Tensor, optional
        [K], in the dtype of x or float32.
    preference : str
        JSON of a PlanPreference, which holds for the gradients too.

    The result [N, K, rows, columns] is ``channels_last``. x, filter and bias have gradients. If the device
    has no kernel for the problem and nothing is preferred, PyTorch convolves with a dense filter. Raises
    InvalidProblemError naming the argument.
    """
    check_dims(x, "x", "N, C, height, width")
    names = "kernel_size", "stride", "padding", "dilation"
    pairs = map(pair_of, names, (kernel_size, stride, padding, dilation))
    values = filter[None] if filter.dim() == 3 else filter
    y = _ops.blocksparse_conv2d(
        x.permute(0, 2, 3, 1), values, _tables_of(layout, x.device), layout.sizes, *pairs, bias, preference
    )
    found: Tensor = y.permute(0, 3, 1, 2)
    return found


def pair_of(name: str, given: Any) -> tuple[int, int]:
    """An integer or a pair as a pair of Python's. Raises InvalidProblemError naming the argument."""
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    found = [integer(one) for one in pair]
    if len(found) != 2 or found[0] is None or found[1] is None:
        raise InvalidProblemError(f"{name}: expected an integer or two, got {shown(given)}")
    return found[0], found[1]
