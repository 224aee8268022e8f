"""Which of the compilations that plans can ask for are tested: a covering set of them, by one rule.

- All that the records' cells choose (``recorded``): what users run first, and what was measured.
- Of each source, every two words that are asked for together: its function, architecture and macros, each
  with each. What spills or warns does so for the sake of one macro or two: sums by their tokens, an epilogue
  by its element.
- Of kernels whose threads have no register left, every three.
- What follows from a schedule's other words and only counts, such as the stages of a ring: every value.

``--every-compilation`` compiles all that is asked for: for who changes a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import pytest

from sparse24_plans.device.jit import compiler

from .recorded import RECORDED
from .requests import ASKED, Request

SOURCES = sorted(
    path.relative_to(compiler.KERNEL_FOLDER).as_posix() for path in compiler.KERNEL_FOLDER.rglob("*.cu")
)
FULL = (
    "blocksparse/attention_backward_wgmma.cu",
    "blocksparse/attention_wgmma.cu",
    "blocksparse/blocks_wgmma.cu",
    "blocksparse/blocks_wgmma_sp.cu",
    "blocksparse/conv_wgmma.cu",
)
"""Sources whose threads have no register left. Of ``gemm/wgmma_sp.cu`` the records' cells are a half."""
COUNTS = {"DENSE_STAGES", "X_STAGES", "SPARSE_STAGES", "STAGES", "STEP_TOKENS", "WEIGHT_STAGES"}
"""Macros that follow from others, and take no registers."""
KNOWN = list(dict.fromkeys((*ASKED, *RECORDED)))


def groups_of(request: Request) -> Iterator[tuple[Any, ...]]:
    """Words that are compiled together: two at a time, or three; and those that count, by themselves."""
    words = [("function", request.function), ("arch", request.arch)]
    words += [one for one in request.defines if one[0] not in COUNTS]
    yield from combinations(words, 3 if request.source in FULL else 2)
    yield from ((one,) for one in request.defines if one[0] in COUNTS)


def covering(asked: Iterable[Request], chosen: Iterable[Request]) -> list[Request]:
    """``chosen``, of ``asked``, and whatever adds the most, until no group is new."""
    bits: dict[tuple[Any, ...], int] = {}
    added, found, have = {}, list(chosen), 0
    for request in asked:
        added[request] = sum(1 << bits.setdefault(group, len(bits)) for group in groups_of(request))
    for request in found:
        have |= added[request]
    while added := {request: new for request, one in added.items() if (new := one & ~have)}:
        best = max(added, key=lambda request: added[request].bit_count())
        found.append(best)
        have |= added[best]
    return found


@functools.cache
def of_source(source: str) -> list[Request]:
    """Those that are compiled."""
    asked, chosen = ([one for one in requests if one.source == source] for requests in (KNOWN, RECORDED))
    return covering(asked, chosen)


REQUESTS = [
    request
    for source in SOURCES
    # Functions of one compilation one after another.
    for request in sorted(of_source(source), key=lambda request: (request.arch, request.defines))
]
every_source = pytest.mark.parametrize("source", SOURCES)


@functools.cache
def compiled(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> tuple[bytes, str]:
    """The cubin, and ptxas's report."""
    return compiler.compile_cubin(source, arch, dict(defines))


def cheapest(source: str) -> Request:
    """A request for the source, of few epilogues and for the oldest architecture: quick to compile."""
    return min(
        of_source(source),
        key=lambda request: (dict(request.defines).get("EPILOGUE", 0), request.arch != "sm_80"),
    )
