"""Groups of four on the host, a group a machine word: what :mod:`canonical` does for NumPy's arrays.

The four cells of a group lie side by side, so a group of 8-bit cells is read as one uint32 and one of 16-bit
cells as one uint64, the first cell in the lowest bits (hosts are little-endian, as CUDA's all are). Every
step is a pass of NumPy over contiguous memory, or a look-up in a small table. Blocks should fit a core's
cache: ``canonical.row_steps`` makes such. What lies between two passes is memory that a thread uses again for
its next block, because fresh pages cost more than the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = "np.ndarray[Any, Any]"

_WORD_OF_GROUP: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint32), 2: np.dtype(np.uint64)}
"""Bytes of a cell -> a group in one word. Groups of wider cells are gathered cell by cell."""
_LAST_BITS = np.uint32(0x00010307)
"""Of a group's four bytes: the comparisons of its first three cells with later ones of the same group."""
_TO_OUTCOME = np.uint32(1 << 16 | 1 << 11 | 1 << 5)
_TO_MASK = np.uint32(1 << 24 | 1 << 17 | 1 << 10 | 1 << 3)


class Scratch:
    """Arrays that are used again: each name has one, and what it held before is gone."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}

    def array(self, name: str, size: int, dtype: npt.DTypeLike) -> Array:
        nbytes = size * np.dtype(dtype).itemsize
        found = self._memory.get(name)
        if found is None or found.size < nbytes:
            found = self._memory[name] = np.empty(nbytes, np.uint8)
        return found[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(memory.size for memory in self._memory.values())


_MOST_KEPT = 8 << 20
"""Bytes of scratch that a thread keeps for its next block."""
_threads = local()


@contextmanager
def scratch() -> Iterator[Scratch]:
    """The thread's scratch memory; another one where that is in use further up."""
    mine: Scratch | None = getattr(_threads, "scratch", None)
    _threads.scratch = None
    found = mine or Scratch()
    try:
        yield found
    finally:
        _threads.scratch = found if found.nbytes <= _MOST_KEPT else None


def outcomes(keys: Array, space: Scratch) -> Array:
    """Six comparisons ``key[i] >= key[j]`` of each group of ``keys``, bit by bit in the order of
    ``canonical.PAIRS``: intp [groups], in scratch memory."""
    flat = np.ascontiguousarray(keys).reshape(-1)
    found, further = (space.array(name, flat.size // 4, np.uint32) for name in ("found", "further"))
    # Cells are compared with those 1, 2 and 3 further on, across groups as well: those flags are masked out.
    found[-1:] = 0
    np.greater_equal(flat[:-1], flat[1:], out=found.view(bool)[:-1])
    for distance in (2, 3):
        further[-1:] = 0
        np.greater_equal(flat[:-distance], flat[distance:], out=further.view(bool)[:-distance])
        np.left_shift(further, np.uint32(distance - 1), out=further)
        np.bitwise_or(found, further, out=found)
    np.bitwise_and(found, _LAST_BITS, out=found)
    # Bits 0-2, 8-9 and 16 of a word become bits 16-21: no sum of the lower ones carries so far.
    np.multiply(found, _TO_OUTCOME, out=found)
    np.right_shift(found, np.uint32(16), out=found)
    np.bitwise_and(found, np.uint32(63), out=found)
    index = space.array("index", found.size, np.intp)
    np.copyto(index, found, casting="unsafe")
    return index


def masks(cells: Array, space: Scratch) -> Array:
    """Masks uint8 [rows, groups] of the cells [rows, K] that aren't 0, cell i in bit i."""
    flags = space.array("flags", cells.size, bool).reshape(cells.shape)
    np.not_equal(cells, 0, out=flags)
    words = flags.reshape(-1).view(np.uint32)
    np.multiply(words, _TO_MASK, out=words)
    np.right_shift(words, np.uint32(24), out=words)
    return words.astype(np.uint8).reshape(cells.shape[0], cells.shape[1] // 4)


def gather(bits: Array, codes: Array, out: Array | None = None) -> Array:
    """The kept values [rows, K/2] of ``bits`` [rows, K]; codes are unchecked. ``out`` is contiguous."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    values = np.empty((bits.shape[0], bits.shape[1] // 2), bits.dtype) if out is None else out
    word = _WORD_OF_GROUP.get(flat.itemsize)
    if word is None:
        np.take(flat, _positions(codes), mode="clip", out=values.reshape(-1, 2))
        return values
    cell = word.type(8 * flat.itemsize)
    with scratch() as space:
        low, high = _shifts(codes, word, space)
        groups = flat.view(word)
        np.right_shift(groups, low, out=low)
        np.bitwise_and(low, _ones(word), out=low)
        np.right_shift(groups, high, out=high)
        np.left_shift(high, cell, out=high)
        np.bitwise_or(low, high, out=low)
        np.copyto(values.reshape(-1).view(f"u{2 * flat.itemsize}"), low, casting="unsafe")
    return values


def scatter(values: Array, codes: Array, out: Array | None = None) -> Array:
    """The inverse of :func:`gather`: dense bits [rows, K], zero where nothing was kept."""
    flat = np.ascontiguousarray(values).reshape(-1)
    dense = np.empty((values.shape[0], 2 * values.shape[1]), values.dtype) if out is None else out
    word = _WORD_OF_GROUP.get(flat.itemsize)
    if word is None:
        dense[...] = 0
        dense.reshape(-1)[_positions(codes)] = flat.reshape(-1, 2)
        return dense
    cell = word.type(8 * flat.itemsize)
    with scratch() as space:
        low, high = _shifts(codes, word, space)
        pairs, first = (space.array(name, codes.size, word) for name in ("pairs", "first"))
        np.copyto(pairs, flat.view(f"u{2 * flat.itemsize}"))
        np.bitwise_and(pairs, _ones(word), out=first)
        np.left_shift(first, low, out=low)
        np.right_shift(pairs, cell, out=pairs)
        np.left_shift(pairs, high, out=high)
        np.bitwise_or(low, high, out=dense.reshape(-1).view(word))
    return dense


def keep(bits: Array, codes: Array, out: Array) -> None:
    """``bits`` [rows, K] to ``out``, contiguous, with zeros where the codes [groups] name no position."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    word = _WORD_OF_GROUP.get(flat.itemsize)
    if word is None:
        scatter(gather(bits, codes), codes, out)
        return
    with scratch() as space:
        low, high = _shifts(codes, word, space)
        for shift in (low, high):
            np.left_shift(_ones(word), shift, out=shift)
        np.bitwise_or(low, high, out=low)
        np.bitwise_and(flat.view(word), low, out=out.reshape(-1).view(word))


def _ones(word: np.dtype[Any]) -> Any:
    """A cell's bits in the lowest cell of a group of ``word``."""
    return word.type((1 << 2 * word.itemsize) - 1)


def _shifts(codes: Array, word: np.dtype[Any], space: Scratch) -> tuple[Array, Array]:
    """Bits below each of the two positions in a group of ``word``, in scratch memory."""
    cell = {4: 3, 8: 4}[word.itemsize]  # log2 of a cell's bits
    low, high = (space.array(name, codes.size, word) for name in ("low", "high"))
    np.copyto(high, codes)
    np.bitwise_and(high, word.type(3), out=low)
    np.left_shift(low, word.type(cell), out=low)
    np.bitwise_and(high, word.type(12), out=high)
    np.left_shift(high, word.type(cell - 2), out=high)
    return low, high


def _positions(codes: Array) -> Array:
    """Index [groups, 2] of every kept value among the cells."""
    index = np.empty((codes.size, 2), np.int64)
    base = np.arange(0, 4 * codes.size, 4, dtype=np.int64)
    np.add(base, codes & np.uint8(3), out=index[:, 0])
    np.add(base, codes >> np.uint8(2) & np.uint8(3), out=index[:, 1])
    return index
