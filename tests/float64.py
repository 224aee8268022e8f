"""An independent reference in float64: products, activations, and the error that a plan may make."""

from __future__ import annotations

import math

import numpy as np

from sparse24_plans import ElementKind, EpilogueKind, GemmSparse24Plan
from sparse24_plans.plan.plan import Plan

_erfc = np.vectorize(math.erfc, otypes=[float])


def activate(v: np.ndarray, kind: str, bounds: tuple[float, float] = (0.0, math.inf)) -> np.ndarray:
    """The epilogues' activations in float64, by their definition; of a gated one its gate's.

    ``bounds`` are relu's threshold and upper bound.
    """
    kind = EpilogueKind(kind).activation
    if kind == "relu":
        return np.where(v > bounds[0], np.minimum(v, bounds[1]), 0)
    if kind == "relu2":
        return np.maximum(v, 0) ** 2
    if kind in ("gelu", "geglu"):
        return v * 0.5 * _erfc(-v / math.sqrt(2)) if v.size else v
    if kind in ("gelu_tanh", "geglu_tanh"):
        with np.errstate(over="ignore"):
            return v / (1 + np.exp(-tanh_exponent(v)))
    if kind in ("silu", "swiglu"):
        with np.errstate(over="ignore"):
            return v / (1 + np.exp(-v))
    return v


def tanh_exponent(v: np.ndarray) -> np.ndarray:
    """2u, where gelu_tanh(v) = v/2 * (1 + tanh(u)), which is v / (1 + exp(-2u)) without its cancellation."""
    return 2 * np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)


def product64(plan: Plan, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product of float64 matrices. Large ones are multiplied on the plan's device."""
    if plan.device.cublaslt is None or a.size * b.shape[1] < 1 << 28:
        return a @ b
    import cupy

    with cupy.cuda.Device(plan.device.ordinal):
        return (cupy.asarray(a) @ cupy.asarray(b)).get()


def reference(
    plan: GemmSparse24Plan,
    x: np.ndarray,
    dense: np.ndarray,
    bias: np.ndarray | None,
    scale: np.ndarray | float = 1.0,
    c: np.ndarray | None = None,
    scale_y: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result and the allowed error, float64 [N, outputs]."""
    desc = plan.descriptor
    wide, w = x.astype(np.float64), dense.astype(np.float64, copy=False)
    if desc.op == "forward":
        w = w.T
    exact = desc.alpha * product64(plan, wide, w) * scale
    sizes = [
        plan.guarantee.magnitudes(values, element)
        for values, element in ((wide, desc.x_element), (w, desc.element))
    ]
    abs_sum = product64(plan, *sizes) * scale
    f32, out = ElementKind.F32, desc.out_element
    scaling = np.abs(exact) * (4 * f32.unit_roundoff) * np.any(np.asarray(scale) != 1)
    if desc.epilogue == "identity" and c is None and scale_y is None:
        allowed = plan.guarantee.tolerance(desc.reduction, exact, abs_sum, out, desc.alpha) + scaling
        return saturated(exact, out), allowed
    before = plan.guarantee.tolerance(desc.reduction, exact, abs_sum, f32, desc.alpha) + scaling
    v = exact
    if c is not None:
        addend = desc.beta * c.astype(np.float64)
        v = v + addend
        before += (
            np.abs(addend) * (3 * f32.unit_roundoff) + np.abs(v) * f32.unit_roundoff + f32.smallest_subnormal
        )
    if bias is not None:
        v = v + bias.astype(np.float64)
    before += np.abs(v) * f32.unit_roundoff
    value, after = v, before
    if desc.epilogue != "identity":
        value, after = activated(v, before, desc.epilogue, desc.relu_bounds)
    if desc.epilogue.activation == "gelu_tanh" and plan.sku.backend == "cusparselt":
        after = after + np.abs(v) * 2.0**-11  # the hardware's tanh (PTX ISA, tanh.approx.f32)
    if scale_y is not None:
        value, after = value * float(scale_y[0]), after * float(scale_y[0])
        after = after + (np.abs(value) + after) * f32.unit_roundoff
    size = np.where(np.isinf(after), 0, np.abs(value) + after)
    rounding = size * 1.01 * out.unit_roundoff + 0.5 * out.is_integer
    return saturated(value, out), after + rounding + out.smallest_subnormal + f32.smallest_subnormal


def activated(
    v: np.ndarray, error: np.ndarray, kind: EpilogueKind, bounds: tuple[float, float] = (0.0, math.inf)
) -> tuple[np.ndarray, np.ndarray]:
    """The activation of values that are known up to an error, and the error of the result.

    For a gated kind it is multiplied by the other factor. If either factor may overflow float32 to Inf, any
    error is allowed.
    """
    if kind.is_gated:
        (gate, up), (of_gate, of_up) = (rows_of_gates(each) for each in (v, error))
    else:
        gate, of_gate = v, error
    value = activate(gate, kind, bounds)
    f32 = ElementKind.F32
    if kind.activation == "relu2":
        return value, (2 * np.abs(gate) + of_gate) * of_gate + value * 2 * f32.unit_roundoff
    # Activations have slopes below 1.13; float32 activations add a few units in the last place.
    after = 1.13 * of_gate + (np.abs(value) + of_gate) * (8 * f32.unit_roundoff)
    if kind.activation == "relu" and bounds[0]:  # it jumps there
        after += np.where(np.abs(gate - bounds[0]) <= after, abs(bounds[0]), 0)
    if kind.activation in (
        "gelu_tanh",
        "geglu_tanh",
    ):  # the exponent is rounded, and its exponential overflows
        exponent = tanh_exponent(gate)
        slope = 0.25 / np.cosh(np.minimum(np.abs(exponent), 200) / 2) ** 2
        after += 4 * f32.unit_roundoff * np.abs(gate * exponent) * slope + 2.0**-120
    if not kind.is_gated:
        return value, after
    after = after + f32.smallest_subnormal
    with np.errstate(over="ignore", invalid="ignore"):
        of_product = after * (np.abs(up) + of_up) + np.abs(value) * of_up
        product = value * up
        of_product += (np.abs(product) + of_product) * f32.unit_roundoff
    beyond = np.maximum(np.abs(gate) + of_gate, np.abs(up) + of_up) >= float(np.finfo(np.float32).max)
    return product, np.where(beyond, np.inf, of_product)


def rows_of_gates(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split columns in the order of W's rows [N, M] into gates and the values that they scale."""
    n, m = values.shape
    pairs = values.reshape(n, m // 16, 2, 8)
    return pairs[:, :, 0].reshape(n, m // 2), pairs[:, :, 1].reshape(n, m // 2)


def saturated(value: np.ndarray, out: ElementKind) -> np.ndarray:
    """Return ``value`` clipped to the range of an integer or fp8 result."""
    if out in ("fp8_e4m3", "fp8_e5m2"):
        return np.clip(value, -out.largest, out.largest)
    return np.clip(value, np.iinfo(out.dtype).min, np.iinfo(out.dtype).max) if out.is_integer else value
