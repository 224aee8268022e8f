"""Launches ``blocksparse/blocks_mma.cu``: products of kept blocks with few tokens by mma."""

from __future__ import annotations

from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...plan.kernel import Choice
from ...plan.kernel_table import HOPPER
from ...plan.operands import Views, address_of
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import K_MAJOR, KernelProblem, launched
from ..prepasses import SOURCES, PreparingKernel
from ..schedules.blocks_mma import BlocksMmaSchedule, block_rows

_SOURCE = "blocksparse/blocks_mma.cu"


@kernel_params("blocksparse/params/blocks_mma.cuh")
class BlocksMmaParams(KernelParams):
    """Parameters of ``blocksparse/blocks_mma.cu``."""

    values = field("const void*", "Values [Z, blocks, b, b].")
    x = field("const void*", "X [Z, H, ..].")
    bias = field("const void*", "Bias [H, rows], or null.")
    out = field("void*", "C [Z, H, ..].")
    order = field("const int*", "Block rows in the order in which CTAs take them, or null for 0, 1, 2 ...")
    pointers = field("const int*", "Index where the entries of each block row begin.")
    columns = field("const int*", "Block column of each entry in op(S): [entries].")
    value_index = field("const int*", "Index of each entry in the values, if S enters transposed.")
    x_matrix = field("i64", "Elements from one matrix of X to the next.")
    x_stride = field("i64", "Elements from one row of X to the next.")
    out_matrix = field("i64", "Elements from one matrix of C to the next.")
    out_row = field("i64", "Elements from one row of op(S) in C to the next.")
    out_token = field("i64", "Elements from one token in C to the next.")
    blocks = field("i64", "Number of kept blocks of a batch element.")
    tokens = field("u32", "Number of columns of X.")
    n_tiles = field("u32", "Number of token tiles of a block row.")
    block_rows = field("u32", "Number of block rows of all heads.")
    head_block_rows = field("u32", "Number of block rows of a head.")
    heads = field("u32", "Number of heads, H.")
    batch = field("u32", "Number of batch elements, Z.")
    long_rows = field("u32", "Number of block rows, the first in their order, that may have several slices.")
    alpha = field("float", "Factor of the product.")


class Kernel(PreparingKernel):
    sources = (_SOURCE, *SOURCES)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        problem, most = self._problem, choice.preference.max_workspace_bytes
        may_slice = device.compute_capability == HOPPER  # where slices were measured
        schedule = BlocksMmaSchedule.of(desc, device.multiprocessors, most, may_slice=may_slice)
        prepared = schedule.prepared(desc)
        self._prepare(prepared, device)
        self._ctas = schedule.ctas(desc)
        # The longest block rows come first if they may have slices, or if not all CTAs run at once.
        waits = self._ctas > schedule.resident_ctas(device.multiprocessors)
        self._ordered = waits or schedule.row_slices > 1
        self.details = (
            f"{self._ctas} CTAs of {schedule.rows} rows x {schedule.tokens} tokens, "
            f"{schedule.warps} warps a block row"
            + (f", clusters of {schedule.row_slices} for long ones" if schedule.row_slices > 1 else "")
            + self._prepasses.details
        )
        self._function = load(
            _SOURCE,
            "blocks_mma",
            32 * schedule.warps,
            device,
            defines(desc, schedule),
            shared_bytes=schedule.shared_bytes(desc),
        )
        one, rows = desc.layout, problem.head_block_rows * desc.layout.block
        tokens = prepared[0].sides[1] if prepared and not schedule.x_along_k else desc.n
        self._parameters = BlocksMmaParams(
            x_matrix=desc.reduction * tokens,
            x_stride=desc.reduction if schedule.x_along_k else tokens,
            out_matrix=rows * desc.n,
            out_row=desc.n if problem.tokens_contiguous else 1,
            out_token=1 if problem.tokens_contiguous else rows,
            blocks=one.blocks,
            tokens=desc.n,
            n_tiles=schedule.n_tiles(desc),
            block_rows=block_rows(desc),
            head_block_rows=max(problem.head_block_rows, 1),
            heads=one.heads,
            batch=desc.batch,
            long_rows=schedule.long_rows(desc),
            alpha=desc.alpha,
        )

    def _parameters_of(self, views: Views, workspace: int) -> BlocksMmaParams:
        problem = self._problem
        return self._parameters.with_values(
            **problem.entries(views["layout"].address, ordered=self._ordered),
            values=views[problem.left].address,
            x=views[problem.right].address,
            bias=address_of(views, "bias"),
            out=views["c"].address,
        )


def defines(desc: BlockSparseMatmulDescriptor, schedule: BlocksMmaSchedule) -> dict[str, int]:
    """Macros of the kernel."""
    problem = KernelProblem(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "WARPS": schedule.warps,
        "RESIDENT_WARPS": schedule.resident_warps,
        "ROW_SLICES": schedule.row_slices,
        "M16_TILES": schedule.m16_tiles,
        "N8_TILES": schedule.n8_tiles,
        "DEPTH": schedule.depth,
        "UNITS": schedule.units,
        "X_UNITS": schedule.x_units,
        "LEFT_ALONG_K": int(problem.left_major == K_MAJOR),
        "RIGHT_ALONG_K": int(schedule.x_along_k),
        "TOKENS_CONTIGUOUS": int(problem.tokens_contiguous),
        "X_COPIED": int(bool(launched(schedule.prepared(desc)))),
    }
