"""Attention over kept blocks beside dense attention: the other half of ``sparse24 bench --blocksparse``.

Microseconds of what select chooses, of a random layout for each head, and of PyTorch's dense attention with
the same operands, by the fastest of its kernels. ``tflops``: of the kept blocks. Operands exceed the L2
cache, so one copy of them is enough.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blocksparse.args import BlockSparseAttentionArgs
from ..blocksparse.descriptor import BlockSparseAttentionDescriptor
from ..blocksparse.layout import BlockSparseLayout
from ..blocksparse.plan import BlockSparseAttentionPlan
from ..errors import UnsupportedError
from ..vocab import BlockSparsePass, ElementKind
from .gemm import rounded
from .peers import torch
from .record import sources_of

TOKENS, HEADS = 16384, 16
HEAD_SIZES = (128, 64)
BLOCKS = (128, 64)
DENSITIES = (0.5, 0.2, 0.1, 0.05)
_ELEMENT = ElementKind.BF16
_WORST_ERROR = 5e-3
"""Relative error above which a time is not recorded: the result is wrong."""
_PEERS = ("CUDNN_ATTENTION", "FLASH_ATTENTION")
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
        Cell(TOKENS, HEADS, head_size, block, density, BlockSparsePass.FORWARD.value)
        for head_size in HEAD_SIZES
        for block in BLOCKS
        for density in DENSITIES
    ]


def measured(cell: Cell, sources: set[str]) -> dict[str, Any]:
    """The cell's row of the record. Adds to ``sources`` what was timed.

    Raises UnsupportedError for a wrong result.
    """
    layout = BlockSparseLayout(cell.bitmap(), cell.block)
    desc = BlockSparseAttentionDescriptor(layout=layout, head_size=cell.head_size, element=_ELEMENT)
    plan = BlockSparseAttentionPlan.select(desc, device=0)
    shape = (1, cell.heads, cell.tokens, cell.head_size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    o, lse = torch.full_like(q, float("nan")), torch.empty(shape[:3], device="cuda")
    size = plan.workspace_size()
    bound = plan.bind(
        BlockSparseAttentionArgs(layout=plan.pack(layout), q=q, k=k, v=v, o=o, lse=lse),
        workspace=torch.empty(size, dtype=torch.uint8, device="cuda") if size else None,
    )
    bound.launch(torch.cuda.current_stream())
    _check(cell, layout, q, k, v, o)
    contenders = {name: _dense(name, q, k, v) for name in _PEERS}
    contenders["ours"] = lambda: bound.launch(torch.cuda.current_stream())
    times = _times(contenders)
    sources.update(sources_of(plan))
    flops = 4 * layout.shape.blocks * cell.block**2 * cell.head_size
    return {
        **vars(cell),
        "us": rounded(times["ours"]),
        "dense_us": rounded(min(times[name] for name in _PEERS)),
        "tflops": rounded(flops / times["ours"] / 1e6),
    }


def _check(cell: Cell, layout: BlockSparseLayout, q: Any, k: Any, v: Any, o: Any) -> None:
    """The last head, against a dense computation in float32 of the same 16-bit operands."""
    hidden = torch.from_numpy(~layout.bitmap[-1]).cuda()
    hidden = hidden.repeat_interleave(cell.block, 0).repeat_interleave(cell.block, 1)
    query, key, value, got = (one[0, -1].float() for one in (q, k, v, o))
    scores = (query @ key.T * cell.head_size**-0.5).masked_fill_(hidden, -torch.inf)
    exact = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ value  # NaN: rows that see nothing
    error = float(torch.linalg.norm(got - exact) / torch.linalg.norm(exact))
    if not error <= _WORST_ERROR:
        raise UnsupportedError(f"{cell}: relative error {error:.3g}, not recorded")


def _dense(name: str, q: Any, k: Any, v: Any) -> Callable[[], object]:
    attention = torch.nn.attention
    kernel = getattr(attention.SDPBackend, name)

    def call() -> object:
        with attention.sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return call


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
