"""GPTQ's and AWQ's tensors, of matrices whose values are 2:4 with stored zeros."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from .._vendor import packed_integers
from ..errors import FormatError
from ..weights.quantized_weight import Sparse24QuantizedWeight
from .base import integer_option
from .quantized import (
    BITS,
    GROUP,
    Array,
    QuantizedFormat,
    Scales,
    Stored,
    sparse_weight,
    unpacked,
    wrong_shape,
)

_VERSION = integer_option(1, "1 or 2", lambda version: version in (1, 2))


class Gptq(QuantizedFormat):
    name = "gptq"
    origin = "GPTQModel, AutoGPTQ; `version=2` for the zero points of `gptq_v2`"
    parts = ("qweight", "scales", "qzeros", "g_idx")
    optional = ("qzeros", "g_idx")
    options = MappingProxyType({"bits": BITS, "group": GROUP, "version": _VERSION})

    def decode(self, found: Stored) -> Sparse24QuantizedWeight:
        bits = found.options["bits"]
        words = found.words("qweight")
        m, k = words.shape[1], words.shape[0] * 32 // bits
        self.check(m, k)
        scales = _scales(found, m, k)
        scales.check_order("g_idx", found.order("g_idx", k))
        zeros = None
        if "qzeros" in found.parts:
            packed = found.words("qzeros", scales.values.shape[1], -(-m * bits // 32))
            zeros = unpacked(packed, bits)[:, :m].T
            if found.options["version"] == 1:
                zeros = _with_one(zeros, bits)
        return sparse_weight(
            "qweight",
            lambda rows: unpacked(np.ascontiguousarray(words[:, rows].T), bits),
            zeros,
            scales,
            bits,
            k,
        )


class Awq(QuantizedFormat):
    name = "awq"
    origin = "AutoAWQ, llm-awq's GEMM version: 4 bits"
    parts = ("qweight", "scales", "qzeros")
    constraint = "M and K multiples of 8"
    optional = ("qzeros",)
    options = MappingProxyType({"group": GROUP})

    def decode(self, found: Stored) -> Sparse24QuantizedWeight:
        words = found.words("qweight")
        m, k = 8 * words.shape[1], words.shape[0]
        self.check(m, k)
        scales = _scales(found, m, k)
        zeros = None
        if "qzeros" in found.parts:
            zeros = _awq_rows(found.words("qzeros", scales.values.shape[1], m // 8), slice(0, m))
        return sparse_weight("qweight", lambda rows: _awq_rows(words, rows), zeros, scales, 4, k)


def _scales(found: Stored, m: int, k: int) -> Scales:
    """The scales of a part [groups, M]."""
    scales = Scales.of(found, "scales", k, lambda stored: stored.T)
    if len(scales.values) != m:
        raise wrong_shape("scales", (scales.values.shape[1], m), scales.values.shape[::-1])
    return scales


def _with_one(stored: Array, bits: int) -> Array:
    """Zero points of version 1, which are stored less one."""
    if (spoilt := stored == (1 << bits) - 1).any():
        row, group = divmod(int(spoilt.argmax()), stored.shape[1])
        raise FormatError(
            f"qzeros: expected stored zero points below {(1 << bits) - 1}, which may stand for 0, got it in "
            f"row {row}, group {group} of scales; quantize symmetrically"
        )
    return stored + np.uint8(1)


def _awq_rows(words: Array, rows: slice) -> Array:
    """The integers uint8 [rows, width] of some rows of W, of AWQ's words uint32 [width, M/8]."""
    first, last = rows.start // 8, -(-rows.stop // 8)
    width, count = len(words), last - first
    stored = unpacked(np.ascontiguousarray(words[:, first:last]), 4).reshape(width, count, 8)
    found = stored[:, :, packed_integers.AWQ_PLACES].reshape(width, 8 * count)
    return np.ascontiguousarray(found[:, rows.start - 8 * first : rows.stop - 8 * first].T)
