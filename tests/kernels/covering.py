"""A covering set of the compilations that plans can ask for, which are the ones that are tested.

- Every two words of a source that are asked for together: its function and its macros, each with each. A
  kernel that spills or warns does so because of one macro or two, such as a tile and an epilogue.
- Every architecture with each function and element.
- Every value of macros that are only numbers in the code, such as the stages of a pipeline.

``--every-compilation`` compiles all that is asked for, and what the benchmarks' cells choose: for changes
of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

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


def groups_of(request: Request) -> Iterator[tuple[Any, ...]]:
    """Return the groups of words that are compiled together."""
    words = [("function", request.function)]
    words += [one for one in request.defines if one[0] not in COUNTS]
    yield from combinations(words, 2)
    yield from ((("arch", request.arch), one) for one in words if one[0] in ("function", "ELEMENT"))
    yield from ((one,) for one in request.defines if one[0] in COUNTS)


def covering(asked: Iterable[Request]) -> list[Request]:
    """Return requests that have all groups of ``asked``. Each adds the most groups that are still new."""
    bits: dict[tuple[Any, ...], int] = {}
    added, found, have = {}, [], 0
    for request in asked:
        added[request] = sum(1 << bits.setdefault(group, len(bits)) for group in groups_of(request))
    while added := {request: new for request, one in added.items() if (new := one & ~have)}:
        best = max(added, key=lambda request: added[request].bit_count())
        found.append(best)
        have |= added[best]
    return found


@functools.cache
def of_source(source: str) -> list[Request]:
    """Return the requests for the source that are compiled."""
    return covering(one for one in ASKED if one.source == source)


def everything() -> list[Request]:
    """Return all that plans are known to ask for."""
    from .recorded import RECORDED

    return list(dict.fromkeys((*ASKED, *RECORDED)))


REQUESTS = [
    request
    for source in SOURCES
    # Functions of one compilation follow each other.
    for request in sorted(of_source(source), key=lambda request: (request.arch, request.defines))
]
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
