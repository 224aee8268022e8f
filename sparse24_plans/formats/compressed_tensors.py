"""compressed-tensors' sparse-24-bitmask, the format of llm-compressor's checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._vendor import compressed_tensors
from ..device.tensors import wrong
from ..errors import FormatError
from ..weights import canonical
from .base import (
    ALL_ELEMENTS,
    ForeignFormat,
    Incoming,
    Layout,
    Outgoing,
    Parts,
    WeightShape,
    row_major,
    two_sizes,
)
from .positions import packed_nibbles, unpacked_nibbles

_CODE_OF_FLAGS = np.frombuffer(compressed_tensors.NIBBLE_OF_FLAGS, np.uint8)
_FLAGS_OF_CODE = np.frombuffer(compressed_tensors.FLAGS_OF_NIBBLE, np.uint8)


class CompressedTensors(ForeignFormat):
    name = "compressed_tensors"
    origin = "compressed-tensors' sparse-24-bitmask, the format of llm-compressor's checkpoints"
    elements = ALL_ELEMENTS
    parts = ("compressed", "bitmask", "shape")
    optional = ("shape",)

    def layout(self, shape: WeightShape) -> Layout:
        return {
            "compressed": row_major(shape),
            "bitmask": ("uint8", (shape.m, shape.k // 8)),
            "shape": ("int64", (2, 1)),
        }

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        shape = found.shape
        wanted = (shape.m, shape.k)
        if (sizes := two_sizes("shape", found.parts.get("shape", wanted))) != wanted:
            raise wrong("shape", f"{list(wanted)}, as the values have it", list(sizes))
        values = found.values()
        mask = found.words("bitmask")
        xp = canonical.array_module(mask)
        flags = unpacked_nibbles(mask, shape.m, shape.k // 4)
        codes = xp.asarray(_CODE_OF_FLAGS)[flags]
        bad = codes == 0
        if bool(bad.any()):
            row, group = divmod(int(bad.argmax()), shape.k // 4)
            count = int(flags[row, group]).bit_count()
            raise FormatError(
                f"bitmask: expected 2 bits in every group of 4, got {count}", row=row, group=group
            )
        return values, codes

    def encode(self, out: Outgoing) -> Parts:
        xp = canonical.array_module(out.codes)
        flags = xp.asarray(_FLAGS_OF_CODE)[out.codes]
        sizes = xp.asarray(np.array([[out.shape.m], [out.shape.k]], np.int64))
        return {"compressed": out.typed(out.values), "bitmask": packed_nibbles(flags), "shape": sizes}
