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


def quantized_rows(values: Array, element: ElementKind) -> tuple[Array, Array]:
    """Kept values [M, K/2] in the element, and the float32 scales [M, 1] that they are divided by.

    A scale maps the row's largest |value| to the largest value of the element, and is at least 2^-100. Values
    are rounded to nearest even. A row with NaN or Inf has a scale of NaN or Inf; NaN is 0 in s8.
    """
    largest = np.float32(LARGEST[element])
    wide = values.astype(np.float32)
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        most = np.abs(wide).max(axis=1, keepdims=True, initial=0)
        scale = np.maximum(most / largest, np.float32(LEAST_SCALE))
        scaled = np.clip(wide / scale, -largest, largest)
    if element is ElementKind.S8:
        scaled = np.rint(np.nan_to_num(scaled, nan=0.0))
    return scaled.astype(element.dtype), scale
