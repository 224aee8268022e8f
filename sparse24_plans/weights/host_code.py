"""The choice of the host's code for weights: NumPy or numba, with the same bits."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from . import compiled, groups

Array: TypeAlias = "np.ndarray[Any, Any]"

MIN_CELLS = 3 << 18
"""Smallest number of cells that numba is used for. Models are read in blocks of almost 2^20 cells."""


class HostCode(Protocol):
    """The functions that :mod:`groups` and :mod:`compiled` both have."""

    def title(self) -> str: ...
    def ready(self, itemsize: int, *names: str) -> None: ...
    def largest(self, keys: Array, space: groups.Scratch) -> Array: ...
    def covering(self, cells: Array, space: groups.Scratch) -> tuple[Array, Array | None]: ...
    def gather(self, bits: Array, codes: Array, out: Array) -> None: ...
    def scatter(self, values: Array, codes: Array, out: Array) -> None: ...
    def keep(self, bits: Array, codes: Array, out: Array) -> None: ...


def best(cells: int) -> HostCode:
    """The code for a matrix of ``cells`` cells."""
    return compiled if cells >= MIN_CELLS and compiled.obstacle() is None else groups


def versions() -> dict[str, str | None]:
    """Numba's version for reports, or None and the reason why numba isn't used."""
    obstacle = compiled.obstacle()
    return {"numba": None if obstacle else compiled.version(), "no_numba": obstacle}
