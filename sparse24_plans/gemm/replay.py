"""Replaying: what a plan has computed is computed again on the host, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

from ..device.tensors import TensorView
from ..errors import InvalidProblemError, shown
from ..plan.operands import Views
from ..vocab import INT64_MAX, ElementKind, Model, Size, integer
from ..weights import threads
from .arithmetic.divergence import parting_of
from .arithmetic.results import Results, blocks_of, places
from .descriptor import GemmSparse24Descriptor

Array = np.ndarray[Any, Any]
OnBlock = Callable[[int], object]
"""Called with how many more results have been compared, by any thread, one at a time."""


class ReplayDifference(Model):
    """A result that isn't what its arithmetic gives."""

    token: Size
    """Its row of Y (of dX)."""
    output: Size
    """Its column."""
    recorded: float
    """Its value in the recorded result."""
    recomputed: float
    """Its value by the arithmetic."""
    recorded_bits: Size
    """The recorded value's bits in the result's element, as an unsigned integer."""
    recomputed_bits: Size
    """Those of the other value."""
    parting: str | None
    """The step where the two may have parted, in words; None where no one step explains it."""


class Replay(Model):
    """What a replay has found."""

    arithmetic: str
    """The name of the sequence of roundings that was computed again."""
    results: Size
    """All that the plan computes."""
    compared: Size
    """Of them, those that were computed again."""
    differing: Size
    """Of these, those whose bits differ."""
    first: ReplayDifference | None
    """Of those that differ, the first by token and output."""

    @property
    def equal(self) -> bool:
        """Whether all that was compared has the same bits."""
        return self.differing == 0


def chosen_results(samples: Any, seed: Any, desc: GemmSparse24Descriptor) -> tuple[Array, Array]:
    """Tokens and outputs that are asked for: all (None), so many at random, or pairs. In the best order."""
    total, number, start = desc.n * desc.outputs, integer(samples), integer(seed)
    if start is None or not 0 <= start <= INT64_MAX:
        raise InvalidProblemError(f"seed: expected an integer from 0 to 2^63 - 1, got {shown(seed)}")
    if samples is None or (number is not None and number >= total):
        return places(np.arange(total), desc)
    if number is not None:
        if number < 1:
            raise InvalidProblemError(f"samples: expected at least 1, got {shown(samples)}")
        drawn = np.random.default_rng(start).choice(total, number, replace=False, shuffle=False)
        return places(np.sort(drawn), desc)
    return _pairs(samples, desc)


def _pairs(samples: Any, desc: GemmSparse24Descriptor) -> tuple[Array, Array]:
    expected = "samples: expected None, a number of results, or pairs (token, output) as integers [P, 2]"
    try:
        if not isinstance(samples, (np.ndarray, list, tuple)):
            samples = TensorView.of(samples, argument="samples").array()
        pairs = np.asarray(samples)
    except Exception as error:  # whatever a broken object raises
        raise InvalidProblemError(f"{expected}, got {shown(samples)}") from error
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise InvalidProblemError(f"{expected}, got {shown(samples)}")
    tokens, outputs = pairs.astype(np.int64).T
    for name, found, size in (("token", tokens, desc.n), ("output", outputs, desc.outputs)):
        wrong = (found < 0) | (found >= size)
        if wrong.any():
            raise InvalidProblemError(
                f"samples: expected {name}s from 0 to below {size}, got {found[wrong][0]}"
            )
    order = np.lexsort((tokens, outputs))
    return tokens[order], outputs[order]


def replayed(
    results: Results, views: Views, tokens: Array, outputs: Array, on_block: OnBlock | None = None
) -> Replay:
    """Compares the results that ``views`` hold with what they ought to be."""
    result, lock = views["result"].bits(), Lock()
    wrong: list[tuple[int, int, int, int]] = []
    differing = 0

    def compare(block: slice) -> None:
        nonlocal differing
        n, m = tokens[block], outputs[block]
        want, got = results.at(n, m), result[n, m]
        at = np.flatnonzero(want != got)
        with lock:
            if len(at):
                differing += len(at)
                first = at[np.lexsort((m[at], n[at]))[0]]
                wrong.append((int(n[first]), int(m[first]), int(got[first]), int(want[first])))
            if on_block is not None:
                on_block(len(n))

    threads.for_each(compare, blocks_of(len(tokens)))
    desc = results.desc
    return Replay(
        arithmetic=str(results.arithmetic),
        results=desc.n * desc.outputs,
        compared=len(tokens),
        differing=differing,
        first=_difference(results, *min(wrong)) if wrong else None,
    )


def _difference(results: Results, token: int, output: int, got: int, want: int) -> ReplayDifference:
    element = results.desc.out_element
    return ReplayDifference(
        token=token,
        output=output,
        recorded=_value(got, element),
        recomputed=_value(want, element),
        recorded_bits=got,
        recomputed_bits=want,
        parting=parting_of(results, token, output, got, want),
    )


def _value(bits: int, element: ElementKind) -> float:
    return float(np.array([bits], element.bits_dtype).view(element.dtype)[0])
