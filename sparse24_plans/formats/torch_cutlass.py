"""PyTorch's CUTLASS weights, in the order of CUTLASS's kernels for sm_80."""

from __future__ import annotations

from typing import Any

from .._vendor import cutlass_sm80
from ..vocab import ElementKind
from .base import ForeignFormat, Incoming, Layout, Outgoing, Parts, WeightShape, row_major
from .positions import codes_in, nibbles_out, packed_nibbles, unpacked_nibbles


def _word(shape: WeightShape) -> tuple[int, int]:
    """Bytes of a metadata word, and words per row."""
    size = 4 if shape.element.itemsize == 1 else 2
    return size, shape.nibbles // (2 * size)


class TorchCutlass(ForeignFormat):
    name = "torch_cutlass"
    origin = "PyTorch's SparseSemiStructuredTensorCUTLASS; CUTLASS for sm_80"
    elements = (ElementKind.F32, ElementKind.F16, ElementKind.BF16, ElementKind.S8)
    parts = ("packed", "meta")
    constraint = "M a multiple of 32 and K of 32 (f32: 16; s8: 16 and 64)"

    def fits(self, shape: WeightShape) -> bool:
        size, _ = _word(shape)
        return shape.m % (16 if size == 4 else 32) == 0 and shape.nibbles % (4 * size) == 0

    def layout(self, shape: WeightShape) -> Layout:
        size, columns = _word(shape)
        return {"packed": row_major(shape), "meta": (f"int{8 * size}", (shape.m, columns))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        shape = found.shape
        _, columns = _word(shape)
        stored, values = found.words("meta"), found.values()
        words = cutlass_sm80.restore(stored, shape.m, columns)
        return values, codes_in(unpacked_nibbles(words, shape.m, shape.nibbles), values, shape)

    def encode(self, out: Outgoing) -> Parts:
        values, found = nibbles_out(out)
        size, columns = _word(out.shape)
        words = packed_nibbles(found).view(f"u{size}")
        stored = cutlass_sm80.reorder(words).view(f"i{size}")
        return {"packed": out.typed(values), "meta": stored.reshape(out.shape.m, columns)}
