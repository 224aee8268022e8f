"""Launches ``gemm/mma_sp.cu``: packed weights, sparse tensor cores, one kernel, no workspace."""

from __future__ import annotations

from ...device.jit.compiler import digest
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.arithmetic import Arithmetic
from ...plan.kernel import Choice, nothing
from ...plan.kernel_table import HOPPER
from ...plan.operands import Alignment, Views, address_of, leading_dimension
from ...vocab import FP8, DeviceProperties, MatrixOrder
from ...weights.packed_layouts import TILE_M
from ..arithmetic.tensor_core import named
from ..descriptor import GemmSparse24Descriptor
from ..kernel import (
    SCALES,
    BatchParams,
    GemmKernel,
    batch_parameters,
    c_parameters,
    product_defines,
    scale_defines,
)
from ..schedules import mma_sp as schedules
from ..schedules.mma_sp import MmaSpSchedule

_SOURCE = "gemm/mma_sp.cu"
_THREADS = 256


@kernel_params("gemm/params/mma_sp.cuh")
class MmaSpParams(KernelParams):
    """Parameters of ``gemm/mma_sp.cu``."""

    packed = field("const u8*", "Packed W: [row_tiles][k_tiles][Tile::kBytes].")
    x = field("const void*", "X[n, k]; its rows, or columns, begin at multiples of 16 bytes.")
    bias = field("const void*", "Bias [m], or null.")
    y = field("void*", "Y[n, m], or Y[n, m / 2] if the epilogue is gated.")
    n = field("i64", "Number of tokens.")
    m = field("i64", "Number of rows of W.")
    k = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one row of X to the next, or column if X is column-major.")
    y_stride = field("i64", "Elements from one row of Y to the next, or column if Y is column-major.")
    row_tiles = field("i64", "Number of packed tiles along the rows of W.")
    k_tiles = field("i64", "Number of packed tiles along K.")
    alpha = field("float", "Factor of the product.")
    n_tiles = field("u32", "Number of token tiles that cover n.")
    beta = field("float", "Factor of C.")
    c = field("const void*", "C, which lies as y does, or null.")
    c_stride = field("i64", "Elements from one row of C to the next, or column if Y is column-major.")
    scale_x, scale_w, scale_y, amax = SCALES.values()
    batches = field(BatchParams, "Batched: where each batch lies. All else is of one batch.")


class Kernel(GemmKernel):
    alignments = {"weight": Alignment(16), "source": Alignment(16, 16)}  # noqa: RUF012
    sources = (_SOURCE,)
    tunable = True

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        if desc.is_empty:
            return
        self._clusters = schedules.can_reduce_in_cluster(device)
        self._schedule = schedule = _schedule(choice)
        self.details = (
            f"{schedule.blocks * desc.batch_count} CTAs of "
            f"{TILE_M * schedule.warp_pairs_m} rows x {8 * schedule.n8_tiles} "
            f"tokens, split-K {schedule.split_k}, {schedule.stages} stages"
        )
        self._function = load(
            _SOURCE,
            "gemm_mma_sp",
            _THREADS,
            device,
            defines(desc, schedule),
            shared_bytes=schedule.stages * schedule.stage_bytes,
        )

        self._fixed = MmaSpParams(
            n=desc.n,
            m=desc.m,
            k=desc.k,
            row_tiles=-(-desc.m // TILE_M),
            k_tiles=-(-desc.k // self.tiles.tile_k),
            alpha=desc.alpha,
            beta=desc.beta,
            n_tiles=schedule.token_blocks,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        if desc.is_empty:
            return nothing
        parameters = self._fixed.with_values(
            packed=views["packed"].address,
            x=source.address,
            y=result.address,
            x_stride=leading_dimension(source, desc.x_order),
            y_stride=leading_dimension(result, desc.y_order),
            **{name: address_of(views, name) for name in ("bias", *SCALES)},
            **c_parameters(desc, views),
            batches=batch_parameters(desc, views, self._schedule.work_tiles),
        )
        blocks = self._schedule.blocks * desc.batch_count
        return self._function.bind(blocks, parameters, overlapping=self._clusters)

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        if choice.device.compute_capability != HOPPER:
            return None  # other tensor cores add in other steps
        desc = choice.descriptor
        if desc.element in FP8:
            return None  # mma.sp adds products of fp8 in other steps than wgmma.sp
        return named(desc, str(Arithmetic.hopper(desc.element, _schedule(choice).split_k)))

    @classmethod
    def candidates(cls, descriptor: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
        return schedules.candidates(descriptor, device)

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        return f"sources {digest(_SOURCE)}"


def _schedule(choice: Choice) -> MmaSpSchedule:
    return MmaSpSchedule.of(choice.descriptor, choice.device, choice.configuration, choice.preference.whole_m)


def defines(desc: GemmSparse24Descriptor, schedule: MmaSpSchedule) -> dict[str, int]:
    """The kernel's macros for a problem type and schedule."""
    return {
        **product_defines(desc),
        **scale_defines(desc),
        "SPLIT_K": schedule.split_k,
        "N8_TILES": schedule.n8_tiles,
        "WARP_PAIRS_M": schedule.warp_pairs_m,
        "CTAS_PER_SM": schedule.ctas_per_sm,
        "STAGES": schedule.stages,
        "BATCHED": int(desc.is_batched),
        "X_COLUMN_MAJOR": int(desc.x_order is MatrixOrder.COLUMN),
        "Y_COLUMN_MAJOR": int(desc.y_order is MatrixOrder.COLUMN),
    }
