"""Times contenders each alone in a steady state, with the clock and the power that the GPU settles at.

A contender runs by itself for a block of time, and only the second half of the block counts: by then the GPU
has the clock that this contender's own power allows. In bursts of milliseconds contenders would share one
clock, which flatters the one that draws more. Each contender has several blocks, in changing order.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from ..device.install import import_cupy
from ..tuning.timing import Contender, capture_for
from . import power

BLOCK_US, SHORT_BLOCK_US = 300_000.0, 60_000.0
"""Microseconds of a block, and of one where every contender takes less than SHORT_US: bytes limit such
products, not power. ``python -m benchmarks.short_blocks`` compares the two on a GPU."""
SHORT_US = 50.0
BLOCKS = 2
MANY_TOKENS = 1024
"""Fewest tokens for which a record has the clock and the power of each contender."""
_GRAPH_US = 3_000.0
_WARM_UP_US = 20_000.0
_MARGIN = 1.15
"""Blocks are planned longer than asked for, since a clock that rises shortens them."""
_SAMPLE_S = 0.005


@dataclass(frozen=True)
class Steady:
    """Time of a contender alone; clock and power are None where NVML doesn't report them."""

    us: float
    sm_mhz: float | None = None
    watts: float | None = None

    def fields(self, us: str = "us") -> dict[str, float | None]:
        """Clock and power as fields of a record, beside the time's own field ``us`` or ``PEER_us``."""
        prefix = us.removesuffix("us")
        return {f"{prefix}sm_mhz": _rounded(self.sm_mhz), f"{prefix}watts": _rounded(self.watts)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value)


@dataclass(frozen=True)
class Work:
    """Work that is enqueued again and again."""

    enqueue: Callable[[], object]
    launches: int = 1
    """Launches of the contender in one call of ``enqueue``."""


class Ruler(Protocol):
    """Marks moments of a stream of work."""

    def mark(self) -> Any:
        """A mark behind all that has been enqueued."""

    def wait(self, mark: Any) -> None:
        """Return once the work before the mark has been done."""

    def is_past(self, mark: Any) -> bool:
        """Whether the work before the mark has been done."""

    def us_between(self, begin: Any, end: Any) -> float:
        """Microseconds from one mark to another, both of which are past."""


class StreamRuler:
    """Events of a CUDA stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def mark(self) -> Any:
        event = import_cupy().cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def is_past(self, mark: Any) -> bool:
        return bool(mark.done)

    def us_between(self, begin: Any, end: Any) -> float:
        return 1e3 * float(import_cupy().cuda.get_elapsed_time(begin, end))


def time_alone(
    contenders: Sequence[Contender], *, short_block_us: float = SHORT_BLOCK_US
) -> dict[str, Steady]:
    """Time of one launch of each contender alone, from CUDA graphs over its operand copies."""
    stream = import_cupy().cuda.Stream(non_blocking=True)
    graphs = {one.name: capture_for(one, stream, _GRAPH_US) for one in contenders}
    works = {name: Work(lambda graph=graph: graph.launch(stream), n) for name, (graph, n) in graphs.items()}  # type: ignore[misc]
    return steady(works, StreamRuler(stream), short_block_us=short_block_us)


def steady(
    works: Mapping[str, Work],
    ruler: Ruler,
    agree: Callable[[int], int] = int,
    *,
    block_us: float = BLOCK_US,
    short_block_us: float = SHORT_BLOCK_US,
) -> dict[str, Steady]:
    """Time of one launch of each work alone, from blocks of the given microseconds.

    ``agree`` gives all of several processes that run together the same number from their own ones.
    """
    once = {name: _rough_us(work, ruler, agree) for name, work in works.items()}
    are_short = all(us / works[name].launches < SHORT_US for name, us in once.items())
    planned_us = _MARGIN * (short_block_us if agree(are_short) else block_us)
    counts = {name: agree(math.ceil(planned_us / 2 / us)) for name, us in once.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    samples: dict[str, list[power.Sample]] = {name: [] for name in works}
    order = list(works)
    for _ in range(BLOCKS):
        for name in order:
            marks, seen = _block(works[name], ruler, counts[name])
            times[name] += [ruler.us_between(*pair) / works[name].launches for pair in pairwise(marks)]
            samples[name] += seen
        order.reverse()
    return {
        name: Steady(
            statistics.median(times[name]),
            _median(one.sm_mhz for one in samples[name]),
            _median(one.watts for one in samples[name]),
        )
        for name in works
    }


def _rough_us(work: Work, ruler: Ruler, agree: Callable[[int], int]) -> float:
    """Microseconds of one call, once the clocks are up."""
    begin, _, end = ruler.mark(), work.enqueue(), ruler.mark()
    ruler.wait(end)
    repeats = agree(max(1, math.ceil(_WARM_UP_US / max(ruler.us_between(begin, end), 1.0))))
    begin = ruler.mark()
    for _ in range(repeats):
        work.enqueue()
    end = ruler.mark()
    ruler.wait(end)
    return max(ruler.us_between(begin, end) / repeats, 1e-3)


def _block(work: Work, ruler: Ruler, count: int) -> tuple[list[Any], list[power.Sample]]:
    """The marks round each call of the half that counts, and what the sensors say meanwhile."""
    for _ in range(count):
        work.enqueue()
    marks = [ruler.mark()]
    for _ in range(count):
        work.enqueue()
        marks.append(ruler.mark())
    seen = []
    ruler.wait(marks[0])
    while not ruler.is_past(marks[-1]):
        seen.append(power.sample())
        time.sleep(_SAMPLE_S)
    ruler.wait(marks[-1])
    return marks, seen


def _median(values: Iterator[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
