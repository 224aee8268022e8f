"""Weights of PyTorch's and xFormers' tile packers: W, its transpose, and a bitmask of kept cells."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from .._vendor import cutlass_sm80, nibbles, torch_tile
from ..errors import FormatError, InvalidProblemError
from ..vocab import ElementKind
from ..weights import canonical
from .base import SHAPE, VALUES, ForeignFormat, Incoming, Layout, Outgoing, Parts, WeightShape
from .positions import PAD_NIBBLES, unpacked_nibbles

# Suffixes of the parts' names of W and of its transpose.
_PLAIN, _TRANSPOSED = "", "_t"


class TorchTile(ForeignFormat):
    name = "torch_tile"
    origin = "torch._sparse_semi_structured_tile(use_cutlass=True); xFormers' sparse24_sparsify_both_ways"
    elements = (ElementKind.F16, ElementKind.BF16)
    parts = ("packed", "meta", "packed_t", "meta_t", "bitmask")
    constraint = "M and K multiples of 8"
    optional = ("packed_t", "meta_t", "bitmask")
    options = MappingProxyType({"shape": SHAPE})

    def fits(self, shape: WeightShape) -> bool:
        return shape.m % 8 == 0

    def layout(self, shape: WeightShape) -> Layout:
        layout: Layout = {}
        for suffix in (_PLAIN, _TRANSPOSED):
            rows, columns = _padded(shape, suffix)
            layout["packed" + suffix] = (VALUES, (rows, columns // 2))
            layout["meta" + suffix] = ("int16", (rows, 2, columns // 32))
        rows, columns = _padded(shape, _PLAIN)
        return {**layout, "bitmask": ("uint8", (rows // 8, columns // 8, 8))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        shape = found.shape
        values, codes = _half(found, _PLAIN, shape.m, shape.k)
        if {"packed_t", "meta_t"} & found.parts.keys():
            _check_transpose(found, values, codes)
        if "bitmask" in found.parts:
            _check_mask(found, values, codes)
        return values, codes

    def encode(self, out: Outgoing) -> Parts:
        shape, xp = out.shape, canonical.array_module(out.values)
        dense = canonical.scatter(out.values, xp.ascontiguousarray(out.codes).reshape(-1))
        transposed = xp.ascontiguousarray(dense.T)
        try:
            codes_t = canonical.occupancy_codes(transposed, shape.element)
        except FormatError as error:
            raise FormatError(
                "weight: expected one whose transpose is 2:4 as well, got more than 2 non-zeros in 4 rows of "
                "a column; row and group are the transpose's",
                row=error.row,
                group=error.group,
            ) from error
        values_t = canonical.gather(transposed, codes_t)
        parts = _half_out(out, _PLAIN, out.values, out.codes)
        parts |= _half_out(out, _TRANSPOSED, values_t, codes_t.reshape(shape.k, shape.m // 4))
        kept = xp.zeros(_padded(shape, _PLAIN), np.uint8)
        kept[: shape.m, : shape.k] = canonical.magnitude_keys(dense, shape.element) != 0
        parts["bitmask"] = torch_tile.encode_mask(kept)
        return parts


def _padded(shape: WeightShape, suffix: str) -> tuple[int, int]:
    """Padded rows and columns of W or of its transpose."""
    return torch_tile.padded(*((shape.k, shape.m) if suffix else (shape.m, shape.k)))


# In -----------------------------------------------------------------------------------------------


def _half(found: Incoming, suffix: str, m: int, k: int) -> tuple[Any, Any]:
    """Values and codes of W [m, k], or of its transpose, without padding."""
    rows, columns = _padded(found.shape, suffix)
    values = found.values("packed" + suffix)[:m, : k // 2]
    words = cutlass_sm80.restore(found.words("meta" + suffix), rows, columns // 16)
    return values, unpacked_nibbles(words, rows, columns // 4)[:m, : k // 4]


def _dense(values: Any, codes: Any, element: ElementKind) -> Any:
    """Dense bits [rows, k] of values and codes of any positions."""
    flat = canonical.array_module(codes).ascontiguousarray(codes).reshape(-1)
    return canonical.scatter(*canonical.normalise(values, flat, element))


def _check_transpose(found: Incoming, values: Any, codes: Any) -> None:
    shape = found.shape
    for part in ("packed_t", "meta_t"):
        if part not in found.parts:
            raise InvalidProblemError(f"parts: expected packed_t and meta_t, or neither; {part} is missing")
    other = _dense(*_half(found, _TRANSPOSED, shape.k, shape.m), shape.element).T
    dense = _dense(values, codes, shape.element)
    zero = canonical.magnitude_keys(dense, shape.element) == 0
    differs = (dense != other) & ~(zero & (canonical.magnitude_keys(other, shape.element) == 0))
    _refuse_first(differs, "packed_t: expected the transpose of packed, got another matrix")


def _check_mask(found: Incoming, values: Any, codes: Any) -> None:
    shape = found.shape
    stored = found.words("bitmask")
    xp = canonical.array_module(stored)
    kept = torch_tile.decode_mask(stored.reshape(found.layout["bitmask"][1]), xp.empty)
    dense = _dense(values, codes, shape.element)
    outside = (canonical.magnitude_keys(dense, shape.element) != 0) & (kept[: shape.m, : shape.k] == 0)
    _refuse_first(outside, "bitmask: expected every non-zero to be marked as kept")


def _refuse_first(bad: Any, complaint: str) -> None:
    if bool(bad.any()):
        row, column = divmod(int(bad.argmax()), bad.shape[1])
        raise FormatError(complaint, row=row, group=column // 4)


# Out ----------------------------------------------------------------------------------------------


def _half_out(out: Outgoing, suffix: str, values: Any, codes: Any) -> Parts:
    """Both parts of W, or of its transpose, from values and codes without padding."""
    xp = canonical.array_module(values)
    rows, columns = _padded(out.shape, suffix)
    packed = xp.zeros((rows, columns // 2), values.dtype)
    packed[: values.shape[0], : values.shape[1]] = values
    metadata = xp.full((rows, columns // 8), PAD_NIBBLES, np.uint8)
    metadata[: codes.shape[0], : codes.shape[1] // 2] = nibbles.pack(codes)
    stored = cutlass_sm80.reorder(metadata.view(np.uint16)).view(np.int16)
    return {
        "packed" + suffix: out.typed(packed),
        "meta" + suffix: torch_tile.as_view(stored, rows, columns),
    }
