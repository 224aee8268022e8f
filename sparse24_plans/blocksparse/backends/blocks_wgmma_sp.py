"""Launches ``blocksparse/blocks_wgmma_sp.cu``: kept 2:4 blocks and the rows that they meet, by wgmma.sp."""

from __future__ import annotations

import ctypes

from ..._vendor import cuda_driver_abi
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load, put_maps
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import K_MAJOR, Form
from ..lookup_tables import STRIP
from ..schedules.blocks_wgmma_sp import THREADS, Schedule, best_schedule
from ..wgmma import matrices_map, rows_map

_SOURCE = "blocksparse/blocks_wgmma_sp.cu"
_STEP, _LINE_BYTES = 64, 128
"""Of what is summed over, in a stage of X; bytes of a line of a box."""


class _Parameters(ctypes.Structure):
    """BlocksWgmmaSpParams of the kernel."""

    _fields_ = [
        ("values_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("right_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("out_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("metadata", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("blocks", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("strips", ctypes.c_uint32),
        ("head_strips", ctypes.c_uint32),
        ("head_lines", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("token_clusters", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("bands", ctypes.c_uint32),
        ("padding", ctypes.c_char * 24),  # a tensor map's alignment is the struct's
    ]


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._form = form = Form(desc)
        self._reads = desc.layout.blocks > 0 and desc.reduction > 0  # or the result is zeros
        self._schedule = schedule = best_schedule(desc, device.multiprocessors)
        items = schedule.items(desc)
        clusters = min(items, schedule.resident_clusters(device.multiprocessors))
        self._blocks = clusters * schedule.share
        band, bands = schedule.bands(desc, clusters)
        self.details = (
            f"{items * schedule.share} tiles of 128 rows x {schedule.tokens} tokens on {self._blocks} "
            f"blocks, clusters of {schedule.share}, {schedule.dense_stages} stages"
        )
        self._function = load(
            _SOURCE,
            "blocks_wgmma_sp",
            THREADS,
            device,
            defines(desc, schedule),
            _Parameters,
            shared_bytes=schedule.shared_bytes(desc.layout.block),
        )
        head_strips = form.head_strips(STRIP, desc.layout.block)
        self._parameters = _Parameters(
            blocks=desc.layout.blocks,
            alpha=desc.alpha,
            strips=desc.layout.heads * head_strips,
            head_strips=head_strips,
            head_lines=form.head_lines,
            words=form.words,
            heads=desc.layout.heads,
            batch=desc.batch,
            tokens=desc.n,
            token_clusters=schedule.token_clusters(desc),
            band=band,
            bands=bands,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._blocks == 0:
            return nothing
        parameters = _Parameters.from_buffer_copy(self._parameters)
        for field, at in self._form.tables(views["layout"].address, self.descriptor).items():
            setattr(parameters, field, at)
        put_maps(parameters, self._maps, views)
        parameters.metadata = views["metadata"].address
        if "bias" in views:
            parameters.bias = views["bias"].address
        return self._function.bind(self._blocks, parameters, overlapping=True)

    def _maps(self, views: Views) -> bytes:
        """Of the values, X and the result."""
        form, schedule = self._form, self._schedule
        found = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        if self._reads:
            values = views[form.left]
            rows, width = values.shape[-2:]
            found = rows_map(values, (rows // schedule.share, width))
            lines = schedule.tokens if form.right_major == K_MAJOR else _STEP
            found += matrices_map(views[form.right], (lines, _STEP))
        out = views["c"]
        wide = _LINE_BYTES // out.element.itemsize  # the kernel's staging area has 64 lines of 128 bytes
        return found + matrices_map(out, (_STEP if form.tokens_contiguous else wide, wide))


def defines(desc: BlockSparseMatmulDescriptor, schedule: Schedule) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    form = Form(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TILE_N": schedule.tokens,
        "CLUSTER_N": schedule.share,
        "SPARSE_STAGES": schedule.sparse_stages,
        "DENSE_STAGES": schedule.dense_stages,
        "BUFFERS": schedule.buffers,
        "DENSE_MAJOR": form.right_major,
        "TOKENS_CONTIGUOUS": int(form.tokens_contiguous),
    }
