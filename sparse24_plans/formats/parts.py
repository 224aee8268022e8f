"""Between the parts of a foreign weight and its canonical form: checked words, nibbles, 1:2 float32.

*Nibbles* uint8 [M, groups] are one for each group of four: bits 1:0 the first position, 3:2 the second.
Formats that hold float32 hold it as the hardware does, 1:2 sparse: a nibble for each pair, 0x4 where the
even element is kept and 0xE where the odd one is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._vendor import nibbles, tilelang, torch_tile
from ..device.tensors import Device, TensorView
from ..errors import FormatError, InvalidProblemError
from ..vocab import ElementKind
from ..weights import canonical

F32 = ElementKind.F32
DEFAULT_TILE_K = 128
PAD_NIBBLES = 0x44
"""A byte of padding: positions 0 and 1 (and even elements), which are legal to the hardware."""
EVEN, _ODD = 0x4, 0xE
_WORDS = {1: ElementKind.U8, 2: ElementKind.U16, 4: ElementKind.I32}


@dataclass(frozen=True, slots=True)
class WeightShape:
    """A weight [m, k] of an element, and the options of its format."""

    m: int
    k: int
    element: ElementKind
    tile_k: int = DEFAULT_TILE_K
    word_bytes: int = 2

    @property
    def nibbles(self) -> int:
        """Nibbles of a row where float32 is 1:2."""
        return self.k // (2 if self.element is F32 else 4)


def weight_shape(
    m: int, k: int, element: ElementKind, tile_k: int | None, word_bytes: int | None
) -> WeightShape:
    """A weight's shape with the options of its format, or their defaults."""
    if tile_k is None:
        tile_k = DEFAULT_TILE_K
    if type(tile_k) is not int or not 0 < tile_k <= 1 << 20:
        raise InvalidProblemError(f"tile_k: expected a positive number of columns, got {tile_k!r}")
    if word_bytes is None:
        word_bytes = 2
    if word_bytes not in tilelang.WORD_BYTES:
        raise InvalidProblemError(f"word_bytes: expected 1, 2 or 4, got {word_bytes!r}")
    return WeightShape(m, k, element, tile_k, word_bytes)


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""NumPy's name of the type (``VALUES`` for the element) and the shape of each part."""
VALUES = "values"


@dataclass(frozen=True, slots=True)
class Incoming:
    """The parts of a foreign weight, on their way in."""

    shape: WeightShape
    layout: Layout
    parts: Mapping[str, Any]
    device: Device

    def words(self, part: str) -> Any:
        """A part's words as a flat contiguous array of unsigned integers: as many as its layout has."""
        dtype, sizes = self.layout[part]
        array = self._bits(part, _WORDS[np.dtype(dtype).itemsize])
        if part.startswith("meta"):
            array = torch_tile.as_stored(array)
        count = math.prod(sizes)
        if array.size != count:
            raise InvalidProblemError(
                f"{part}: expected {count} words {dtype} for M = {self.shape.m}, K = {self.shape.k}, "
                f"got {array.size}"
            )
        return canonical.array_module(array).ascontiguousarray(array.reshape(-1))

    def values(self, part: str = "") -> Any:
        """A part's elements (by default the first part's) as bits of exactly its layout's shape."""
        part = part or next(iter(self.layout))
        array = self._bits(part, self.shape.element)
        if array.shape != self.layout[part][1]:
            raise InvalidProblemError(
                f"{part}: expected shape {list(self.layout[part][1])} for M = {self.shape.m}, "
                f"K = {self.shape.k}, got {list(array.shape)}"
            )
        return array

    def _bits(self, part: str, kind: ElementKind) -> Any:
        view = TensorView.of(self.parts[part], element=kind, argument=part)
        if view.device != self.device:
            raise InvalidProblemError(f"{part}: expected memory on {self.device}, got {view.device}")
        return view.bits()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A canonical weight on its way out: bits [m, k/2] and codes uint8 [m, k/4]."""

    shape: WeightShape
    values: Any
    codes: Any

    def typed(self, bits: Any) -> Any:
        """A copy of ``bits`` as an array of the element's type."""
        return TensorView.of(bits.copy(), element=self.shape.element).array()


Parts = dict[str, Any]


# Nibbles ------------------------------------------------------------------------------------------


def codes_in(found: Any, values: Any, shape: WeightShape) -> Any:
    """Nibbles [m, shape.nibbles] as read -> codes [m, k/4]. An odd nibble of a zero is taken as even."""
    if shape.element is not F32:
        return found
    odd = found == np.uint8(_ODD)
    bad = ~odd & (found != np.uint8(EVEN)) & (values != 0)
    if bool(bad.any()):
        row, pair = divmod(int(bad.argmax()), shape.nibbles)
        raise FormatError(
            f"meta: expected 0x4 or 0xe for a pair of float32, got {int(found[row, pair]):#x}",
            row=row,
            group=pair // 2,
        )
    position = odd.view(np.uint8)
    return position[:, 0::2] | (position[:, 1::2] | np.uint8(2)) << np.uint8(2)


# Occupied positions of a group -> the code with one position in each pair.
_ONE_A_PAIR = np.array(
    [
        canonical.IMPOSSIBLE if mask & 3 == 3 or mask & 12 == 12 else (mask >> 1 & 1) | (2 | mask >> 3) << 2
        for mask in range(16)
    ],
    np.uint8,
)


def nibbles_out(out: Outgoing) -> tuple[Any, Any]:
    """Values [m, k/2] and nibbles [m, shape.nibbles] of a weight; float32 as 1:2."""
    shape = out.shape
    if shape.element is not F32:
        return out.values, out.codes
    values, codes = canonical.relocate(
        out.values,
        out.codes.reshape(-1),
        F32,
        _ONE_A_PAIR,
        0,
        "weight: expected one non-zero in each pair of float32 (the format is 1:2), got two",
    )
    xp = canonical.array_module(values)
    flags = xp.stack([codes & np.uint8(1), codes >> np.uint8(2) & np.uint8(1)], axis=1)
    found = xp.where(flags != 0, np.uint8(_ODD), np.uint8(EVEN)).astype(np.uint8)
    return values, found.reshape(shape.m, shape.nibbles)


def packed_nibbles(found: Any) -> Any:
    """Nibbles [rows, G] -> contiguous bytes [rows, G/2]."""
    return canonical.array_module(found).ascontiguousarray(nibbles.pack(found))


def unpacked_nibbles(words: Any, rows: int, groups: int) -> Any:
    """Words in row-major order -> nibbles [rows, groups]."""
    xp = canonical.array_module(words)
    packed = xp.ascontiguousarray(words).reshape(-1).view(np.uint8)
    return nibbles.unpack(packed.reshape(rows, groups // 2), xp.empty)
