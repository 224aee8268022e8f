"""Launches ``smxx_inflate.cu``: a canonical weight to a dense matrix, at memory speed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from .. import jit
from ..registry import INFLATE_BLOCK_BYTES
from ..vocab import DeviceProperties, ElementKind
from ..weights import PackedWeight

ALIGNMENT = 16
_THREADS = 256
_VECTOR_BYTES = 16
_BLOCK_VECTORS = INFLATE_BLOCK_BYTES // _VECTOR_BYTES


class _Parameters(ctypes.Structure):
    """InflateParams of the kernel."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
        ("dense", ctypes.c_void_p),
        ("vectors", ctypes.c_uint64),
    ]


class Inflate:
    """The inflate kernel for one element on one device."""

    def __init__(self, element: ElementKind, device: DeviceProperties) -> None:
        self._function = jit.load(
            "smxx_inflate.cu",
            "inflate",
            _THREADS,
            device.cuda_arch,
            device.ordinal,
            {"ELEMENT": jit.ELEMENT_CODES[element], "OUT": 0, "BIAS": 0, "EPILOGUE": 0},
        )

    def prepare(self, weight: PackedWeight, dense: int) -> Callable[[int], None]:
        """A launcher that writes [M, K] row-major to address ``dense``. The weight must not be empty."""
        values, metadata = weight.buffers
        vectors = weight.m * weight.k * weight.element.itemsize // _VECTOR_BYTES
        blocks = -(-vectors // _BLOCK_VECTORS)
        return self._function.bind(blocks, _Parameters(values.address, metadata.address, dense, vectors))
