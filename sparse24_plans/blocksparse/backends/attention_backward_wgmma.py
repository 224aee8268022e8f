"""Launches ``blocksparse/attention_backward_wgmma.cu``: the gradients of attention over kept blocks, fused.

One launch makes what each row of Q adds to the others; then one over columns of blocks gives dK and dV, and
one over rows of blocks dQ.
"""

from __future__ import annotations

import ctypes
import math

from ..._vendor import cuda_driver_abi
from ...device.jit.codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, align_up, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import DeviceProperties
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import COUNTER_BYTES, PASSES, backward_workspace, rows_of_queries
from ..tables import addresses
from ..wgmma import BOX, SHARED_BYTES, THREADS, band, from_zero, maps

_SOURCE = "blocksparse/attention_backward_wgmma.cu"
_ROW_THREADS, _ROW_ELEMENTS = 256, 8
"""Of the first launch; of a row, each thread's."""
_ALIGNMENT = 1024
"""Of a channel's shared memory."""
_OF_COLUMNS = "columns_by_length", "column_pointers", "column_rows"
_OF_ROWS = "rows_by_length", "row_pointers", "columns"
"""Tables: the order of items, where each one's entries begin, the entries."""
_MAP = ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES
_SIDE = 128
"""Rows of a thread block's items: one block of 128, or two of 64, each with a channel."""
_MOST_SLOTS = 8
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
        ("order", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("taken", ctypes.c_void_p),
        ("q_lengths", ctypes.c_void_p),
        ("kv_lengths", ctypes.c_void_p),
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
        one, self._desc, self._keys = desc.layout, desc, keys
        self._tile = _tile(desc, keys=keys)
        matrices = desc.batch * (desc.kv_heads if keys else one.heads)
        lines = one.block_cols if keys else one.block_rows
        items, channels, slots = matrices * lines, _SIDE // one.block, _slots(desc, keys=keys)
        self.blocks = min(-(-items // channels), device.multiprocessors)
        self.details = (
            f"{items} {'columns' if keys else 'rows'} of blocks on {self.blocks} blocks of 2 x 64 rows, "
            f"{channels * slots} slots of {self._tile} rows"
        )
        self.function = load(
            _SOURCE,
            "attention_backward_wgmma",
            THREADS,
            device,
            defines(desc, keys=keys),
            _Parameters,
            shared_bytes=channels * _channel_bytes(desc, slots, keys=keys),
        )
        passing = desc.group * one.rows if keys else one.cols / max(desc.group, 1)
        self._parameters = _Parameters(
            scale=desc.scale,
            exponent_scale=desc.scale * math.log2(math.e),
            matrices=matrices,
            heads=one.heads,
            kv_heads=desc.kv_heads,
            group=desc.group,
            rows=one.rows,
            keys=one.cols,
            head_lines=lines,
            band=band(matrices, 2 * passing * desc.head_size * desc.element.itemsize),
        )

    def parameters(self, views: Views, workspace: int) -> _Parameters:
        desc, tables = self._desc, addresses(views["layout"].address, self._desc.layout)
        found = _Parameters.from_buffer_copy(self._parameters)
        names = _OF_COLUMNS if self._keys else _OF_ROWS
        found.order, found.pointers, found.entries = (tables[name] for name in names)
        found.o, found.d_o, found.lse = (views[name].address for name in ("o", "do", "lse"))
        rows = rows_of_queries(desc)
        found.bases, found.deltas = workspace, workspace + 4 * rows
        found.taken = workspace + 8 * rows + COUNTER_BYTES * self._keys
        for at, name in enumerate(("dk", "dv") if self._keys else ("dq",)):
            found.results[at] = views[name].address
        if desc.lengths:
            found.q_lengths, found.kv_lengths = (views[f"{of}_lengths"].address for of in ("q", "kv"))
        if desc.layout.blocks:  # else nothing is read
            stays, passes = (("k", "v"), ("q", "do")) if self._keys else (("q", "do"), ("k", "v"))
            boxes = [(views[name], BOX) for name in stays] + [(views[name], self._tile) for name in passes]
            made = maps(*boxes)
            ctypes.memmove(ctypes.addressof(found), made, len(made))  # the maps come first
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
    space = SHARED_BYTES // (_SIDE // desc.layout.block)
    return max(n for n in range(_MOST_SLOTS + 1) if _channel_bytes(desc, n, keys=keys) <= space)


def defines(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    return {
        "ELEMENT": ELEMENT_CODES[desc.element],
        "BLOCK": desc.layout.block,
        "HEAD": desc.head_size,
        "CAUSAL": int(desc.causal),
        "LENGTHS": int(desc.lengths),
        "KEYS": int(keys),
        "TILE": _tile(desc, keys=keys),
        "SLOTS": _slots(desc, keys=keys),
    }
