"""What the backends on Hopper's tensor cores share: tensor maps; of attention the items' order, counters."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

from .._vendor import cuda_driver_abi
from .._vendor.library_error import LibraryError
from ..device.streams import Launch, driver_error
from ..device.tensors import TensorView, import_cupy
from .schedule import SHARED_BYTES as SHARED_BYTES

BOX = 64
"""Columns of 16 bits that a box of a tensor map has: 128 bytes."""
THREADS = 384
"""Two warpgroups that multiply and one that copies."""
_BAND_BYTES = 16 << 20
"""Of what the items of a band share: L2 has it, and that of the bands beside."""


def from_zero(counters: int, nbytes: int, kernel: Launch) -> Launch:
    """``kernel`` behind a fill of the counters that deal its items."""
    fill = import_cupy().cuda.runtime.memsetAsync

    def launch(stream: int) -> None:
        fill(counters, 0, nbytes, stream)
        kernel(stream)

    return launch


def maps(*boxes: tuple[TensorView, int]) -> bytes:
    """Of each view [Z, heads, rows, head_size] a tensor map: boxes of so many rows x 128 bytes.

    Raises DriverError.
    """
    try:
        return b"".join(matrices_map(view, (lines, BOX)) for view, lines in boxes)
    except LibraryError as error:
        raise driver_error(error) from error


def put_maps(parameters: ctypes.Structure, make: Callable[..., bytes], *given: object) -> None:
    """Put ``make(*given)`` where the maps of a struct of parameters lie: in front. Raises DriverError."""
    try:
        maps = make(*given)
    except LibraryError as error:
        raise driver_error(error) from error
    ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))


def matrices_map(view: TensorView, box: tuple[int, int]) -> bytes:
    """Of a view [Z, heads, rows, columns]: a box (rows, columns) is of one matrix. Raises LibraryError."""
    batch, heads, rows, columns = view.shape
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, (batch * heads, rows, columns), view.element.itemsize, box
    )


def rows_map(view: TensorView, box: tuple[int, int]) -> bytes:
    """Of a view of four sizes as one matrix, with the last as columns. Raises LibraryError."""
    first, second, third, columns = view.shape
    size = view.element.itemsize
    return cuda_driver_abi.swizzled_matrix_map(
        view.address, (first * second * third, columns), columns * size, size, box
    )


def band(matrices: int, nbytes: float) -> int:
    """Matrices whose items are taken together, when the items of one share so many bytes."""
    bands = math.ceil(matrices * nbytes / _BAND_BYTES)
    return max(1, -(-matrices // max(bands, 1)))
