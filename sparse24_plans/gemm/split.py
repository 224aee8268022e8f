"""Launches ``gemm/f32_split.cu`` and ``gemm/wgmma_sp.cu``: float32 as parts of bf16 on sparse tensor cores.

The workspace holds the parts of X.
"""

from __future__ import annotations

import ctypes

from .._vendor import cuda_driver_abi
from .._vendor.library_error import LibraryError
from ..device.jit.launcher import load
from ..device.streams import Launch, driver_error
from ..plan.kernel import Choice, align_up
from ..plan.operands import Alignment, Views
from ..weights.layouts import TILE_M, TILES_32BIT
from .arithmetic import names
from .kernel import GemmKernel, address
from .limits import BF16, SPLIT_BLOCK, split_bytes
from .schedules.split_choice import best_schedule
from .schedules.wgmma_sp import Lines, Schedule
from .wgmma import SOURCE, Parameters, defines

_SPLIT = "gemm/f32_split.cu"
_THREADS, _BOX_COLUMNS = 256, 64
"""Of a block of the pass over X; columns of its parts that are copied at a time."""


class _SplitParameters(ctypes.Structure):
    """F32SplitParams of the kernel."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
    ]


class Kernel(GemmKernel):
    """Of both backends: the row says how many parts there are."""

    alignments = {"weight": Alignment(16), "source": Alignment(16, 16)}  # noqa: RUF012
    sources = (_SPLIT, SOURCE)
    launches = 2
    workspace_alignment = 128

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._schedule = schedule = _schedule_of(choice)
        items = schedule.items(desc.n, desc.m)
        # One slice: blocks stay and take tile after tile.
        resident = schedule.resident_clusters(device.multiprocessors)
        self._blocks = (min(items, resident) if schedule.slices == 1 else items) * schedule.cluster
        self._split_blocks = -(-desc.n * desc.k // SPLIT_BLOCK)
        self.workspace_size = split_bytes(self.row.parts, desc)
        lines, parts = Lines.of(desc), self.row.parts
        self._split = load(_SPLIT, "f32_split", _THREADS, device, {"PARTS": parts}, _SplitParameters)
        stages = schedule.stages(lines, parts)
        self._function = load(
            SOURCE,
            "gemm_wgmma_sp",
            128 * (schedule.warpgroups + 1),
            device,
            defines(desc, schedule, False, parts),
            Parameters,
            shared_bytes=schedule.shared_bytes(lines, parts),
        )
        self.details = (
            f"X in {parts} parts, {items * schedule.share} tiles of {schedule.rows} rows x "
            f"{schedule.tokens} tokens on {self._blocks} blocks, K in {schedule.slices} slices, clusters of "
            f"{schedule.cluster}, {stages[0]} + {stages[1]} stages"
        )
        blocks = -(-desc.n // schedule.tokens)
        tail_rows = schedule.tail_rows(desc.n)
        self._tail_box = tail_rows, _BOX_COLUMNS
        self._source_box = (schedule.tokens // schedule.share, _BOX_COLUMNS) if blocks > 1 else self._tail_box
        self._result_box = schedule.step_tokens(lines.out_bytes), min(TILE_M, 128 // lines.out_bytes)
        self._parameters = Parameters(
            n=desc.n,
            m=desc.m,
            k=desc.k,
            row_tiles=-(-desc.m // TILE_M),
            k_tiles=-(-desc.k // TILES_32BIT.tile_k),
            alpha=desc.alpha,
            token_blocks=blocks,
            items=items,
            whole=items,
            tail_rows=tail_rows,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        parameters = Parameters.from_buffer_copy(self._parameters)
        size, result_stride = result.element.itemsize, result.strides[0]
        copied = self._schedule.slices == 1
        ends = desc.m * size if copied else 0
        parameters.aligned = (result.address | result_stride * size | ends) % 16 == 0
        shape, size_of_part = (self.row.parts * desc.n, desc.k), BF16.itemsize
        space = workspace or source.address  # whether it can run is asked without a workspace
        try:
            map_of = cuda_driver_abi.swizzled_matrix_map
            maps = map_of(space, shape, desc.k * size_of_part, size_of_part, self._source_box)
            # The rest map is of X in columns alone.
            maps += 2 * map_of(space, shape, desc.k * size_of_part, size_of_part, self._tail_box)
            if parameters.aligned and copied:
                pitch = result_stride * size if desc.n > 1 else align_up(desc.m * size, 16)
                maps += map_of(result.address, (desc.n, desc.m), pitch, size, self._result_box)
        except LibraryError as error:
            raise driver_error(error) from error
        ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))
        parameters.packed = views["packed"].address
        parameters.bias = address(views.get("bias"))
        parameters.y = result.address
        parameters.y_stride = result_stride
        parameters.x = source.address
        parameters.x_stride = source.strides[0]
        split = self._split.bind(
            self._split_blocks,
            _SplitParameters(source.address, workspace, desc.n, desc.k, source.strides[0]),
            overlapping=True,
        )
        multiply = self._function.bind(self._blocks, parameters, overlapping=True)

        def launch(stream: int) -> None:
            split(stream)
            multiply(stream)

        return launch

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        return names.split(choice.descriptor, choice.row.parts, _schedule_of(choice).slices)


def _schedule_of(choice: Choice) -> Schedule:
    return best_schedule(choice.descriptor, choice.row, choice.preference.whole_m)
