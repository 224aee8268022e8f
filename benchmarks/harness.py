"""How everything here is timed.

Contenders run interleaved in one process. Each is captured into a CUDA graph that goes once round its
rotating operand copies, which together exceed twice the L2 cache, so that weights come from memory. The
figure is the median over the rounds of graph time / launches.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy

from sparse24_plans.devices import driver_version

Launch = Callable[[int], None]
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Contender:
    """``launches``: one closure for each operand copy, called with a stream handle."""

    name: str
    launches: Sequence[Launch]


def copies_beyond_l2(nbytes: int, *, most: int = 64) -> int:
    """Copies of ``nbytes`` that together exceed twice the L2 cache."""
    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    return max(2, min(most, -(-2 * l2 // max(nbytes, 1)) + 1))


def capture(launches: Sequence[Launch], stream: Any, repeats: int) -> Any:
    for launch in launches:  # warm up outside the capture
        launch(stream.ptr)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(repeats):
        for launch in launches:
            launch(stream.ptr)
    return stream.end_capture()


def time_contenders(
    contenders: Sequence[Contender], *, rounds: int = 15, round_ms: float = 3.0
) -> dict[str, float]:
    """Median microseconds of one launch, by contender."""
    stream = cupy.cuda.Stream(non_blocking=True)
    graphs = []
    for contender in contenders:
        once = capture(contender.launches, stream, 1)
        once_ms = _elapsed(once, stream)
        repeats = max(1, round(round_ms / max(once_ms, 1e-3)))
        graph = once if repeats == 1 else capture(contender.launches, stream, repeats)
        graphs.append((contender.name, graph, repeats * len(contender.launches)))
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for name, graph, count in graphs:
            times[name].append(_elapsed(graph, stream) * 1e3 / count)
    return {name: statistics.median(values) for name, values in times.items()}


def _elapsed(graph: Any, stream: Any) -> float:
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


def kernels_sha256() -> str:
    """SHA-256 over every kernel source: path, NUL, contents, NUL, in path order."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kernels_cu").rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """What a record says of the machine."""
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    version = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "gpu": name,
        "driver": driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "kernels_sha256": kernels_sha256(),
    }
