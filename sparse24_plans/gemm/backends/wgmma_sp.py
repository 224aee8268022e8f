"""Launches ``gemm/wgmma_sp.cu``: packed weights, wgmma.sp fed by the copy engine.

Its workspace is for sums that blocks hand over, and flags: one that holds the launch's own mark is set; then
for row-major X, if X is column-major and ``common/transpose.cu`` transposes it first.
"""

from __future__ import annotations

from ...device import transpose
from ...device.jit.compiler import digest
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...errors import UnsupportedError
from ...plan.kernel import Choice, launch_in_order
from ...plan.operands import Alignment, Views, leading_dimension
from ...vocab import DeviceProperties, ElementKind, MatrixOrder
from ..arithmetic import names
from ..descriptor import GemmSparse24Descriptor
from ..kernel import GemmKernel
from ..limits import should_turn, turned_bytes, wgmma_sp_workspace
from ..schedules.wgmma_heuristics import allowed_schedules, best_schedule, candidates
from ..schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from ..wgmma import (
    SOURCE,
    defines,
    fixed_parameters,
    grid_size,
    launch_parameters,
    result_box,
    source_boxes,
    view_map,
)


class Kernel(GemmKernel):
    alignments = {"weight": Alignment(16), "source": Alignment(16, 16)}  # noqa: RUF012
    sources = (SOURCE, transpose.SOURCE)
    tunable = True
    workspace_alignment = 256

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._schedule = schedule = _schedule_of(choice)
        self._transpose = None
        if _transposes(choice, schedule):
            self._transpose, self.launches = transpose.Transpose(desc.element.itemsize, device), 2
            self.alignments = {"weight": Alignment(16)}
            desc = desc.model_copy(update={"x_order": MatrixOrder.ROW})
        self._multiplied = desc
        self._blocks = grid_size(schedule, desc.n, desc.m, device)
        self.workspace_size = schedule.workspace_bytes() + (turned_bytes(desc) if self._transpose else 0)
        lines = OperandLayouts.of(desc)
        weight_stages, source_stages = schedule.stages(lines)
        self.details = (
            f"{schedule.items(desc.n, desc.m) * schedule.cluster_m} tiles of {schedule.rows} rows x "
            f"{schedule.tokens} tokens on {self._blocks} blocks"
            f"{' in equal shares' if schedule.stream_k else ''}"
            f", K in {schedule.split_k * schedule.k_chunks} slices, clusters of "
            f"{schedule.cluster}, {weight_stages} + {source_stages} stages"
            f"{', X transposed first' if self._transpose else ''}"
        )
        self._function = load(
            SOURCE,
            "gemm_wgmma_sp",
            128 * (schedule.warpgroups + 1),
            device,
            defines(desc, schedule, lines, self.entry.promoted, after_pass=self._transpose is not None),
            shared_bytes=schedule.shared_bytes(lines),
        )
        self._source_boxes = source_boxes(desc, schedule, desc.element.itemsize)
        self._result_box = result_box(desc, schedule)
        self._fixed = fixed_parameters(desc, schedule, lines)

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc = self._multiplied
        source, turn = self._source(views["source"], workspace)

        def source_maps() -> list[bytes]:
            return [view_map(source, desc.x_order, box) for box in self._source_boxes]

        views = {**views, "source": source}
        parameters = launch_parameters(
            self._fixed, desc, self._schedule, views, source_maps, self._result_box, workspace
        )
        multiply = self._function.bind(self._blocks, parameters, overlapping=True)
        return multiply if turn is None else launch_in_order(turn, multiply)

    def _source(self, source: TensorView, workspace: int) -> tuple[TensorView, Launch | None]:
        """X as it is multiplied, and what makes it so."""
        if self._transpose is None:
            return source, None
        # Whether it can run is asked without a workspace.
        space = workspace + self._schedule.workspace_bytes() if workspace else source.address & -256
        rows = TensorView(space, source.shape, source.element, source.device)
        n, k = source.shape
        matrices = transpose.Matrices(k, n, source.element.itemsize)
        stride = leading_dimension(source, MatrixOrder.COLUMN)
        return rows, self._transpose.bind(matrices, source.address, space, stride)

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        if choice.entry.promoted or choice.descriptor.element is ElementKind.S8:
            return super().arithmetic(choice)  # where the cut doesn't show
        schedule = _schedule_of(choice)
        return names.sliced(choice.descriptor, schedule.split_k * schedule.k_chunks)

    @classmethod
    def candidates(cls, descriptor: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
        return candidates(descriptor)

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        return f"sources {digest(SOURCE)}"


def _schedule_of(choice: Choice) -> WgmmaSpSchedule:
    desc, row, preference = choice.descriptor, choice.entry, choice.preference
    whole_m, most = preference.whole_m, preference.max_workspace_bytes
    if most is not None:
        most -= wgmma_sp_workspace(desc)
    if whole_m is not None or not choice.configuration:  # which knows nothing of whole_m
        return best_schedule(desc, row, whole_m, most)
    schedule = WgmmaSpSchedule(**choice.configuration)
    if schedule not in allowed_schedules(desc, row):
        raise UnsupportedError(f"configuration: {row.name} can't keep its promises with {schedule}")
    if most is not None and schedule.workspace_bytes() > most:
        return best_schedule(desc, row, whole_m, most)
    return schedule


def _transposes(choice: Choice, schedule: WgmmaSpSchedule) -> bool:
    """Return whether column-major X is transposed first."""
    desc, most = choice.descriptor, choice.preference.max_workspace_bytes
    has_space = most is None or schedule.workspace_bytes() + turned_bytes(desc) <= most
    return should_turn(desc) and has_space
