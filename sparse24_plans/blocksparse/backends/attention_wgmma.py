"""Launches ``blocksparse/attention_wgmma.cu``: attention over kept blocks, fused."""

from __future__ import annotations

import ctypes
import math

from ..._vendor import cuda_driver_abi
from ...device.jit.codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import COUNTER_BYTES
from ..tables import addresses
from ..wgmma import BOX, SHARED_BYTES, THREADS, band, from_zero, maps

_SOURCE = "blocksparse/attention_wgmma.cu"
_BARRIER_BYTES = 256
"""Of a channel: barriers, and what its item is."""
_TILE, _MOST_SLOTS = 128, 8


class _Parameters(ctypes.Structure):
    """AttentionWgmmaParams of the kernel."""

    _fields_ = [
        ("q_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("k_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("v_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("taken", ctypes.c_void_p),
        ("q_lengths", ctypes.c_void_p),
        ("kv_lengths", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("matrices", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("keys", ctypes.c_uint32),
        ("head_rows", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("padding", ctypes.c_char * 32),  # a tensor map's alignment is the struct's
    ]


class Kernel(BaseKernel[BlockSparseAttentionDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        one = desc.layout
        channels = _TILE // one.block
        matrices = desc.batch * one.heads
        items = matrices * one.block_rows
        self._blocks = min(-(-items // channels), device.multiprocessors)
        self.launches, self.workspace_size, self.workspace_alignment = 2, COUNTER_BYTES, COUNTER_BYTES
        slots = _slots(desc)
        self.details = (
            f"{items} rows of blocks on {self._blocks} blocks of 2 x 64 rows, {channels * slots} slots of "
            f"{_TILE} keys"
        )
        self._function = load(
            _SOURCE,
            "attention_wgmma",
            THREADS,
            device,
            defines(desc),
            _Parameters,
            shared_bytes=_fixed_bytes(desc) + channels * slots * _tile_bytes(desc),
        )
        self._parameters = _Parameters(
            scale=abs(desc.scale) * math.log2(math.e),
            matrices=matrices,
            heads=one.heads,
            group=desc.group,
            rows=one.rows,
            keys=one.cols,
            head_rows=one.block_rows,
            band=_band(desc),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc = self.descriptor
        if self._blocks == 0:
            return nothing
        parameters = _Parameters.from_buffer_copy(self._parameters)
        tables = addresses(views["layout"].address, desc.layout)
        parameters.order, parameters.pointers = tables["rows_by_length"], tables["row_pointers"]
        parameters.columns = tables["columns"]
        parameters.o, parameters.lse = views["o"].address, views["lse"].address
        if desc.lengths:
            parameters.q_lengths = views["q_lengths"].address
            parameters.kv_lengths = views["kv_lengths"].address
        if desc.layout.blocks:  # else nothing is read
            found = maps((views["q"], BOX), *((views[name], desc.layout.block) for name in "kv"))
            ctypes.memmove(ctypes.addressof(parameters), found, len(found))  # the maps come first
        parameters.taken = workspace
        return from_zero(workspace, COUNTER_BYTES, self._function.bind(self._blocks, parameters))


def _tile_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    return _TILE * desc.head_size * desc.element.itemsize


def _fixed_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    """Of shared memory, beside the slots: Q of both warpgroups, barriers."""
    return _tile_bytes(desc) + _TILE // desc.layout.block * _BARRIER_BYTES


def _slots(desc: BlockSparseAttentionDescriptor) -> int:
    """Of a channel."""
    space = (SHARED_BYTES - _fixed_bytes(desc)) // (_TILE // desc.layout.block)
    return min(space // _tile_bytes(desc), _MOST_SLOTS)


def _band(desc: BlockSparseAttentionDescriptor) -> int:
    """Matrices of Q whose rows are taken together."""
    of_one = 2 * desc.layout.cols * desc.head_size * desc.element.itemsize / max(desc.group, 1)
    return band(desc.batch * desc.layout.heads, of_one)


def defines(desc: BlockSparseAttentionDescriptor) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    return {
        "ELEMENT": ELEMENT_CODES[desc.element],
        "BLOCK": desc.layout.block,
        "HEAD": desc.head_size,
        "CAUSAL": int(desc.causal),
        "LENGTHS": int(desc.lengths),
        "SIGN": -1 if desc.scale < 0 else 1,
        "TURNS": int(desc.layout.block == _TILE),
        "SLOTS": _slots(desc),
    }
