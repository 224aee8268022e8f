"""Launches ``gemm/transpose_x.cu``: X in columns becomes rows in the workspace, in front of a product."""

from __future__ import annotations

from ..device.jit.launcher import load
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..plan.operands import leading_dimension
from ..vocab import DeviceProperties, MatrixOrder
from .descriptor import GemmSparse24Descriptor
from .limits import TURNED_TILE, turned_bytes

SOURCE = "gemm/transpose_x.cu"
_THREADS = 256


@kernel_params("gemm/params/transpose_x.cuh")
class TransposeXParams(KernelParams):
    """Parameters of ``gemm/transpose_x.cu``."""

    x = field("const u16*", "Column-major X[n, k] of 16-bit elements.")
    out = field("u16*", "Row-major copy of X[n, k], contiguous; k is a multiple of 8.")
    n = field("i64", "Number of tokens.")
    k = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one column of X to the next.")
    column_tiles = field("u32", "Number of tiles of 64 columns that cover k.")
    x_aligned = field("u32", "1 if every column of X begins at a multiple of 16 bytes, else 0.")


class Turning:
    """Of the X of one problem, whose elements have 16 bits."""

    def __init__(self, desc: GemmSparse24Descriptor, device: DeviceProperties) -> None:
        self._n, self._k, self.nbytes = desc.n, desc.k, turned_bytes(desc)
        self._column_blocks = -(-desc.k // TURNED_TILE)
        self._function = load(SOURCE, "turn_columns", _THREADS, device, {})

    def launcher(self, source: TensorView, rows: int) -> Launch:
        """From ``source`` to the rows at an address."""
        stride = leading_dimension(source, MatrixOrder.COLUMN)
        parameters = TransposeXParams(
            x=source.address,
            out=rows,
            n=self._n,
            k=self._k,
            x_stride=stride,
            column_tiles=self._column_blocks,
            x_aligned=(source.address | stride * source.element.itemsize) % 16 == 0,
        )
        blocks = self._column_blocks * -(-self._n // TURNED_TILE)
        return self._function.bind(blocks, parameters, overlapping=True)
