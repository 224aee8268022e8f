"""What the backends of attention on Hopper's tensor cores share: maps, the items' order, counters."""

from __future__ import annotations

import math

from .._vendor import cuda_driver_abi
from .._vendor.library_error import LibraryError
from ..device.streams import Launch, driver_error
from ..device.tensors import TensorView, import_cupy

BOX = 64
"""Columns of 16 bits that a box of a tensor map has: 128 bytes."""
SHARED_BYTES = 227 << 10
"""Of a multiprocessor, for one thread block."""
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
        return b"".join(_map(view, lines) for view, lines in boxes)
    except LibraryError as error:
        raise driver_error(error) from error


def _map(view: TensorView, lines: int) -> bytes:
    batch, heads, rows, width = view.shape
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, (batch * heads, rows, width), view.element.itemsize, (lines, BOX)
    )


def band(matrices: int, nbytes: float) -> int:
    """Matrices whose items are taken together, when the items of one share so many bytes."""
    bands = math.ceil(matrices * nbytes / _BAND_BYTES)
    return max(1, -(-matrices // max(bands, 1)))
