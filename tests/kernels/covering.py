"""Covering sets of the compilations that plans can ask for, which are the ones that are tested.

By default, ``--compile=kinds``, ``every_kind()``:

- Each function of a source, and every element and stored element; of a source with tensor cores, every one
  that it has instructions for, where f16 and bf16 count as one.
- Each source for one architecture, if it is for several: each of them in turn.

With ``--compile=values``, as CI does, ``every_value()``:

- Every architecture with each function.
- Every word of a source: each of its functions, and every value of each of its macros.

With ``--compile=pairs``, ``every_pair()``:

- Every two words of a source that are asked for together: its function and its macros, each with each. A
  kernel that spills or warns does so because of one macro or two, such as a tile and an epilogue.
- Every architecture with each function and element.
- Every value of macros that are only numbers in the code, such as the stages of a pipeline.

``--compile=everything`` compiles all that is asked for, and what the benchmarks' cells choose. A change of a
kernel takes every pair, and everything once.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import combinations

import pytest

from sparse24_plans import ElementKind
from sparse24_plans.device.jit import compiler
from sparse24_plans.device.jit.enum_codes import ELEMENT_CODES

from .block_requests import (
    ATTENTION_ENTRIES,
    BLOCKS_ENTRIES,
    CONVOLUTION_ENTRIES,
    SOFTMAX_ENTRIES,
    attention_requests,
    blocks_requests,
    convolution_requests,
    softmax_requests,
    table_requests,
)
from .gemm_requests import GEMM_ENTRIES, PREPARE_ENTRIES, gemm_requests, prepare_requests
from .requests import CAPABILITIES, Request, device_of

SOURCES = sorted(
    path.relative_to(compiler.KERNEL_FOLDER).as_posix() for path in compiler.KERNEL_FOLDER.rglob("*.cu")
)
COUNTS = {
    *("DENSE_STAGES", "X_STAGES", "SPARSE_STAGES", "STAGES", "STEP_TOKENS", "WEIGHT_STAGES"),
    *("EXPONENT_BIAS", "FIRST_NAN", "MANTISSA_BITS", "RELU_THRESHOLD", "RELU_UPPER_BOUND"),
}
"""Macros that follow from others and are only numbers in the code: they take no registers."""
KINDS = {"ELEMENT", "WEIGHT"}
"""Macros that say which instructions a kernel has."""
ARCHITECTURES = [device_of(one).cuda_arch for one in reversed(CAPABILITIES)]
"""Architectures, of which the default set has one for each source, in turn. CI compiles for all of them."""
RARE = 10**9
"""The weight of a group that one compilation alone has; one that many have is covered in passing."""


@functools.cache
def all_asked() -> list[Request]:
    """Return all that plans are known to ask for, the benchmarks' cells left out. It takes seconds, once."""
    return list(
        dict.fromkeys(
            request
            for rows, requests in (
                (GEMM_ENTRIES, gemm_requests),
                (PREPARE_ENTRIES, prepare_requests),
                (BLOCKS_ENTRIES, blocks_requests),
                (ATTENTION_ENTRIES, attention_requests),
                (CONVOLUTION_ENTRIES, convolution_requests),
                (SOFTMAX_ENTRIES, softmax_requests),
                ((None,), lambda row, capability: table_requests(capability)),
            )
            for row in rows
            for capability in CAPABILITIES
            for request in requests(row, capability)
        )
    )


def kinds_of(request: Request) -> Iterator[Hashable]:
    """Return what the default set covers of a request."""
    for name, element in request.defines:
        if name in KINDS:
            yield name, element
            if "mma" in request.source:  # others load elements alike
                yield request.source, name, instructions_of(element)
    yield request.source, request.function
    if request.arch == ARCHITECTURES[SOURCES.index(request.source) % len(ARCHITECTURES)]:
        yield request.source, request.arch


def instructions_of(element: int) -> int:
    """Return the element whose instructions have the same shapes: f16 for bf16, otherwise the same."""
    f16, bf16 = ELEMENT_CODES[ElementKind.F16], ELEMENT_CODES[ElementKind.BF16]
    return f16 if element == bf16 else element


def single_words_of(request: Request) -> Iterator[Hashable]:
    """Return the request's architecture with its function, and every value of its macros."""
    yield from request.defines
    yield request.arch, request.function


def pairs_of(request: Request) -> Iterator[Hashable]:
    """Return the groups of words that are compiled together."""
    words = [("function", request.function)]
    words += [one for one in request.defines if one[0] not in COUNTS]
    yield from combinations(words, 2)
    yield from ((("arch", request.arch), one) for one in words if one[0] in ("function", "ELEMENT"))
    yield from ((one,) for one in request.defines if one[0] in COUNTS)


def covering(asked: Iterable[Request], groups_of: Callable[[Request], Iterator[Hashable]]) -> list[Request]:
    """Return requests that have all groups of ``asked``, each of them for a group that no other has.

    Each compilation adds the most groups that are still new, rare ones foremost, for the time that it takes.
    """
    groups = {request: {*groups_of(request)} for request in asked}
    compilations: dict[Hashable, list[Request]] = {}
    for request in groups:
        compilations.setdefault((request.source, request.arch, request.defines), []).append(request)
    together = {name: set().union(*(groups[one] for one in ones)) for name, ones in compilations.items()}
    times = Counter(itertools.chain.from_iterable(together.values()))
    have: set[Hashable] = set()

    def gain(name: Hashable) -> float:
        return sum(RARE // times[one] for one in together[name] - have) / cost_of(compilations[name][0])

    # The gain of a compilation only shrinks, so the first that adds what its entry says adds the most.
    heap = [(-gain(name), place, name) for place, name in enumerate(together)]
    heapq.heapify(heap)
    found: list[Request] = []
    while heap and heap[0][0]:
        before, place, name = heap[0]
        if -gain(name) != before:
            heapq.heapreplace(heap, (-gain(name), place, name))
            continue
        heapq.heappop(heap)
        found += compilations[name]
        have |= together[name]
    covered = Counter(itertools.chain.from_iterable(groups[one] for one in found))
    for request in sorted(found, key=cost_of, reverse=True):
        if all(covered[one] > 1 for one in groups[request]):
            found.remove(request)
            covered.subtract(groups[request])
    return found


def cost_of(request: Request) -> int:
    """Return about how long the request compiles: what is unrolled is mostly columns of a tile or a head."""
    defines = dict(request.defines)
    tile = defines.get("TILE_N", 0) * defines.get("M_TILES_PER_WARPGROUP", 1)
    return 64 + tile + defines.get("HEAD", 0)


def _in_order(requests: Iterable[Request]) -> list[Request]:
    """Return the requests with the functions of one compilation after each other."""
    return sorted(requests, key=lambda one: (SOURCES.index(one.source), one.arch, one.defines))


def _of_all_sources(groups_of: Callable[[Request], Iterator[Hashable]]) -> list[Request]:
    found = (covering((one for one in all_asked() if one.source == source), groups_of) for source in SOURCES)
    return _in_order(itertools.chain.from_iterable(found))


@functools.cache
def every_kind() -> list[Request]:
    """Return requests that have every function and element."""
    return _in_order(covering(all_asked(), kinds_of))


@functools.cache
def every_value() -> list[Request]:
    """Return requests that have every architecture with each function, and every value of each macro."""
    return _of_all_sources(single_words_of)


@functools.cache
def every_pair() -> list[Request]:
    """Return requests that have every two words that are asked for together."""
    return _of_all_sources(pairs_of)


def everything() -> list[Request]:
    """Return all that plans are known to ask for."""
    from .recorded import RECORDED

    return list(dict.fromkeys((*all_asked(), *RECORDED)))


every_source = pytest.mark.parametrize("source", SOURCES)


@functools.cache
def compiled(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> tuple[bytes, str]:
    """Return the cubin, and ptxas's report."""
    return compiler.compile_cubin(source, arch, dict(defines))


def cheapest(source: str) -> Request:
    """Return a request for the source that compiles quickly: few epilogues, the oldest architecture."""
    return min(
        (request for request in every_value() if request.source == source),
        key=lambda request: (dict(request.defines).get("EPILOGUE", 0), request.arch != "sm_80"),
    )
