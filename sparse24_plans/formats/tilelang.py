"""TileLang's weights for gemm_sp_v2: row-major nibbles."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from .._vendor import tilelang
from .base import (
    ALL_ELEMENTS,
    ForeignFormat,
    Incoming,
    Layout,
    Outgoing,
    Parts,
    WeightShape,
    integer_option,
    row_major,
)
from .positions import packed_nibbles, unpacked_nibbles


def _columns(shape: WeightShape) -> int:
    """Dense columns of a metadata word."""
    return tilelang.dense_columns(shape.options["word_bytes"])


class TileLang(ForeignFormat):
    name = "tilelang"
    origin = "TileLang's gemm_sp_v2"
    elements = ALL_ELEMENTS[1:]  # all but float32
    parts = ("packed", "meta")
    constraint = "K a multiple of 8 times the bytes of a metadata word"
    options = MappingProxyType(
        {"word_bytes": integer_option(2, "1, 2 or 4", lambda size: size in tilelang.WORD_BYTES)}
    )

    def fits(self, shape: WeightShape) -> bool:
        return shape.k % _columns(shape) == 0

    def layout(self, shape: WeightShape) -> Layout:
        bits = 8 * shape.options["word_bytes"]
        return {"packed": row_major(shape), "meta": (f"int{bits}", (shape.m, shape.k // _columns(shape)))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        return found.values(), unpacked_nibbles(found.words("meta"), found.shape.m, found.shape.nibbles)

    def encode(self, out: Outgoing) -> Parts:
        meta = packed_nibbles(out.codes).view(f"i{out.shape.options['word_bytes']}")
        return {"packed": out.typed(out.values), "meta": meta}
