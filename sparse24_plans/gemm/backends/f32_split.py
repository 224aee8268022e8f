"""Launches ``gemm/f32_split.cu`` and ``gemm/wgmma_sp.cu``: float32 in bf16 terms on sparse tensor cores.

The workspace holds the bf16 terms of X, then the flags and partial sums of stream-K, then blocked sums.
"""

from __future__ import annotations

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.arithmetic import Arithmetic
from ...plan.kernel import Choice, launch_in_order
from ...plan.operands import Views
from ..arithmetic.tensor_core import named
from ..limits import BF16, SPLIT_CTA_ELEMENTS
from ..schedules.f32_split_heuristics import RANGE_TILES, Regions, best_schedule
from ..schedules.wgmma_sp import WgmmaSpSchedule
from ..wgmma import SOURCE, WgmmaKernel, grid_size, possible_schedules

_SPLIT = "gemm/f32_split.cu"
_THREADS = 256
"""Threads of a CTA of the pre-pass kernel."""


@kernel_params("gemm/params/f32_split.cuh")
class F32SplitParams(KernelParams):
    """Parameters of ``gemm/f32_split.cu``."""

    x = field("const float*", "X[n, k].")
    terms = field("u16*", "The bf16 terms of X: [terms][n][k].")
    n = field("i64", "Number of tokens.")
    k = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one row of X to the next.")


class Kernel(WgmmaKernel):
    """The kernel of f32_split3 and f32_split6. Their entries differ in the number of bf16 terms."""

    sources = (_SPLIT, SOURCE)
    launches = 2

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device, schedule = self.descriptor, choice.device, _schedule_of(choice)
        terms = self.entry.split_terms
        self._split = load(_SPLIT, "f32_split", _THREADS, device, {"SPLIT_TERMS": terms})
        self._load(
            desc,
            schedule,
            device,
            x_bytes=BF16.itemsize,
            prepass=f"X in {terms} bf16 terms",
            tiles_per_unit=RANGE_TILES[terms],
        )
        self._regions = Regions.of(schedule, desc, terms, self._ctas)
        self.workspace_size = self._regions.end

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, x = self.descriptor, views["source"]
        # can_implement asks without a workspace, so the address of X stands in for it.
        terms = TensorView(workspace or x.address, (self.entry.split_terms * desc.n, desc.k), BF16, x.device)
        parameters = self._parameters(views, terms, workspace + self._regions.handed)
        parameters.blocked_sums = workspace + self._regions.groups
        split = self._split.bind(
            -(-desc.n * desc.k // SPLIT_CTA_ELEMENTS),
            F32SplitParams(x=x.address, terms=workspace, n=desc.n, k=desc.k, x_stride=x.strides[0]),
            overlapping=True,
        )
        return launch_in_order(split, self._multiply(parameters))

    @classmethod
    def most_workspace(cls, choice: Choice) -> int:
        desc, terms = choice.descriptor, choice.entry.split_terms
        tried = possible_schedules(choice, {1})
        ctas = ((one, grid_size(one, one.work_tiles(desc.n, desc.m), choice.device)) for one in tried)
        return max(Regions.of(one, desc, terms, count).end for one, count in ctas)

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        terms, slices = choice.entry.split_terms, _schedule_of(choice).split_k
        return named(choice.descriptor, str(Arithmetic.split(terms, slices)))


def _schedule_of(choice: Choice) -> WgmmaSpSchedule:
    preference = choice.preference
    return best_schedule(choice.descriptor, choice.entry, preference.whole_m, preference.max_workspace_bytes)
