"""Shared by the measurements of block-sparse matrices: element, operands, checks, dense products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from sparse24_plans.bench.peers import torch
from sparse24_plans.bench.steady import Steady
from sparse24_plans.blocksparse.layout import BlockSparseLayout
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.plan.plan import Plan
from sparse24_plans.vocab import ElementKind

ELEMENT = ElementKind.BF16
_WORST_ERROR = 5e-3
"""Relative error above which a time is not recorded: the result is wrong."""
_REPLAYS = 7


def random(shape: tuple[int, ...]) -> Any:
    """A tensor of the element on PyTorch's GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def workspace_of(plan: Plan) -> Any:
    """Memory on PyTorch's GPU that the plan may use, or None if it needs none."""
    size = plan.workspace_size()
    return torch.empty(size, dtype=torch.uint8, device="cuda") if size else None


def dense_of(layout: BlockSparseLayout, values: Any) -> Any:
    """The matrix of ``values`` [blocks, block, block], with its zeros. The layout has one head."""
    one = layout.shape
    kept = torch.from_numpy(layout.bitmap[0].copy()).to(values.device)
    dense = values.new_zeros(one.block_rows, one.block_cols, one.block, one.block)
    dense[kept] = values
    return dense.transpose(1, 2).reshape(one.rows, one.cols)


def check(what: object, got: Any, exact: Any) -> None:
    """Raise UnsupportedError where results in float32 aren't nearly the exact ones."""
    error = float(torch.linalg.norm(got - exact) / torch.linalg.norm(exact))
    if not error <= _WORST_ERROR:
        raise UnsupportedError(f"{what}: relative error {error:.3g}, not recorded")


_PEERS: dict[Hashable, Steady] = {}


def timed_once(key: Hashable, measure: Callable[[], Steady]) -> Steady:
    """A dense peer's time. Cells of the same sizes share it, since each contender is timed alone."""
    if key not in _PEERS:
        _PEERS[key] = measure()
    return _PEERS[key]


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a call to PyTorch, with all calls in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return statistics.median(_replay_us(graph, stream) for _ in range(_REPLAYS)) / len(calls)


def _replay_us(graph: Any, stream: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    microseconds: float = 1e3 * begin.elapsed_time(end)
    return microseconds
