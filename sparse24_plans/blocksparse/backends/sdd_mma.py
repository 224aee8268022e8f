"""Launches ``blocksparse/sdd_mma.cu``: kept blocks of products with short sums by mma."""

from __future__ import annotations

from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ..descriptor import BlockSparseMatmulDescriptor
from ..lookup_tables import addresses
from ..schedules.sdd_mma import WARPS, SddMmaSchedule

_SOURCE = "blocksparse/sdd_mma.cu"


@kernel_params("blocksparse/params/sdd_mma.cuh")
class SddMmaParams(KernelParams):
    """Parameters of ``blocksparse/sdd_mma.cu``."""

    a = field("const void*", "A [Z, H, ..].")
    b = field("const void*", "B [Z, H, ..].")
    out = field("void*", "Values of C [Z, blocks, b, b].")
    rows = field("const int*", "Block row of each block, among all heads: [blocks].")
    columns = field("const int*", "Block column of each block: [blocks].")
    a_matrix = field("i64", "Elements from one matrix of A to the next.")
    a_stride = field("i64", "Elements from one row of A to the next.")
    b_matrix = field("i64", "Elements from one matrix of B to the next.")
    b_stride = field("i64", "Elements from one row of B to the next.")
    terms = field("u32", "Number of products of a sum, n.")
    blocks = field("u32", "Number of kept blocks of a batch element.")
    run_blocks = field("u32", "Most blocks of a run, at most 32.")
    runs = field("u32", "Number of runs of a batch element.")
    batch = field("u32", "Number of batch elements, Z.")
    heads = field("u32", "Number of heads, H.")
    head_block_rows = field("u32", "Number of block rows of a head.")
    alpha = field("float", "Factor of the product.")


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        schedule = SddMmaSchedule.of(desc, device.multiprocessors)
        self._ctas = schedule.ctas(desc)
        self.details = (
            f"{self._ctas} CTAs of {WARPS} warps, each with {16 * schedule.m16_tiles} rows of up to "
            f"{schedule.run_blocks} blocks"
        )
        self._function = load(_SOURCE, "sdd_mma", 32 * WARPS, device, defines(desc, schedule))
        one = desc.layout
        self._parameters = SddMmaParams(
            a_matrix=one.rows * desc.n,
            a_stride=one.rows if desc.trans_a else desc.n,
            b_matrix=one.cols * desc.n,
            b_stride=desc.n if desc.trans_b else one.cols,
            terms=desc.n,
            blocks=one.blocks,
            run_blocks=schedule.run_blocks,
            runs=schedule.runs(desc),
            batch=desc.batch,
            heads=one.heads,
            head_block_rows=one.block_rows,
            alpha=desc.alpha,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._ctas == 0:
            return nothing
        found = addresses(views["layout"].address, self.descriptor.layout)
        parameters = self._parameters.with_values(
            rows=found["rows"],
            columns=found["columns"],
            a=views["a"].address,
            b=views["b"].address,
            out=views["c"].address,
        )
        return self._function.bind(self._ctas, parameters, overlapping=True)


def defines(desc: BlockSparseMatmulDescriptor, schedule: SddMmaSchedule) -> dict[str, int]:
    """Macros of the kernel."""
    left_along_k, right_along_k = schedule.along_k(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "M16_TILES": schedule.m16_tiles,
        "WORDS": schedule.words,
        "VECTOR": schedule.vector,
        "LEFT_ALONG_K": int(left_along_k),
        "RIGHT_ALONG_K": int(right_along_k),
    }
