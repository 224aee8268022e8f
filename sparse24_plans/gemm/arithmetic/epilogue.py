"""What follows a sum, to the bit: alpha, bias, activation, rounding; as StrictMath in common/epilogue.cuh."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from ...device.jit.compiler import KERNEL_FOLDER
from ...device.tensors import TensorView
from ...vocab import ElementKind, EpilogueKind

Array = np.ndarray[Any, Any]


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


def _exponential(y: Array) -> Array:
    c = _constants()
    n = np.floor(y * c["LOG2E"][0] + 0.5)
    r = (y - n * c["LN2_HI"][0]) - n * c["LN2_LO"][0]
    scale = ((1023 + n.astype(np.int64)) << 52).view(np.float64)
    return _polynomial(c["EXP_COEFFICIENTS"], r) * scale


def _erfc(z: Array) -> Array:
    c = _constants()
    t = 2.0 / (2.0 + z)
    u = (t - c["ERFC_MIDDLE"][0]) / c["ERFC_HALF"][0]
    return t * _exponential(_polynomial(c["ERFC_COEFFICIENTS"], u) - z * z)


def _silu(v: Array) -> Array:
    wide = v.astype(np.float64)
    bounded = np.nan_to_num(np.clip(wide, -120.0, 120.0))
    result = (wide / (1.0 + _exponential(-bounded))).astype(np.float32)
    return np.where(v < -120.0, np.float32(-0.0), result)


def _gelu(v: Array) -> Array:
    wide = v.astype(np.float64)
    bounded = np.nan_to_num(np.clip(np.abs(wide), 0.0, 15.0))
    tail = 0.5 * _erfc(bounded * _constants()["SQRT_HALF"][0])
    result = (wide * np.where(v < 0, tail, 1.0 - tail)).astype(np.float32)
    return np.where(v < -15.0, np.float32(-0.0), np.where(v > 15.0, v, result))


def apply_epilogue(acc: Array, alpha: float, bias: Array | None, kind: EpilogueKind) -> Array:
    """float32 in, float32 out: alpha, then bias, then the activation, each rounded on its own."""
    v = acc if alpha == 1 else acc * np.float32(alpha)
    if bias is not None:
        v = v + bias
    if kind is EpilogueKind.BIAS_RELU:
        return np.where(v < 0, np.float32(0.0), v)
    if kind is EpilogueKind.BIAS_GELU:
        return _gelu(v)
    if kind is EpilogueKind.BIAS_SILU:
        return _silu(v)
    if kind is EpilogueKind.BIAS_GELU_TANH:  # not in strict mode: NumPy's tanh isn't defined to the bit
        wide = v.astype(np.float64)
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        result = (0.5 * wide * (1 + np.tanh(inner))).astype(np.float32)
        return np.where(v == -np.inf, np.float32(-0.0), result)
    return v


_NAN_BITS = {ElementKind.F32: 0x7FFFFFFF, ElementKind.F16: 0x7FFF, ElementKind.BF16: 0x7FFF}


def write(result: TensorView, value: Array) -> None:
    """Round to the result's element and store; every NaN becomes the one that the kernels write.

    Integers are rounded to nearest even and saturate; NaN becomes 0. ``value`` may be overwritten.
    """
    if result.element.is_integer:
        limits = np.iinfo(result.element.dtype)
        rounded = np.rint(np.nan_to_num(value.astype(np.float64), posinf=np.inf, neginf=-np.inf))
        result.array()[...] = np.clip(rounded, limits.min, limits.max).astype(result.element.dtype)
        return
    bits = value.astype(result.element.dtype, copy=False).view(result.element.bits_dtype)
    nan = np.isnan(value)
    if nan.any():
        bits[nan] = _NAN_BITS[result.element]
    result.bits()[...] = bits
