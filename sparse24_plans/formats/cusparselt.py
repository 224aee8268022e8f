"""cuSPARSELt's compressed matrices: one buffer of values and metadata, which doesn't tell M and K."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np

from .._vendor import cusparselt_blob
from ..device.tensors import TensorView
from ..errors import InvalidProblemError
from ..vocab import ElementKind
from ..weights import canonical
from .base import SHAPE, VALUES, ForeignFormat, Incoming, Layout, Outgoing, Parts, WeightShape
from .positions import EVEN, packed_nibbles, unpacked_nibbles


class _Blob(ForeignFormat):
    """The base of both architectures' formats."""

    parts = ("packed",)
    options = MappingProxyType({"shape": SHAPE})

    def sizes(self, values: TensorView) -> tuple[int, int]:
        raise InvalidProblemError(
            f"packed: expected shape=(M, K) with K a multiple of 8, got a tensor {list(values.shape)}"
        )

    def split(self, found: Incoming) -> tuple[Any, Any]:
        """The values [m, k/2] and the metadata as bytes. Trailing bytes aren't read."""
        shape, name = found.shape, self.parts[0]
        view = TensorView.of(found.parts[name], element=shape.element, argument=name)
        count, needed = shape.m * shape.k // 2, found.layout[name][1][0]
        if not view.is_contiguous or view.bits().size < needed:
            raise InvalidProblemError(f"{name}: expected {needed} words or more, contiguous, got {view!r}")
        bits = view.bits().reshape(-1)
        return bits[:count].reshape(shape.m, shape.k // 2), bits[count:needed].view(np.uint8)

    def joined(self, out: Outgoing, metadata: Any) -> Parts:
        """Values and then metadata bytes in one tensor of the element."""
        xp = canonical.array_module(out.values)
        words = xp.ascontiguousarray(metadata).view(out.values.dtype)
        return {self.parts[0]: out.typed(xp.concatenate([out.values.reshape(-1), words]))}


class CusparseltSm80(_Blob):
    name = "cusparselt_sm80"
    origin = "cuSPARSELt on sm_80; torch._sparse_semi_structured_tile(use_cutlass=False)"
    elements = (ElementKind.F16, ElementKind.BF16)
    constraint = "M and K multiples of 128"

    def fits(self, shape: WeightShape) -> bool:
        return shape.m % 128 == 0 and shape.k % 128 == 0

    def layout(self, shape: WeightShape) -> Layout:
        return {"packed": (VALUES, (shape.m * shape.k // 2 + shape.m * shape.k // 16,))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        m, k = found.shape.m, found.shape.k
        values, stored = self.split(found)
        words = cusparselt_blob.restore_sm80(stored.view(np.uint16), m, k // 16)
        return values, unpacked_nibbles(words, m, k // 4)

    def encode(self, out: Outgoing) -> Parts:
        words = cusparselt_blob.reorder_sm80(packed_nibbles(out.codes).view(np.uint16))
        return self.joined(out, words.view(np.uint8))


class CusparseltSm90(_Blob):
    name = "cusparselt_sm90"
    origin = "cuSPARSELt 0.8 on sm_90; torch._cslt_compress there"
    elements = (ElementKind.F16, ElementKind.BF16, ElementKind.S8, ElementKind.FP8_E4M3)
    constraint = "M and K multiples of 32 (8-bit: K of 64)"

    def fits(self, shape: WeightShape) -> bool:
        return shape.m % 32 == 0 and shape.k % (64 if shape.element.itemsize == 1 else 32) == 0

    def layout(self, shape: WeightShape) -> Layout:
        metadata_bytes = math.prod(_padded_sm90(shape)) // 2
        return {"packed": (VALUES, (shape.m * shape.k // 2 + metadata_bytes // shape.element.itemsize,))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        shape = found.shape
        rows, groups = _padded_sm90(shape)
        values, stored = self.split(found)
        flat = unpacked_nibbles(stored, 1, rows * groups)
        padded = cusparselt_blob.restore_sm90(flat, rows, groups, shape.element.itemsize)
        return values, padded[: shape.m, : shape.k // 4]

    def encode(self, out: Outgoing) -> Parts:
        shape, xp = out.shape, canonical.array_module(out.codes)
        padded = xp.full(_padded_sm90(shape), EVEN, np.uint8)
        padded[: shape.m, : shape.k // 4] = out.codes
        stored = cusparselt_blob.reorder_sm90(padded, shape.element.itemsize)
        return self.joined(out, packed_nibbles(stored.reshape(1, -1)).reshape(-1))


def _padded_sm90(shape: WeightShape) -> tuple[int, int]:
    """Rows and groups of the metadata, padded."""
    step = cusparselt_blob.PADDED_SM90
    return -(-shape.m // step) * step, -(-shape.k // step) * step // 4
