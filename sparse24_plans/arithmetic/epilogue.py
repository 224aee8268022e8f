"""Epilogues to the bit, as StrictMath in the kernels: alpha, C, bias, activation, gate, scale_y, rounding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, Protocol

import numpy as np

from ..device.jit.compiler import KERNEL_FOLDER
from ..device.tensors import TensorView
from ..vocab import FP8, ElementKind, EpilogueKind
from ..weights.gates import GATE_GROUP, GATE_ROWS

Array = np.ndarray[Any, Any]

IN_STEPS = tuple(
    kind
    for kind in EpilogueKind
    if kind.activation in (EpilogueKind.IDENTITY, EpilogueKind.RELU, EpilogueKind.RELU2)
)
"""Epilogues that all kernels round step by step. GELU and SiLU of kernels that aren't strict take the
hardware's approximate functions."""
UNGATED = tuple(kind for kind in EpilogueKind if not kind.is_gated)
"""Epilogues without a gate: each sum gives one result."""
NO_BOUNDS = 0.0, float("inf")
"""Threshold and upper bound of the ordinary relu."""


@lru_cache(maxsize=1)
def _constants() -> dict[str, tuple[float, ...]]:
    """The constants of common/strict_math.inc, by name without S24_."""
    text = (KERNEL_FOLDER / "common/strict_math.inc").read_text().replace("\\\n", " ")
    found = re.findall(r"^#define S24_(\w+) (.+)$", text, re.MULTILINE)
    return {name: tuple(float.fromhex(v.strip()) for v in values.split(",")) for name, values in found}


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def exponential(y: Array) -> Array:
    """exp of float64 values from -120 to 120, in float64 and to its last bits."""
    c = _constants()
    n = np.floor(y * c["LOG2E"][0] + 0.5)
    r = (y - n * c["LN2_HI"][0]) - n * c["LN2_LO"][0]
    scale = ((1023 + n.astype(np.int64)) << 52).view(np.float64)
    return _polynomial(c["EXP_COEFFICIENTS"], r) * scale


def _erfc(z: Array) -> Array:
    c = _constants()
    t = 2.0 / (2.0 + z)
    u = (t - c["ERFC_MIDDLE"][0]) / c["ERFC_HALF"][0]
    return t * exponential(_polynomial(c["ERFC_COEFFICIENTS"], u) - z * z)


def _silu(v: Array) -> Array:
    wide = v.astype(np.float64)
    bounded = np.nan_to_num(np.clip(wide, -120.0, 120.0))
    result = (wide / (1.0 + exponential(-bounded))).astype(np.float32)
    return np.where(v < -120.0, np.float32(-0.0), result)


def _gelu(v: Array) -> Array:
    wide = v.astype(np.float64)
    bounded = np.nan_to_num(np.clip(np.abs(wide), 0.0, 15.0))
    tail = 0.5 * _erfc(bounded * _constants()["SQRT_HALF"][0])
    result = (wide * np.where(v < 0, tail, 1.0 - tail)).astype(np.float32)
    return np.where(v < -15.0, np.float32(-0.0), np.where(v > 15.0, v, result))


def _gelu_tanh(v: Array) -> Array:
    """v / (1 + exp(-2u)), with u = sqrt(2/pi) * (v + 0.044715 v^3): the same as v/2 * (1 + tanh(u))."""
    c, wide = _constants(), v.astype(np.float64)
    bounded = np.nan_to_num(np.clip(wide, -11.0, 11.0))
    exponent = bounded * (c["GELU_TANH_LINEAR"][0] + c["GELU_TANH_CUBIC"][0] * (bounded * bounded))
    result = (wide / (1.0 + exponential(-exponent))).astype(np.float32)
    return np.where(v < -11.0, np.float32(-0.0), np.where(v > 11.0, v, result))


def apply_epilogue(
    acc: Array,
    alpha: float,
    bias: Array | None,
    kind: EpilogueKind,
    addend: Array | None = None,
    relu_bounds: tuple[float, float] = NO_BOUNDS,
) -> Array:
    """float32 in, float32 out: alpha, the addend, bias and the activation in this order, each rounded.

    Without a bias, the activation is applied to v + 0, which turns -0 into +0. For a gated kind the last
    axis, which is in the order of W's rows, becomes half as long.
    """
    v = acc if alpha == 1 else acc * np.float32(alpha)
    if addend is not None:
        v = v + addend
    if kind is not EpilogueKind.IDENTITY:
        v = v + (np.float32(0) if bias is None else bias)
    activation = kind.activation
    if not kind.is_gated:
        return _activated(v, activation, relu_bounds)
    pairs = v.reshape(*v.shape[:-1], v.shape[-1] // GATE_GROUP, 2, GATE_ROWS)
    found = _activated(pairs[..., 0, :], activation) * pairs[..., 1, :]
    return found.reshape(*v.shape[:-1], v.shape[-1] // 2)


def _activated(v: Array, activation: EpilogueKind, relu_bounds: tuple[float, float] = NO_BOUNDS) -> Array:
    """The activation; for a gated kind, the activation of its gate."""
    if activation is EpilogueKind.RELU and relu_bounds != NO_BOUNDS:
        threshold, most = map(np.float32, relu_bounds)
        return np.where(v <= threshold, np.float32(0.0), np.where(v > most, most, v))
    if activation is EpilogueKind.RELU:
        return np.where(v < 0, np.float32(0.0), v)
    if activation is EpilogueKind.RELU2:
        kept = np.where(v < 0, np.float32(0.0), v)
        return kept * kept
    if activation in (EpilogueKind.GELU, EpilogueKind.GEGLU):
        return _gelu(v)
    if activation in (EpilogueKind.SILU, EpilogueKind.SWIGLU):
        return _silu(v)
    if activation in (EpilogueKind.GELU_TANH, EpilogueKind.GEGLU_TANH):
        return _gelu_tanh(v)
    return v


_NAN_BITS = {
    ElementKind.F32: 0x7FFFFFFF,
    ElementKind.F16: 0x7FFF,
    ElementKind.BF16: 0x7FFF,
    **dict.fromkeys(FP8, 0x7F),
}


def encoded(value: Array, element: ElementKind) -> Array:
    """The bits of float32 values rounded to ``element``; every NaN is the one that the kernels write.

    Integers and fp8 are rounded to nearest even and saturate; NaN becomes 0 as an integer. ``value`` may be
    overwritten.
    """
    if element in FP8:
        most = element.largest
        value = np.clip(value, -most, most)
    if element.is_integer:
        limits = np.iinfo(element.dtype)
        rounded = np.rint(np.nan_to_num(value.astype(np.float64), posinf=np.inf, neginf=-np.inf))
        return np.clip(rounded, limits.min, limits.max).astype(element.dtype).view(element.bits_dtype)
    bits = value.astype(element.dtype, copy=False).view(element.bits_dtype)
    nan = np.isnan(value)
    if nan.any():
        bits[nan] = _NAN_BITS[element]
    return bits


def addend_of(c: Array, beta: float) -> Array:
    """beta * C, rounded to float32. Integers of C that float32 can't hold are rounded first."""
    return c.astype(np.float32) * np.float32(beta)


class Fp8Scale:
    """The operands ``scale_y`` and ``amax`` of an fp8 product. Any number of threads may call it."""

    def __init__(self, scale: Array | None, amax: Array | None) -> None:
        self._scale, self._amax, self._lock = scale, amax, Lock()

    @classmethod
    def of(cls, views: Mapping[str, TensorView], *, raises_amax: bool = True) -> Fp8Scale:
        """The scale of checked operands. With ``raises_amax`` False, amax stays as it is."""
        scale, amax = views.get("scale_y"), views.get("amax") if raises_amax else None
        return cls(*(None if view is None else view.array() for view in (scale, amax)))

    def scaled(self, values: Array) -> Array:
        """Results times scale_y, rounded. amax becomes the largest of itself and their magnitudes.

        Like the kernels, it compares bits as signed integers, in which NaN exceeds every number.
        """
        if self._amax is not None and values.size:
            sizes = np.where(np.isnan(values), _NAN_BITS[ElementKind.F32], np.abs(values).view(np.int32))
            bits = self._amax.view(np.int32)
            with self._lock:
                bits[0] = max(bits[0], sizes.max())
        return values if self._scale is None else values * self._scale


class Finish(Protocol):
    """The part of a product's descriptor that describes its epilogue."""

    @property
    def alpha(self) -> float: ...
    @property
    def epilogue(self) -> EpilogueKind: ...
    @property
    def out_element(self) -> ElementKind: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def relu_bounds(self) -> tuple[float, float]: ...


def finished(
    sums: Array,
    desc: Finish,
    scale_x: Array | None = None,
    scale_w: Array | None = None,
    bias: Array | None = None,
    addend: Array | None = None,
    fp8: Fp8Scale | None = None,
) -> Array:
    """The results' bits, from sums in float32 (for s8: exact sums in float64).

    Scales, bias and addend (beta * C, of :func:`addend_of`) broadcast to the sums. For a gated epilogue the
    last axis is in the order of W's rows, and the results' last axis is half as long. ``fp8`` scales results.
    """
    if desc.out_element is ElementKind.I32 and desc.is_plain:
        limits = np.iinfo(np.int32)
        return np.clip(sums, limits.min, limits.max).astype(np.int32).view(np.uint32)
    v = sums.astype(np.float32, copy=False)
    for scale in (scale_x, scale_w):
        if scale is not None:
            v = v * scale
    wide = None if bias is None else bias.astype(np.float32)
    v = apply_epilogue(v, desc.alpha, wide, desc.epilogue, addend, desc.relu_bounds)
    return encoded(v if fp8 is None else fp8.scaled(v), desc.out_element)
