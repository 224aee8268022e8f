"""``MatMul``, ``Softmax``, ``Linear`` and ``Conv2d``, with Torch-Blocksparse's names and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...blocksparse.layout import BlockSparseLayout
from ...errors import InvalidProblemError, check_choice, shown
from ...vocab import checked_flag
from ..activations import FORWARD, check_activation
from . import conv_ops
from .dense_copy import DenseCopy
from .functional import conv2d, matmul, pair_of, softmax
from .layout_buffers import Layout, layout_of
from .memory_order import checked_order, one_element, permuted

MODES = ("sdd", "dsd", "dds")


class _OverLayout(nn.Module):
    """A module over one Layout, with the attributes that Torch-Blocksparse's has."""

    layout: Layout

    @property
    def block(self) -> int:
        """The blocks' size."""
        return self.layout.shape.block


class _Benched(_OverLayout):
    """A module that takes ``bench``, which does nothing."""

    def __init__(self, layout: Layout, bench: bool) -> None:
        super().__init__()
        self.layout, self.bench = layout, bench

    @property
    def spdims(self) -> torch.Size:
        """The bitmap's sizes: heads, rows / block, cols / block."""
        return self.layout.bitmap.shape


class MatMul(_Benched):
    """A product in which one operand, or the result, is block-sparse.

    Parameters
    ----------
    layout : Layout, BlockSparseLayout, Tensor or array
        The layout of the sparse matrix as it is stored. A Layout is shared; anything else makes a new one.
    block : int, optional
        The blocks' size; needed beside a bitmap.
    mode : str
        The sparse matrix: the result for ``sdd``, a for ``dsd``, b for ``dds``.
    trans_a, trans_b : bool
        Whether the operand is stored transposed.
    bench : bool
        Does nothing, here and in other modules: Torch-Blocksparse's time themselves with it. The attributes
        ``time_c``, ``time_da`` and ``time_db``, which it fills, are None.

    Raises InvalidProblemError naming the argument.
    """

    time_c = time_da = time_db = None

    def __init__(
        self,
        layout: Any,
        block: int | None = None,
        mode: str = "",
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        check_choice("mode", mode, MODES)
        super().__init__(layout_of(layout, block), bench)
        self.mode = mode
        self.trans_a, self.trans_b = checked_flag("trans_a", trans_a), checked_flag("trans_b", trans_b)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """``op(a) @ op(b)``: [Z, H, rows, columns], or for ``sdd`` values [Z, blocks, block, block].

        A dense operand is [Z, H, rows, columns], a sparse one its values. Leading dimensions of 1 may be
        omitted.
        """
        a, b = _padded(a), _padded(b)
        return matmul(a, b, self.layout, self.mode, self.trans_a, self.trans_b)

    def extra_repr(self) -> str:
        return f"mode={self.mode}, trans_a={self.trans_a}, trans_b={self.trans_b}"


class Softmax(_Benched):
    """The softmax over the kept cells of each row.

    Parameters
    ----------
    layout, block, bench
        Arguments of MatMul. The layout is that of the scores. ``time_y`` is None.
    causal : bool
        Whether cells whose column is beyond their row are dropped.
    """

    time_y = None

    def __init__(
        self, layout: Any, block: int | None = None, bench: bool = False, *, causal: bool = False
    ) -> None:
        super().__init__(layout_of(layout, block), bench)
        self.causal = checked_flag("causal", causal)

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
        """Call the function ``softmax``. Unlike Torch-Blocksparse's module it doesn't overwrite x."""
        masks = rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode
        return softmax(_padded(x), self.layout, scale, *masks, causal=self.causal)


class _Weighted(_OverLayout):
    """A module with the values of a block-sparse weight, and a bias or None."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _make_parameters(self, outputs: int, bias: bool, about: dict[str, Any]) -> None:
        one = self.layout.shape
        self._outputs = outputs
        self.weight = nn.Parameter(torch.empty(one.blocks, one.block, one.block, **about))
        self.bias = nn.Parameter(torch.empty(outputs, **about)) if checked_flag("bias", bias) else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniformly within PyTorch's bound for the number of inputs that an output has on average."""
        inputs = self.weight.numel() / max(self._outputs, 1)
        bound = inputs**-0.5 if inputs else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def _copy(self, values: Tensor, bias: Tensor | None) -> None:
        """Copy the values [1, blocks, block, block] and the bias of a dense layer."""
        with torch.no_grad():
            self.weight.copy_(values[0])
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)


class Linear(_Weighted):
    """``activation(x S + bias)`` with S [in_features, out_features] block-sparse; x has any leading sizes.

    Parameters
    ----------
    in_features, out_features : int
        The sides of S, multiples of the block.
    block : int, optional
        16, 32, 64 or 128; needed beside a bitmap.
    layout : Layout, BlockSparseLayout, Tensor or array
        The layout of S: one head, or a bitmap [in_features/block, out_features/block]. S is the transpose of
        the weight of ``nn.Linear``.
    bias : bool
        Whether there is a bias [out_features]. Torch-Blocksparse has none, and ``bench`` in its place.
    activation : str
        ``none``, ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``, in the product's epilogue.
    dense_copy : bool
        Whether a layer of float16 or bfloat16 in eval mode may keep a dense copy of S, for the numbers of
        rows for which a product with it is faster. It is made at the first such call that needs no gradient,
        anew if the weight has changed, and freed by ``train()``. ``dense_copy_bytes`` is its size.
    weight_stays : bool
        Whether a captured CUDA graph may read the dense copy, because weight and mask do not change any more.
        Otherwise each replay makes a copy of its own, and so follows both.
    device, dtype
        The arguments of ``torch.nn.Linear``; float32, float16 or bfloat16.

    ``weight`` holds the values [blocks, block, block]. Raises InvalidProblemError naming the argument.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int | None,
        layout: Any,
        bias: bool = False,
        *,
        bench: bool = False,
        activation: str = "none",
        dense_copy: bool = True,
        weight_stays: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout_of(layout, block, device)
        self._dense_copy = DenseCopy() if checked_flag("dense_copy", dense_copy) else None
        self.weight_stays = checked_flag("weight_stays", weight_stays)
        one = self.layout.shape
        if (one.heads, one.rows, one.cols) != (1, in_features, out_features):
            raise InvalidProblemError(
                f"layout: expected 1 head of [{in_features}, {out_features}], got {one.heads} of "
                f"[{one.rows}, {one.cols}]"
            )
        check_activation(activation, gates=False)
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation
        self._make_parameters(out_features, bias, {"device": device, "dtype": dtype})

    @classmethod
    def from_linear(cls, linear: nn.Linear, block: int | None, layout: Any, **options: Any) -> Linear:
        """A layer with copies of the kept blocks and the bias of ``linear``, which stays as it is."""
        if not isinstance(linear, nn.Linear):
            raise InvalidProblemError(f"linear: expected an nn.Linear, got a {type(linear).__name__}")
        weight, bias = linear.weight.detach(), linear.bias
        sides = linear.in_features, linear.out_features
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        found = cls(*sides, block, layout, bias is not None, **options)
        found._copy(found.layout.kept_blocks(weight.t()[None, None]), bias)
        return found

    def dense_weight(self) -> Tensor:
        """S^T [out_features, in_features], the weight of an ``nn.Linear``; differentiable."""
        return self.layout.to_dense(self.weight[None])[0, 0].t()

    @property
    def dense_copy_bytes(self) -> int:
        """Bytes of the dense copy that the layer keeps beside its weight; 0 without one."""
        return 0 if self._dense_copy is None else self._dense_copy.nbytes

    def train(self, mode: bool = True) -> Linear:
        """Set the mode as ``nn.Module`` does. Training frees the dense copy."""
        if mode and self._dense_copy is not None:
            self._dense_copy.drop()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        if self._dense_copy is not None:
            self._dense_copy.drop()
        super()._apply(fn, recurse)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise InvalidProblemError(f"input: expected [..., {self.in_features}], got {list(input.shape)}")
        rows = input.flatten(0, -2) if input.dim() > 1 else input[None]
        dense = None
        if self._dense_copy is not None and not self.training:
            dense = self._dense_copy.find(self, rows)
        if dense is not None:
            y = FORWARD[self.activation](nn.functional.linear(rows, dense, self.bias))
            return y.reshape(*input.shape[:-1], self.out_features)
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
            + (f", dense_copy_bytes={self.dense_copy_bytes}" if self.dense_copy_bytes else "")
        )


class Conv2d(_Weighted):
    """A 2-D convolution whose filter is block-sparse.

    Parameters
    ----------
    in_channels, out_channels : int
        C and K, multiples of the block.
    kernel_size : int or (int, int)
        R and S.
    layout : Layout, BlockSparseLayout, Tensor or array
        The filter's bitmap [K/block, C/block, R, S], or a layout of one head of [K, C * R * S] with the
        columns in that order. A Layout is shared.
    block : int, optional
        16, 32, 64 or 128; needed beside a bitmap.
    padding, stride : int or (int, int)
        Padding is zeros.
    dilation : int, (int, int) or str
        A string is the ``order``, as Torch-Blocksparse has that argument in this place and no dilation.
    bias : bool
        Whether there is a bias [K]. Torch-Blocksparse has none.
    order : str, optional
        ``NHWC``, the default, ``CHWN`` or ``NCHW``: how the result lies in memory. Its shape is [N, K, rows,
        columns].
    device, dtype
        The arguments of ``torch.nn.Conv2d``; float32, float16 or bfloat16.

    ``weight`` holds the values [blocks, block, block], in the bitmap's order; Torch-Blocksparse's are in that
    of a bitmap [K/block, R, S, C/block]. ``num_blocks`` is their number. Raises InvalidProblemError naming
    the argument.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        layout: Any,
        block: int | None = None,
        padding: Any = 0,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        *,
        order: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dilation, str):
            if order is not None:
                raise InvalidProblemError(
                    f"dilation: expected integers beside order {order!r}, got {shown(dilation)}"
                )
            dilation, order = 1, dilation
        self.order = checked_order("order", "NHWC" if order is None else order)
        self.kernel_size = pair_of("kernel_size", kernel_size)
        self.padding, self.stride = pair_of("padding", padding), pair_of("stride", stride)
        self.dilation = pair_of("dilation", dilation)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.layout = self._layout(layout, block, device)
        self._make_parameters(out_channels, bias, {"device": device, "dtype": dtype})

    @property
    def num_blocks(self) -> int:
        """Kept blocks."""
        return self.layout.shape.blocks

    def _layout(self, given: Any, block: int | None, device: Any) -> Layout:
        sides = getattr(given, "shape", None)
        taps = self.kernel_size[0] * self.kernel_size[1]
        if not isinstance(given, (Layout, BlockSparseLayout)) and sides is not None and len(sides) == 4:
            if tuple(sides[2:]) != self.kernel_size:
                raise InvalidProblemError(
                    f"layout: expected [K/block, C/block, {self.kernel_size[0]}, {self.kernel_size[1]}], "
                    f"got {list(sides)}"
                )
            given = given.reshape(1, sides[0], sides[1] * taps)
        found = layout_of(given, block, device)
        one = found.shape
        if (one.heads, one.rows, one.cols) != (1, self.out_channels, self.in_channels * taps):
            raise InvalidProblemError(
                f"layout: expected 1 head of [{self.out_channels}, {self.in_channels} * {taps}], got "
                f"{one.heads} of [{one.rows}, {one.cols}]"
            )
        return found

    @classmethod
    def from_conv2d(cls, conv: nn.Conv2d, layout: Any, block: int | None = None, **options: Any) -> Conv2d:
        """A layer with copies of the kept blocks and the bias of ``conv``, which stays as it is.

        Raises InvalidProblemError for groups, and for padding other than by a number of zeros.
        """
        if not isinstance(conv, nn.Conv2d):
            raise InvalidProblemError(f"conv: expected an nn.Conv2d, got a {type(conv).__name__}")
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise InvalidProblemError(
                "conv: expected one group and padding by a number of zeros, got "
                f"{conv.groups}, {conv.padding_mode}, {conv.padding!r}"
            )
        filter, bias = conv.weight.detach(), conv.bias
        options = {"device": filter.device, "dtype": filter.dtype, **options}
        channels, walk = (conv.in_channels, conv.out_channels), (conv.padding, conv.stride, conv.dilation)
        found = cls(*channels, conv.kernel_size, layout, block, *walk, bias is not None, **options)
        one = found.layout
        found._copy(conv_ops.values_of_filter(filter, one.tables_on(filter.device), one.sizes), bias)
        return found

    def dense_weight(self) -> Tensor:
        """The filter [K, C, R, S], the weight of an ``nn.Conv2d``; differentiable."""
        one = self.layout
        tables = one.tables_on(self.weight.device)
        return conv_ops.filter_of(self.weight[None], tables, one.sizes, self.kernel_size)

    def forward(self, input: Tensor, biasa: Tensor | None = None, biasb: Tensor | None = None) -> Tensor:
        """Map [N, C, height, width] to [N, K, rows, columns].

        Torch-Blocksparse's ``biasa`` and ``biasb`` are tensors of one element. With them the convolution is
        that of ``relu(input + biasa) + biasb``, and without ``biasa`` of ``input + biasb``. Padding stays
        zero. Both have gradients.
        """
        if biasa is not None:
            input = torch.relu(input + one_element("biasa", biasa))
        if biasb is not None:
            input = input + one_element("biasb", biasb)
        walk = self.kernel_size, self.bias, self.stride, self.padding, self.dilation
        return permuted(conv2d(input, self.weight, self.layout, *walk), self.order)

    @staticmethod
    def nchw_to_chwn(x: Tensor) -> Tensor:
        """The same tensor [N, C, height, width] with images adjacent in memory."""
        return permuted(x, "CHWN")

    @staticmethod
    def chwn_to_nchw(x: Tensor) -> Tensor:
        """The same tensor [N, C, height, width], contiguous in memory."""
        return permuted(x, "NCHW")

    @staticmethod
    def update_layout(layout_a: Tensor, tensor_a: Tensor, layout_b: Tensor, init_val: float) -> Tensor:
        """Values for ``layout_b``: those of ``tensor_a`` where both bitmaps keep a block, else ``init_val``.

        Bitmaps are [K/block, C/block, R, S], values [blocks, block, block] in their order. Raises
        InvalidProblemError naming the argument.
        """
        if layout_a.shape != layout_b.shape:
            raise InvalidProblemError(
                f"layout_b: expected shape {list(layout_a.shape)}, as layout_a, got {list(layout_b.shape)}"
            )
        if tensor_a.dim() != 3 or len(tensor_a) != int((layout_a != 0).sum()):
            raise InvalidProblemError(
                f"tensor_a: expected [{int((layout_a != 0).sum())}, block, block], as layout_a keeps, got "
                f"{list(tensor_a.shape)}"
            )
        both = (layout_a != 0) & (layout_b != 0)
        found = tensor_a.new_full((int((layout_b != 0).sum()), *tensor_a.shape[1:]), init_val)
        found[both[layout_b != 0]] = tensor_a[both[layout_a != 0]]
        return found

    def clear_cache(self) -> None:
        """Do nothing: Torch-Blocksparse drops its look-up tables, which belong to the layout here."""

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, bias={self.bias is not None}"
        )


def _padded(x: Tensor) -> Tensor:
    """x with leading dimensions of 1, so that it has four."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x
