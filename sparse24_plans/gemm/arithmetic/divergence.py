"""Single steps that would explain why a recorded result differs from its replay.

The accumulators of the recorded run are not known. But one step that went wrong changes the result in its own
way, so each is tried: a step left out, a step whose accumulator was a unit too large or too small, and each
operation after the sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...vocab import EpilogueKind, ScaleKind
from . import tensor_core
from .results import Results
from .sums import AfterStep, StepPlace, multiplied_element, step_places

Array = np.ndarray[Any, Any]


def explain_difference(
    results: Results, token: int, output: int, recorded: int, recomputed: int
) -> str | None:
    """Describe the step in words, or return None. ``recorded`` and ``recomputed`` are bits of the result."""
    return (
        _left_out(results, token, output, recorded)
        or _after_the_sum(results, token, output, recorded)
        or _off_by_a_unit(results, token, output, recorded)
        or _rounding(recorded, recomputed)
    )


def _steps(results: Results) -> tuple[StepPlace, ...]:
    """The steps of the tensor cores. Other arithmetics have no steps that can be tried."""
    return step_places(results.desc, results.arithmetic) if results.arithmetic.on_tensor_cores else ()


def _tried(results: Results, token: int, output: int, count: int, after_step: AfterStep) -> Array:
    return results.at(np.full(count, token), np.full(count, output), after_step)


def _left_out(results: Results, token: int, output: int, recorded: int) -> str | None:
    """Try sums that each lack one step."""
    steps = _steps(results)
    if not steps:
        return None
    before = np.zeros(len(steps))

    def without(number: int, accumulator: Array) -> Array:
        if number == 0 or steps[number].accumulator != steps[number - 1].accumulator:
            before[:] = 0
        accumulator[number] = before[number]
        before[:] = accumulator
        return accumulator

    found = np.flatnonzero(_tried(results, token, output, len(steps), without) == recorded)
    return f"as if {_where(steps[found[0]])} were left out" if len(found) else None


def _off_by_a_unit(results: Results, token: int, output: int, recorded: int) -> str | None:
    """Try sums in which one accumulator each is a unit larger or smaller."""
    steps = _steps(results)
    if not steps:
        return None
    bits = tensor_core.STEPS[multiplied_element(results.desc, results.arithmetic)].result_bits

    def nudged(number: int, accumulator: Array) -> Array:
        for at, sign in ((2 * number, 1), (2 * number + 1, -1)):
            exponent = max(int(np.frexp(accumulator[at])[1]) - 1, -126)
            accumulator[at] += sign * 2.0 ** (exponent - bits)
        return accumulator

    found = np.flatnonzero(_tried(results, token, output, 2 * len(steps), nudged) == recorded) // 2
    if not len(found):
        return None
    others = len(set(found.tolist())) - 1
    more = f", or after {others} other steps" if others else ""
    return f"as if the accumulator came out a unit off after {_where(steps[found[0]])}{more}"


def _where(place: StepPlace) -> str:
    first, below = place.columns
    terms = "" if place.terms is None else " for term {} of X and term {} of W".format(*place.terms)
    return f"the step of columns {first} to {below - 1}{terms} (slice {place.slice})"


def _after_the_sum(results: Results, token: int, output: int, recorded: int) -> str | None:
    """Try the operations after the sum with one of them left out."""
    desc = results.desc
    plain: dict[str, dict[str, Any]] = {
        "scale_x": {"scale_x": ScaleKind.NONE},
        "scale_w": {"scale_w": ScaleKind.NONE},
        "alpha": {"alpha": 1.0},
        "C": {"beta": 0.0},
        "beta": {"beta": 1.0} if desc.has_c else {},
        "scale_y": {"scale_y": ScaleKind.NONE},
    }
    activation = desc.epilogue.activation
    if desc.epilogue.has_bias:
        plain["the bias"] = {"epilogue": activation}
    # Without its gate a product would have twice the results.
    if activation is not EpilogueKind.IDENTITY and not activation.is_gated:
        linear = EpilogueKind.BIAS if desc.epilogue.has_bias else EpilogueKind.IDENTITY
        without = {"relu_threshold": 0.0, "relu_upper_bound": None}
        plain["the activation"] = {"epilogue": linear, **without}
        plain["bias and activation"] = {"epilogue": EpilogueKind.IDENTITY, **without}
    for name, update in plain.items():
        if any(getattr(desc, field) != value for field, value in update.items()):
            other = results.of(desc.model_copy(update=update))
            if int(other.at(np.array([token]), np.array([output]))[0]) == recorded:
                return f"after the sum, as if {name} were left out"
    return None


def _rounding(recorded: int, recomputed: int) -> str | None:
    return "the rounding to the result's type" if abs(recorded - recomputed) == 1 else None
