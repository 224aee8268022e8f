"""``MatMul``, ``Softmax`` and ``Linear``: modules of Torch-Blocksparse's names, arguments and meaning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidProblemError
from ..activations import check_activation
from .functional import matmul, softmax
from .layout_buffers import layout_of

MODES = ("sdd", "dsd", "dds")


class MatMul(nn.Module):
    """The product of two matrices of which one, or the result, is block-sparse.

    Parameters
    ----------
    layout : Layout, BlockSparseLayout, Tensor or array
        Of the sparse matrix as it is stored; a Layout is shared, else one is made.
    block : int, optional
        Its blocks' size; needed beside a bitmap.
    mode : str
        ``sdd``, ``dsd`` or ``dds``: which of result, a and b is sparse.
    trans_a, trans_b : bool
        Whether the operand is stored transposed.

    Raises InvalidProblemError naming the argument.
    """

    def __init__(
        self,
        layout: Any,
        block: int | None = None,
        mode: str = "",
        trans_a: bool = False,
        trans_b: bool = False,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise InvalidProblemError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.layout = layout_of(layout, block)
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """``op(a) @ op(b)``: [Z, H, rows, columns], or of ``sdd`` values [Z, blocks, block, block].

        Dense operands are [Z, H, rows, columns], sparse ones values; leading dimensions of 1 may lack.
        """
        a, b = _padded(a), _padded(b)
        return matmul(a, b, self.layout, self.mode, self.trans_a, self.trans_b)

    def extra_repr(self) -> str:
        return f"mode={self.mode}, trans_a={self.trans_a}, trans_b={self.trans_b}"


class Softmax(nn.Module):
    """The softmax over the kept cells of each row, with what is added to them before.

    Parameters
    ----------
    layout : Layout, BlockSparseLayout, Tensor or array
        Of the scores; a Layout is shared, else one is made.
    block : int, optional
        Its blocks' size; needed beside a bitmap.
    causal : bool
        Whether cells whose column is beyond their row are dropped.
    """

    def __init__(self, layout: Any, block: int | None = None, *, causal: bool = False) -> None:
        super().__init__()
        self.layout = layout_of(layout, block)
        self.causal = causal

    def forward(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """As the function ``softmax``. Unlike the reference's it leaves x as it is."""
        return softmax(
            _padded(x),
            self.layout,
            scale,
            rpe,
            key_padding_mask,
            attn_mask,
            key_padding_mask_mode,
            attn_mask_mode,
            causal=self.causal,
        )


class Linear(nn.Module):
    """``activation(x S + bias)`` with S [in_features, out_features] block-sparse; x has any leading sizes.

    Parameters
    ----------
    in_features, out_features : int
        The sides of S, multiples of the block.
    block : int, optional
        16, 32, 64 or 128; needed beside a bitmap.
    layout : Layout, BlockSparseLayout, Tensor or array
        Of S, one head: a bitmap [in_features/block, out_features/block]. S is the transpose of what
        ``nn.Linear`` has.
    bias : bool
        Whether there is a bias [out_features]; none by default, as in the reference.
    activation : str
        ``none``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``, in the product's epilogue.
    device, dtype
        As of torch.nn.Linear; float32, float16 or bfloat16.

    ``weight`` is the values [blocks, block, block]. Raises InvalidProblemError naming the argument.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int | None,
        layout: Any,
        bias: bool = False,
        *,
        activation: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout_of(layout, block, device)
        one = self.layout.shape
        if (one.heads, one.rows, one.cols) != (1, in_features, out_features):
            raise InvalidProblemError(
                f"layout: expected 1 head of [{in_features}, {out_features}], got {one.heads} of "
                f"[{one.rows}, {one.cols}]"
            )
        check_activation(activation, gates=False)
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation
        values = torch.empty(one.blocks, one.block, one.block, device=device, dtype=dtype)
        self.weight = nn.Parameter(values)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, with the bound of ``nn.Linear`` for as many inputs as an output has on average."""
        inputs = self.weight.numel() / max(self.out_features, 1)
        bound = inputs**-0.5 if inputs else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_linear(cls, linear: nn.Linear, layout: Any, block: int | None = None, **options: Any) -> Linear:
        """Of a dense layer, which stays as it is: its kept blocks, the others dropped; the bias is copied."""
        if not isinstance(linear, nn.Linear):
            raise InvalidProblemError(f"linear: expected an nn.Linear, got a {type(linear).__name__}")
        weight, bias = linear.weight.detach(), linear.bias
        sides = linear.in_features, linear.out_features
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        found = cls(*sides, block, layout, bias is not None, **options)
        with torch.no_grad():
            found.weight.copy_(found.layout.kept_blocks(weight.t()[None, None])[0])
            if found.bias is not None:
                found.bias.copy_(bias)
        return found

    def dense_weight(self) -> Tensor:
        """S^T [out_features, in_features], as ``nn.Linear`` has it; differentiable."""
        return self.layout.to_dense(self.weight[None])[0, 0].t()

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise InvalidProblemError(f"input: expected [..., {self.in_features}], got {list(input.shape)}")
        rows = input.flatten(0, -2) if input.dim() > 1 else input[None]
        y = matmul(
            rows[None, None],
            self.weight[None],
            self.layout,
            "dds",
            bias=None if self.bias is None else self.bias[None],
            activation=self.activation,
        )
        return y.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation={self.activation}"
        )


def _padded(x: Tensor) -> Tensor:
    """With leading dimensions of 1 for those that lack."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x
