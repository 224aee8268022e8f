"""Times kernels in CUDA graphs, for the benchmarks and for the search for configurations.

Each contender is captured into a CUDA graph that goes round its rotating operand copies, which together
exceed twice the L2 cache, so that weights come from memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..device.install import import_cupy

Launch = Callable[[int], None]
_WARM_UP_US = 20_000


@dataclass
class Contender:
    """``launches``: one closure for each operand copy, called with a stream handle."""

    name: str
    launches: Sequence[Launch]


def copies_beyond_l2(nbytes: int) -> int:
    """Number of copies of ``nbytes`` that together exceed twice the L2 cache, from 2 to 64."""
    l2 = int(import_cupy().cuda.Device().attributes["L2CacheSize"])
    return max(2, min(64, -(-2 * l2 // max(nbytes, 1)) + 1))


def capture(launches: Sequence[Launch], stream: Any, repeats: int) -> Any:
    """A CUDA graph of the launches, ``repeats`` times over, after one round to warm up."""
    for launch in launches:  # warm up outside the capture
        launch(stream.ptr)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(repeats):
        for launch in launches:
            launch(stream.ptr)
    return stream.end_capture()


def capture_for(contender: Contender, stream: Any, graph_us: float) -> tuple[Any, int]:
    """A CUDA graph that runs for about ``graph_us`` or once round the copies, and its number of launches."""
    once = capture(contender.launches, stream, 1)
    repeats = max(1, round(graph_us / max(elapsed_us(once, stream), 1.0)))
    graph = once if repeats == 1 else capture(contender.launches, stream, repeats)
    return graph, repeats * len(contender.launches)


def time_contenders(
    contenders: Sequence[Contender], *, rounds: int = 15, round_ms: float = 3.0
) -> dict[str, float]:
    """Median microseconds of one launch, by contender, each in a short burst a round.

    All contenders share one clock, which suits comparisons of alternatives with one another. Rounds that
    bring the GPU's clocks up come first: the GPU was idle while the host prepared the operands.
    """
    stream = import_cupy().cuda.Stream(non_blocking=True)
    graphs = [(one.name, *capture_for(one, stream, 1e3 * round_ms)) for one in contenders]
    warm_us = 0.0
    while graphs and warm_us < _WARM_UP_US:
        warm_us += sum(elapsed_us(graph, stream) for _, graph, _ in graphs)
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for name, graph, count in graphs:
            times[name].append(elapsed_us(graph, stream) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def elapsed_us(graph: Any, stream: Any) -> float:
    """Microseconds of one launch of a captured graph."""
    begin, end = import_cupy().cuda.Event(), import_cupy().cuda.Event()
    begin.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return 1e3 * float(import_cupy().cuda.get_elapsed_time(begin, end))
