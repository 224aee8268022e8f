"""Launches ``blocksparse/attention_backward_wgmma.cu``: the gradients of attention over kept blocks, fused.

One launch makes what each row of Q adds to the others; then one over columns of blocks gives dK and dV, and
one over rows of blocks dQ.
"""

from __future__ import annotations

import ctypes
import math

from ..._vendor import cuda_driver_abi
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, align_up, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import DeviceProperties
from ..attention import BOX, MOST_SLOTS, THREADS, Items, Walk, channels, from_zero, problem_defines
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import COUNTER_BYTES, PASSES, backward_workspace, rows_of_queries
from ..schedules.blocks_wgmma import SHARED_BYTES

_SOURCE = "blocksparse/attention_backward_wgmma.cu"
_ROW_THREADS, _ROW_ELEMENTS = 256, 8
"""Of the first launch; of a row, each thread's."""
_ALIGNMENT = 1024
"""Of a channel's shared memory."""
_MAP = ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES
_SLOT_WORDS, _WORDS = 20, 96
"""Bytes: of a slot its barriers and its first row; of a channel two barriers and four items."""


class _Parameters(ctypes.Structure):
    """AttentionBackwardWgmmaParams of the kernel."""

    _fields_ = [
        ("stays", _MAP * 2),
        ("passes", _MAP * 2),
        ("results", ctypes.c_void_p * 2),
        ("o", ctypes.c_void_p),
        ("d_o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("bases", ctypes.c_void_p),
        ("deltas", ctypes.c_void_p),
        ("items", Items),
        ("scale", ctypes.c_float),
        ("exponent_scale", ctypes.c_float),
        ("matrices", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("kv_heads", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("keys", ctypes.c_uint32),
        ("head_lines", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("padding", ctypes.c_char * 48),  # a tensor map's alignment is the struct's
    ]


class _Pass:
    """One walk over the kept blocks: ``keys`` over columns, for dK and dV, else over rows, for dQ."""

    def __init__(self, desc: BlockSparseAttentionDescriptor, device: DeviceProperties, *, keys: bool) -> None:
        self._walk, self._tile = Walk(desc, columns=keys), _tile(desc, keys=keys)
        slots = _slots(desc, keys=keys)
        self.blocks = self._walk.blocks(device)
        self.details = self._walk.details(device, f"{channels(desc) * slots} slots of {self._tile} rows")
        self.function = load(
            _SOURCE,
            "attention_backward_wgmma",
            THREADS,
            device,
            defines(desc, keys=keys),
            _Parameters,
            shared_bytes=channels(desc) * _channel_bytes(desc, slots, keys=keys),
        )
        self._parameters = _Parameters(
            scale=desc.scale,
            exponent_scale=desc.scale * math.log2(math.e),
            kv_heads=desc.kv_heads,
            **self._walk.sizes(),
        )

    def parameters(self, views: Views, workspace: int) -> _Parameters:
        found = _Parameters.from_buffer_copy(self._parameters)
        keys, rows = self._walk.columns, rows_of_queries(self._walk.problem)
        found.o, found.d_o, found.lse = (views[name].address for name in ("o", "do", "lse"))
        found.bases, found.deltas = workspace, workspace + 4 * rows
        for at, name in enumerate(("dk", "dv") if keys else ("dq",)):
            found.results[at] = views[name].address
        stays, passes = (("k", "v"), ("q", "do")) if keys else (("q", "do"), ("k", "v"))
        boxes = dict.fromkeys(stays, BOX) | dict.fromkeys(passes, self._tile)
        self._walk.fill(found, views, boxes, workspace + 8 * rows + COUNTER_BYTES * keys)
        return found


class Kernel(BaseKernel[BlockSparseAttentionDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self.workspace_size, self.workspace_alignment = backward_workspace(desc), 16
        self.launches = 2 + PASSES
        self._passes = [_Pass(desc, device, keys=keys) for keys in (True, False)]
        self.details = "; ".join(one.details for one in self._passes)
        self._row_blocks = rows_of_queries(desc) * desc.head_size // (_ROW_ELEMENTS * _ROW_THREADS)
        self._row_function = load(
            _SOURCE,
            "attention_backward_rows",
            _ROW_THREADS,
            device,
            defines(desc, keys=True),
            _Parameters,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        bound: list[Launch] = []
        for one in self._passes:
            if not one.blocks:
                continue
            parameters = one.parameters(views, workspace)
            if not bound and self._row_blocks:
                bound.append(self._row_function.bind(self._row_blocks, parameters))
            bound.append(one.function.bind(one.blocks, parameters))
        if not bound:
            return nothing

        def launch(stream: int) -> None:
            for part in bound:
                part(stream)

        counters = workspace + 8 * rows_of_queries(self.descriptor)
        return from_zero(counters, PASSES * COUNTER_BYTES, launch)


def _tile(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> int:
    """Rows that pass at a time: for dK and dV, half of the registers that sums of 128 columns leave."""
    return 64 if keys else desc.layout.block


def _channel_bytes(desc: BlockSparseAttentionDescriptor, slots: int, *, keys: bool) -> int:
    """Of shared memory: what stays; slots; of their rows, where those are of Q, two numbers; words."""
    row = desc.head_size * desc.element.itemsize
    stays, slot = 2 * desc.layout.block * row, 2 * _tile(desc, keys=keys) * (row + 4 * keys)
    return align_up(stays + slots * (slot + _SLOT_WORDS) + _WORDS, _ALIGNMENT)


def _slots(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> int:
    """Of a channel."""
    space = SHARED_BYTES // channels(desc)
    return max(n for n in range(MOST_SLOTS + 1) if _channel_bytes(desc, n, keys=keys) <= space)


def defines(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    return {
        **problem_defines(desc),
        "STATIONARY_KV": int(keys),
        "TILE": _tile(desc, keys=keys),
        "PIPELINE_STAGES": _slots(desc, keys=keys),
    }
