"""Launches ``gemm/f32_split.cu`` and ``gemm/wgmma_sp.cu``: float32 as parts of bf16 on sparse tensor cores.

The workspace holds the parts of X, then what blocks hand over, then sums of groups of columns.
"""

from __future__ import annotations

from ..device.jit.launcher import load
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.streams import Launch
from ..plan.kernel import Choice, launch_in_order
from ..plan.operands import Alignment, Views
from ..weights.packed_layouts import layout_called
from .arithmetic import names
from .kernel import GemmKernel
from .limits import BF16, SPLIT_BLOCK
from .schedules.f32_split_heuristics import RANGE_TILES, Regions, best_schedule
from .schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from .wgmma import (
    SOURCE,
    defines,
    fixed_parameters,
    grid_size,
    launch_parameters,
    lines_map,
    result_box,
    source_boxes,
)

_SPLIT = "gemm/f32_split.cu"
_THREADS = 256
"""Of a block of the pass over X."""


@kernel_params("gemm/params/f32_split.cuh")
class F32SplitParams(KernelParams):
    """Parameters of ``gemm/f32_split.cu``."""

    x = field("const float*", "X[n, k].")
    terms = field("u16*", "The bf16 terms of X: [terms][n][k].")
    n = field("i64", "Number of tokens.")
    k = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one row of X to the next.")


class Kernel(GemmKernel):
    """Of both backends: the row says how many parts there are."""

    alignments = {"weight": Alignment(16), "source": Alignment(16, 16)}  # noqa: RUF012
    sources = (_SPLIT, SOURCE)
    launches = 2
    workspace_alignment = 256

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._schedule = schedule = _schedule_of(choice)
        self._blocks = grid_size(schedule, desc.n, desc.m, device)
        self._split_blocks = -(-desc.n * desc.k // SPLIT_BLOCK)
        self._regions = Regions.of(schedule, desc, self.entry.parts, self._blocks)
        self.workspace_size = self._regions.end
        lines, parts = OperandLayouts.of(desc, layout_called(self.entry.layout)), self.entry.parts
        self._split = load(_SPLIT, "f32_split", _THREADS, device, {"SPLIT_TERMS": parts})
        stages = schedule.stages(lines, parts)
        self._function = load(
            SOURCE,
            "gemm_wgmma_sp",
            128 * (schedule.warpgroups + 1),
            device,
            defines(desc, schedule, lines, False, parts, after_pass=True),
            shared_bytes=schedule.shared_bytes(lines, parts),
        )
        self.details = (
            f"X in {parts} parts, {schedule.items(desc.n, desc.m) * schedule.cluster_m} tiles of {schedule.rows} "
            f"rows x {schedule.tokens} tokens on {self._blocks} blocks"
            f"{' in equal shares' if schedule.stream_k else ''}, K in {schedule.split_k} slices, "
            f"clusters of {schedule.cluster}, {stages[0]} + {stages[1]} stages"
        )
        self._source_boxes = source_boxes(desc, schedule, BF16.itemsize)
        self._result_box = result_box(desc, schedule)
        self._fixed = fixed_parameters(desc, schedule, lines, RANGE_TILES[parts])

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source = self.descriptor, views["source"]
        space = workspace or source.address  # whether it can run is asked without a workspace
        shape = self.entry.parts * desc.n, desc.k

        def source_maps() -> list[bytes]:
            return [lines_map(space, shape, desc.k, BF16.itemsize, box) for box in self._source_boxes]

        handed = workspace + self._regions.handed
        parameters = launch_parameters(
            self._fixed, desc, self._schedule, views, source_maps, self._result_box, handed
        )
        parameters.blocked_sums = workspace + self._regions.groups
        split = self._split.bind(
            self._split_blocks,
            F32SplitParams(x=source.address, terms=workspace, n=desc.n, k=desc.k, x_stride=source.strides[0]),
            overlapping=True,
        )
        return launch_in_order(split, self._function.bind(self._blocks, parameters, overlapping=True))

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        return names.split(choice.descriptor, choice.entry.parts, _schedule_of(choice).split_k)


def _schedule_of(choice: Choice) -> WgmmaSpSchedule:
    wish = choice.preference
    return best_schedule(choice.descriptor, choice.entry, wish.whole_m, wish.max_workspace_bytes)
