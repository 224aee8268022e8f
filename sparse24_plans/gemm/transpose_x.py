"""Launches ``gemm/transpose_x.cu``: X in columns becomes rows in the workspace, in front of a product."""

from __future__ import annotations

import ctypes

from ..device.jit.launcher import load
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..plan.operands import leading_dimension
from ..vocab import DeviceProperties, MatrixOrder
from .descriptor import GemmSparse24Descriptor
from .limits import TURNED_TILE, turned_bytes

SOURCE = "gemm/transpose_x.cu"
_THREADS = 256


class _Parameters(ctypes.Structure):
    """TurnColumnsParams of the kernel."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("column_blocks", ctypes.c_uint32),
        ("aligned", ctypes.c_uint32),
    ]


class Turning:
    """Of the X of one problem, whose elements have 16 bits."""

    def __init__(self, desc: GemmSparse24Descriptor, device: DeviceProperties) -> None:
        self._n, self._k, self.nbytes = desc.n, desc.k, turned_bytes(desc)
        self._column_blocks = -(-desc.k // TURNED_TILE)
        self._function = load(SOURCE, "turn_columns", _THREADS, device, {}, _Parameters)

    def launcher(self, source: TensorView, rows: int) -> Launch:
        """From ``source`` to the rows at an address."""
        stride = leading_dimension(source, MatrixOrder.COLUMN)
        parameters = _Parameters(
            x=source.address,
            rows=rows,
            n=self._n,
            k=self._k,
            x_stride=stride,
            column_blocks=self._column_blocks,
            aligned=(source.address | stride * source.element.itemsize) % 16 == 0,
        )
        blocks = self._column_blocks * -(-self._n // TURNED_TILE)
        return self._function.bind(blocks, parameters, overlapping=True)
