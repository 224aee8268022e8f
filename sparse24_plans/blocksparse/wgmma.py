"""Tensor maps of the backends on Hopper's tensor cores."""

from __future__ import annotations

from .._vendor import cuda_driver_abi
from ..device.tensors import TensorView


def matrices_map(view: TensorView, box: tuple[int, int]) -> bytes:
    """Tensor map of a view [Z, heads, rows, columns], whose box (rows, columns) lies in one matrix.

    Raises LibraryError.
    """
    batch, heads, rows, columns = view.shape
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, (batch * heads, rows, columns), view.element.itemsize, box
    )


def rows_map(view: TensorView, box: tuple[int, int]) -> bytes:
    """Tensor map of a view of four sizes as one matrix with the last as columns. Raises LibraryError."""
    first, second, third, columns = view.shape
    size = view.element.itemsize
    return cuda_driver_abi.swizzled_matrix_map(
        view.address, (first * second * third, columns), columns * size, size, box
    )
