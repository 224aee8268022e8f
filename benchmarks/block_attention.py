"""Attention over kept blocks beside dense attention: a part of ``python -m benchmarks.measure blocksparse``.

Microseconds of what select chooses for a random layout of each head, and of PyTorch's dense attention with
the same operands by the fastest of its kernels, each alone. Forward passes also have the time of the fastest
of FlashInfer's kernels for the same blocks, if it is installed. ``tflops`` counts the products of the kept
blocks: two in ``forward``, five in ``backward``, however often a kernel computes one of them again. Operands
exceed the L2 cache, so one copy of them is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparse24_plans.bench.gemm import rounded
from sparse24_plans.bench.peers import torch, torch_ruler
from sparse24_plans.bench.record import sources_of
from sparse24_plans.bench.steady import Steady, Work, steady
from sparse24_plans.blocksparse.args import BlockSparseAttentionArgs, BlockSparseAttentionBackwardArgs
from sparse24_plans.blocksparse.descriptor import BlockSparseAttentionDescriptor
from sparse24_plans.blocksparse.layout import BlockSparseLayout
from sparse24_plans.blocksparse.plan import BlockSparseAttentionPlan
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.vocab import BlockSparsePass

from . import flashinfer_peer
from .block_operands import ELEMENT, check, random, timed_once, workspace_of

TOKENS, HEADS = 16384, 16
HEAD_SIZES = (128, 64)
BLOCKS = (128, 64)
DENSITIES = (0.5, 0.2, 0.1, 0.05)
_PEERS = ("CUDNN_ATTENTION", "FLASH_ATTENTION")
_PRODUCTS = {BlockSparsePass.FORWARD: 2, BlockSparsePass.BACKWARD: 5}
"""Products of a kept block that count."""


@dataclass(frozen=True)
class Cell:
    """Attention that is measured."""

    tokens: int
    heads: int
    head_size: int
    block: int
    density: float
    direction: str

    def bitmap(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Blocks drawn independently, for each head its own."""
        side = self.tokens // self.block
        return np.random.default_rng(1).random((self.heads, side, side)) < self.density


def cells() -> list[Cell]:
    """Every cell of the record."""
    return [
        Cell(TOKENS, HEADS, head_size, block, density, direction.value)
        for head_size in HEAD_SIZES
        for block in BLOCKS
        for density in DENSITIES
        for direction in BlockSparsePass
    ]


def measured(cell: Cell, sources: set[str]) -> dict[str, Any]:
    """The cell's row of the record. Adds to ``sources`` what was timed.

    Raises UnsupportedError for a wrong result.
    """
    problem = _Problem(cell)
    ours = problem.launch(BlockSparsePass.FORWARD, sources)
    ours()
    if backward := cell.direction == BlockSparsePass.BACKWARD:
        ours = problem.launch(BlockSparsePass.BACKWARD, sources)
        ours()
    problem.check(backward=backward)
    time = _alone(lambda: ours)
    key = cell.tokens, cell.heads, cell.head_size, cell.direction
    dense = timed_once(key, lambda: problem.fastest_dense(backward=backward))
    flops = 2 * _PRODUCTS[BlockSparsePass(cell.direction)] * problem.layout.shape.blocks * cell.block**2
    return {
        **vars(cell),
        "us": rounded(time.us),
        "dense_us": rounded(dense.us),
        "tflops": rounded(flops * cell.head_size / time.us / 1e6),
        **time.fields(),
        **dense.fields("dense_us"),
        **({} if backward else problem.beside_flashinfer()),
    }


class _Problem:
    """The operands of a cell and their results, as PyTorch's tensors."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.layout = cell, BlockSparseLayout(cell.bitmap(), cell.block)
        shape = (1, cell.heads, cell.tokens, cell.head_size)
        names = ("q", "k", "v", "do")
        self.read = {name: random(shape) for name in names}
        self.made = {
            name: torch.full_like(self.read["q"], float("nan")) for name in ("o", "dq", "dk", "dv")
        } | {"lse": torch.empty(shape[:3], device="cuda")}

    def launch(self, op: BlockSparsePass, sources: set[str]) -> Callable[[], object]:
        """The plan that select chooses, bound. ``backward`` reads what ``forward`` made."""
        desc = BlockSparseAttentionDescriptor(
            layout=self.layout, head_size=self.cell.head_size, element=ELEMENT, op=op
        )
        plan = BlockSparseAttentionPlan.select(desc, device=0)
        given = {name: self.read[name] for name in ("q", "k", "v")}
        given |= {name: self.made[name] for name in ("o", "lse")}
        kind: Any = BlockSparseAttentionArgs
        if op is BlockSparsePass.BACKWARD:
            kind = BlockSparseAttentionBackwardArgs
            given |= {"do": self.read["do"]} | {name: self.made[name] for name in ("dq", "dk", "dv")}
        args = kind(layout=plan.pack(self.layout), **given)
        bound = plan.bind(args, workspace=workspace_of(plan))
        sources.update(sources_of(plan))
        return lambda: bound.launch(torch.cuda.current_stream())

    def check(self, *, backward: bool) -> None:
        """The last head, against a dense computation in float32 of the same 16-bit operands."""
        block, scale = self.cell.block, self.cell.head_size**-0.5
        hidden = torch.from_numpy(~self.layout.bitmap[-1]).cuda()
        hidden = hidden.repeat_interleave(block, 0).repeat_interleave(block, 1)
        q, k, v, do = (one[0, -1].float() for one in self.read.values())
        scores = (q @ k.T * scale).masked_fill_(hidden, -torch.inf)
        p = torch.softmax(scores, dim=-1).nan_to_num_(0.0)  # NaN: rows that see nothing
        exact = {"o": p @ v}
        if backward:
            ds = p * (do @ v.T - (do * exact["o"]).sum(-1, keepdim=True))
            exact = {"dq": ds @ k * scale, "dk": ds.T @ q * scale, "dv": p.T @ do}
        for name, wanted in exact.items():
            check(f"{self.cell}, {name}", self.made[name][0, -1].float(), wanted)

    def fastest_dense(self, *, backward: bool) -> Steady:
        """Time of the fastest of PyTorch's kernels alone."""
        times = (_alone(partial(self.dense, name, backward=backward)) for name in _PEERS)
        return min(times, key=lambda one: one.us)

    def beside_flashinfer(self) -> dict[str, Any]:
        """Time of the fastest of FlashInfer's kernels that serve the problem, if any does, and its name."""
        tried = {backend: self._flashinfer(backend) for backend in flashinfer_peer.BACKENDS}
        times = {backend: time for backend, time in tried.items() if time is not None}
        if not times:
            return {}
        name, time = min(times.items(), key=lambda one: one[1].us)
        about = {"flashinfer": f"{name} of {flashinfer_peer.flashinfer.__version__}"}
        return {**about, "flashinfer_us": rounded(time.us), **time.fields("flashinfer_us")}

    def _flashinfer(self, backend: str) -> Steady | None:
        """Time of one of FlashInfer's kernels alone; None if it doesn't serve the problem, or is wrong."""
        found = flashinfer_peer.forward(backend, self.read, self.layout.bitmap, self.cell.block)
        if found is None:
            return None
        run, result = found
        try:
            run()
            self.made["o"][0].copy_(result)
            self.check(backward=False)
        except (UnsupportedError, RuntimeError) as error:  # FlashInfer's fault, not our cell's
            print(f"{self.cell}, FlashInfer's {backend}: {error}", file=sys.stderr, flush=True)
            return None
        return _alone(lambda: run)

    def dense(self, name: str, *, backward: bool) -> Callable[[], object]:
        """PyTorch's attention over all blocks: one pass by itself."""
        attention = torch.nn.attention
        kernel = getattr(attention.SDPBackend, name)
        given = [self.read[operand].detach().requires_grad_(backward) for operand in "qkv"]

        def forward() -> Any:
            with attention.sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(*given)

        if not backward:
            return forward
        o, do = forward(), self.read["do"]
        return lambda: torch.autograd.grad(o, given, do, retain_graph=True)


def _alone(make: Callable[[], Callable[[], object]]) -> Steady:
    """Time of a call of ``make()`` alone. Calls run for so long that launches hide behind them."""
    with torch_ruler() as ruler:
        return steady({"call": Work(make())}, ruler)["call"]
