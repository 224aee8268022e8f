"""baracuda's 2:4 weight: the bytes of the canonical form."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._vendor import baracuda
from ..vocab import ElementKind
from ..weights import canonical
from .base import ForeignFormat, Incoming, Layout, Outgoing, Parts, WeightShape, row_major


class Baracuda(ForeignFormat):
    name = "baracuda"
    origin = "baracuda's Rust facade: the bytes of the canonical form, unchecked"
    elements = (ElementKind.F32, ElementKind.F16, ElementKind.BF16)
    parts = ("compressed", "metadata")

    def layout(self, shape: WeightShape) -> Layout:
        return {"compressed": row_major(shape), "metadata": ("uint16", (shape.m, shape.k // 8))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        codes = baracuda.nibbles_of(found.words("metadata").view(np.uint8))
        return found.values(), codes.reshape(found.shape.m, found.shape.k // 4)

    def encode(self, out: Outgoing) -> Parts:
        metadata = canonical.to_metadata(out.codes.copy().reshape(-1), out.shape.m, out.shape.k)
        return {"compressed": out.typed(out.values), "metadata": metadata}
