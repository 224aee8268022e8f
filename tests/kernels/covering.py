"""Covering sets of the compilations that plans can ask for, which are the ones that are tested.

By default, ``REQUESTS``:

- Every word of a source: each of its functions, and every value of each of its macros.
- Every architecture with each function.

With ``--every-pair``, ``every_pair()``:

- Every two words of a source that are asked for together: its function and its macros, each with each. A
  kernel that spills or warns does so because of one macro or two, such as a tile and an epilogue.
- Every architecture with each function and element.
- Every value of macros that are only numbers in the code, such as the stages of a pipeline.

``--every-compilation`` compiles all that is asked for, and what the benchmarks' cells choose. Continuous
integration compiles every pair; changes of a kernel need every compilation.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import combinations

import pytest

from sparse24_plans.device.jit import compiler

from .requests import ASKED, Request

SOURCES = sorted(
    path.relative_to(compiler.KERNEL_FOLDER).as_posix() for path in compiler.KERNEL_FOLDER.rglob("*.cu")
)
COUNTS = {
    *("DENSE_STAGES", "X_STAGES", "SPARSE_STAGES", "STAGES", "STEP_TOKENS", "WEIGHT_STAGES"),
    *("EXPONENT_BIAS", "FIRST_NAN", "MANTISSA_BITS", "RELU_THRESHOLD", "RELU_UPPER_BOUND"),
}
"""Macros that follow from others and are only numbers in the code: they take no registers."""


def single_words_of(request: Request) -> Iterator[Hashable]:
    """Return what the default set covers of a request."""
    yield from request.defines
    yield request.arch, request.function


def pairs_of(request: Request) -> Iterator[Hashable]:
    """Return the groups of words that are compiled together."""
    words = [("function", request.function)]
    words += [one for one in request.defines if one[0] not in COUNTS]
    yield from combinations(words, 2)
    yield from ((("arch", request.arch), one) for one in words if one[0] in ("function", "ELEMENT"))
    yield from ((one,) for one in request.defines if one[0] in COUNTS)


def covering(
    asked: Iterable[Request], groups_of: Callable[[Request], Iterator[Hashable]] = pairs_of
) -> list[Request]:
    """Return requests that have all groups of ``asked``. Each adds the most groups that are still new."""
    groups = {request: {*groups_of(request)} for request in asked}
    # What a request adds only shrinks, so the first that adds what its entry says adds the most.
    heap = [(-len(own), place, request) for place, (request, own) in enumerate(groups.items())]
    heapq.heapify(heap)
    found, have = [], set()
    while heap:
        before, place, request = heap[0]
        added = len(groups[request] - have)
        if -added != before:
            heapq.heapreplace(heap, (-added, place, request))
            continue
        if not added:
            break
        heapq.heappop(heap)
        found.append(request)
        have |= groups[request]
    return found


@functools.cache
def of_source(source: str) -> list[Request]:
    """Return the requests for the source that are compiled by default."""
    return covering((one for one in ASKED if one.source == source), single_words_of)


def _in_order(requests: Iterable[Request]) -> list[Request]:
    """Return the requests with the functions of one compilation after each other."""
    return sorted(requests, key=lambda one: (SOURCES.index(one.source), one.arch, one.defines))


@functools.cache
def every_pair() -> list[Request]:
    """Return requests that have every two words that are asked for together."""
    found = (covering(one for one in ASKED if one.source == source) for source in SOURCES)
    return _in_order(itertools.chain.from_iterable(found))


def everything() -> list[Request]:
    """Return all that plans are known to ask for."""
    from .recorded import RECORDED

    return list(dict.fromkeys((*ASKED, *RECORDED)))


REQUESTS = _in_order(itertools.chain.from_iterable(map(of_source, SOURCES)))
every_source = pytest.mark.parametrize("source", SOURCES)


@functools.cache
def compiled(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> tuple[bytes, str]:
    """Return the cubin, and ptxas's report."""
    return compiler.compile_cubin(source, arch, dict(defines))


def cheapest(source: str) -> Request:
    """Return a request for the source that compiles quickly: few epilogues, the oldest architecture."""
    return min(
        of_source(source),
        key=lambda request: (dict(request.defines).get("EPILOGUE", 0), request.arch != "sm_80"),
    )
