"""Launches ``common/transpose.cu``, which transposes operands into a workspace in front of a product."""

from __future__ import annotations

from typing import NamedTuple

from ..vocab import DeviceProperties
from .jit.launcher import load
from .jit.structs import KernelParams, field, kernel_params
from .streams import Launch

SOURCE = "common/transpose.cu"
_THREADS, _TILE_COLUMNS, _TILE_ROW_BYTES, _VECTOR_BYTES = 256, 64, 128, 16


@kernel_params("common/params/transpose.cuh")
class TransposeParams(KernelParams):
    """Parameters of ``common/transpose.cu``."""

    matrices = field("const void*", "Matrices [batch, rows, columns], one behind the other.")
    out = field("void*", "Transposed matrices [batch, columns, rows], contiguous.")
    rows = field("i64", "Rows of a matrix.")
    columns = field("i64", "Columns of a matrix.")
    row_stride = field("i64", "Elements from one row of a matrix to the next.")
    row_tiles = field("u32", "Number of tiles that cover the rows.")
    column_tiles = field("u32", "Number of tiles that cover the columns.")
    rows_aligned = field("u32", "1 if every row of the matrices begins at a multiple of 16 bytes.")
    columns_aligned = field("u32", "1 if every row of the transposes begins at a multiple of 16 bytes.")


class Matrices(NamedTuple):
    """Matrices of one size to transpose, one behind the other."""

    rows: int
    columns: int
    itemsize: int
    """Bytes of an element: 1 or 2."""
    batch: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all the matrices."""
        return self.batch * self.rows * self.columns * self.itemsize

    @property
    def ctas(self) -> int:
        """Grid size of the launch that transposes them."""
        row_tiles, column_tiles = self.tiles
        return self.batch * row_tiles * column_tiles

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles that cover the rows and the columns of a matrix."""
        return -(-self.rows * self.itemsize // _TILE_ROW_BYTES), -(-self.columns // _TILE_COLUMNS)


class Transpose:
    """The transpose kernel for elements of ``itemsize`` bytes on one device."""

    def __init__(self, itemsize: int, device: DeviceProperties) -> None:
        self._function = load(SOURCE, "transpose", _THREADS, device, {"BYTES": itemsize})

    def bind(self, matrices: Matrices, source: int, target: int, row_stride: int | None = None) -> Launch:
        """A launch that writes the transposes of the matrices at ``source`` to ``target``.

        ``row_stride`` is the elements from one row to the next if rows do not touch.
        """
        stride = matrices.columns if row_stride is None else row_stride
        row_tiles, column_tiles = matrices.tiles
        parameters = TransposeParams(
            matrices=source,
            out=target,
            rows=matrices.rows,
            columns=matrices.columns,
            row_stride=stride,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            rows_aligned=(source | stride * matrices.itemsize) % _VECTOR_BYTES == 0,
            columns_aligned=matrices.rows * matrices.itemsize % _VECTOR_BYTES == 0,
        )
        return self._function.bind(matrices.ctas, parameters, overlapping=True)
