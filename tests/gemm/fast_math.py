"""The activations of kernels that aren't strict, in NumPy: FastMath of common/epilogue.cuh, step by step.

The last two arguments of each are relative errors of the hardware's power of two and reciprocal.
"""

from __future__ import annotations

import numpy as np

from sparse24_plans.arithmetic.epilogue import _constants
from sparse24_plans.arithmetic.fma32 import fma_f32

APPROXIMATE = 2.0**-22
"""The largest relative error of the hardware's power of two and reciprocal."""
_F32 = np.float32


def _polynomial(name: str, z: np.ndarray) -> np.ndarray:
    coefficients = _constants()[name]
    assert all(float(_F32(one)) == one for one in coefficients)
    result = np.full_like(z, coefficients[-1])
    for one in reversed(coefficients[:-1]):
        result = fma_f32(result, z, np.full_like(z, one))
    return result


def fast_gelu(v: np.ndarray, of_power: np.ndarray | float, of_inverse: np.ndarray | float) -> np.ndarray:
    """gelu of float32 values."""
    quarter = _F32(_constants()["LOG2E"][0] / 4)
    z = np.fmin(np.abs(v), _F32(_constants()["GELU_VANISHES"][0]))
    exponent = -z * (z * quarter)
    root = (np.exp2(exponent.astype(np.float64)) * (1 + of_power)).astype(_F32)
    denominator = _polynomial("GELU_DENOMINATOR", z)
    inverse = (1 / denominator.astype(np.float64) * (1 + of_inverse)).astype(_F32)
    least = np.finfo(_F32).smallest_normal
    assert min(root.min(), inverse.min()) >= least  # else kernels would have 0
    tail = z * _polynomial("GELU_NUMERATOR", z) * inverse * root
    positive = np.where((v < 0) | ((v == 0) & np.signbit(v)), _F32(-0.0), v)
    return fma_f32(-tail, root, positive)


def _sigmoid(z: np.ndarray, of_power: np.ndarray | float, of_inverse: np.ndarray | float) -> np.ndarray:
    """1 / (1 + exp(-z)), in which subnormal numbers are 0."""
    exponent = (z * -_F32(_constants()["LOG2E"][0])).astype(np.float64)
    power = _flushed(np.exp2(exponent) * (1 + of_power))
    return _flushed(1 / (1 + power).astype(np.float64) * (1 + of_inverse))


def _flushed(values: np.ndarray) -> np.ndarray:
    rounded = values.astype(_F32)
    return np.where(np.abs(rounded) < np.finfo(_F32).smallest_normal, _F32(0), rounded)


def fast_silu(v: np.ndarray, of_power: np.ndarray | float, of_inverse: np.ndarray | float) -> np.ndarray:
    """silu of float32 values."""
    v = np.maximum(v, _F32(-120))
    return v * _sigmoid(v, of_power, of_inverse)


def fast_gelu_tanh(v: np.ndarray, of_power: np.ndarray | float, of_inverse: np.ndarray | float) -> np.ndarray:
    """gelu_tanh of float32 values."""
    linear, cubic = (_F32(_constants()[f"GELU_TANH_{name}"][0]) for name in ("LINEAR", "CUBIC"))
    v = np.maximum(v, _F32(-11))
    slope = fma_f32(np.full_like(v, cubic), v * v, np.full_like(v, linear))
    return v * _sigmoid(v * slope, of_power, of_inverse)
