"""Convolutions with block-sparse filters beside cuDNN's dense ones: ``python benchmarks/convolutions.py``.

Needs a GPU and PyTorch. Microseconds of 3x3 convolutions in bf16, ``channels_last``, in a CUDA graph each: of
the plan that ``select`` gives, with blocks drawn at random, and of PyTorch's dense convolution by cuDNN's
fastest algorithm. Each result is checked against a dense convolution in float32 before it is timed. The
operands are larger than the L2 cache, or nearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from sparse24_plans import (
    BlockSparseConv2dDescriptor,
    BlockSparseConv2dPlan,
    BlockSparseConvOp,
    BlockSparseLayout,
    ElementKind,
)

from .block_operands import check, graph_us, workspace_of

SIZES = ((64, 256, 56), (64, 512, 28), (256, 256, 14), (256, 512, 7))
"""Images, channels in and out, height and width."""
BLOCKS, DENSITIES, STRIDES = (128, 64, 32), (0.5, 0.2, 0.1), (1, 2)
_CALLS = 10


class Cell(NamedTuple):
    """The measured problem."""

    op: str
    images: int
    channels: int
    side: int
    block: int
    density: float
    stride: int

    def layout(self) -> BlockSparseLayout:
        """A random choice of as many blocks as the density says."""
        across = self.channels // self.block
        kept = np.zeros(across * across * 9, bool)
        kept[np.random.default_rng(1).permutation(kept.size)[: max(1, round(self.density * kept.size))]] = (
            True
        )
        return BlockSparseLayout(kept.reshape(1, across, -1), self.block)


def cells() -> Iterator[Cell]:
    for images, channels, side in SIZES:
        for block in BLOCKS:
            for density in DENSITIES:
                for stride in STRIDES if density == 0.2 and block == 64 else (1,):
                    for op in BlockSparseConvOp:
                        if block >= 64 or op is not BlockSparseConvOp.WGRAD:
                            yield Cell(op.value, images, channels, side, block, density, stride)


class Setting:
    """A cell's operands, ours and dense."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.layout = cell, cell.layout()
        desc = BlockSparseConv2dDescriptor(
            layout=self.layout,
            op=cell.op,
            batch=cell.images,
            height=cell.side,
            width=cell.side,
            kernel=3,
            stride=cell.stride,
            padding=1,
            element=ElementKind.BF16,
        )
        torch.manual_seed(0)
        self.plan = BlockSparseConv2dPlan.select(desc, device=0)
        self.made = {
            one.name: torch.randn(one.shape, device="cuda", dtype=torch.bfloat16)
            for one in desc.operands()
            if one.name != "layout"
        }
        self.result = self.made[{"forward": "y", "dgrad": "dx", "wgrad": "dfilter"}[cell.op]]

    def ours(self) -> Callable[[], object]:
        args = self.plan.args_type(self.plan.descriptor)(layout=self.plan.pack(self.layout), **self.made)
        bound = self.plan.bind(args, workspace=workspace_of(self.plan))
        return lambda: bound.launch(torch.cuda.current_stream())

    def dense(self, dtype: torch.dtype, filter: Any = None) -> Callable[[], Any]:
        """PyTorch's convolution of the same images."""
        cell = self.cell
        channels = cell.channels, cell.channels, 3, 3
        filter = torch.randn(channels, device="cuda") if filter is None else filter
        filter = filter.to(dtype).to(memory_format=torch.channels_last)
        images = {
            name: one.permute(0, 3, 1, 2).to(dtype) for name, one in self.made.items() if name in ("x", "dy")
        }
        walk = [cell.stride] * 2, [1, 1], [1, 1]
        if cell.op == "forward":
            return lambda: torch.nn.functional.conv2d(images["x"], filter, None, *walk)
        x = images["x"] if cell.op == "wgrad" else self.made["dx"].permute(0, 3, 1, 2).to(dtype)
        at = 0 if cell.op == "dgrad" else 1
        mask = [at == 0, at == 1, False]
        back = torch.ops.aten.convolution_backward
        return lambda: back(images["dy"], x, filter, None, *walk, False, [0, 0], 1, mask)[at]

    def filter(self) -> Any:
        """Dense, [K, C, 3, 3]."""
        one = self.layout.shape
        tiles = torch.zeros(one.block_rows, one.block_cols, one.block, one.block, device="cuda")
        tiles[torch.from_numpy(self.layout.bitmap[0].copy()).cuda()] = self.made["filter"][0].float()
        tiles = tiles.view(one.block_rows, -1, 3, 3, one.block, one.block)
        return tiles.permute(0, 4, 1, 5, 2, 3).reshape(one.rows, -1, 3, 3)

    def check(self, ours: Callable[[], object]) -> None:
        """Raises UnsupportedError for a wrong result."""
        self.result.fill_(float("nan"))
        ours()
        if self.cell.op == "wgrad":
            one, block = self.layout.shape, self.cell.block
            exact = self.dense(torch.float32)().view(one.block_rows, block, -1, block, 3, 3)
            exact = exact.permute(0, 2, 4, 5, 1, 3).reshape(one.block_rows, -1, block, block)
            exact = exact[torch.from_numpy(self.layout.bitmap[0].copy()).cuda()][None]
        else:
            exact = self.dense(torch.float32, self.filter())().permute(0, 2, 3, 1)
        check(self.cell, self.result.float(), exact)


def main() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    print("| op | images | channels | size | stride | block | kept | us | dense us | ratio | kept TFLOP/s |")
    print("| --- " * 11 + "|")
    dense: dict[tuple[Any, ...], float] = {}
    for cell in cells():
        setting = Setting(cell)
        ours = setting.ours()
        setting.check(ours)
        key = cell.op, cell.images, cell.channels, cell.side, cell.stride
        if key not in dense:
            dense[key] = graph_us([setting.dense(torch.bfloat16)] * _CALLS)
        us = graph_us([ours] * _CALLS)
        products = cell.images * setting.plan.descriptor.forward.pixels * setting.layout.shape.blocks
        rate = 2e-6 * products * cell.block**2 / us
        what = f"{cell.op} | {cell.images} | {cell.channels} | {cell.side} x {cell.side} | {cell.stride}"
        times = f"{us:.1f} | {dense[key]:.1f} | {dense[key] / us:.2f} | {rate:.0f}"
        print(f"| {what} | {cell.block} | {cell.density:.0%} | {times} |", flush=True)


if __name__ == "__main__":
    main()
