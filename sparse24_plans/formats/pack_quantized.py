"""compressed-tensors' pack-quantized, of a matrix whose values are 2:4 with stored zeros."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from .._vendor import packed_integers
from ..device.tensors import wrong
from ..errors import InvalidProblemError
from ..vocab import ElementKind
from ..weights.quantized_weight import Sparse24QuantizedWeight
from .base import two_sizes
from .quantized import (
    BITS,
    GROUP,
    Array,
    QuantizedFormat,
    Scales,
    Stored,
    middle_of,
    sparse_weight,
    unpacked,
    wrong_shape,
)


class PackQuantized(QuantizedFormat):
    name = "pack_quantized"
    origin = "compressed-tensors' pack-quantized, the format of llm-compressor's checkpoints"
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    optional = ("weight_zero_point", "weight_g_idx")
    options = MappingProxyType({"bits": BITS, "group": GROUP})

    def decode(self, found: Stored) -> Sparse24QuantizedWeight:
        bits = found.options["bits"]
        m, k = two_sizes("weight_shape", found.parts["weight_shape"])
        words = found.words("weight_packed", m, -(-k * bits // 32))
        self.check(m, k)
        scales = Scales.of(found, "weight_scale", k, lambda stored: stored)
        if len(scales.values) != m:
            raise wrong_shape("weight_scale", (m, scales.values.shape[1]), scales.values.shape)
        order = found.order("weight_g_idx", k)
        if order is not None and (order == packed_integers.ANY_ORDER).any():
            order = None
        scales.check_order("weight_g_idx", order)
        zeros = _zero_points(found, bits, scales.values.shape)
        return sparse_weight(
            "weight_packed", lambda rows: unpacked(words[rows], bits)[:, :k], zeros, scales, bits, k
        )


def _zero_points(found: Stored, bits: int, shape: tuple[int, int]) -> Array | None:
    """Zero points [M, groups], or None if there are none."""
    part = "weight_zero_point"
    if part not in found.parts:
        return None
    m, groups = shape
    given = found.view(part)
    if given.element is ElementKind.S8:
        if given.shape != shape:
            raise wrong_shape(part, shape, given.shape)
        signed = np.asarray(given.array(), np.int16)
        if (abs_bad := (signed < -middle_of(bits)) | (signed >= middle_of(bits))).any():
            raise wrong(part, f"values of {bits} bits", int(signed[abs_bad][0]))
        return signed + np.int16(middle_of(bits))
    if given.element is not ElementKind.I32:
        raise InvalidProblemError(f"{part}: expected s8 or i32, got {given.element}")
    words = found.words(part, -(-m * bits // 32), groups)
    return unpacked(np.ascontiguousarray(words.T), bits)[:, :m].T
