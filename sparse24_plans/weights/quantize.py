"""Symmetric quantization of weights to 8 bits, with one scale for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..vocab import ElementKind

Array = np.ndarray[Any, Any]

LARGEST = {ElementKind.FP8_E4M3: 448.0, ElementKind.S8: 127.0}
"""The largest value of each element that a weight may be quantized to."""
LEAST_SCALE = 2.0**-100
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
        found: Array = np.maximum(most / np.float32(LARGEST[element]), np.float32(LEAST_SCALE))
    return found


def quantized(rows: Array, scale: Array, element: ElementKind) -> Array:
    """float32 rows divided by their scales, or by one, in the element."""
    largest = np.float32(LARGEST[element])
    with np.errstate(all="ignore"):
        scaled = np.clip(rows / scale, -largest, largest)
        if element is ElementKind.S8:
            return np.rint(np.nan_to_num(scaled, nan=0.0)).astype(np.int8)
        bits = scaled.astype(element.dtype).view(np.uint8)
    bits[np.isnan(scaled)] = _NAN_BITS
    return bits.view(element.dtype)
