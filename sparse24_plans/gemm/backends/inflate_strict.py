"""Launches ``gemm/inflate_strict.cu``: canonical weights, one kernel, no workspace."""

from __future__ import annotations

import ctypes

from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Alignment, Views
from ...vocab import DeviceProperties, GemmOp
from ..descriptor import GemmSparse24Descriptor
from ..kernel import GemmKernel, address
from ..limits import STRICT_SMALL_TILE

_SOURCE = "gemm/inflate_strict.cu"
# (outputs, tokens) of a tile -> kernel, threads; from the largest to the smallest.
_TILES = {
    (128, 128): ("gemm_strict_large", 256),
    (128, 32): ("gemm_strict_medium", 128),
    STRICT_SMALL_TILE: ("gemm_strict_small", 128),
}


class _Parameters(ctypes.Structure):
    """StrictParams of the kernel."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("source_stride", ctypes.c_int64),
        ("result_stride", ctypes.c_int64),
        ("alpha", ctypes.c_float),
    ]


class Kernel(GemmKernel):
    alignments = {"weight": Alignment(16)}  # noqa: RUF012
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        tile = _tile_for(desc, device)
        self._blocks = _blocks(desc, tile)
        name, threads = _TILES[tile]
        self.details = f"{name}, tile {tile[0]}x{tile[1]}, {self._blocks} blocks"
        defines = {**type_defines(desc), "DGRAD": int(desc.op is GemmOp.DGRAD)}
        self._function = load(_SOURCE, name, threads, device, defines, _Parameters)

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        if self._blocks == 0:
            return nothing
        return self._function.bind(
            self._blocks,
            _Parameters(
                views["values"].address,
                views["metadata"].address,
                source.address,
                address(views.get("bias")),
                result.address,
                desc.n,
                desc.m,
                desc.k,
                source.strides[0],
                result.strides[0],
                desc.alpha,
            ),
        )


def _tile_for(desc: GemmSparse24Descriptor, device: DeviceProperties) -> tuple[int, int]:
    """The largest tile that n half fills and that leaves no half of the device idle.

    Every result is defined on its own, so the tile is free to follow n: no bit depends on it.
    """
    for tile in _TILES:
        if 2 * desc.n > tile[1] and 2 * _blocks(desc, tile) >= device.multiprocessors:
            return tile
    return STRICT_SMALL_TILE


def _blocks(desc: GemmSparse24Descriptor, tile: tuple[int, int]) -> int:
    return -(-desc.sums // tile[0]) * -(-desc.n // tile[1])
