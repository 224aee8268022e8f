"""Launches ``blocksparse/blocks_wgmma_sp.cu``: products of kept 2:4 blocks by wgmma.sp."""

from __future__ import annotations

from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load, put_maps
from ...device.jit.structs import KernelParams, field, kernel_params
from ...plan.kernel import Choice
from ...plan.operands import Views, address_of
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem
from ..panels import PANEL_ROWS
from ..prepasses import SOURCES, PreparingKernel
from ..schedules.blocks_wgmma_sp import THREADS, BlocksWgmmaSpSchedule
from ..wgmma import NO_MAP, PANEL_SIZES, PANEL_TABLES, matrices_map, rows_map, tokens_map

_SOURCE = "blocksparse/blocks_wgmma_sp.cu"
_STEP, _LINE_BYTES = 64, 128
"""Elements of k in a stage of X; bytes of a box's row."""


@kernel_params("blocksparse/params/blocks_wgmma_sp.cuh")
class BlocksWgmmaSpParams(KernelParams):
    """Parameters of ``blocksparse/blocks_wgmma_sp.cu``."""

    values_map = field("TensorMap", "Values [Z * blocks * b, b / 2] in boxes of each CTA's share of a block.")
    right_map = field("TensorMap", "X [Z * H, ..] in boxes of 128 bytes.")
    right_tail_map = field("TensorMap", "Like right_map, in boxes for the last token tile.")
    out_map = field("TensorMap", "C [Z * H, ..] in boxes of 128 bytes.")
    metadata = field("const u8*", "Metadata of the kept blocks: [Z * blocks, b * b / 8] bytes.")
    panel_order, panel_columns, kept = PANEL_TABLES.values()
    pointers = field("const int*", "Index where the blocks of each block row begin.")
    value_index = field("const int*", "Index of each block in the values, or null if they are in order.")
    bias = field("const void*", "Bias [H, rows], or null.")
    out = field("void*", "C [Z * H, rows, tokens], stored without a tensor map if its rows are not aligned.")
    blocks = field("int", "Number of kept blocks of a batch element.")
    alpha, panels, head_panels, head_block_rows, bit_words, heads, batch, tokens = PANEL_SIZES.values()
    cluster_tiles = field("u32", "Number of clusters' token tiles that cover the tokens.")
    raster_tiles = field("u32", "Number of token tiles of a raster group, which L2 holds.")
    raster_groups = field("u32", "Number of raster groups.")


class Kernel(PreparingKernel):
    sources = (_SOURCE, *SOURCES)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._prepare(self._problem.prepared_operands(), device)
        self._reads = desc.layout.blocks > 0 and desc.reduction > 0  # or the result is zeros
        self._schedule = schedule = BlocksWgmmaSpSchedule.of(desc, device.multiprocessors)
        work_tiles = schedule.work_tiles(desc)
        clusters = min(work_tiles, schedule.resident_clusters(device.multiprocessors))
        self._ctas = clusters * schedule.cluster_n
        raster_tiles, raster_groups = schedule.raster_groups(desc, clusters)
        self.details = (
            f"{work_tiles * schedule.cluster_n} tiles of 128 rows x {schedule.tokens} tokens on {self._ctas} "
            f"CTAs, clusters of {schedule.cluster_n}, {schedule.dense_stages} stages"
            + self._prepasses.details
        )
        self._function = load(
            _SOURCE,
            "blocks_wgmma_sp",
            THREADS,
            device,
            defines(desc, schedule),
            shared_bytes=schedule.shared_bytes(desc.layout.block),
        )
        self._parameters = BlocksWgmmaSpParams(
            **self._problem.sizes(PANEL_ROWS),
            cluster_tiles=schedule.cluster_tiles(desc),
            raster_tiles=raster_tiles,
            raster_groups=raster_groups,
        )

    def _parameters_of(self, views: Views, workspace: int) -> BlocksWgmmaSpParams:
        parameters = self._parameters.with_values(
            **self._problem.tables(views["layout"].address),
            metadata=views["metadata"].address,
            bias=address_of(views, "bias"),
            out=views["c"].address,
        )
        put_maps(parameters, self._maps, views)
        return parameters

    def _maps(self, views: Views) -> bytes:
        """Tensor maps of the values, X, its last tile and the result."""
        problem, schedule = self._problem, self._schedule
        found = 3 * NO_MAP
        if self._reads:
            values = views[problem.left]
            rows, width = values.shape[-2:]
            found = rows_map(values, (rows // schedule.cluster_n, width))
            for tokens in (schedule.tokens, self.descriptor.n % schedule.tokens):
                found += tokens_map(views[problem.right], problem.right_major, tokens, _STEP)
        out = views["c"]
        if problem.unaligned_rows:
            return found + NO_MAP
        wide = _LINE_BYTES // out.element.itemsize  # the kernel's staging area has 64 lines of 128 bytes
        return found + matrices_map(out, (_STEP if problem.tokens_contiguous else wide, wide))


def defines(desc: BlockSparseMatmulDescriptor, schedule: BlocksWgmmaSpSchedule) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    problem = KernelProblem(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TILE_N": schedule.tokens,
        "CLUSTER_N": schedule.cluster_n,
        "SPARSE_STAGES": schedule.sparse_stages,
        "DENSE_STAGES": schedule.dense_stages,
        "BUFFERS": schedule.buffers,
        "DENSE_MAJOR": problem.right_major,
        "TOKENS_CONTIGUOUS": int(problem.tokens_contiguous),
        "UNALIGNED_ROWS": int(problem.unaligned_rows),
    }
