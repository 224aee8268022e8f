"""Launches ``blocksparse/transpose.cu``: operands, transposed into the workspace."""

from __future__ import annotations

import ctypes
from math import prod

from ..device.jit.launcher import load
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..vocab import DeviceProperties

SOURCE = "blocksparse/transpose.cu"
_THREADS, _COLUMNS, _ROW_BYTES, _WHOLE = 256, 64, 128, 16


class _Parameters(ctypes.Structure):
    """TurnParams of the kernel."""

    _fields_ = [
        ("from", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_tiles", ctypes.c_uint32),
        ("column_tiles", ctypes.c_uint32),
        ("whole_in", ctypes.c_uint32),
        ("whole_out", ctypes.c_uint32),
    ]


def turn_blocks(shape: tuple[int, ...], itemsize: int) -> int:
    """Blocks of threads that transpose matrices [.., rows, columns]."""
    return prod(shape[:-2]) * prod(_tiles(shape, itemsize))


def _tiles(shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    *_, rows, columns = shape
    return -(-rows * itemsize // _ROW_BYTES), -(-columns // _COLUMNS)


class Turn:
    """Of elements of so many bytes."""

    def __init__(self, itemsize: int, device: DeviceProperties) -> None:
        self._size = itemsize
        self._function = load(SOURCE, "turn", _THREADS, device, {"BYTES": itemsize}, _Parameters)

    def bind(self, view: TensorView, to: int) -> tuple[Launch, TensorView]:
        """A launch that writes the transposes of ``view`` [.., rows, columns] to ``to``, and their view."""
        *outer, rows, columns = view.shape
        row_tiles, column_tiles = _tiles(view.shape, self._size)
        whole_in = (view.address | columns * self._size) % _WHOLE == 0
        parameters = _Parameters(
            to=to,
            rows=rows,
            columns=columns,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            whole_in=int(whole_in),
            whole_out=int(rows * self._size % _WHOLE == 0),
        )
        setattr(parameters, "from", view.address)
        launch = self._function.bind(turn_blocks(view.shape, self._size), parameters)
        return launch, TensorView(to, (*outer, columns, rows), view.element, view.device, owner=view.owner)
