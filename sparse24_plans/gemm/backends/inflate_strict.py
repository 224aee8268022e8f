"""Launches ``gemm/inflate_strict.cu``: canonical weights, one kernel, no workspace."""

from __future__ import annotations

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Alignment, Views, address_of, leading_dimension
from ...vocab import GemmOp, MatrixOrder
from ..kernel import (
    GROUPS,
    SCALES,
    BatchParams,
    GemmKernel,
    batch_parameters,
    c_parameters,
    group_parameters,
    product_defines,
    scale_defines,
)
from ..schedules.inflate_strict import TILES, InflateStrictSchedule

_SOURCE = "gemm/inflate_strict.cu"


@kernel_params("gemm/params/inflate_strict.cuh")
class StrictParams(KernelParams):
    """Parameters of ``gemm/inflate_strict.cu``."""

    values = field("const void*", "Kept values of W: [m, k / 2].")
    metadata = field("const u16*", "Positions of the kept values: [m, k / 8].")
    x = field("const void*", "X[n, k]; dY[n, m] for dgrad.")
    bias = field("const void*", "Bias of the outputs, or null.")
    y = field("void*", "Y[n, m], or Y[n, m / 2] if the epilogue is gated; dX[n, k] for dgrad.")
    n = field("i64", "Number of tokens.")
    m = field("i64", "Number of rows of W.")
    k = field("i64", "Number of columns of W.")
    x_stride = field("i64", "Elements from one row of x to the next.")
    y_stride = field("i64", "Elements from one row of y to the next.")
    alpha = field("float", "Factor of the product.")
    beta = field("float", "Factor of C.")
    c = field("const void*", "C, which lies as y does, or null.")
    c_stride = field("i64", "Elements from one row of C to the next.")
    scale_x, scale_w, scale_y, amax = SCALES.values()
    group_tokens, groups, group_places = GROUPS.values()
    batches = field(BatchParams, "Batched: where each batch lies. All else is of one batch.")


class Kernel(GemmKernel):
    alignments = {"weight": Alignment(16)}  # noqa: RUF012
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        schedule = InflateStrictSchedule.of(desc, device.multiprocessors)
        self._tiles, self._ctas = schedule.work_tiles(desc), schedule.ctas(desc)
        self.details = f"tile {schedule.rows}x{schedule.tokens}, {self._ctas} CTAs"
        defines = {
            **product_defines(desc),
            **scale_defines(desc),
            "DGRAD": int(desc.op is GemmOp.DGRAD),
            "GROUPED": int(desc.groups > 0),
            "BATCHED": int(desc.is_batched),
            "TILE": TILES.index(schedule),
        }
        self._function = load(_SOURCE, "gemm_strict", schedule.threads, device, defines)

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        if self._ctas == 0:
            return nothing
        return self._function.bind(
            self._ctas,
            StrictParams(
                values=views["values"].address,
                metadata=views["metadata"].address,
                x=source.address,
                y=result.address,
                n=desc.n,
                m=desc.m,
                k=desc.k,
                x_stride=leading_dimension(source, MatrixOrder.ROW),
                y_stride=leading_dimension(result, MatrixOrder.ROW),
                alpha=desc.alpha,
                beta=desc.beta,
                **c_parameters(desc, views),
                **{name: address_of(views, name) for name in ("bias", *SCALES)},
                **group_parameters(desc, views),
                batches=batch_parameters(desc, views, self._tiles),
            ),
        )
