"""Launches ``blocksparse/transpose.cu``: operands, transposed into the workspace."""

from __future__ import annotations

from math import prod

from ..device.jit.launcher import load
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..vocab import DeviceProperties

SOURCE = "blocksparse/transpose.cu"
_THREADS, _COLUMNS, _ROW_BYTES, _WHOLE = 256, 64, 128, 16


@kernel_params("blocksparse/params/transpose.cuh")
class TransposeParams(KernelParams):
    """Parameters of ``blocksparse/transpose.cu``."""

    matrices = field("const void*", "Matrices [.., rows, columns], contiguous.")
    out = field("void*", "Their transposes [.., columns, rows], contiguous.")
    rows = field("i64", "Rows of a matrix.")
    columns = field("i64", "Columns of a matrix.")
    row_tiles = field("u32", "Number of tiles that cover the rows.")
    column_tiles = field("u32", "Number of tiles that cover the columns.")
    rows_aligned = field("u32", "1 if every row of the matrices begins at a multiple of 16 bytes, else 0.")
    columns_aligned = field(
        "u32", "1 if every row of the transposes begins at a multiple of 16 bytes, else 0."
    )


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
        self._function = load(SOURCE, "turn", _THREADS, device, {"BYTES": itemsize})

    def bind(self, view: TensorView, to: int) -> tuple[Launch, TensorView]:
        """A launch that writes the transposes of ``view`` [.., rows, columns] to ``to``, and their view."""
        *outer, rows, columns = view.shape
        row_tiles, column_tiles = _tiles(view.shape, self._size)
        whole_in = (view.address | columns * self._size) % _WHOLE == 0
        parameters = TransposeParams(
            matrices=view.address,
            out=to,
            rows=rows,
            columns=columns,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            rows_aligned=int(whole_in),
            columns_aligned=int(rows * self._size % _WHOLE == 0),
        )
        launch = self._function.bind(turn_blocks(view.shape, self._size), parameters)
        return launch, TensorView(to, (*outer, columns, rows), view.element, view.device, owner=view.owner)
