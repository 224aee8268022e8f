"""Launches ``blocksparse/attention_wgmma.cu``: attention over kept blocks, fused."""

from __future__ import annotations

import ctypes
import math

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...device.jit.codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.streams import Launch, driver_error
from ...device.tensors import TensorView, import_cupy
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import COUNTER_BYTES
from ..tables import addresses

_SOURCE = "blocksparse/attention_wgmma.cu"
_THREADS, _SHARED_BYTES = 384, 227 << 10
_BARRIER_BYTES = 256
"""Of a channel: barriers, and what its item is."""
_TILE, _BOX, _MOST_SLOTS = 128, 64, 8
_BAND_BYTES = 16 << 20
"""Of K and V that the items of a band read: L2 has them, and those of the bands beside."""


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
            _THREADS,
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
            lines = {"q": _BOX, "k": desc.layout.block, "v": desc.layout.block}
            try:
                maps = b"".join(_map(views[name], count) for name, count in lines.items())
            except LibraryError as error:
                raise driver_error(error) from error
            ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))  # the maps come first
        parameters.taken = workspace
        return _from_zero(workspace, self._function.bind(self._blocks, parameters))


def _from_zero(counter: int, kernel: Launch) -> Launch:
    """``kernel`` behind a fill of the counter that deals its items."""
    fill = import_cupy().cuda.runtime.memsetAsync

    def launch(stream: int) -> None:
        fill(counter, 0, COUNTER_BYTES, stream)
        kernel(stream)

    return launch


def _map(view: TensorView, lines: int) -> bytes:
    """Boxes of so many rows x 128 bytes."""
    batch, heads, rows, width = view.shape
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, (batch * heads, rows, width), view.element.itemsize, (lines, _BOX)
    )


def _tile_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    return _TILE * desc.head_size * desc.element.itemsize


def _fixed_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    """Of shared memory, beside the slots: Q of both warpgroups, barriers."""
    return _tile_bytes(desc) + _TILE // desc.layout.block * _BARRIER_BYTES


def _slots(desc: BlockSparseAttentionDescriptor) -> int:
    """Of a channel."""
    space = (_SHARED_BYTES - _fixed_bytes(desc)) // (_TILE // desc.layout.block)
    return min(space // _tile_bytes(desc), _MOST_SLOTS)


def _band(desc: BlockSparseAttentionDescriptor) -> int:
    """Matrices of Q whose rows are taken together."""
    matrices = desc.batch * desc.layout.heads
    of_one = 2 * desc.layout.cols * desc.head_size * desc.element.itemsize / max(desc.group, 1)
    bands = math.ceil(matrices * of_one / _BAND_BYTES)
    return max(1, -(-matrices // max(bands, 1)))


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
