"""Convolutions with block-sparse filters: the descriptor, and the operands that each op asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, SupportsFloat, SupportsIndex

from pydantic import BeforeValidator, model_validator

from ..plan.descriptor import BIAS_ELEMENT, OUT_ELEMENT, Factor, ProductDescriptor
from ..plan.operands import Operand, Role
from ..vocab import (
    BlockSparseConvOp,
    ElementKind,
    ElementLike,
    EpilogueKind,
    Integer,
    OpCategory,
)
from ..vocab.fields import INT32_MAX
from .descriptor import FLOATS, BlockSparseDescriptor, LayoutLike


def _pair(given: Any) -> Any:
    """One number stands for both axes."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given, given)


_Size = Annotated[int, Integer(least=1, most=INT32_MAX)]
_Padding = Annotated[int, Integer(most=INT32_MAX)]
Sizes = Annotated[tuple[_Size, _Size], BeforeValidator(_pair)]
Paddings = Annotated[tuple[_Padding, _Padding], BeforeValidator(_pair)]
PairLike = SupportsIndex | tuple[SupportsIndex, SupportsIndex]


class Axis(NamedTuple):
    """Rows or columns of a convolution: which pixels its results read.

    A tap is a position in the filter; taps are counted row by row. At a tap, result i of a phase reads pixel
    ``lower + stride * i + offset``. A phase is the set of results that are ``divide`` apart: for the gradient
    of a strided input, each phase reads at taps of its own.
    """

    size: int
    """Pixels of the image that is read."""
    results: int
    """Results of a phase, including those that a phase may lack at the end."""
    lower: int
    stride: int
    start: int
    step: int
    divide: int
    taps: int

    @classmethod
    def forward(cls, size: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
        """The axis of a forward pass; ``results`` is 0 or less if the kernel is wider than the image."""
        results = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        return cls(size, results, -padding, stride, 0, dilation, 1, kernel)

    @classmethod
    def gradient(cls, size: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
        """The axis of the input's gradient, which has ``size`` pixels."""
        read = cls.forward(size, kernel, stride, padding, dilation).results
        lower = -((dilation * (kernel - 1) - padding) // stride)
        start = padding - stride * lower
        return cls(read, -(-size // stride), lower, 1, start, -dilation, stride, kernel)

    def offset(self, phase: int, tap: int) -> int | None:
        """Offset at a tap, from 0 on, or None if the phase reads no pixel there."""
        found, rest = divmod(self.start + phase + self.step * tap, self.divide)
        return None if rest else found

    def phase_of(self, tap: Any) -> Any:
        """The only phase that reads a pixel at a tap, or at each tap of an array."""
        return -(self.start + self.step * tap) % self.divide

    @property
    def most_offset(self) -> int:
        # Offsets rise or fall from the first tap to the last one. A stride has too many phases to try each.
        return max(-(-(self.start + self.step * tap) // self.divide) for tap in (0, self.taps - 1))

    @property
    def upper(self) -> int:
        """Pixel of the last result at offset 0, relative to the image's last pixel."""
        return self.lower + self.stride * (self.results - 1) - (self.size - 1)


class Geometry(NamedTuple):
    """Both axes of a convolution."""

    h: Axis
    w: Axis

    @property
    def taps(self) -> int:
        return self.h.taps * self.w.taps

    @property
    def phases(self) -> int:
        """Phases of both axes; the phase of the columns varies fastest."""
        return self.h.divide * self.w.divide

    @property
    def pixels(self) -> int:
        """Results of an image in a phase."""
        return self.h.results * self.w.results

    def offsets(self, phase: int, tap: int) -> tuple[int, int] | None:
        """Offsets at a tap, or None if the phase reads no pixels there."""
        rows = self.h.offset(phase // self.w.divide, tap // self.w.taps)
        columns = self.w.offset(phase % self.w.divide, tap % self.w.taps)
        return None if rows is None or columns is None else (rows, columns)


class BlockSparseConv2dDescriptor(BlockSparseDescriptor, ProductDescriptor):
    """A 2-D convolution of N images with a block-sparse filter, or one of its gradients.

    The filter [K, C, R, S] of K out and C in channels is a matrix [K, C * R * S] of one head whose columns
    are ordered by block of in channels, then by tap (r, s), then by channel in the block: the layout's bitmap
    is one of [K/block, C/block, R, S] as [K/block, C/block * R * S]. Its blocks are [out, in] channels of a
    tap. Images are [N, height, width, channels], ``channels_last`` in PyTorch's terms.

    Parameters
    ----------
    layout : BlockSparseShape or BlockSparseLayout
        Layout of the filter; it has one head.
    batch : int
        N, 1 by default; may be 0.
    height, width : int
        Sizes of the input's images.
    kernel : int or (int, int)
        R and S.
    stride, padding, dilation : int or (int, int)
        One number, or one each for rows and columns; 1, 0 and 1 by default. Zeros pad both sides.
    element : ElementKind
        Type of every tensor but results and bias: ``f32``, ``f16`` or ``bf16``.
    op : BlockSparseConvOp
        ``forward`` (default): Y = epilogue(alpha * conv(X, W)). ``dgrad``: dX = alpha * the gradient of X.
        ``wgrad``: dW = alpha * the gradient of the kept blocks.
    epilogue, alpha, out_element, bias_element : optional
        These are as in GemmSparse24Descriptor. A bias is one number for each out channel. Gradients take only
        ``identity``.

    Raises
    ------
    InvalidProblemError
        The message names the field.
    """

    category: ClassVar[OpCategory] = OpCategory.CONVOLUTION

    height: _Size
    width: _Size
    kernel: Sizes
    op: BlockSparseConvOp = BlockSparseConvOp.FORWARD
    stride: Sizes = (1, 1)
    padding: Paddings = (0, 0)
    dilation: Sizes = (1, 1)
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    alpha: Factor = 1.0
    out_element: ElementKind = OUT_ELEMENT
    bias_element: ElementKind = BIAS_ELEMENT

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            layout: LayoutLike,
            height: SupportsIndex,
            width: SupportsIndex,
            kernel: PairLike,
            element: ElementLike,
            batch: SupportsIndex = ...,
            op: BlockSparseConvOp | str = ...,
            stride: PairLike = ...,
            padding: PairLike = ...,
            dilation: PairLike = ...,
            epilogue: EpilogueKind | str = ...,
            alpha: SupportsFloat = ...,
            out_element: ElementLike = ...,
            bias_element: ElementLike = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _consistent(self) -> BlockSparseConv2dDescriptor:
        self._expect("element", FLOATS)
        self._expect_result_types()
        one, taps = self.layout, self.kernel[0] * self.kernel[1]
        if self.op is not BlockSparseConvOp.FORWARD and self.epilogue is not EpilogueKind.IDENTITY:
            raise ValueError(f"epilogue: expected identity for op {self.op}, got {self.epilogue}")
        if one.heads != 1:
            raise ValueError(f"layout: expected one head, got {one.heads}")
        if one.block_cols % taps:
            raise ValueError(
                f"layout: expected columns of blocks in a multiple of the kernel's {taps} taps, "
                f"got {one.block_cols}"
            )
        for name, axis, at in (("height", self.forward.h, 0), ("width", self.forward.w, 1)):
            if axis.results < 1:
                least = self.dilation[at] * (self.kernel[at] - 1) + 1 - 2 * self.padding[at]
                raise ValueError(
                    f"{name}: expected at least {least} for this kernel and padding, got {axis.size}"
                )
        largest = max(one.rows, one.cols) * max(self.height * self.width, self.forward.pixels)
        self._check_largest(max(one.blocks * one.block**2, self.batch * largest))
        return self

    @property
    def op_name(self) -> str:
        return f"conv2d_blocksparse_{self.op}"

    @property
    def channels(self) -> int:
        """Number of the input's channels, C."""
        return self.layout.cols // (self.kernel[0] * self.kernel[1])

    @property
    def forward(self) -> Geometry:
        """Geometry of the forward pass; ``wgrad`` reads the results' gradient by it."""
        return self._geometry(Axis.forward)

    @property
    def geometry(self) -> Geometry:
        """Geometry of the op; ``dgrad`` reads the results' gradient by it."""
        return self._geometry(Axis.gradient if self.op is BlockSparseConvOp.DGRAD else Axis.forward)

    def _geometry(self, axis: Any) -> Geometry:
        sizes = (self.height, self.width), self.kernel, self.stride, self.padding, self.dilation
        return Geometry(*(axis(*of_one) for of_one in zip(*sizes, strict=True)))

    @property
    def reduction(self) -> int:
        """Most products in a sum; blocks that are not kept and padding add none."""
        one, taps = self.layout, self.kernel[0] * self.kernel[1]
        return {"forward": one.cols, "dgrad": one.rows * taps, "wgrad": self.batch * self.forward.pixels}[
            self.op
        ]

    def operands(self) -> tuple[Operand, ...]:
        """The layout's tables; ``x``, ``filter``, ``y`` and ``bias`` [K]; or those of gradients."""
        one, (h, w) = self.layout, self.forward
        images = (self.batch, self.height, self.width, self.channels)
        results = (self.batch, h.results, w.results, one.rows)
        values = (1, one.blocks, one.block, one.block)
        shapes = {"x": images, "dx": images, "filter": values, "dfilter": values, "y": results, "dy": results}
        *read, written = {
            "forward": ("x", "filter", "y"),
            "dgrad": ("dy", "filter", "dx"),
            "wgrad": ("x", "dy", "dfilter"),
        }[self.op]
        found = [Operand(name, Role.IN, shapes[name], self.element) for name in read]
        found.append(Operand(written, Role.OUT, shapes[written], self.out_element))
        if self.epilogue.has_bias:
            found.append(Operand("bias", Role.IN, (one.rows,), self.bias_element))
        return self._tables(), *found
