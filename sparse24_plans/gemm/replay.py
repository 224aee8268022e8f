"""Replay: a plan's results are computed again on the host and compared bit for bit."""

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
from .arithmetic.divergence import explain_difference
from .arithmetic.results import AnyResults, blocks_of, places
from .descriptor import GemmSparse24Descriptor

Array = np.ndarray[Any, Any]
OnBlock = Callable[[int], object]
"""Callback with the number of results compared since the last call. Threads call it one at a time."""


class ReplayDifference(Model):
    """A recorded result that differs from what its arithmetic gives."""

    token: Size
    """Row of Y (of dX) of the result; rows of batches follow each other."""
    output: Size
    """Column of Y (of dX) of the result."""
    recorded: float
    """Value in the recorded result."""
    recomputed: float
    """Value that the arithmetic gives."""
    recorded_bits: Size
    """Bits of ``recorded`` in the result's element, as an unsigned integer."""
    recomputed_bits: Size
    """Bits of ``recomputed`` in the result's element, as an unsigned integer."""
    divergence: str | None
    """A single step that would explain the difference, in words; None if no single step does."""


class Replay(Model):
    """The findings of a replay."""

    arithmetic: str
    """Name of the recomputed sequence of roundings."""
    results: Size
    """Number of results of the plan."""
    compared: Size
    """Number of results that were recomputed."""
    differing: Size
    """Number of recomputed results whose bits differ from the recorded ones."""
    first: ReplayDifference | None
    """The differing result with the smallest token, and of these with the smallest output."""

    @property
    def equal(self) -> bool:
        """Return whether all compared results have the same bits."""
        return self.differing == 0


def chosen_results(samples: Any, seed: Any, desc: GemmSparse24Descriptor) -> tuple[Array, Array]:
    """Tokens and outputs of the requested results (all, some random ones, or pairs) in the fastest order."""
    total, number, start = desc.result_rows * desc.outputs, integer(samples), integer(seed)
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
    for name, found, size in (("token", tokens, desc.result_rows), ("output", outputs, desc.outputs)):
        wrong = (found < 0) | (found >= size)
        if wrong.any():
            raise InvalidProblemError(
                f"samples: expected {name}s from 0 to below {size}, got {found[wrong][0]}"
            )
    order = np.lexsort((tokens, outputs))
    return tokens[order], outputs[order]


def check_c_is_kept(args: Any) -> None:
    """Raise InvalidProblemError if C lies in y: the run has overwritten it, so no replay can read it."""
    c = getattr(args, "c", None)
    if (
        c is not None
        and TensorView.of(c, argument="c").address == TensorView.of(args.y, argument="y").address
    ):
        raise InvalidProblemError(
            "c: expected C as it was before the run, got y, which the run has overwritten"
        )


def replayed(
    results: AnyResults,
    views: Views,
    tokens: Array,
    outputs: Array,
    on_block: OnBlock | None = None,
) -> Replay:
    """Compare the results in ``views`` with recomputed ones."""
    desc, result, lock = results.desc, views["result"].bits(), Lock()
    wrong: list[tuple[int, int, int, int]] = []
    differing = 0

    def compare(block: slice) -> None:
        nonlocal differing
        n, m = tokens[block], outputs[block]
        rows = divmod(n, desc.n) if desc.is_batched else (n,)
        want, got = results.at(n, m), result[(*rows, m)]
        at = np.flatnonzero(want != got)
        with lock:
            if len(at):
                differing += len(at)
                first = at[np.lexsort((m[at], n[at]))[0]]
                wrong.append((int(n[first]), int(m[first]), int(got[first]), int(want[first])))
            if on_block is not None:
                on_block(len(n))

    threads.for_each(compare, blocks_of(len(tokens)))
    return Replay(
        arithmetic=str(results.arithmetic),
        results=desc.result_rows * desc.outputs,
        compared=len(tokens),
        differing=differing,
        first=_difference(results, *min(wrong)) if wrong else None,
    )


def _difference(results: AnyResults, token: int, output: int, got: int, want: int) -> ReplayDifference:
    element = results.desc.out_element
    single = results.single(token)
    return ReplayDifference(
        token=token,
        output=output,
        recorded=_value(got, element),
        recomputed=_value(want, element),
        recorded_bits=got,
        recomputed_bits=want,
        divergence=single and explain_difference(*single, output, got, want),
    )


def _value(bits: int, element: ElementKind) -> float:
    return float(np.array([bits], element.bits_dtype).view(element.dtype)[0])
