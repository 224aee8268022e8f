"""Launches ``gemm/wgmma_sp.cu``: packed weights, wgmma.sp fed by TMA.

The workspace holds the flags and the partial sums of stream-K. A flag is set if it holds the launch's own id.
Behind them lies the transposed X, if ``common/transpose.cu`` transposes a column-major X first.
"""

from __future__ import annotations

from ...device import transpose
from ...device.jit.compiler import digest
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...errors import UnsupportedError
from ...plan.arithmetic import Arithmetic
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.operands import Alignment, Views, leading_dimension
from ...vocab import DeviceProperties, ElementKind, MatrixOrder
from ..arithmetic.tensor_core import named
from ..descriptor import GemmSparse24Descriptor
from ..limits import should_transpose_x, transpose_bytes, wgmma_sp_workspace
from ..schedules.wgmma_heuristics import WGMMA_SP
from ..schedules.wgmma_sp import WgmmaSpSchedule
from ..wgmma import SOURCE, WgmmaKernel, possible_schedules


class Kernel(WgmmaKernel):
    sources = (SOURCE, transpose.SOURCE)
    tunable = True

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        if self.descriptor.is_empty:
            return
        desc, device, schedule = self.descriptor, choice.device, _schedule_of(choice)
        self.workspace_size = schedule.workspace_bytes()
        self._transpose = None
        if _transposes(choice, schedule):
            self._transpose, self.launches = transpose.Transpose(desc.element.itemsize, device), 2
            self.alignments = {"weight": Alignment(16)}
            self.workspace_size += transpose_bytes(desc)
            desc = desc.model_copy(update={"x_order": MatrixOrder.ROW})
        prepass = "X transposed first" if self._transpose else ""
        self._load(desc, schedule, device, x_bytes=desc.element.itemsize, prepass=prepass)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self.descriptor.is_empty:
            return nothing
        x = views["source"]
        if self._transpose is None:
            return self._multiply(self._parameters.of(views, x, workspace))
        at = workspace + self._schedule.workspace_bytes()
        rows = TensorView(at, x.shape, x.element, x.device)
        n, k = x.shape
        matrices, stride = (
            transpose.Matrices(k, n, x.element.itemsize),
            leading_dimension(x, MatrixOrder.COLUMN),
        )
        return launch_in_order(
            self._transpose.bind(matrices, x.address, at, stride),
            self._multiply(self._parameters.of({**views, "source": rows}, rows, workspace)),
        )

    @classmethod
    def most_workspace(cls, choice: Choice) -> int:
        desc, preference = choice.descriptor, choice.preference
        if choice.entry.promoted or desc.is_empty:
            return 0  # promoted kernels hold all sums in registers
        chunks = {one.k_chunks for one in WGMMA_SP.allowed(desc, choice.entry, preference.whole_m)}
        transposed = transpose_bytes(desc) if desc.x_order is MatrixOrder.COLUMN else 0
        return transposed + max(one.workspace_bytes() for one in possible_schedules(choice, chunks))

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        desc = choice.descriptor
        if choice.entry.promoted or desc.element is ElementKind.S8 or desc.is_empty:
            return super().arithmetic(choice)  # the bits don't depend on the schedule
        schedule = _schedule_of(choice)
        return named(desc, str(Arithmetic.hopper(desc.element, schedule.split_k * schedule.k_chunks)))

    @classmethod
    def candidates(cls, descriptor: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
        return WGMMA_SP.configurations(descriptor)

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        return f"sources {digest(SOURCE)}"


def _schedule_of(choice: Choice) -> WgmmaSpSchedule:
    desc, entry, preference = choice.descriptor, choice.entry, choice.preference
    whole_m, most = preference.whole_m, preference.max_workspace_bytes
    if most is not None:
        most -= wgmma_sp_workspace(desc)
    if desc.is_batched:
        single = _schedule_of(choice._replace(descriptor=desc.one_batch))
        return WGMMA_SP.best_of_batches(desc, entry, single, most)
    if whole_m is not None or not choice.configuration:  # configurations don't account for whole_m
        return WGMMA_SP.best(desc, entry, whole_m, most)
    schedule = _configured(choice)
    if most is not None and schedule.workspace_bytes() > most:
        return WGMMA_SP.best(desc, entry, whole_m, most)
    return schedule


def _configured(choice: Choice) -> WgmmaSpSchedule:
    """The schedule of a tuning table. Raises UnsupportedError for one that isn't allowed."""
    entry, configuration = choice.entry, dict(choice.configuration)
    try:
        schedule = WgmmaSpSchedule(**configuration)
    except TypeError:  # a table's file may name any fields
        pass
    else:
        if schedule in WGMMA_SP.allowed(choice.descriptor, entry):
            return schedule
    raise UnsupportedError(f"configuration: {entry.name} can't keep its promises with {configuration}")


def _transposes(choice: Choice, schedule: WgmmaSpSchedule) -> bool:
    """Return whether column-major X is transposed first."""
    desc, most = choice.descriptor, choice.preference.max_workspace_bytes
    has_space = most is None or schedule.workspace_bytes() + transpose_bytes(desc) <= most
    return should_transpose_x(desc) and has_space
