"""Attention over kept blocks beside dense attention: the other half of ``sparse24 bench --blocksparse``.

Microseconds of what select chooses, of a random layout for each head, and of PyTorch's dense attention with
the same operands, by the fastest of its kernels. ``tflops``: of the kept blocks, whose two products count in
``forward``, and five in ``backward``, as usual, however often a kernel computes one of them again. Operands
exceed the L2 cache, so one copy of them is enough.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blocksparse.args import BlockSparseAttentionArgs, BlockSparseAttentionBackwardArgs
from ..blocksparse.descriptor import BlockSparseAttentionDescriptor
from ..blocksparse.layout import BlockSparseLayout
from ..blocksparse.plan import BlockSparseAttentionPlan
from ..vocab import BlockSparsePass
from .block_operands import ELEMENT, check, random
from .gemm import rounded
from .peers import torch
from .record import sources_of

TOKENS, HEADS = 16384, 16
HEAD_SIZES = (128, 64)
BLOCKS = (128, 64)
DENSITIES = (0.5, 0.2, 0.1, 0.05)
_PEERS = ("CUDNN_ATTENTION", "FLASH_ATTENTION")
_PRODUCTS = {BlockSparsePass.FORWARD: 2, BlockSparsePass.BACKWARD: 5}
"""That count, of a kept block."""
_ROUNDS, _ROUND_US = 9, 6000.0


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
    """All of the record."""
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
    contenders = {name: problem.dense(name, backward=backward) for name in _PEERS}
    times = _times({**contenders, "ours": ours})
    flops = 2 * _PRODUCTS[BlockSparsePass(cell.direction)] * problem.layout.shape.blocks * cell.block**2
    return {
        **vars(cell),
        "us": rounded(times["ours"]),
        "dense_us": rounded(min(times[name] for name in _PEERS)),
        "tflops": rounded(flops * cell.head_size / times["ours"] / 1e6),
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
        """What select chooses, bound. ``backward`` reads what ``forward`` made."""
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
        size = plan.workspace_size()
        space = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        bound = plan.bind(kind(layout=plan.pack(self.layout), **given), workspace=space)
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

    def dense(self, name: str, *, backward: bool) -> Callable[[], object]:
        """PyTorch's, of all blocks: one pass alone."""
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


def _times(contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of a call, interleaved. They run for so long that launches hide behind them."""
    repeats = {name: max(1, round(_ROUND_US / _elapsed_us(call, 1))) for name, call in contenders.items()}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, call in contenders.items():
            found[name].append(_elapsed_us(call, repeats[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def _elapsed_us(call: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / repeats
