"""Launches ``sm80_gemm_mma_sp.cu``: packed weights, sparse tensor cores, one kernel, no workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from .. import jit
from ..gemm import GemmSparse24Descriptor, Operands
from ..packing import TILE_BYTES, TILE_K, TILE_M
from ..registry import KernelSpec
from ..vocab import DeviceProperties, PlanPreference

_THREADS = 256
_STREAMS = 4  # tiles of W that a block works on side by side
_SHARED_ALONE, _SHARED_PAIRED = 227 << 10, 113 << 10  # bytes of a block that has its SM alone, or shares it
# n8 tiles -> how many of the streams lie along M: the more tokens, the more rows share one X.
_BLOCK_TILES = {1: 1, 2: 1, 4: 2, 8: 4, 16: 4}


class _Parameters(ctypes.Structure):
    """MmaSpParams of the kernel."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("row_tiles", ctypes.c_int64),
        ("k_tiles", ctypes.c_int64),
        ("alpha", ctypes.c_float),
    ]


class Shape(NamedTuple):
    """How a problem is cut. ``slices`` fixes the bits and depends on M and the device alone."""

    token_tiles: int
    block_tiles: int
    slices: int
    stages: int
    blocks: int
    shared_bytes: int


def slices_of(m: int, multiprocessors: int) -> int:
    """Slices of K: 8 where four a row tile would leave half of the device without a block, else 4."""
    return 8 if 2 * -(-m // TILE_M) <= multiprocessors else 4


def shape_of(n: int, m: int, multiprocessors: int, slices: int, most_stages: int = 8) -> Shape:
    """The cut for n tokens and m out features."""
    token_tiles = next(tiles for tiles in _BLOCK_TILES if 8 * tiles >= n)
    block_tiles = _BLOCK_TILES[token_tiles]
    groups = _STREAMS // block_tiles
    blocks = -(-m // (TILE_M * block_tiles)) * (slices // groups)
    stage = _STREAMS * TILE_BYTES + groups * 8 * token_tiles * TILE_K * 2
    alone = blocks <= multiprocessors or token_tiles > 8
    stages = min(most_stages, (_SHARED_ALONE if alone else _SHARED_PAIRED) // stage)
    return Shape(token_tiles, block_tiles, slices, stages, blocks, stages * stage)


class Kernel:
    workspace_size = 0
    workspace_alignment = 1
    weight_alignment = 16
    source_alignment = 16
    source_row_alignment = 16
    result_alignment = 1
    launches = 1

    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        device: DeviceProperties,
        spec: KernelSpec,
        preference: PlanPreference,
    ) -> None:
        self._desc = desc
        sms = device.multiprocessors
        self._shape = shape = shape_of(desc.n, desc.m, sms, slices_of(desc.m, sms))
        self.details = (
            f"{shape.blocks} blocks of {TILE_M * shape.block_tiles} rows x {8 * shape.token_tiles} tokens, "
            f"{shape.slices} slices of K, {shape.stages} stages"
        )
        self._function = jit.load(
            "sm80_gemm_mma_sp.cu",
            "gemm_mma_sp",
            _THREADS,
            device.cuda_arch,
            device.ordinal,
            defines(desc, shape),
            shared_bytes=shape.shared_bytes,
        )

    def prepare(self, operands: Operands, workspace: int) -> Callable[[int], None]:
        desc = self._desc
        return self._function.bind(
            self._shape.blocks,
            _Parameters(
                operands.weight.buffers[0].address,
                operands.source.address,
                0 if operands.bias is None else operands.bias.address,
                operands.result.address,
                desc.n,
                desc.m,
                desc.k,
                operands.source_stride,
                operands.result_stride,
                -(-desc.m // TILE_M),
                -(-desc.k // TILE_K),
                desc.alpha,
            ),
        )


def defines(desc: GemmSparse24Descriptor, shape: Shape) -> dict[str, int]:
    """Macros of the kernel for one problem type and cut."""
    return {
        "ELEMENT": jit.ELEMENT_CODES[desc.element],
        "OUT": jit.ELEMENT_CODES[desc.out_element],
        "BIAS": jit.ELEMENT_CODES[desc.bias_element],
        "EPILOGUE": jit.EPILOGUE_CODES[desc.epilogue],
        "TOKEN_TILES": shape.token_tiles,
        "BLOCK_TILES": shape.block_tiles,
        "SLICES": shape.slices,
        "STAGES": shape.stages,
    }
