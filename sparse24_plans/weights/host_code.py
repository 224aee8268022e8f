"""Which code prepares weights on the host: NumPy's, or what numba compiles. Both give the same bits."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from . import compiled, groups

Array: TypeAlias = "np.ndarray[Any, Any]"

LEAST_CELLS = 3 << 18
"""Of a matrix that is worth compiling for. (Models are read in blocks that hold a little less than 2^20.)"""


class HostCode(Protocol):
    """What :mod:`groups` and :mod:`compiled` have in common."""

    def title(self) -> str: ...
    def ready(self, itemsize: int, *names: str) -> None: ...
    def largest(self, keys: Array, space: groups.Scratch) -> Array: ...
    def covering(self, cells: Array, space: groups.Scratch) -> tuple[Array, Array | None]: ...
    def gather(self, bits: Array, codes: Array, out: Array | None = None) -> Array: ...
    def scatter(self, values: Array, codes: Array, out: Array | None = None) -> Array: ...
    def keep(self, bits: Array, codes: Array, out: Array) -> None: ...


def best(cells: int) -> HostCode:
    """The code for a matrix of so many cells."""
    return compiled if cells >= LEAST_CELLS and compiled.obstacle() is None else groups


def versions() -> dict[str, str | None]:
    """numba's version or None, and then why it isn't used: for reports."""
    obstacle = compiled.obstacle()
    return {"numba": None if obstacle else compiled.version(), "no_numba": obstacle}
