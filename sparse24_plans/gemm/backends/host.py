"""The host tier: NumPy. ``host_blas`` inflates and calls BLAS; ``host_strict`` is the oracle.

The strict mode computes, bit for bit, what ``gemm/inflate_strict.cu`` does: one float32 accumulator a result,
one fma a kept position in increasing order, then the kernels' epilogue. Products of s8 are summed exactly in
both modes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from ...device.jit.compiler import KERNEL_FOLDER
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.kernel import Choice
from ...plan.operands import Views
from ...vocab import ElementKind, EpilogueKind, GemmOp
from ...weights import canonical
from ..kernel import GemmKernel

Array = np.ndarray[Any, Any]


class Kernel(GemmKernel):
    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.details = "NumPy, emulated float32 fma" if self.row.strict else "NumPy, BLAS"

    def launcher(self, views: Views, workspace: int) -> Launch:
        return lambda stream: self._run(views)

    def _run(self, views: Views) -> None:
        desc, result = self.descriptor, views["result"]
        with np.errstate(all="ignore"):  # overflow, Inf and NaN are results here, not accidents
            product = self._product(views)
            if desc.out_element is ElementKind.I32 and desc.is_plain:
                limits = np.iinfo(np.int32)
                result.array()[...] = np.clip(product, limits.min, limits.max)
                return
            product = scaled(product.astype(np.float32), views)
            bias = views["bias"].array().astype(np.float32) if "bias" in views else None
            _write(result, apply_epilogue(product, desc.alpha, bias, desc.epilogue))

    def _product(self, views: Views) -> Array:
        """The sums: float64 of s8, else float32."""
        desc, values = self.descriptor, views["values"]
        source = views["source"].array().astype(np.float32)
        codes = canonical.from_metadata(views["metadata"].bits())
        forward = desc.op is GemmOp.FORWARD
        if self.row.strict and desc.element is not ElementKind.S8:
            kept = values.array().astype(np.float32)
            return (_strict_forward if forward else _strict_dgrad)(source, kept, codes, desc.k)
        dense = canonical.scatter(values.bits(), codes).view(desc.element.dtype)
        if desc.element is ElementKind.S8:
            return _exact(source, dense, desc.op)
        wide = dense.astype(np.float32)
        product: Array = source @ (wide.T if forward else wide)
        return product


def _exact(source: Array, dense: Array, op: GemmOp) -> Array:
    """The product of s8 operands as float64, which holds every such sum of fewer than 2^39 terms exactly."""
    wide = dense.astype(np.float64)
    return source.astype(np.float64) @ (wide.T if op is GemmOp.FORWARD else wide)


def scaled(product: Array, views: Views) -> Array:
    """float32 in and out: times scale_x, then scale_w, each rounded on its own."""
    if "scale_x" in views:
        product = product * views["scale_x"].array()[:, None]
    if "scale_w" in views:
        product = product * views["scale_w"].array()
    return product


# Strict accumulation ------------------------------------------------------------------------------


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """float32 fma(a, b, c), rounded once, elementwise on float32 arrays.

    The product is exact in float64. The float64 sum is rounded to odd, by its TwoSum error, so that the
    second rounding, to float32, gives what a single one would (Boldo and Melquiond 2008).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    away = (error > 0) == (total > 0)
    odd = bits + np.where(inexact, np.where(away, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32)


def _positions(codes: Array, rows: int, k: int) -> Array:
    """Column of every kept value: int64 [rows, K/2]."""
    pairs = np.stack([codes & 3, codes >> 2], axis=-1).astype(np.int64)
    groups = np.arange(k // 4, dtype=np.int64)[:, None] * 4
    return (pairs.reshape(rows, k // 4, 2) + groups).reshape(rows, k // 2)


def _strict_forward(x: Array, kept: Array, codes: Array, k: int) -> Array:
    columns = _positions(codes, kept.shape[0], k)
    acc = np.zeros((x.shape[0], kept.shape[0]), np.float32)
    for j in range(k // 2):
        acc = fma_f32(x[:, columns[:, j]], kept[:, j], acc)
    return acc


def _strict_dgrad(dy: Array, kept: Array, codes: Array, k: int) -> Array:
    columns = _positions(codes, kept.shape[0], k)
    acc = np.zeros((dy.shape[0], k), np.float32)
    for i in range(kept.shape[0]):
        at = columns[i]
        acc[:, at] = fma_f32(dy[:, i : i + 1], kept[i], acc[:, at])
    return acc


# Epilogue: the same steps as StrictMath in common/epilogue.cuh ---------------------------------------------


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
    v = acc * np.float32(alpha)
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


def _write(result: TensorView, value: Array) -> None:
    """Round to the result's element and store; every NaN becomes the one that the kernels write.

    Integers are rounded to nearest even and saturate; NaN becomes 0.
    """
    if result.element.is_integer:
        limits = np.iinfo(result.element.dtype)
        rounded = np.rint(np.nan_to_num(value.astype(np.float64), posinf=np.inf, neginf=-np.inf))
        result.array()[...] = np.clip(rounded, limits.min, limits.max).astype(result.element.dtype)
        return
    bits = value.astype(result.element.dtype).view(result.element.bits_dtype)
    bits[np.isnan(value)] = _NAN_BITS[result.element]
    result.bits()[...] = bits
