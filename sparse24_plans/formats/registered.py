"""Formats of users: the values in row-major order, the metadata in an order of the user's own.

Metadata are nibbles, one for each group of four cells: bits 1:0 are the first position, 3:2 the second.
float32 is held 1:2, like in the hardware, with a nibble 0x4 or 0xE for each pair. An order moves words of
one, two, four or eight nibbles, the first nibble in the lowest bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._vendor import nibbles as nibble_pairs
from ..device.tensors import wrong
from ..errors import InvalidProblemError, Sparse24Error, shown
from ..vocab import ElementKind, ElementLike, checked_flag, element_kind, integer
from ..weights import canonical
from ..weights.codes import VALID_CODES
from .base import ALL_ELEMENTS, ForeignFormat, Incoming, Layout, Outgoing, Parts, WeightShape, row_major
from .positions import EVEN, ODD, codes_in, nibbles_out, packed_nibbles, unpacked_nibbles
from .table import FORMATS, TAKEN_NAMES

Reorder = Callable[[Any], Any]
"""Takes unsigned words [M, words a row] of NumPy or CuPy and gives as many words of the same type."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STORED = {4: "uint8", 8: "uint8", 16: "int16", 32: "int32"}
"""NumPy's type of the stored metadata, by bits of a word. A byte holds two nibbles."""
_DEFAULT_ELEMENTS = ALL_ELEMENTS[1:]  # all but float32
_TRIED = ((1, 1), (2, 1), (1, 2), (3, 2), (2, 5), (4, 4))
"""Sizes of random metadata that an order is tried on: tiles down and across."""
_MAX_WORDS = 1 << 20
"""The most words of a tile of metadata. Real formats have at most some thousands."""
_ROUNDS = 4


def register_format(
    name: str,
    *,
    permutation: Sequence[int] | None = None,
    encode: Reorder | None = None,
    decode: Reorder | None = None,
    tile: tuple[int, int] | None = None,
    word_bits: int = 16,
    elements: Sequence[ElementLike] = _DEFAULT_ELEMENTS,
    origin: str = "registered by the user",
    replace: bool = False,
) -> None:
    """Register a format of your own under a name.

    ``from_foreign``, ``to_foreign`` and ``convert_checkpoint`` then take the name. The command ``sparse24``
    finds formats of installed packages (docs/formats.md). A weight has the parts ``packed`` [M, K/2], the
    values in row-major order, and ``meta`` [M, words a row], the metadata.

    Parameters
    ----------
    name : str
        Letters, digits, ``_``, ``.`` and ``-``. Names of the package's own formats are refused.
    permutation : sequence of int, optional
        The order within a tile of metadata, of at most 2^20 words: the i-th stored word is word number
        ``permutation[i]`` of the tile in row-major order. Tiles are stored in row-major order.
    encode, decode : callable, optional
        Functions in place of a permutation. ``encode`` takes the metadata in row-major order, unsigned
        [M, words a row] of NumPy or CuPy, and returns as many words, of any shape, in stored order.
        ``decode`` takes stored words [M, words a row] and returns them in row-major order.
    tile : (int, int), optional
        Rows and words that divide M and the words of a row; by default one row, and as many words as the
        permutation has, or one.
    word_bits : int
        Bits of a word that moves as a whole: 4, 8, 16 or 32. ``meta`` is uint8 (two nibbles a byte), uint8,
        int16 or int32.
    elements : sequence of ElementKind or str
        Elements that the format holds.
    origin : str
        The software that writes and reads the format.
    replace : bool
        Whether to replace a format that was registered under the name before.

    Raises
    ------
    InvalidProblemError
        An invalid argument. An order that isn't invertible: the message has the positions of a number that
        comes twice, or the row and the word of random metadata that the functions don't restore.
    """
    _check_name(name, replace)
    _register(name, _order(permutation, encode, decode, tile, word_bits), _elements(elements), origin)


def _order(permutation: Any, encode: Any, decode: Any, tile: Any, word_bits: Any) -> _Order:
    """The order that the arguments describe, not tried yet."""
    if type(word_bits) is not int or word_bits not in _STORED:
        raise wrong("word_bits", "4, 8, 16 or 32", word_bits)
    if permutation is not None and encode is None and decode is None:
        return _permuted(permutation, tile, word_bits)
    if permutation is None and callable(encode) and callable(decode):
        rows, words = (1, 1) if tile is None else _tile(tile)
        return _Order(encode, decode, rows, words, word_bits)
    given = {"permutation": permutation, "encode": encode, "decode": decode}
    got = ", ".join(f"{what} {shown(one)}" for what, one in given.items() if one is not None)
    raise InvalidProblemError(
        f"permutation, encode, decode: expected a permutation, or two functions; got {got or 'nothing'}"
    )


def _register(name: str, order: _Order, elements: tuple[ElementKind, ...], origin: object) -> None:
    if not isinstance(origin, str):
        raise wrong("origin", "text", origin)
    for element in elements:
        order.check(element)
    fields = {
        "name": name,
        "origin": origin,
        "elements": elements,
        "parts": ("packed", "meta"),
        "constraint": order.constraint(elements),
    }
    FORMATS[name] = type("RegisteredFormat", (_Registered,), fields)(order)


# The order ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """An order of words in tiles of ``rows`` x ``words``."""

    encode: Reorder
    decode: Reorder
    rows: int
    words: int
    word_bits: int

    def columns(self, element: ElementKind) -> int:
        """Dense columns of a word."""
        return self.word_bits // 4 * (2 if element is ElementKind.F32 else 4)

    def constraint(self, elements: tuple[ElementKind, ...]) -> str:
        found = {self.words * self.columns(element): element for element in reversed(elements)}
        least = " or ".join(str(columns) for columns in sorted(found, reverse=True))
        return f"M a multiple of {self.rows} and K of {least}" + (" (f32)" if len(found) > 1 else "")

    def words_of(self, found: Any) -> Any:
        """Nibbles [m, groups] as words [m, words a row]."""
        if self.word_bits == 4:
            return found
        packed = packed_nibbles(found)
        return packed.view(f"u{self.word_bits // 8}")

    def nibbles_of(self, words: Any, groups: int) -> Any:
        """The inverse of :meth:`words_of`."""
        return words if self.word_bits == 4 else unpacked_nibbles(words, words.shape[0], groups)

    def apply(self, which: str, words: Any) -> Any:
        """The result of the function ``which`` for words [m, words a row], flat and contiguous."""
        if not words.size:
            return words.reshape(-1)
        xp = canonical.array_module(words)
        given = f"{words.dtype}{list(words.shape)}"
        try:
            made = getattr(self, which)(words.copy())
        except Sparse24Error:
            raise
        except Exception as error:
            raise InvalidProblemError(
                f"{which}: expected a result for metadata {given}, got {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, xp.ndarray) or made.dtype != words.dtype or made.size != words.size:
            shape = f"{made.dtype}{list(made.shape)}" if isinstance(made, xp.ndarray) else shown(made)
            raise InvalidProblemError(f"{which}: expected as many words for metadata {given}, got {shape}")
        if self.word_bits == 4 and bool((made > 15).any()):
            raise InvalidProblemError(f"{which}: expected nibbles, 0 to 15, got {int(made.max())}")
        return xp.ascontiguousarray(made).reshape(-1)

    def check(self, element: ElementKind) -> None:
        """Raise InvalidProblemError for the first word that ``decode`` doesn't restore."""
        rng = np.random.default_rng(0)
        valid = [EVEN, ODD] if element is ElementKind.F32 else VALID_CODES
        for down, across in _TRIED * _ROUNDS:
            m, count = down * self.rows, across * self.words
            groups = count * self.word_bits // 4
            if groups * (2 if element is ElementKind.F32 else 4) % 8:
                continue  # no weight has such a K
            words = self.words_of(rng.choice(np.array(valid, np.uint8), (m, groups)))
            back = self.apply("decode", self.apply("encode", words).reshape(m, count)).reshape(m, count)
            if (differs := back != words).any():
                row, word = divmod(int(differs.argmax()), count)
                raise InvalidProblemError(
                    f"decode: expected the words that encode was given, metadata {list(words.shape)}; got "
                    f"{int(back[row, word]):#x} for {int(words[row, word]):#x} at row {row}, word {word}"
                )


def _permuted(permutation: Any, tile: Any, word_bits: int) -> _Order:
    stored: list[int | None] = [None]
    with suppress(Exception):  # a broken object may raise anything; an endless one has no length
        stored = [integer(permutation[at]) for at in range(min(len(permutation), _MAX_WORDS + 1))]
    if len(stored) > _MAX_WORDS:
        raise InvalidProblemError(
            f"permutation: expected at most {_MAX_WORDS} numbers, got {len(permutation)}"
        )
    bad = next((at for at, one in enumerate(stored) if one is None), None)
    if bad is not None or not stored:
        raise wrong("permutation", "integers", permutation)
    rows, words = (1, len(stored)) if tile is None else _tile(tile)
    if rows * words != len(stored):
        raise InvalidProblemError(
            f"permutation: expected {rows * words} numbers for a tile of {rows} x {words} words, "
            f"got {len(stored)}"
        )
    first: dict[int, int] = {}
    for at, one in enumerate(stored):
        assert one is not None
        if not 0 <= one < len(stored):
            raise InvalidProblemError(
                f"permutation: expected numbers from 0 to {len(stored) - 1}, "
                f"got {shown(one)} at position {at}"
            )
        if one in first:
            raise InvalidProblemError(
                f"permutation: expected each number once, got {one} at positions {first[one]} and {at}"
            )
        first[one] = at
    there = np.array(stored, np.intp)
    back = np.argsort(there)

    def reorder(found: Any, index: Any) -> Any:
        return found[:, canonical.array_module(found).asarray(index)]

    def encode(plain: Any) -> Any:
        m, width = plain.shape
        tiles = plain.reshape(m // rows, rows, width // words, words).transpose(0, 2, 1, 3)
        return reorder(tiles.reshape(-1, rows * words), there)

    def decode(found: Any) -> Any:
        m, width = found.shape
        tiles = reorder(found.reshape(-1, rows * words), back).reshape(m // rows, width // words, rows, words)
        return tiles.transpose(0, 2, 1, 3)

    return _Order(encode, decode, rows, words, word_bits)


# The format ---------------------------------------------------------------------------------------


class _Registered(ForeignFormat):
    """Base of registered formats, with a subclass for each name."""

    def __init__(self, order: _Order) -> None:
        self._order = order

    def fits(self, shape: WeightShape) -> bool:
        order = self._order
        return shape.m % order.rows == 0 and shape.k % (order.words * order.columns(shape.element)) == 0

    def layout(self, shape: WeightShape) -> Layout:
        bits = max(self._order.word_bits, 8)
        return {
            "packed": row_major(shape),
            "meta": (_STORED[self._order.word_bits], (shape.m, 4 * shape.nibbles // bits)),
        }

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        shape, order = found.shape, self._order
        stored, values = found.words("meta", as_stored=True), found.values()
        if order.word_bits == 4:
            stored = unpacked_nibbles(stored, 1, stored.size * 2)
        sizes = shape.m, 4 * shape.nibbles // order.word_bits
        plain = order.apply("decode", stored.reshape(sizes)).reshape(sizes)
        return values, codes_in(order.nibbles_of(plain, shape.nibbles), values, shape)

    def encode(self, out: Outgoing) -> Parts:
        values, found = nibbles_out(out)
        order, (kind, sizes) = self._order, self.layout(out.shape)["meta"]
        stored = order.apply("encode", order.words_of(found))
        if order.word_bits == 4:
            stored = nibble_pairs.pack(stored.reshape(1, -1)).reshape(-1)
        return {"packed": out.typed(values), "meta": stored.view(kind).reshape(sizes)}


# Arguments ----------------------------------------------------------------------------------------


def _check_name(name: object, replace: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong("name", "letters, digits, '_', '.' and '-', at most 64, the first no sign", name)
    if name in TAKEN_NAMES:
        raise InvalidProblemError(f"name: expected a name that no format of the package has, got {name!r}")
    if not checked_flag("replace", replace) and name in FORMATS:
        raise InvalidProblemError(f"name: {name!r} is registered already; pass replace=True")


def _elements(elements: Any) -> tuple[ElementKind, ...]:
    if isinstance(elements, str) or not isinstance(elements, Sequence) or not elements:
        raise wrong("elements", "a sequence of elements", elements)
    kinds = tuple(dict.fromkeys(element_kind(one, "elements") for one in elements))
    for kind in kinds:
        if kind not in ALL_ELEMENTS:
            raise InvalidProblemError(f"elements: expected some of {', '.join(ALL_ELEMENTS)}, got {kind}")
    return kinds


def _tile(tile: Any) -> tuple[int, int]:
    sizes = (
        [integer(size) for size in tile] if isinstance(tile, Sequence) and not isinstance(tile, str) else []
    )
    found = [size for size in sizes if size is not None and size > 0]
    if len(sizes) != 2 or len(found) != 2:
        raise wrong("tile", "two positive sizes, rows and words", tile)
    return found[0], found[1]
