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
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import DeviceProperties
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import COUNTER_BYTES, PASSES, backward_workspace, rows_of_queries
from ..tables import addresses
from ..wgmma import BOX, SHARED_BYTES, THREADS, band, from_zero, maps

_SOURCE = "blocksparse/attention_backward_wgmma.cu"
_ROW_THREADS, _ALIGNMENT = 256, 1024
"""Of the first launch; of a channel's shared memory."""
_MAP = ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES
_SIDE = 128
"""Rows of a thread block's items: one block of 128, or two of 64, each with a channel."""
_MOST_SLOTS = 8


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
        self.tile = _tile(desc, keys=keys)
        matrices = desc.batch * (desc.kv_heads if keys else one.heads)
        lines = one.block_cols if keys else one.block_rows
        self.items = matrices * lines
        self.blocks = min(-(-self.items * one.block // _SIDE), device.multiprocessors)
        self.slots = _slots(desc, keys=keys)
        self.about = (_SOURCE, device, defines(desc, keys=keys))
        self.shared_bytes = _SIDE // one.block * _channel_bytes(desc, self.slots, keys=keys)
        passing = desc.group * one.rows if keys else one.cols / max(desc.group, 1)
        self.fields = {
            "scale": desc.scale,
            "exponent_scale": desc.scale * math.log2(math.e),
            "matrices": matrices,
            "heads": one.heads,
            "kv_heads": desc.kv_heads,
            "group": desc.group,
            "rows": one.rows,
            "keys": one.cols,
            "head_lines": lines,
            "band": band(matrices, 2 * passing * desc.head_size * desc.element.itemsize),
        }

    def parameters(self, views: Views, workspace: int) -> _Parameters:
        desc, tables = self._desc, addresses(views["layout"].address, self._desc.layout)
        found = _Parameters(**self.fields)
        line, other = ("column", "rows") if self._keys else ("row", "columns")
        found.order, found.pointers = tables[f"{line}s_by_length"], tables[f"{line}_pointers"]
        found.entries = tables["column_rows" if self._keys else other]
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
            made = maps(
                *((views[name], BOX) for name in stays), *((views[name], self.tile) for name in passes)
            )
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
        passes = [_Pass(desc, device, keys=keys) for keys in (True, False)]
        self.details = "; ".join(
            f"{name}: {one.items} {lines} of blocks on {one.blocks} thread blocks, {one.slots} slots of {one.tile} rows"
            for one, name, lines in zip(passes, ("dK, dV", "dQ"), ("columns", "rows"), strict=True)
        )
        self._passes = []
        for one in passes:
            source, device, macros = one.about
            function = load(
                source, "attention_backward_wgmma", THREADS, device, macros, _Parameters, one.shared_bytes
            )
            self._passes.append((one, function))
        self._row_function = load(
            _SOURCE, "attention_backward_rows", _ROW_THREADS, device, passes[0].about[2], _Parameters
        )
        self._row_blocks = rows_of_queries(desc) * desc.head_size // (8 * _ROW_THREADS)

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc = self.descriptor
        bound: list[Launch] = []
        for one, function in self._passes:
            if not one.blocks:
                continue
            parameters = one.parameters(views, workspace)
            if not bound and self._row_blocks:
                bound.append(self._row_function.bind(self._row_blocks, parameters))
            bound.append(function.bind(one.blocks, parameters))
        if not bound:
            return nothing

        def launch(stream: int) -> None:
            for part in bound:
                part(stream)

        counters = workspace + 8 * rows_of_queries(desc)
        return from_zero(counters, PASSES * COUNTER_BYTES, launch)


def _tile(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> int:
    """Rows that pass at a time: for dK and dV, half of the registers that sums of 128 columns leave."""
    return 64 if keys else desc.layout.block


def _channel_bytes(desc: BlockSparseAttentionDescriptor, slots: int, *, keys: bool) -> int:
    """Of shared memory: what stays; slots, and where their rows are of Q, two numbers of each; barriers and words."""
    row = desc.head_size * desc.element.itemsize
    stays, slot = 2 * desc.layout.block * row, 2 * _tile(desc, keys=keys) * (row + 4 * keys)
    return -(-(stays + slots * (slot + 20) + 96) // _ALIGNMENT) * _ALIGNMENT


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
