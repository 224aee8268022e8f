"""Launches ``weights/inflate.cu``, which expands a canonical weight to a dense matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ..device.jit.enum_codes import ELEMENT_CODES
from ..device.jit.launcher import load
from ..device.tensors import TensorView
from ..vocab import DeviceProperties, ElementKind

SOURCE = "weights/inflate.cu"
ALIGNMENT = 16
"""Bytes that must divide every address."""
BLOCK_BYTES = 16384
"""Dense bytes that a CTA writes."""
_THREADS = 256


class _Parameters(ctypes.Structure):
    """InflateParams of the kernel."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
        ("dense", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]


class Inflate:
    """The inflate kernel for one element on one device."""

    def __init__(self, element: ElementKind, device: DeviceProperties) -> None:
        self._function = load(SOURCE, "inflate", _THREADS, device, _defines(element), _Parameters)

    def bind(self, values: TensorView, metadata: TensorView, dense: int) -> Callable[[int], None]:
        """A launch that writes [M, K], row-major, to address ``dense``. The weight must not be empty."""
        nbytes = 2 * values.shape[0] * values.shape[1] * values.element.itemsize
        blocks = -(-nbytes // BLOCK_BYTES)
        return self._function.bind(blocks, _Parameters(values.address, metadata.address, dense, nbytes))


def _defines(element: ElementKind) -> dict[str, int]:
    """Macros of the kernel. 8-bit elements are told by their width, because not all of them have a code."""
    if element.itemsize == 1:
        return {"WIDTH": 1}
    return {"ELEMENT": ELEMENT_CODES[element], "OUT": 0, "BIAS": 0, "EPILOGUE": 0}
