"""Launches ``smxx_inflate.cu``: a canonical weight to a dense matrix, at memory speed.

:class:`Inflate` serves the inflate tier; :class:`Kernel` is the plan of prepare.py around it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from .. import jit
from ..limits import INFLATE_BLOCK_BYTES
from ..prepare_problems import DecompressSparse24Descriptor
from ..tensors import TensorView
from ..vocab import CANONICAL_LAYOUT, DeviceProperties, ElementKind
from ..weights import PackedWeight

ALIGNMENT = 16
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
        self._function = jit.load(
            "smxx_inflate.cu",
            "inflate",
            _THREADS,
            device.cuda_arch,
            device.ordinal,
            _defines(element),
        )

    def prepare(self, weight: PackedWeight, dense: int) -> Callable[[int], None]:
        """A launcher that writes [M, K] row-major to address ``dense``. The weight must not be empty."""
        values, metadata = weight.buffers
        nbytes = weight.m * weight.k * weight.element.itemsize
        blocks = -(-nbytes // INFLATE_BLOCK_BYTES)
        return self._function.bind(blocks, _Parameters(values.address, metadata.address, dense, nbytes))


def _defines(element: ElementKind) -> dict[str, int]:
    """8-bit elements have no arithmetic in common.cuh, and need none here: only their width."""
    if element.itemsize == 1:
        return {"WIDTH": 1}
    return {"ELEMENT": jit.ELEMENT_CODES[element], "OUT": 0, "BIAS": 0, "EPILOGUE": 0}


class Kernel:
    alignment = ALIGNMENT
    launches = 1
    details = "one vector of 16 dense bytes a step"

    def __init__(self, desc: DecompressSparse24Descriptor, device: DeviceProperties) -> None:
        self._desc = desc
        self._inflate = Inflate(desc.element, device)

    def prepare(self, views: dict[str, TensorView]) -> Callable[[int], None]:
        desc, values, metadata = self._desc, views["values"], views["metadata"]
        if desc.m * desc.k == 0:
            return lambda stream: None
        weight = PackedWeight(
            CANONICAL_LAYOUT, desc.m, desc.k, desc.element, values.device, (values, metadata)
        )
        return self._inflate.prepare(weight, views["dense"].address)
