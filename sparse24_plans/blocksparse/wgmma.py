"""What the backends on Hopper's tensor cores share: tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from .._vendor import cuda_driver_abi
from .._vendor.library_error import LibraryError
from ..device.streams import driver_error
from ..device.tensors import TensorView


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
