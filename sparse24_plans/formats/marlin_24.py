"""compressed-tensors' marlin-24, the tensors of Sparse-Marlin's 2:4 kernel."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from .._vendor import marlin_24
from ..errors import InvalidProblemError, UnsupportedError
from ..vocab import ElementKind
from ..weights import canonical
from ..weights.quantized_weight import Sparse24QuantizedWeight, nibbles_of, signed_nibbles
from .base import Parts
from .positions import packed_nibbles, unpacked_nibbles
from .quantized import BITS, GROUP, Array, QuantizedFormat, Scales, Stored, middle_of, unpacked, wrong_shape

_GROUPS = (0, marlin_24.GROUP)


class Marlin24(QuantizedFormat):
    name = "marlin_24"
    origin = "compressed-tensors' marlin-24 (up to 0.10), Sparse-Marlin, for its kernel"
    parts = ("weight_packed", "scale_packed", "meta")
    constraint = "M a multiple of 64 and K of 32 (in groups: 128)"
    options = MappingProxyType({"bits": BITS, "group": GROUP})

    def decode(self, found: Stored) -> Sparse24QuantizedWeight:
        bits = found.options["bits"]
        scale = found.view("scale_packed", ElementKind.F16)
        words = found.words("weight_packed")
        m, k = scale.shape[1], marlin_24.COLUMNS * words.shape[0]
        if words.shape[1] != m * bits // 2:
            raise wrong_shape("weight_packed", (words.shape[0], m * bits // 2), words.shape)
        self._check(m, k, scale.shape[0])
        meta = _metadata_words(found, m * k // 16)
        scales = Scales.of(found, "scale_packed", k, marlin_24.restore_scales)
        self._check(m, k, scales.values.shape[1], scales.group)
        stored = unpacked(words, bits).reshape(-1)
        integers = marlin_24.restore_values(stored, m, k // 2, bits)
        values = np.ascontiguousarray(integers - np.uint8(middle_of(bits))).view(np.int8)
        codes = unpacked_nibbles(marlin_24.restore_words(meta, m, k // 16), m, k // 4)
        metadata = canonical.to_metadata(codes.reshape(-1), m, k)
        canonical.check_metadata(metadata)
        return scales.weight(values, metadata, bits)

    def encode(self, weight: Sparse24QuantizedWeight) -> Parts:
        by, (m, k) = weight.quantization, (weight.m, weight.k)
        for what, wanted, got in (
            ("element", ElementKind.F16, weight.element),
            ("scales of", ElementKind.F16, by.scale_element),
        ):
            if wanted is not got:
                raise UnsupportedError(f"weight: {self.name} holds {what} {wanted}, got {got}")
        if by.element is ElementKind.FP8_E4M3:
            raise UnsupportedError(f"weight: {self.name} holds s4 and s8, got {by.element}")
        self._check(m, k, weight.scales.shape[1], by.group)
        bits = 8 if by.element is ElementKind.S8 else 4
        signed = weight.values if bits == 8 else signed_nibbles(weight.values)
        stored = marlin_24.reorder_values(signed.view(np.uint8) + np.uint8(middle_of(bits)), bits)
        held = stored if bits == 8 else nibbles_of(stored.view(np.int8).reshape(1, -1)).reshape(-1)
        codes = canonical.from_metadata(weight.metadata).reshape(m, k // 4)
        meta = marlin_24.reorder_words(packed_nibbles(codes).view(np.uint16))
        return {
            "weight_packed": held.view(np.int32).reshape(k // marlin_24.COLUMNS, -1),
            "scale_packed": np.ascontiguousarray(marlin_24.reorder_scales(weight.scales)),
            "meta": meta.view(np.int16).reshape(k // marlin_24.COLUMNS, -1),
        }

    def _check(self, m: int, k: int, count: int, group: int | None = None) -> None:
        """Raise the error for a shape, with ``count`` scales a row, that writers don't write."""
        columns = marlin_24.COLUMNS if count == 1 else marlin_24.GROUP
        self.check(m, k, m % marlin_24.ROWS == 0 and k % columns == 0 and k > 0)
        if group is not None and group not in _GROUPS:
            raise UnsupportedError(f"group: {self.name} holds 0 and {marlin_24.GROUP}, got {group}")
        if count > 1 and k == marlin_24.AMBIGUOUS_K:
            raise UnsupportedError(
                f"{self.name}: expected another K than {k} in groups of {marlin_24.GROUP}, for which its "
                "writers order scales in two ways"
            )


def _metadata_words(found: Stored, count: int) -> Array:
    """Return ``count`` words, flat, since writers give them different shapes."""
    words: Array = np.ascontiguousarray(found.view("meta", ElementKind.U16).bits()).reshape(-1)
    if words.size != count:
        raise InvalidProblemError(f"meta: expected {count} words int16, got {words.size}")
    return words
