"""The functions of :mod:`groups`, compiled by numba, with the same bits.

numba is optional, and is imported when :mod:`host_code` first asks for it. A function is compiled once per
process and cell width. Nothing is cached on disk, because numba's cache holds pickles, in a folder outside of
this package's rules. The loops read a group's four cells before they write, and have no branch, so that LLVM
vectorises them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from importlib import util
from typing import Any, TypeAlias

import numpy as np

from ..device.install import importing, lock_across_forks
from ..device.log import COMPILE
from .groups import Scratch

Array: TypeAlias = "np.ndarray[Any, Any]"


OLDEST = (0, 62)
"""The oldest numba whose LLVM vectorises all loops. With older ones some are slower than NumPy."""


def _numba() -> Any:
    with importing("numba"):
        import numba
    return numba


@cache
def obstacle() -> str | None:
    """A message that says why numba can't be used, or None."""
    if util.find_spec("numba") is None:
        return "numba isn't installed"
    try:
        numba = _numba()
    except ImportError as error:  # this numba doesn't support this NumPy
        COMPILE.warning("numba can't be imported, so NumPy prepares weights on the host: %s", error)
        return f"numba can't be imported: {error}"
    if tuple(numba.version_info[:2]) < OLDEST:
        return f"numba {numba.__version__} is older than {'.'.join(map(str, OLDEST))}"
    return "numba's compiler is switched off (NUMBA_DISABLE_JIT)" if numba.config.DISABLE_JIT else None


def version() -> str:
    """The version of numba."""
    return str(_numba().__version__)


def title() -> str:
    """The name of this code for ``explain``."""
    return f"compiled by numba {version()}"


def ready(itemsize: int, *names: str) -> None:
    """Compile the named functions for cells of ``itemsize`` bytes, unless they are compiled already."""
    for name in names:
        _compiled(name, itemsize)


def largest(keys: Array, space: Scratch) -> Array:
    """See :func:`groups.largest`."""
    flat = np.ascontiguousarray(keys).reshape(-1)
    codes = np.empty(flat.size // 4, np.uint8)
    _compiled("largest", flat.itemsize)(flat, codes)
    return codes


def covering(cells: Array, space: Scratch) -> tuple[Array, Array | None]:
    """See :func:`groups.covering`."""
    flat = np.ascontiguousarray(cells).reshape(-1)
    codes = np.empty(flat.size // 4, np.uint8)
    if not _compiled("covering", flat.itemsize)(flat, codes):
        return codes, None
    used = flat.reshape(-1, 4) != 0
    return codes, np.packbits(used, axis=1, bitorder="little").reshape(-1)


def gather(bits: Array, codes: Array, out: Array) -> None:
    """See :func:`groups.gather`."""
    _move("gather", bits, codes, out)


def scatter(values: Array, codes: Array, out: Array) -> None:
    """See :func:`groups.scatter`."""
    _move("scatter", values, codes, out)


def keep(bits: Array, codes: Array, out: Array) -> None:
    """See :func:`groups.keep`."""
    # A loop that may write what it reads doesn't run as vector code.
    _move("keep", bits.copy() if np.may_share_memory(bits, out) else bits, codes, out)


def _move(name: str, cells: Array, codes: Array, out: Array) -> None:
    flat = np.ascontiguousarray(cells).reshape(-1)
    _compiled(name, flat.itemsize)(flat, np.ascontiguousarray(codes).reshape(-1), out.reshape(-1))


# Compiling ----------------------------------------------------------------------------------------

_known: dict[tuple[str, int], Callable[..., Any]] = {}
_lock = lock_across_forks()


def _compiled(name: str, itemsize: int) -> Callable[..., Any]:
    found = _known.get((name, itemsize))
    if found is not None:
        return found
    with _lock:
        if (name, itemsize) not in _known:
            begin = time.perf_counter()
            _known[name, itemsize] = _compile(name, itemsize)
            seconds = time.perf_counter() - begin
            COMPILE.info("%s of %d-byte cells: compiled by numba in %.2f s", name, itemsize, seconds)
        return _known[name, itemsize]


def _compile(name: str, itemsize: int) -> Callable[..., Any]:
    numba = _numba()
    types = numba.types

    def array(dtype: str, readonly: bool) -> Any:  # any alignment
        return types.Array(getattr(types, dtype), 1, "C", readonly=readonly, aligned=False)

    cells, codes = f"uint{8 * itemsize}", "uint8"
    chooses = name in ("largest", "covering")
    inputs = [array(cells, True)] if chooses else [array(cells, True), array(codes, True)]
    result = array(codes if chooses else cells, False)
    signature = (types.boolean if name == "covering" else types.void)(*inputs, result)
    found: Callable[..., Any] = numba.njit(signature, nogil=True)(LOOPS[name])
    # The first call imports more of NumPy. A fork meanwhile would leave the import's lock held in the child.
    found(*(np.empty(0, one.dtype.name) for one in (*inputs, result)))
    return found


# Loops that numba compiles -----------------------------------------------------------------------


def _largest(keys: Any, codes: Any) -> None:
    for group in range(codes.size):
        at = 4 * group
        a, b, c, d = keys[at], keys[at + 1], keys[at + 2], keys[at + 3]
        ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
        # A cell is kept if it wins two of its three comparisons.
        keeps_a = (ab & ac) | (ab & ad) | (ac & ad)
        keeps_b = ((not ab) & bc) | ((not ab) & bd) | (bc & bd)
        keeps_d = ((not ad) & (not bd)) | ((not ad) & (not cd)) | ((not bd) & (not cd))
        first = np.uint8(0) if keeps_a else (np.uint8(1) if keeps_b else np.uint8(2))
        second = np.uint8(12) if keeps_d else (np.uint8(4) if keeps_a & keeps_b else np.uint8(8))
        codes[group] = first | second


def _covering(cells: Any, codes: Any) -> bool:
    crowded = False
    for group in range(codes.size):
        at = 4 * group
        a, b, c, d = cells[at] != 0, cells[at + 1] != 0, cells[at + 2] != 0, cells[at + 3] != 0
        crowded |= (a & b & (c | d)) | (c & d & (a | b))
        # A zero is kept if fewer than two other cells are, the lowest first.
        keeps_a = a | (not ((b & c) | (b & d) | (c & d)))
        keeps_b = b | (not (c | d))
        keeps_d = d & (not ((a & b) | (a & c) | (b & c)))
        first = np.uint8(0) if keeps_a else (np.uint8(1) if keeps_b else np.uint8(2))
        second = np.uint8(12) if keeps_d else (np.uint8(4) if keeps_a & keeps_b else np.uint8(8))
        codes[group] = first | second
    return crowded


def _gather(cells: Any, codes: Any, values: Any) -> None:
    for group in range(codes.size):
        at = 4 * group
        a, b, c, d = cells[at], cells[at + 1], cells[at + 2], cells[at + 3]
        first, second = codes[group] & np.uint8(3), codes[group] & np.uint8(12)
        values[2 * group] = a if first == 0 else (b if first == 1 else c)
        values[2 * group + 1] = d if second == 12 else (b if second == 4 else c)


def _scatter(values: Any, codes: Any, dense: Any) -> None:
    zero = dense.dtype.type(0)
    for group in range(codes.size):
        at = 4 * group
        a, b = values[2 * group], values[2 * group + 1]
        first, second = codes[group] & np.uint8(3), codes[group] & np.uint8(12)
        dense[at] = a if first == 0 else zero
        dense[at + 1] = a if first == 1 else (b if second == 4 else zero)
        dense[at + 2] = a if first == 2 else (b if second == 8 else zero)
        dense[at + 3] = b if second == 12 else zero


def _keep(cells: Any, codes: Any, out: Any) -> None:
    zero = out.dtype.type(0)
    for group in range(codes.size):
        at = 4 * group
        a, b, c, d = cells[at], cells[at + 1], cells[at + 2], cells[at + 3]
        first, second = codes[group] & np.uint8(3), codes[group] & np.uint8(12)
        out[at] = a if first == 0 else zero
        out[at + 1] = b if (first == 1) | (second == 4) else zero
        out[at + 2] = c if (first == 2) | (second == 8) else zero
        out[at + 3] = d if second == 12 else zero


LOOPS: dict[str, Callable[..., Any]] = {
    "largest": _largest,
    "covering": _covering,
    "gather": _gather,
    "scatter": _scatter,
    "keep": _keep,
}
"""The functions to compile, over flat arrays."""
