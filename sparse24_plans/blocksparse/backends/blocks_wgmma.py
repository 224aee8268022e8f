"""Launches ``blocksparse/blocks_wgmma.cu``: products of kept blocks by wgmma."""

from __future__ import annotations

import itertools
import secrets

from ..._vendor import cuda_driver_abi
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load, put_maps
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.tensors import TensorView
from ...plan.kernel import Choice
from ...plan.operands import Views, address_of
from ...vocab import INT64_MAX, ElementKind
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import COUNTER_BYTES, K_MAJOR, KernelProblem, Prepared, launched, prepared_bytes
from ..prepasses import SOURCES, PreparingKernel
from ..schedules.blocks_wgmma_cuts import APART, LONG_FIRST, NO_SLICES, SEQUENTIAL, Cut, as_run
from ..wgmma import NO_MAP, PANEL_SIZES, PANEL_TABLES, matrices_map, rows_map, tokens_map

_SOURCE = "blocksparse/blocks_wgmma.cu"
_LINE_BYTES = 128
"""Bytes of a box's row, and of a step's k."""
_TILE = 64
"""Rows of a wgmma tile; also rows or tokens of a box that is not K-major."""

_SLICES = {
    NO_SLICES: "",
    APART: "; long panels are cut, and summed by several CTAs",
    SEQUENTIAL: "; long panels are cut, and summed one after the other",
    LONG_FIRST: "; long panels come first",
}
_COUNT_BITS = 16
"""Bits of a counter of arrivals below those of the launch's id."""
_launch_ids = itertools.count(secrets.randbits(47) | 1)


@kernel_params("blocksparse/params/blocks_wgmma.cuh")
class BlocksWgmmaParams(KernelParams):
    """Parameters of ``blocksparse/blocks_wgmma.cu``."""

    left_map = field("TensorMap", "Values of S [Z * blocks * b, b], or op(A) for sdd: boxes of 128 bytes.")
    right_map = field("TensorMap", "X [Z * H, ..], or op(B) for sdd, in boxes of 128 bytes.")
    right_tail_map = field("TensorMap", "Like right_map, in boxes for the last token tile; unused for sdd.")
    out_map = field("TensorMap", "C [Z * H, ..], or the values for sdd, in boxes of 128 bytes.")
    panel_order, panel_columns, kept = PANEL_TABLES.values()
    pointers = field("const int*", "Index where each block row, or panel for small blocks and sdd, begins.")
    columns = field("const int*", "Block columns: of each block for sdd, of each panel for small blocks.")
    value_index = field(
        "const int*",
        "Index of each block in the values, or null if they are in order. Small blocks: for each column "
        "of a panel one index for every block row, negative where no block is kept.",
    )
    values = field("void*", "Values of S, read or written without a tensor map for small blocks.")
    out = field("void*", "C [Z * H, rows, tokens], stored without a tensor map if its rows are not aligned.")
    bias = field("const void*", "Bias [H, rows], or null.")
    blocks = field("int", "Number of kept blocks of a batch element.")
    slices = field(
        "const int*",
        "Slices of row panels, the longest first, five integers each: the panel; its first kept column; "
        "how many; the slice's index + (the panel's slices << 16); the index of the panel's first slice in "
        "partials. Not for sdd.",
    )
    slice_count = field("const int*", "Number of slices of all panels.")
    long_panels = field(
        "const int*", "Number of panels that are long enough to be cut; the first of panel_order."
    )
    claimed = field("u64*", "Number of work tiles that clusters have claimed beyond each one's first.")
    panel_slices = field("const int*", "Number of slices of each panel.")
    partials = field("float*", "Sums of slices: [slice][64 rows][batch][8 tokens], 128 threads x four.")
    arrivals = field("u64*", "Arrivals of a panel's slices: [slice][64 rows][batch][64 tokens].")
    launch_id = field("u64", "Value of the high 48 bits of arrivals that no other launch uses.")
    alpha, panels, head_panels, head_block_rows, bit_words, heads, batch, tokens = PANEL_SIZES.values()
    cluster_tiles = field("u32", "Number of clusters' token tiles that cover the tokens; unused for sdd.")
    raster_tiles = field("u32", "Number of token tiles of a raster group, which L2 holds.")
    panel_groups = field("u32", "Work tiles of a panel at most, for sdd.")
    k_steps = field("u32", "Number of steps along the tokens, for sdd.")
    full_boxes = field("u32", "Small blocks: 1 if a box of right_map holds a whole token tile, else 0.")


class Kernel(PreparingKernel):
    sources = (_SOURCE, *SOURCES)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        problem, most = self._problem, choice.preference.max_workspace_bytes
        needed = prepared_bytes(problem.prepared_operands())
        self._cut = cut = as_run(
            desc,
            device.multiprocessors,
            None if most is None else most - needed,
            invariant=choice.entry.invariant,
        )
        prepared = problem.prepared_operands(None if most is None else most - cut.workspace)
        self._prepare(prepared, device, cut.workspace)
        self._majors = problem.majors(prepared)
        self._reads = desc.layout.blocks > 0 and desc.reduction > 0  # or the result is zeros
        self._schedule = schedule = cut.schedule
        work_tiles = most_tiles = schedule.work_tiles(desc)
        if cut.slices == APART:
            most_tiles = schedule.most_work_tiles(desc)
        resident = schedule.resident_clusters(device.multiprocessors)
        clusters = work_tiles if cut.cluster_slices > 1 else min(most_tiles, resident)
        cluster = schedule.cluster_n * cut.cluster_slices
        self._ctas = clusters * cluster
        self.details = (
            ("up to " if problem.sampled else "")
            + f"{work_tiles * schedule.cluster_n} tiles of {schedule.rows} rows x {schedule.tokens} tokens "
            f"on {self._ctas} CTAs, clusters of {cluster}, {schedule.stages} stages"
            + _SLICES[cut.slices]
            + (f"; every panel is cut, and summed by {cluster} CTAs" if cut.cluster_slices > 1 else "")
            + self._prepasses.details
        )
        self._function = load(
            _SOURCE,
            "blocks_wgmma",
            schedule.threads,
            device,
            defines(desc, cut, prepared),
            shared_bytes=schedule.shared_bytes(),
        )
        self._parameters = BlocksWgmmaParams(
            **problem.sizes(schedule.rows),
            cluster_tiles=schedule.cluster_tiles(desc),
            raster_tiles=schedule.raster_tiles(desc),
            panel_groups=schedule.groups(desc.layout),
            k_steps=-(-desc.n // _depth(desc)),
        )

    def _parameters_of(self, views: Views, workspace: int) -> BlocksWgmmaParams:
        problem, tables, rows = self._problem, views["layout"].address, self._schedule.rows
        parameters = self._parameters.with_values(
            **problem.tables(tables, rows),
            **({} if problem.sampled else problem.slices(tables, rows)),
            values=views["c" if problem.sampled else problem.left].address,
            bias=address_of(views, "bias"),
            out=views["c"].address,
            full_boxes=int(views[problem.right].shape[-1] % _TILE == 0),
        )
        if self._cut.workspace:
            parameters.claimed = workspace
            parameters.arrivals = parameters.claimed + COUNTER_BYTES
            parameters.partials = parameters.claimed + self._cut.counter_bytes
            parameters.launch_id = next(_launch_ids) << _COUNT_BITS & INT64_MAX
        put_maps(parameters, self._maps, views)
        return parameters

    def _maps(self, views: Views) -> bytes:
        """Tensor maps of the left operand, the right operand, its last tile and the result."""
        desc, problem, one = self.descriptor, self._problem, self._schedule
        left_major, right_major = self._majors
        found = 3 * NO_MAP
        if self._reads:
            block, depth = desc.layout.block, _depth(desc)
            if problem.sampled:
                found = _dense_map(views["a"], left_major, one.rows, depth, one.cluster_n)
                found += _dense_map(views["b"], right_major, min(block, one.tokens), depth) + NO_MAP
            else:
                step = min(block, depth)
                lines = block if left_major == K_MAJOR else step
                found = rows_map(views[problem.left], (lines // one.cluster_n, step))
                grouped = problem.small and right_major != K_MAJOR
                for tokens in (one.tokens, desc.n % one.tokens):
                    if grouped and tokens:
                        found += _grouped_map(views[problem.right], tokens, step)
                    else:
                        found += tokens_map(views[problem.right], right_major, tokens, step)
        out = views["c"]
        wide = min(_LINE_BYTES // out.element.itemsize, _TILE)  # what the kernel's staging area holds
        if problem.sampled:
            return found + (NO_MAP if problem.small else rows_map(out, (_TILE, wide)))
        if problem.unaligned_rows:
            return found + NO_MAP
        return found + matrices_map(out, (_TILE if problem.tokens_contiguous else wide, wide))


def _depth(desc: BlockSparseMatmulDescriptor) -> int:
    """Elements of k in a step."""
    return _LINE_BYTES // desc.element.itemsize


def _dense_map(view: TensorView, major: int, lines: int, step: int, cluster_n: int = 1) -> bytes:
    """Tensor map with boxes of ``step`` k of some rows or tokens, divided among the CTAs of a cluster."""
    box = (lines // cluster_n, step) if major == K_MAJOR else (step // cluster_n, min(lines, _TILE))
    return matrices_map(view, box)


def _grouped_map(view: TensorView, tokens: int, step: int) -> bytes:
    """Tensor map with boxes of ``step`` k of some tokens, or of a part of them if n is no multiple of 64."""
    batch, heads, rows, width = view.shape
    whole = width % _TILE == 0
    group, groups = (_TILE, -(-tokens // _TILE)) if whole else (width, 1)
    return cuda_driver_abi.grouped_matrices_map(
        view.address, (batch * heads, rows, width), view.element.itemsize, group, (groups, step, _TILE)
    )


def defines(
    desc: BlockSparseMatmulDescriptor,
    cut: Cut,
    prepared: tuple[Prepared, ...],
) -> dict[str, int]:
    """Macros of the kernel for one problem type and cut, with the operands that pre-passes copy."""
    problem, schedule = KernelProblem(desc), cut.schedule
    majors = problem.majors(prepared)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TILE_M": schedule.rows,
        "TILE_N": schedule.tokens,
        "WARPGROUPS": schedule.warpgroups,
        "CLUSTER_N": schedule.cluster_n,
        "STAGES": schedule.stages,
        "BUFFERS": schedule.buffers,
        "SPARSE_MAJOR": majors[0],
        "DENSE_MAJOR": majors[1],
        "TOKENS_CONTIGUOUS": int(problem.tokens_contiguous),
        "UNALIGNED_ROWS": int(problem.unaligned_rows),
        "SAMPLED": int(problem.sampled),
        "SLICES": cut.slices,
        "CLUSTER_SLICES": cut.cluster_slices,
        "X_COPIED": int(not problem.sampled and [one.name for one in launched(prepared)] == [problem.right]),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
    }
