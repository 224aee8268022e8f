"""Launches ``gemm/inflate_strict.cu``: canonical weights, one kernel, no workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ...device.jit.codes import type_defines
from ...device.jit.launcher import load
from ...vocab import DeviceProperties, GemmOp, PlanPreference
from ..limits import STRICT_SMALL_TILE
from ..plan import BackendKernel, GemmSparse24Descriptor, Operands
from ..table import KernelSpec

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


class Kernel(BackendKernel):
    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        device: DeviceProperties,
        spec: KernelSpec,
        preference: PlanPreference,
    ) -> None:
        self._desc = desc
        tile = _tile_for(desc, device)
        self._blocks = _blocks(desc, tile)
        name, threads = _TILES[tile]
        self.details = f"{name}, tile {tile[0]}x{tile[1]}, {self._blocks} blocks"
        self._function = load(
            "gemm/inflate_strict.cu",
            name,
            threads,
            device,
            {
                **type_defines(desc),
                "DGRAD": int(desc.op is GemmOp.DGRAD),
            },
            _Parameters,
        )

    def prepare(self, operands: Operands, workspace: int) -> Callable[[int], None]:
        desc = self._desc
        if self._blocks == 0:
            return lambda stream: None
        values, metadata = operands.weight.buffers
        return self._function.bind(
            self._blocks,
            _Parameters(
                values.address,
                metadata.address,
                operands.source.address,
                0 if operands.bias is None else operands.bias.address,
                operands.result.address,
                desc.n,
                desc.m,
                desc.k,
                operands.source_stride,
                operands.result_stride,
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
    return -(-desc.outputs // tile[0]) * -(-desc.n // tile[1])
