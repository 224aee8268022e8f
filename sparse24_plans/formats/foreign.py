"""The table of foreign 2:4 formats, and what is done to a weight to put it into each of them.

The memory orders are in ``vendor/``; what the formats share is in ``foreign_parts.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._vendor import (
    baracuda,
    compressed_tensors,
    cusparselt_blob,
    cutlass_sm80,
    cutlass_sm90,
    nibbles,
    tilelang,
    torch_tile,
)
from ..device.tensors import TensorView
from ..errors import FormatError, InvalidProblemError, UnsupportedError
from ..vocab import ElementKind
from ..weights import canonical
from .parts import (
    EVEN,
    PAD_NIBBLES,
    VALUES,
    Incoming,
    Layout,
    Outgoing,
    Parts,
    WeightShape,
    codes_in,
    nibbles_out,
    packed_nibbles,
    unpacked_nibbles,
)

_F32, _F16, _BF16 = ElementKind.F32, ElementKind.F16, ElementKind.BF16
_S8, _E4M3, _E5M2 = ElementKind.S8, ElementKind.FP8_E4M3, ElementKind.FP8_E5M2
ALL_ELEMENTS = (_F32, _F16, _BF16, _S8, _E4M3, _E5M2)
"""Elements that a weight can be stored with."""


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """One row of :data:`FORMATS`.

    ``parts`` are the tensors that ``to_foreign`` returns, the values first; the ``optional`` ones needn't be
    given to ``from_foreign``, but are checked against the others where they are. ``constraint`` says in
    words which shapes the format holds, ``options`` which keywords it takes, ``origin`` what writes and
    reads it.
    """

    name: str
    origin: str
    elements: tuple[ElementKind, ...]
    parts: tuple[str, ...]
    constraint: str
    fits: Callable[[WeightShape], bool]
    layout: Callable[[WeightShape], Layout]
    decode: Callable[[Incoming], tuple[Any, Any]]
    encode: Callable[[Outgoing], Parts]
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def check(self, shape: WeightShape) -> None:
        """Raise UnsupportedError for an element, InvalidProblemError for a shape that it can't hold."""
        if shape.element not in self.elements:
            raise UnsupportedError(f"{self.name} holds {', '.join(self.elements)}, got {shape.element}")
        if shape.m < 0 or shape.k < 0 or shape.k % 8 or not self.fits(shape):
            raise InvalidProblemError(
                f"{self.name}: expected {self.constraint}; got M = {shape.m}, K = {shape.k}, {shape.element}"
                + "".join(
                    f", {option} = {getattr(shape, option)}" for option in self.options if option != "shape"
                )
            )


# The formats --------------------------------------------------------------------------------------


def _compressed(shape: WeightShape) -> tuple[str, tuple[int, ...]]:
    """The values in row-major order, as most formats have them."""
    return VALUES, (shape.m, shape.k // 2)


def _layout_baracuda(shape: WeightShape) -> Layout:
    return {"compressed": _compressed(shape), "metadata": ("uint16", (shape.m, shape.k // 8))}


def _from_baracuda(found: Incoming) -> tuple[Any, Any]:
    codes = baracuda.nibbles_of(found.words("metadata").view(np.uint8))
    return found.values(), codes.reshape(found.shape.m, found.shape.k // 4)


def _to_baracuda(out: Outgoing) -> Parts:
    metadata = canonical.to_metadata(out.codes.copy().reshape(-1), out.shape.m, out.shape.k)
    return {"compressed": out.typed(out.values), "metadata": metadata}


def _sm80_word(shape: WeightShape) -> tuple[int, int]:
    """Bytes of a metadata word, and words of a row."""
    size = 4 if shape.element.itemsize == 1 else 2
    return size, shape.nibbles // (2 * size)


def _fits_sm80(shape: WeightShape) -> bool:
    size, _ = _sm80_word(shape)
    return shape.m % (16 if size == 4 else 32) == 0 and shape.nibbles % (4 * size) == 0


def _layout_torch_cutlass(shape: WeightShape) -> Layout:
    size, columns = _sm80_word(shape)
    return {"packed": _compressed(shape), "meta": (f"int{8 * size}", (shape.m, columns))}


def _from_torch_cutlass(found: Incoming) -> tuple[Any, Any]:
    _, columns = _sm80_word(found.shape)
    stored, values = found.words("meta"), found.values()
    words = cutlass_sm80.restore(stored, found.shape.m, columns)
    return values, codes_in(unpacked_nibbles(words, found.shape.m, found.shape.nibbles), values, found.shape)


def _to_torch_cutlass(out: Outgoing) -> Parts:
    values, found = nibbles_out(out)
    size, columns = _sm80_word(out.shape)
    words = packed_nibbles(found).view(f"u{size}")
    stored = cutlass_sm80.reorder(words).view(f"i{size}")
    return {"packed": out.typed(values), "meta": stored.reshape(out.shape.m, columns)}


def _sm90_sizes(shape: WeightShape) -> tuple[int, int, int]:
    """Padded rows; bytes of a padded row; bytes of a tile."""
    per_byte = cutlass_sm90.dense_columns_per_byte(shape.element.itemsize)
    rows = -(-shape.m // cutlass_sm90.ROWS) * cutlass_sm90.ROWS
    padded_k = -(-shape.k // shape.tile_k) * shape.tile_k
    return rows, padded_k // per_byte, shape.tile_k // per_byte


def _fits_sm90(shape: WeightShape) -> bool:
    size = shape.element.itemsize
    aligned = shape.k % cutlass_sm90.values_multiple(size) == 0
    return aligned and shape.tile_k % cutlass_sm90.tile_multiple(size) == 0


def _layout_cutlass_sm90(shape: WeightShape) -> Layout:
    return {"packed": _compressed(shape), "meta": ("uint8", _sm90_sizes(shape)[:2])}


def _from_cutlass_sm90(found: Incoming) -> tuple[Any, Any]:
    shape = found.shape
    rows, columns, tile = _sm90_sizes(shape)
    stored, values = found.words("meta"), found.values()
    plain = cutlass_sm90.restore(stored, rows, columns, tile, shape.element.itemsize)
    read = unpacked_nibbles(plain[: shape.m, : shape.nibbles // 2], shape.m, shape.nibbles)
    return values, codes_in(read, values, shape)


def _to_cutlass_sm90(out: Outgoing) -> Parts:
    values, found = nibbles_out(out)
    rows, columns, tile = _sm90_sizes(out.shape)
    xp = canonical.array_module(found)
    padded = xp.full((rows, columns), PAD_NIBBLES, np.uint8)
    padded[: out.shape.m, : out.shape.nibbles // 2] = nibbles.pack(found)
    stored = cutlass_sm90.reorder(padded, tile, out.shape.element.itemsize)
    return {"packed": out.typed(values), "meta": stored.reshape(rows, columns)}


def _fits_tilelang(shape: WeightShape) -> bool:
    return shape.k % tilelang.dense_columns(shape.word_bytes) == 0


def _layout_tilelang(shape: WeightShape) -> Layout:
    columns = shape.k // tilelang.dense_columns(shape.word_bytes)
    return {"packed": _compressed(shape), "meta": (f"int{8 * shape.word_bytes}", (shape.m, columns))}


def _from_tilelang(found: Incoming) -> tuple[Any, Any]:
    return found.values(), unpacked_nibbles(found.words("meta"), found.shape.m, found.shape.nibbles)


def _to_tilelang(out: Outgoing) -> Parts:
    meta = packed_nibbles(out.codes).view(f"i{out.shape.word_bytes}")
    return {"packed": out.typed(out.values), "meta": meta}


def _fits_torch_tile(shape: WeightShape) -> bool:
    return shape.m % 8 == 0


def _layout_torch_tile(shape: WeightShape) -> Layout:
    layout: Layout = {}
    for suffix in ("", "_t"):
        rows, columns = _tile_padded(shape, suffix)
        layout["packed" + suffix] = (VALUES, (rows, columns // 2))
        layout["meta" + suffix] = ("int16", (rows, 2, columns // 32))
    rows, columns = _tile_padded(shape, "")
    return {**layout, "bitmask": ("uint8", (rows // 8, columns // 8, 8))}


def _tile_half(found: Incoming, suffix: str, m: int, k: int) -> tuple[Any, Any]:
    """Values and codes of W [m, k], or of its transpose, without padding."""
    rows, columns = _tile_padded(found.shape, suffix)
    values = found.values("packed" + suffix)[:m, : k // 2]
    words = cutlass_sm80.restore(found.words("meta" + suffix), rows, columns // 16)
    return values, unpacked_nibbles(words, rows, columns // 4)[:m, : k // 4]


def _tile_padded(shape: WeightShape, suffix: str) -> tuple[int, int]:
    return torch_tile.padded(*((shape.k, shape.m) if suffix else (shape.m, shape.k)))


def _from_torch_tile(found: Incoming) -> tuple[Any, Any]:
    shape = found.shape
    values, codes = _tile_half(found, "", shape.m, shape.k)
    if {"packed_t", "meta_t"} & found.parts.keys():
        _check_transpose(found, values, codes)
    if "bitmask" in found.parts:
        _check_mask(found, values, codes)
    return values, codes


def _dense(values: Any, codes: Any, element: ElementKind) -> Any:
    """Dense bits [rows, k] of values and codes of any positions."""
    flat = canonical.array_module(codes).ascontiguousarray(codes).reshape(-1)
    return canonical.scatter(*canonical.normalise(values, flat, element))


def _check_transpose(found: Incoming, values: Any, codes: Any) -> None:
    shape = found.shape
    for part in ("packed_t", "meta_t"):
        if part not in found.parts:
            raise InvalidProblemError(f"parts: expected packed_t and meta_t, or neither; {part} is missing")
    other = _dense(*_tile_half(found, "_t", shape.k, shape.m), shape.element).T
    dense = _dense(values, codes, shape.element)
    zero = canonical.magnitude_keys(dense, shape.element) == 0
    differs = (dense != other) & ~(zero & (canonical.magnitude_keys(other, shape.element) == 0))
    _refuse_first(differs, "packed_t: expected the transpose of packed, got another matrix")


def _check_mask(found: Incoming, values: Any, codes: Any) -> None:
    shape = found.shape
    rows, columns = _tile_padded(shape, "")
    stored = found.words("bitmask")
    xp = canonical.array_module(stored)
    kept = torch_tile.decode_mask(stored.reshape(rows // 8, columns // 8, 8), xp.empty)
    dense = _dense(values, codes, shape.element)
    outside = (canonical.magnitude_keys(dense, shape.element) != 0) & (kept[: shape.m, : shape.k] == 0)
    _refuse_first(outside, "bitmask: expected every non-zero to be marked as kept")


def _refuse_first(bad: Any, complaint: str) -> None:
    if bool(bad.any()):
        row, column = divmod(int(bad.argmax()), bad.shape[1])
        raise FormatError(complaint, row=row, group=column // 4)


def _to_torch_tile(out: Outgoing) -> Parts:
    shape, xp = out.shape, canonical.array_module(out.values)
    rows, columns = _tile_padded(shape, "")
    flat = xp.ascontiguousarray(out.codes).reshape(-1)
    dense = canonical.scatter(out.values, flat)
    turned = xp.ascontiguousarray(dense.T)
    try:
        codes_t = canonical.occupancy_codes(turned, shape.element)
    except FormatError as error:
        raise FormatError(
            "weight: expected one whose transpose is 2:4 as well, got more than 2 non-zeros in 4 rows of a "
            "column; row and group are the transpose's",
            row=error.row,
            group=error.group,
        ) from error
    parts = _tile_parts(out, "", out.values, out.codes)
    parts |= _tile_parts(out, "_t", canonical.gather(turned, codes_t), codes_t.reshape(shape.k, shape.m // 4))
    kept = xp.zeros((rows, columns), np.uint8)
    kept[: shape.m, : shape.k] = canonical.magnitude_keys(dense, shape.element) != 0
    parts["bitmask"] = torch_tile.encode_mask(kept)
    return parts


def _tile_parts(out: Outgoing, suffix: str, values: Any, codes: Any) -> Parts:
    xp = canonical.array_module(values)
    rows, columns = _tile_padded(out.shape, suffix)
    packed = xp.zeros((rows, columns // 2), values.dtype)
    packed[: values.shape[0], : values.shape[1]] = values
    metadata = xp.full((rows, columns // 8), PAD_NIBBLES, np.uint8)
    metadata[: codes.shape[0], : codes.shape[1] // 2] = nibbles.pack(codes)
    stored = cutlass_sm80.reorder(metadata.view(np.uint16)).view(np.int16)
    return {
        "packed" + suffix: out.typed(packed),
        "meta" + suffix: torch_tile.as_view(stored, rows, columns),
    }


def _blob(found: Incoming) -> tuple[Any, Any]:
    """A cuSPARSELt blob's values [m, k/2] and its metadata as bytes. What follows them isn't read."""
    shape, name = found.shape, "packed"
    view = TensorView.of(found.parts[name], element=shape.element, argument=name)
    count, needed = shape.m * shape.k // 2, found.layout[name][1][0]
    if not view.is_contiguous or view.bits().size < needed:
        raise InvalidProblemError(f"{name}: expected {needed} words or more, contiguous, got {view!r}")
    bits = view.bits().reshape(-1)
    return bits[:count].reshape(shape.m, shape.k // 2), bits[count:needed].view(np.uint8)


def _as_blob(out: Outgoing, metadata: Any) -> Parts:
    """Values, then metadata bytes, in one tensor of the element."""
    xp = canonical.array_module(out.values)
    words = xp.ascontiguousarray(metadata).view(out.values.dtype)
    return {"packed": out.typed(xp.concatenate([out.values.reshape(-1), words]))}


def _layout_cusparselt_sm80(shape: WeightShape) -> Layout:
    return {"packed": (VALUES, (shape.m * shape.k // 2 + shape.m * shape.k // 16,))}


def _from_cusparselt_sm80(found: Incoming) -> tuple[Any, Any]:
    m, k = found.shape.m, found.shape.k
    values, stored = _blob(found)
    words = cusparselt_blob.restore_sm80(stored.view(np.uint16), m, k // 16)
    return values, unpacked_nibbles(words, m, k // 4)


def _to_cusparselt_sm80(out: Outgoing) -> Parts:
    words = cusparselt_blob.reorder_sm80(packed_nibbles(out.codes).view(np.uint16))
    return _as_blob(out, words.view(np.uint8))


def _sm90_blob(shape: WeightShape) -> tuple[int, int]:
    """Rows and groups of the metadata, padded."""
    step = cusparselt_blob.PADDED_SM90
    return -(-shape.m // step) * step, -(-shape.k // step) * step // 4


def _fits_cusparselt_sm90(shape: WeightShape) -> bool:
    return shape.m % 32 == 0 and shape.k % (64 if shape.element.itemsize == 1 else 32) == 0


def _layout_cusparselt_sm90(shape: WeightShape) -> Layout:
    metadata_bytes = math.prod(_sm90_blob(shape)) // 2
    return {"packed": (VALUES, (shape.m * shape.k // 2 + metadata_bytes // shape.element.itemsize,))}


def _from_cusparselt_sm90(found: Incoming) -> tuple[Any, Any]:
    shape = found.shape
    rows, groups = _sm90_blob(shape)
    values, stored = _blob(found)
    flat = unpacked_nibbles(stored, 1, rows * groups)
    padded = cusparselt_blob.restore_sm90(flat, rows, groups, shape.element.itemsize)
    return values, padded[: shape.m, : shape.k // 4]


def _to_cusparselt_sm90(out: Outgoing) -> Parts:
    shape, xp = out.shape, canonical.array_module(out.codes)
    padded = xp.full(_sm90_blob(shape), EVEN, np.uint8)
    padded[: shape.m, : shape.k // 4] = out.codes
    stored = cusparselt_blob.reorder_sm90(padded, shape.element.itemsize)
    return _as_blob(out, packed_nibbles(stored.reshape(1, -1)).reshape(-1))


_CODE_OF_FLAGS = np.frombuffer(compressed_tensors.NIBBLE_OF_FLAGS, np.uint8)
_FLAGS_OF_CODE = np.frombuffer(compressed_tensors.FLAGS_OF_NIBBLE, np.uint8)


def _layout_compressed_tensors(shape: WeightShape) -> Layout:
    return {
        "compressed": _compressed(shape),
        "bitmask": ("uint8", (shape.m, shape.k // 8)),
        "shape": ("int64", (2, 1)),
    }


def _from_compressed_tensors(found: Incoming) -> tuple[Any, Any]:
    shape = found.shape
    sizes = found.parts["shape"].reshape(-1).tolist() if "shape" in found.parts else [shape.m, shape.k]
    if sizes != [shape.m, shape.k]:
        raise InvalidProblemError(
            f"shape: expected {[shape.m, shape.k]}, as the values have it, got {sizes[:8]}"
        )
    values = found.values()
    mask = found.words("bitmask")
    xp = canonical.array_module(mask)
    flags = unpacked_nibbles(mask, shape.m, shape.k // 4)
    codes = xp.asarray(_CODE_OF_FLAGS)[flags]
    bad = codes == 0
    if bool(bad.any()):
        row, group = divmod(int(bad.argmax()), shape.k // 4)
        count = bin(int(flags[row, group])).count("1")
        raise FormatError(f"bitmask: expected 2 bits in every group of 4, got {count}", row=row, group=group)
    return values, codes


def _to_compressed_tensors(out: Outgoing) -> Parts:
    xp = canonical.array_module(out.codes)
    flags = xp.asarray(_FLAGS_OF_CODE)[out.codes]
    sizes = xp.asarray(np.array([[out.shape.m], [out.shape.k]], np.int64))
    return {"compressed": out.typed(out.values), "bitmask": packed_nibbles(flags), "shape": sizes}


_ROWS = (
    ForeignFormat(
        name="baracuda",
        origin="baracuda's Rust facade: the bytes of the canonical form, unchecked",
        elements=(_F32, _F16, _BF16),
        parts=("compressed", "metadata"),
        constraint="K a multiple of 8",
        fits=lambda shape: True,
        layout=_layout_baracuda,
        decode=_from_baracuda,
        encode=_to_baracuda,
    ),
    ForeignFormat(
        name="torch_cutlass",
        origin="PyTorch's SparseSemiStructuredTensorCUTLASS; CUTLASS for sm_80",
        elements=(_F32, _F16, _BF16, _S8),
        parts=("packed", "meta"),
        constraint="M a multiple of 32 and K of 32 (f32: 16; s8: 16 and 64)",
        fits=_fits_sm80,
        layout=_layout_torch_cutlass,
        decode=_from_torch_cutlass,
        encode=_to_torch_cutlass,
    ),
    ForeignFormat(
        name="cutlass_sm90",
        origin="CUTLASS's StructuredSparseCompressor for sm_90; fp8 in torchao and xFormers",
        elements=ALL_ELEMENTS,
        parts=("packed", "meta"),
        constraint="K a multiple of 16 and tile_k of 32 (f32: 8 and 16; 8-bit: 32 and 8)",
        fits=_fits_sm90,
        layout=_layout_cutlass_sm90,
        decode=_from_cutlass_sm90,
        encode=_to_cutlass_sm90,
        options=("tile_k",),
    ),
    ForeignFormat(
        name="tilelang",
        origin="TileLang's gemm_sp_v2",
        elements=(_F16, _BF16, _S8, _E4M3, _E5M2),
        parts=("packed", "meta"),
        constraint="K a multiple of 8 times the bytes of a metadata word",
        fits=_fits_tilelang,
        layout=_layout_tilelang,
        decode=_from_tilelang,
        encode=_to_tilelang,
        options=("word_bytes",),
    ),
    ForeignFormat(
        name="torch_tile",
        origin="torch._sparse_semi_structured_tile(use_cutlass=True); xFormers' sparse24_sparsify_both_ways",
        elements=(_F16, _BF16),
        parts=("packed", "meta", "packed_t", "meta_t", "bitmask"),
        constraint="M and K multiples of 8",
        fits=_fits_torch_tile,
        layout=_layout_torch_tile,
        decode=_from_torch_tile,
        encode=_to_torch_tile,
        optional=("packed_t", "meta_t", "bitmask"),
        options=("shape",),
    ),
    ForeignFormat(
        name="cusparselt_sm80",
        origin="cuSPARSELt on sm_80; torch._sparse_semi_structured_tile(use_cutlass=False)",
        elements=(_F16, _BF16),
        parts=("packed",),
        constraint="M and K multiples of 128",
        fits=lambda shape: shape.m % 128 == 0 and shape.k % 128 == 0,
        layout=_layout_cusparselt_sm80,
        decode=_from_cusparselt_sm80,
        encode=_to_cusparselt_sm80,
        options=("shape",),
    ),
    ForeignFormat(
        name="cusparselt_sm90",
        origin="cuSPARSELt 0.8 on sm_90; torch._cslt_compress there",
        elements=(_F16, _BF16, _S8, _E4M3),
        parts=("packed",),
        constraint="M and K multiples of 32 (8-bit: K of 64)",
        fits=_fits_cusparselt_sm90,
        layout=_layout_cusparselt_sm90,
        decode=_from_cusparselt_sm90,
        encode=_to_cusparselt_sm90,
        options=("shape",),
    ),
    ForeignFormat(
        name="compressed_tensors",
        origin="compressed-tensors' sparse-24-bitmask, the format of llm-compressor's checkpoints",
        elements=ALL_ELEMENTS,
        parts=("compressed", "bitmask", "shape"),
        constraint="K a multiple of 8",
        fits=lambda shape: True,
        layout=_layout_compressed_tensors,
        decode=_from_compressed_tensors,
        encode=_to_compressed_tensors,
        optional=("shape",),
    ),
)
FORMATS: Mapping[str, ForeignFormat] = {row.name: row for row in _ROWS}
"""Every foreign format by name."""

BLOBS = ("cusparselt_sm80", "cusparselt_sm90")
"""Formats of one buffer, which doesn't say M and K."""
