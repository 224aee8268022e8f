"""How errors grow after the sum of a product: scales, alpha, C, bias, activation, gate, and softmax.

All arrays are float64, of NumPy or CuPy. Each function takes exact values and bounds of their errors, and
bounds the error of what float32 arithmetic makes of them. An activation passes an error on by at most its
largest slope (its Lipschitz constant) and adds its own rounding. The hardware's powers of two and
reciprocals, of which kernels make activations, are within a relative 2^-22 (PTX ISA, ex2.approx and
rcp.approx); activations of strict kernels and of the host are closer. Overflow, Inf and NaN are not covered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..vocab import ElementKind, EpilogueKind, Float64s
from ..weights.gates import GATE_GROUP, GATE_ROWS

_U, _TINY = ElementKind.F32.unit_roundoff, ElementKind.F32.smallest_subnormal
_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""The activations of gates."""
_SLOPES = {"relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
"""Upper bounds of the activations' largest slopes: 1, 1.0998..., 1.1289... and 1.1289..."""
_EVALUATION = {"relu": 0.0, "silu": 12 * _U, "gelu": 10 * _U, "gelu_tanh": 12 * _U}
"""Relative errors of the activations' evaluation in float32."""
_EXP_VANISHES = 2.0**-119
"""Largest |silu(v)| where 1 / (1 + exp(-v)) is subnormal in float32, so that kernels give 0."""


def times(factor: Any, error: Any) -> Any:
    """A factor times an error, one of them an array. Zero times an unbounded error is zero."""
    with np.errstate(invalid="ignore"):
        return np.where((error == 0) | (factor == 0), 0.0, factor * error)


def of_factors(exact: Float64s, sums: Float64s, alpha: float, *scales: Float64s) -> Float64s:
    """The error of alpha times the scales times a sum, whose own error is at most ``sums``.

    ``exact`` is the whole product. The sum, each multiplication and alpha itself are rounded to float32.
    """
    of_alpha = abs(float(np.float32(alpha)) - alpha) / abs(alpha) if alpha else 0.0
    relative = (1 + _U) ** (2 + len(scales)) * (1 + of_alpha) - 1
    factor: Any = abs(alpha)
    underflow: Any = _TINY / 2
    for scale in reversed(scales):
        underflow = underflow + _TINY / 2 * factor
        factor = factor * np.abs(scale)
    found: Float64s = (times(factor, sums) + underflow) * (1 + relative) + np.abs(exact) * relative
    return found


def of_addend(exact: Float64s, error: Float64s, c: Float64s, beta: float) -> tuple[Float64s, Float64s]:
    """The exact sum with beta * C, and its error. C, beta, their product and the sum are rounded."""
    of_beta = abs(float(np.float32(beta)) - beta) / abs(beta) if beta else 0.0
    addend = beta * c
    error = error + np.abs(addend) * ((1 + _U) ** 2 * (1 + of_beta) - 1) + _TINY
    total = exact + addend
    return total, error + (np.abs(total) + error) * _U


class ReluBounds(NamedTuple):
    """Up to ``threshold`` relu gives 0; beyond ``most`` it gives ``most``."""

    threshold: float = 0.0
    most: float = float("inf")


def of_epilogue(
    v: Float64s, error: Float64s, kind: EpilogueKind, bounds: ReluBounds, tanh_error: float
) -> tuple[Float64s, Float64s]:
    """An upper bound of |the epilogue's result|, and its error. ``v`` includes the bias, unrounded."""
    size = np.abs(v)
    if kind.has_bias:
        error = error + (size + error) * _U
    if kind.activation is EpilogueKind.IDENTITY:
        return size, error
    if not kind.is_gated:
        if kind.activation is EpilogueKind.RELU and bounds != ReluBounds():
            return _bounded(v, error, bounds)
        return _activated(v, error, kind.activation, tanh_error)
    (gate, up), (of_gate, of_up) = (_rows_of_gates(one) for one in (v, error))
    value, after = _activated(gate, of_gate, _GATES[kind.activation], tanh_error)
    up = np.abs(up)
    product, lost = value * up, after * (up + of_up) + times(value, of_up)
    return product, lost + (product + lost) * _U + _TINY


def of_scale(size: Float64s, error: Float64s, scale: float) -> tuple[Float64s, Float64s]:
    """Values of at most ``size`` and their error, times ``scale``. The product is rounded to float32."""
    size, error = size * abs(scale), times(abs(scale), error)
    return size, error + (size + error) * _U + _TINY


def of_sum(terms: Float64s, errors: Float64s, weights: Float64s | None) -> tuple[Float64s, Float64s]:
    """The sum along the first axis, times weights, and its error; products and sums are rounded in order."""
    steps = (1 + _U) ** (len(terms) + (weights is not None)) - 1
    if weights is not None:
        terms, errors = terms * weights, times(np.abs(weights), errors)
    error = errors.sum(axis=0)
    error = error + (np.abs(terms).sum(axis=0) + error) * steps + len(terms) * _TINY
    return terms.sum(axis=0), error


def of_rounding(size: Float64s, error: Float64s, out: ElementKind) -> Float64s:
    """The whole error of values of at most ``size`` after their rounding to ``out``."""
    relative = (size + error) * (1.01 * out.unit_roundoff)
    return error + relative + (_TINY + out.smallest_subnormal + 0.5 * out.is_integer)


def _bounded(v: Float64s, error: Float64s, bounds: ReluBounds) -> tuple[Float64s, Float64s]:
    """relu with rounded bounds. It jumps by its threshold where v is as near to it as the error."""
    threshold, most = bounds
    lost = error + (abs(threshold) + (abs(most) if np.isfinite(most) else 0.0)) * _U + _TINY
    size = np.where(v > threshold, np.abs(np.minimum(v, most)), 0.0)
    return size, lost + np.where(np.abs(v - threshold) <= lost, abs(threshold) + lost, 0.0)


def _activated(v: Float64s, error: Float64s, activation: str, tanh_error: float) -> tuple[Float64s, Float64s]:
    if activation == "relu2":
        size = np.square(np.maximum(v, 0.0))
        passed = (2 * np.abs(v) + error) * error
        return size, passed + (size + passed) * _U + _TINY
    passed = _SLOPES[activation] * error
    size = _size_of(v, activation)
    own = times(_EVALUATION[activation], size + passed)
    if activation == "silu":  # the exponent of 2 is rounded, and so is log2(e)
        own = own + 2 * _U * v * v * _sigmoid_slope(v) + (_EXP_VANISHES + _TINY)
    if activation == "gelu":  # the exponent is rounded, too; |v^2 exp(-v^2/2)|' < 1
        own = own + _U * (v * v * np.exp(-0.5 * v * v) + error) + _TINY * (1 + np.abs(v))
    if activation == "gelu_tanh":  # 2u is rounded in four steps, and then as in silu
        exponent = _tanh_exponent(v)
        own = own + 6 * _U * np.abs(v * exponent) * _sigmoid_slope(exponent) + (_EXP_VANISHES + _TINY)
        own = own + times(tanh_error, np.abs(v) + error)
    return size, passed + own


def _size_of(v: Float64s, activation: str) -> Float64s:
    """An upper bound of |activation(v)|, for v < 0 from an upper bound of the activation's factor of v."""
    below, size = np.minimum(v, 0.0), np.maximum(v, 0.0)
    if activation == "relu":
        return size
    exponent = below
    if activation == "gelu":
        exponent = -0.5 * below * below
    if activation == "gelu_tanh":
        exponent = _tanh_exponent(below)
    found: Float64s = size - below * np.exp(exponent)
    return found


def _sigmoid_slope(v: Float64s) -> Float64s:
    """The slope of 1 / (1 + exp(-v))."""
    found: Float64s = 0.25 / np.square(np.cosh(0.5 * np.minimum(np.abs(v), 200.0)))
    return found


def _tanh_exponent(v: Float64s) -> Float64s:
    """2u of gelu_tanh(v) = v / (1 + exp(-2u))."""
    found: Float64s = 2 * np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)
    return found


def _rows_of_gates(values: Float64s) -> tuple[Float64s, Float64s]:
    """The gates and what they multiply, from values whose last axis is in the order of W's rows."""
    *rest, m = values.shape
    pairs = values.reshape(*rest, m // GATE_GROUP, 2, GATE_ROWS)
    return tuple(pairs[..., part, :].reshape(*rest, m // 2) for part in (0, 1))  # type: ignore[return-value]


# Softmax and attention ----------------------------------------------------------------------------


class Softmax(NamedTuple):
    """The exact softmax of scores, and how far rounding may move it."""

    weights: Float64s
    """Zeros in a row of -Inf alone."""
    lost: Float64s
    """Error of the weights, which are at most 1 however wrong the scores are."""
    of_lse: Float64s
    """Error of the logarithm of each row's sum of exponentials."""


def of_softmax(scores: Float64s, moved: Float64s, sums: float) -> Softmax:
    """The softmax along the last axis of scores whose errors are at most ``moved``; -Inf is hidden.

    ``sums`` bounds the relative error of the exponentials and of their sum. Rounding the difference to the
    row's maximum moves an exponent, too.
    """
    if not scores.size:
        return Softmax(scores, scores, scores.sum(axis=-1))
    live, top = np.isfinite(scores), scores.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    powers = np.exp(scores - top)
    total = powers.sum(axis=-1, keepdims=True)
    moved = np.where(live, moved + _U * np.abs(np.where(live, scores - top, 0.0)), 0.0)
    most = moved.max(axis=-1, keepdims=True)
    grown = -float(np.log1p(-sums)) if sums < 1 else float("inf")
    total = np.where(total == 0, 1.0, total)
    lse = np.abs(top + np.log(total))[..., 0]
    of_lse = 2 * most[..., 0] + grown + 4 * _U * (1 + lse)
    weights = powers / total
    with np.errstate(over="ignore", invalid="ignore"):
        lost = weights * np.expm1(2 * (moved + most) + grown + 6 * _U)
    # A weight that float64 has lost may come back if its score is wrong enough.
    largest = np.where(live, 1 + float(np.expm1(grown + 6 * _U)), 0.0)
    return Softmax(weights, np.where(lost < largest, lost, largest), of_lse)
