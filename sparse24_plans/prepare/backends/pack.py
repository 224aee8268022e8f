"""Launches ``prepare/pack.cu``: canonical weights to tiles of 64 rows, and back. One kernel, no workspace."""

from __future__ import annotations

import ctypes

from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Views
from ...vocab import PrepareOp
from ...weights.packed_layouts import layout_of
from ..descriptor import PackSparse24Descriptor
from ..kernel import PrepareKernel, element_defines, reset_then

_SOURCE = "prepare/pack.cu"
_THREADS = 256


class _Parameters(ctypes.Structure):
    """PackParams of the kernels."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
    ]


class Kernel(PrepareKernel[PackSparse24Descriptor]):
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        down, across, _ = layout_of(desc.element).packed_shape(desc.m, desc.k)
        self._blocks = down * across
        self._reports = desc.op is PrepareOp.UNPACK
        self.launches = 2 if self._reports else 1
        self.details = f"{desc.op}, {self._blocks} tiles"
        self._function = load(
            _SOURCE,
            str(desc.op),
            _THREADS,
            choice.device,
            element_defines(desc.element),
            _Parameters,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        names = ("values", "metadata", "packed", "status")
        at = [views[name].address if name in views else 0 for name in names]
        kernel: Launch = nothing
        if self._blocks:
            kernel = self._function.bind(self._blocks, _Parameters(*at, self.descriptor.m, self.descriptor.k))
        return reset_then(views["status"], kernel) if self._reports else kernel
