"""Launches ``common/pad_rows.cu``, which copies an operand to rows that begin at multiples of 16 bytes."""

from __future__ import annotations

from ..vocab import DeviceProperties
from .jit.launcher import load
from .jit.structs import KernelParams, field, kernel_params
from .streams import Launch

SOURCE = "common/pad_rows.cu"
_THREADS, _VECTOR_BYTES, _MAX_CTAS = 256, 16, 1 << 14


@kernel_params("common/params/pad_rows.cuh")
class PadRowsParams(KernelParams):
    """Parameters of ``common/pad_rows.cu``."""

    matrix = field("const void*", "Matrix [rows, columns], contiguous.")
    out = field("void*", "The matrix with zeros behind each row: [rows, row_vectors * 16 bytes].")
    rows = field("i64", "Rows of the matrix.")
    columns = field("i64", "Columns of the matrix.")
    row_vectors = field("i64", "Number of 16-byte vectors of a padded row.")


def padded(columns: int, itemsize: int) -> int:
    """Columns of a padded row."""
    vector = _VECTOR_BYTES // itemsize
    return -(-columns // vector) * vector


class PadRows:
    """The kernel for elements of ``itemsize`` bytes, 1 or 2, on one device."""

    def __init__(self, itemsize: int, device: DeviceProperties) -> None:
        self._itemsize = itemsize
        self._function = load(SOURCE, "pad_rows", _THREADS, device, {"BYTES": itemsize})

    def bind(self, rows: int, columns: int, width: int, source: int, target: int) -> Launch:
        """A launch that writes the matrix [rows, columns] at ``source`` to ``target``, as [rows, width].

        Rows of ``width`` elements are multiples of 16 bytes.
        """
        row_vectors = width * self._itemsize // _VECTOR_BYTES
        parameters = PadRowsParams(
            matrix=source, out=target, rows=rows, columns=columns, row_vectors=row_vectors
        )
        ctas = min(-(-rows * row_vectors // _THREADS), _MAX_CTAS)
        return self._function.bind(ctas, parameters, overlapping=True)
