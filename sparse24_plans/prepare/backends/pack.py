"""Launches ``prepare/pack.cu``: canonical weights to tiles of 64 rows, and back. One kernel, no workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ...device.jit.launcher import load
from ...device.tensors import TensorView
from ...vocab import DeviceProperties, PrepareOp
from ...weights.packing import layout_of
from ..descriptor import PackSparse24Descriptor
from .prune import element_defines, reset_then

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


class Kernel:
    alignment = 16

    def __init__(self, desc: PackSparse24Descriptor, device: DeviceProperties) -> None:
        self._desc = desc
        down, across, _ = layout_of(desc.element).packed_shape(desc.m, desc.k)
        self._blocks = down * across
        self._checks = desc.kind is PrepareOp.UNPACK
        self.launches = 2 if self._checks else 1
        self.details = f"{desc.kind}, {self._blocks} tiles"
        self._function = load(
            "prepare/pack.cu",
            str(desc.kind),
            _THREADS,
            device,
            element_defines(desc.element),
            _Parameters,
        )

    def prepare(self, views: dict[str, TensorView]) -> Callable[[int], None]:
        names = ("values", "metadata", "packed", "status")
        at = [views[name].address if name in views else 0 for name in names]
        kernel: Callable[[int], None] = lambda stream: None  # noqa: E731
        if self._blocks:
            kernel = self._function.bind(self._blocks, _Parameters(*at, self._desc.m, self._desc.k))
        return reset_then(views["status"], kernel) if self._checks else kernel
