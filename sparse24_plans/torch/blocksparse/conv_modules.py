"""``conv2d`` and ``Conv2d``: 2-D convolution with a block-sparse filter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...blocksparse.layout import BlockSparseLayout
from ...errors import InvalidProblemError
from . import conv_ops
from .layout_buffers import Layout, layout_of

_ops: Any = torch.ops.sparse24


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
        [N, C, height, width] of float32, float16 or bfloat16. ``channels_last`` is read as it is, anything
        else is copied.
    filter : Tensor
        Its values [blocks, block, block], or [1, ...] of it: out by in channels of a tap.
    layout : Layout
        Of the filter: one head of [K, C * R * S], a bitmap [K/block, C/block, R, S] as
        [1, K/block, C/block * R * S].
    kernel_size, stride, padding, dilation : int or (int, int)
        As of ``torch.nn.functional.conv2d``; padding is of zeros.
    bias : Tensor, optional
        [K], of x's dtype or float32.
    preference : str
        JSON of a PlanPreference, for the gradients too.

    The result [N, K, rows, columns] is ``channels_last``. x, filter and bias have gradients. Where the device
    has no kernel for the problem and nothing is preferred, PyTorch convolves with the filter as a dense one.
    Raises InvalidProblemError naming the argument.
    """
    if x.dim() != 4:
        raise InvalidProblemError(f"x: expected [N, C, height, width], got {list(x.shape)}")
    pairs = [
        _pair(name, given)
        for name, given in (
            ("kernel_size", kernel_size),
            ("stride", stride),
            ("padding", padding),
            ("dilation", dilation),
        )
    ]
    values = filter[None] if filter.dim() == 3 else filter
    y = _ops.blocksparse_conv2d(
        x.permute(0, 2, 3, 1), values, layout.tables, layout.sizes, *pairs, bias, preference
    )
    found: Tensor = y.permute(0, 3, 1, 2)
    return found


def _pair(name: str, given: Any) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) for one in pair):
        raise InvalidProblemError(f"{name}: expected an integer or two, got {given!r}")
    return pair


class Conv2d(nn.Module):
    """A 2-D convolution whose filter is block-sparse, of Torch-Blocksparse's name and meaning.

    Parameters
    ----------
    in_channels, out_channels : int
        C and K, multiples of the block.
    kernel_size : int or (int, int)
        R and S.
    layout : Layout, BlockSparseLayout, Tensor or array
        Of the filter: a bitmap [K/block, C/block, R, S], or a layout of one head of [K, C * R * S] with the
        columns in that order. A Layout is shared.
    block : int, optional
        16, 32, 64 or 128; needed beside a bitmap.
    padding, stride, dilation : int or (int, int)
        In the reference's order; padding is of zeros.
    bias : bool
        Whether there is a bias [K]; none by default, as in the reference.
    device, dtype
        As of torch.nn.Conv2d; float32, float16 or bfloat16.

    ``weight`` is the values [blocks, block, block], in the bitmap's order. Raises InvalidProblemError naming
    the argument.
    """

    bias: nn.Parameter | None

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.padding, self.stride = _pair("padding", padding), _pair("stride", stride)
        self.dilation = _pair("dilation", dilation)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.layout = self._layout(layout, block, device)
        one = self.layout.shape
        values = torch.empty(one.blocks, one.block, one.block, device=device, dtype=dtype)
        self.weight = nn.Parameter(values)
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

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

    def reset_parameters(self) -> None:
        """Uniform, with the bound of ``nn.Conv2d`` for as many inputs as an output has on average."""
        inputs = self.weight.numel() / max(self.out_channels, 1)
        bound = inputs**-0.5 if inputs else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_conv2d(cls, conv: nn.Conv2d, layout: Any, block: int | None = None, **options: Any) -> Conv2d:
        """Of a dense layer, which stays as it is: its kept blocks, the others dropped; the bias is copied.

        Raises InvalidProblemError for groups, and padding that isn't of zeros in numbers of pixels.
        """
        if not isinstance(conv, nn.Conv2d):
            raise InvalidProblemError(f"conv: expected an nn.Conv2d, got a {type(conv).__name__}")
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise InvalidProblemError(
                "conv: expected one group and padding of zeros in pixels, got "
                f"{conv.groups}, {conv.padding_mode}, {conv.padding!r}"
            )
        filter, bias = conv.weight.detach(), conv.bias
        options = {"device": filter.device, "dtype": filter.dtype, **options}
        walk: dict[str, Any] = {"padding": conv.padding, "stride": conv.stride, "dilation": conv.dilation}
        found = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            layout,
            block,
            bias=bias is not None,
            **walk,
            **options,
        )
        one = found.layout
        with torch.no_grad():
            found.weight.copy_(conv_ops.values_of_filter(filter, one.tables, one.sizes)[0])
            if found.bias is not None and bias is not None:
                found.bias.copy_(bias)
        return found

    def dense_weight(self) -> Tensor:
        """The filter [K, C, R, S], as ``nn.Conv2d`` has it; differentiable."""
        one = self.layout
        return conv_ops.filter_of(self.weight[None], one.tables, one.sizes, self.kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, height, width] to [N, K, rows, columns], which is ``channels_last``."""
        return conv2d(
            input,
            self.weight,
            self.layout,
            self.kernel_size,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, bias={self.bias is not None}"
        )
