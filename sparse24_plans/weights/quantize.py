"""Symmetric quantization of weights to 8 or 4 bits, with a scale for each row or group of columns."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..vocab import ElementKind, ScaleRule
from .packed_layouts import Quantization

Array = np.ndarray[Any, Any]

LARGEST = {ElementKind.FP8_E4M3: 448.0, ElementKind.S8: 127.0}
"""The largest value of each 8-bit element that a weight may be quantized to."""
LARGEST_STORED = {**LARGEST, ElementKind.S4: 7.0}
"""The largest value of each element of stored values that quantization gives."""
MIN_SCALE = 2.0**-100
SCALE_SUFFIX = "_scale"
"""The scales of a tensor NAME are NAME_scale, float32 [M, 1], as in compressed-tensors' checkpoints."""


_NAN_BITS = 0x7F
"""The NaN of fp8_e4m3 that is written."""


def quantized_rows(values: Array, element: ElementKind) -> tuple[Array, Array]:
    """Kept values [M, K/2] in the element, and the float32 scales [M, 1] that they are divided by.

    A scale maps the row's largest |value| to the largest value of the element, and is at least 2^-100. Values
    are rounded to nearest even. A row with NaN or Inf has a scale of NaN or Inf; NaN is 0 in s8.
    """
    wide = values.astype(np.float32)
    scale = scales_of(wide, element)
    return quantized(wide, scale, element), scale


def scales_of(rows: Array, element: ElementKind) -> Array:
    """The scales [M, 1] of float32 rows."""
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        most = np.abs(rows).max(axis=1, keepdims=True, initial=0)
        found: Array = np.maximum(most / np.float32(LARGEST_STORED[element]), np.float32(MIN_SCALE))
    return found


def quantized(rows: Array, scale: Array, element: ElementKind) -> Array:
    """float32 rows divided by their scales, or by one, in the element; ``s4`` as int8."""
    largest = np.float32(LARGEST_STORED[element])
    with np.errstate(all="ignore"):
        scaled = np.clip(rows / scale, -largest, largest)
        if element.is_integer:
            return np.rint(np.nan_to_num(scaled, nan=0.0)).astype(np.int8)
        bits = scaled.astype(element.dtype).view(np.uint8)
    bits[np.isnan(scaled)] = _NAN_BITS
    return bits.view(element.dtype)


# Groups of columns --------------------------------------------------------------------------------

_STEPS, _STEP = 17, 1 / 40
"""Number of scales that ``least_squares`` tries, and the share of the first one between them."""


def quantized_groups(
    kept: Array, element: ElementKind, by: Quantization, rule: ScaleRule
) -> tuple[Array, Array]:
    """The stored values [rows, K/2] of kept float32 values, ``s4`` as int8, and the scales of their groups.

    Values are divided by the rounded scale and rounded to nearest even. A scale that would be 0 is the least
    normal number of its type, and no finite one is so large that a stored value could become Inf in the
    weight's ``element``. A group with NaN or Inf has a scale of NaN or Inf; NaN is 0 in integers.
    """
    rows, width = kept.shape
    each = by.group // 2 or max(width, 1)
    padded = np.zeros((rows, by.scales_of_a_row(2 * width) * each), np.float32)
    padded[:, :width] = kept
    grouped = padded.reshape(-1, each)
    scales = _Scales(element, by)
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        largest = np.abs(grouped).max(axis=1, keepdims=True)
        scale = scales.held(largest / np.float32(LARGEST_STORED[by.element]))
        if rule is ScaleRule.LEAST_SQUARES:
            scale = _least_squares(grouped, scale, scales)
    stored = quantized(grouped, scale, by.element).reshape(padded.shape)[:, :width]
    return stored, scale.astype(by.scale_element.dtype).reshape(rows, -1)


class _Scales:
    """The float32 scales that a quantized weight can hold."""

    def __init__(self, element: ElementKind, by: Quantization) -> None:
        self.by, self._dtype = by, by.scale_element.dtype
        self._least = np.float32(by.scale_element.smallest_normal)
        most = np.float32(ml_dtypes.finfo(element.dtype).max) / np.float32(LARGEST_STORED[by.element])  # type: ignore[no-untyped-call]
        bits = np.array([most]).astype(self._dtype)
        if np.float32(bits[0]) > most:
            bits.view(by.scale_element.bits_dtype)[0] -= 1
        self._most = np.float32(bits[0])

    def held(self, scale: Array) -> Array:
        """The nearest ones."""
        found = scale.astype(self._dtype).astype(np.float32)
        found = np.where(np.isfinite(scale), np.minimum(found, self._most), found)
        found[np.isnan(found)] = np.nan  # one NaN, whatever the processor makes of those in the weight
        return np.where(found == 0, self._least, found)


def _least_squares(values: Array, first: Array, scales: _Scales) -> Array:
    element = scales.by.element
    best, least = first, _squared_error(values, first, element)
    for step in range(_STEPS):
        tried = quantized(values, first * np.float32(1 - step * _STEP), element).astype(np.float32)
        fitted = (values * tried).sum(axis=1, keepdims=True) / np.square(tried).sum(axis=1, keepdims=True)
        scale = scales.held(np.abs(fitted))
        error = _squared_error(values, scale, element)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best


def _squared_error(values: Array, scale: Array, element: ElementKind) -> Array:
    lost = quantized(values, scale, element).astype(np.float32) * scale - values
    found: Array = np.square(lost).sum(axis=1, keepdims=True)
    return found
