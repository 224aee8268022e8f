"""The work of :mod:`canonical` on NumPy's arrays, eight cells at a time.

Eight cells are two groups of four, with one uint16 word of metadata, whose two codes make a number below
4096. Nearly all work on a word is a look-up in a table with a row for every word. The rest are NumPy's passes
over contiguous memory, whose flags ``packbits`` brings to one byte for eight cells. Hosts are little-endian,
because all of CUDA's are.

Blocks should fit a core's cache, like those of ``canonical.row_steps``. A thread uses the memory between two
passes again for its next block, because fresh pages cost more than the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .codes import CROWDED, OCCUPANCY, PAIRS, RANKING

Array: TypeAlias = "np.ndarray[Any, Any]"

_WORD_OF_GROUP: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint32), 2: np.dtype(np.uint64)}
"""The machine word of a group, by bytes of a cell. Wider cells are gathered one by one."""
_CODES = np.uint16(0x0F0F)
"""Mask of a metadata word's codes. Look-ups apply it, so that stray bits do no harm."""
_STRAY_IN_CROWDED = np.uint16(CROWDED << 8 | CROWDED)


class Scratch:
    """Arrays that are used again, one for each name. A new use overwrites the old contents."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._evens = np.empty(0, np.intp)

    def array(self, name: str, size: int, dtype: npt.DTypeLike) -> Array:
        nbytes = size * np.dtype(dtype).itemsize
        found = self._memory.get(name)
        if found is None or found.size < nbytes:
            found = self._memory[name] = np.empty(nbytes, np.uint8)
        return found[:nbytes].view(dtype)

    def evens(self, size: int) -> Array:
        """The even numbers from 0, to be read only."""
        if self._evens.size < size:
            self._evens = np.arange(0, 2 * size, 2, dtype=np.intp)
        return self._evens[:size]

    @property
    def nbytes(self) -> int:
        return self._evens.nbytes + sum(memory.size for memory in self._memory.values())


_MAX_KEPT = 8 << 20
"""Bytes of scratch that a thread keeps for its next block."""
_threads = local()


@contextmanager
def scratch() -> Iterator[Scratch]:
    """The thread's scratch memory, or new memory while a caller uses the thread's."""
    mine: Scratch | None = getattr(_threads, "scratch", None)
    _threads.scratch = None
    found = mine or Scratch()
    try:
        yield found
    finally:
        _threads.scratch = found if found.nbytes <= _MAX_KEPT else None


def title() -> str:
    """The name of this code for ``explain``."""
    return "NumPy"


def ready(itemsize: int, *names: str) -> None:
    """NumPy's code needs no preparation."""


# Choosing what is kept ----------------------------------------------------------------------------


def largest(keys: Array, space: Scratch) -> Array:
    """Codes uint8 [groups] of the two largest of each group of ``keys`` [rows, K]. Ties keep the first."""
    flat = np.ascontiguousarray(keys).reshape(-1)
    # Cells are compared with those at distances 1, 2 and 3. Comparisons across groups are masked out.
    near, middle, far = (_compared(flat, distance, space) for distance in (1, 2, 3))
    np.bitwise_and(near, np.uint8(0x77), out=near)
    np.left_shift(far, np.uint8(3), out=far)
    np.bitwise_and(far, np.uint8(0x88), out=far)
    np.bitwise_or(near, far, out=near)
    np.bitwise_and(middle, np.uint8(0x33), out=middle)
    index = space.array("index", near.size, np.intp)
    np.copyto(index, near)
    np.copyto(index.view(np.uint8)[1 :: index.itemsize], middle)
    return np.take(_words_of_comparisons(), index).view(np.uint8)


def _compared(flat: Array, distance: int, space: Scratch) -> Array:
    """A bit for each cell: whether it is >= the cell at the distance. The last cells' bits are undefined."""
    flags = space.array("flags", flat.size, bool)
    np.greater_equal(flat[:-distance], flat[distance:], out=flags[:-distance])
    return np.packbits(flags, bitorder="little")


@cache
def _words_of_comparisons() -> Array:
    """Metadata words by the comparisons of :func:`largest`.

    Bits 0-2 of each half of the low byte are comparisons at distance 1, bit 3 is the one at distance 3. The
    high byte has those at distance 2.
    """
    index = np.arange(1 << 14)
    place = {1: (0, 1, 2), 2: (8, 9), 3: (3,)}
    codes = []
    for half in (0, 4):
        outcome = sum((index >> place[j - i][i] + half & 1) << bit for bit, (i, j) in enumerate(PAIRS))
        codes.append(RANKING[outcome])
    return np.stack(codes, axis=1).view(np.uint16).reshape(-1)


def covering(cells: Array, space: Scratch) -> tuple[Array, Array | None]:
    """Codes uint8 [groups] that cover the non-zero cells [rows, K]; in a crowded group the first two.

    If a group is crowded, the second result is the masks uint8 [groups] of non-zero cells, cell i in bit i.
    """
    flags = space.array("flags", cells.size, bool)
    np.not_equal(cells, 0, out=flags.reshape(cells.shape))
    masks = np.packbits(flags, bitorder="little")
    index = space.array("index", masks.size, np.intp)
    np.copyto(index, masks)
    words = np.take(_words_of_masks(), index)
    if not bool(np.bitwise_and(words, _STRAY_IN_CROWDED).any()):
        return words.view(np.uint8), None
    np.bitwise_and(words, _CODES, out=words)
    return words.view(np.uint8), np.stack([masks & 15, masks >> 4], axis=1).reshape(-1)


@cache
def _words_of_masks() -> Array:
    """Metadata words by two masks, the first in the lower bits. A crowded group's byte has CROWDED set."""
    masks = np.arange(256)
    return np.stack([OCCUPANCY[masks & 15], OCCUPANCY[masks >> 4]], axis=1).view(np.uint16).reshape(-1)


# Moving values ----------------------------------------------------------------------------------------


def gather(bits: Array, codes: Array, out: Array) -> None:
    """Write the kept values [rows, K/2] of ``bits`` [rows, K] to contiguous ``out``; codes are unchecked."""
    flat, values = np.ascontiguousarray(bits).reshape(-1), out.reshape(-1)
    word = _WORD_OF_GROUP.get(flat.itemsize)
    with scratch() as space:
        if word is None:
            np.take(flat, _positions(codes, space), out=values, mode="clip")
            return
        for slot, shift in enumerate(_shifts(codes, word, space)):
            np.right_shift(flat.view(word), shift, out=shift)
            np.copyto(values[slot::2], shift.view(flat.dtype)[::4])


def scatter(values: Array, codes: Array, out: Array) -> None:
    """The inverse of :func:`gather`: dense bits [rows, K], zero where nothing was kept."""
    flat, dense = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
    word = _WORD_OF_GROUP.get(flat.itemsize)
    with scratch() as space:
        if word is None:
            dense[...] = 0
            dense[_positions(codes, space)] = flat
            return
        cell = 8 * flat.itemsize
        low, high = _shifts(codes, word, space)
        pairs, first = (space.array(name, codes.size, word) for name in ("pairs", "first"))
        np.copyto(pairs, flat.view(f"u{2 * flat.itemsize}"))
        np.bitwise_and(pairs, word.type((1 << cell) - 1), out=first)
        np.left_shift(first, low, out=low)
        np.right_shift(pairs, word.type(cell), out=pairs)
        np.left_shift(pairs, high, out=high)
        np.bitwise_or(low, high, out=dense.view(word))


def keep(bits: Array, codes: Array, out: Array) -> None:
    """Write ``bits`` [rows, K] to contiguous ``out``, with zeros where the codes [groups] keep nothing."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    with scratch() as space:
        kept = _look_up(_kept(flat.itemsize), _index(codes, space), space, "kept")
        np.bitwise_and(flat.view(np.uint64), kept, out=out.reshape(-1).view(np.uint64))


def mask_bytes(codes: Array) -> Array:
    """Masks of the kept cells, uint8 [groups / 2]: a byte for eight cells, cell i in bit i."""
    with scratch() as space:
        return _look_up(_bytes_of_words(), _index(codes, space), space, "masks").copy()


def _shifts(codes: Array, word: np.dtype[Any], space: Scratch) -> tuple[Array, Array]:
    """The number of bits below each of a group's two kept cells, in scratch memory."""
    cell = {4: 3, 8: 4}[word.itemsize]  # log2 of a cell's bits
    low, high = (space.array(name, codes.size, word) for name in ("low", "high"))
    np.copyto(high, codes)
    np.bitwise_and(high, word.type(3), out=low)
    np.left_shift(low, word.type(cell), out=low)
    np.bitwise_and(high, word.type(12), out=high)
    np.left_shift(high, word.type(cell - 2), out=high)
    return low, high


# Tables with a row for every word -----------------------------------------------------------------


def _index(codes: Array, space: Scratch) -> Array:
    """The words of the codes in NumPy's index type, which look-ups take three times as fast."""
    words = codes.reshape(-1).view(np.uint16)
    sound = space.array("sound", words.size, np.uint16)
    np.bitwise_and(words, _CODES, out=sound)
    index = space.array("index", words.size, np.intp)
    np.copyto(index, sound)
    return index


def _look_up(table: Array, index: Array, space: Scratch, name: str) -> Array:
    """Rows of the table, flat, in the scratch array ``name``."""
    found = space.array(name, index.size * table[0].size, table.dtype)
    np.take(table, index, axis=0, out=found.reshape(index.size, *table.shape[1:]), mode="clip")
    return found


@cache
def _slots() -> Array:
    """The two positions of both groups of every word, int [4096, 2, 2]."""
    words = np.arange(4096)
    return np.stack([words >> shift & 3 for shift in (0, 2, 8, 10)], axis=1).reshape(-1, 2, 2)


@cache
def _bytes_of_words() -> Array:
    first, second = _slots()[..., 0], _slots()[..., 1]
    masks = 1 << first | 1 << second
    return (masks[:, 0] | masks[:, 1] << 4).astype(np.uint8)


@cache
def _kept(itemsize: int) -> Array:
    """All bits set in the kept cells of every word, by bytes of a cell: uint64 [4096, itemsize]."""
    flags = np.unpackbits(_bytes_of_words()[:, None], axis=1, bitorder="little")
    cells = np.repeat(flags * np.uint8(255), itemsize, axis=1)
    return cells.view(np.uint64)


@cache
def _offsets() -> Array:
    """Positions of a word's values among its eight cells, minus twice the value's number: [4096, 4]."""
    cells = _slots() + np.array([[0], [4]])
    found: Array = (cells.reshape(-1, 4) - 2 * np.arange(4)).astype(np.intp)
    return found


def _positions(codes: Array, space: Scratch) -> Array:
    """The index of every kept value among the cells, in scratch memory."""
    found = _look_up(_offsets(), _index(codes, space), space, "positions")
    np.add(found, space.evens(found.size), out=found)
    return found
