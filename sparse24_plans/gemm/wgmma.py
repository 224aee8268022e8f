"""The base of all backends that launch ``gemm/wgmma_sp.cu``: its macros, tensor maps and parameters."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import NamedTuple

from .._vendor import cuda_driver_abi
from ..device.jit.enum_codes import ELEMENT_CODES
from ..device.jit.launcher import load, put_maps
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.streams import Launch
from ..device.tensors import TensorView
from ..plan.kernel import Choice, align_up
from ..plan.operands import Alignment, Views, address_of, leading_dimension
from ..plan.schedule_choice import REFERENCE_SMS
from ..vocab import DeviceProperties, ElementKind, MatrixOrder
from ..weights.packed_layouts import TILE_M, TILES_16BIT
from .arithmetic.bf16_terms import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE
from .descriptor import GemmSparse24Descriptor
from .kernel import (
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
from .schedules.wgmma_sp import WIDEST, OperandLayouts, WgmmaSpSchedule, pitch_of

SOURCE = "gemm/wgmma_sp.cu"
_launch_ids = itertools.count(secrets.randbits(63) | 1)
"""A number for each bound launch. No workspace holds it by chance, and a run leaves no flag with it."""


@kernel_params("gemm/params/wgmma_sp.cuh")
class WgmmaSpParams(KernelParams):
    """Parameters of ``gemm/wgmma_sp.cu``."""

    x_map = field(
        "TensorMap",
        "X in boxes of 128 bytes of each row that a CTA loads, swizzled. Column-major X: the whole groups of "
        "tokens of a token tile, as [group, column, token].",
    )
    x_tail_map = field("TensorMap", "Like x_map, in boxes for the last token tile.")
    x_remainder_map = field("TensorMap", "Column-major X: the partial group of tokens that ends a tile.")
    x_tail_remainder_map = field("TensorMap", "Column-major X: the partial group that ends the last tile.")
    y_map = field("TensorMap", "Y in boxes of one step of the staged store. Used if TMA stores Y.")
    x = field("const void*", "X[n, k]. For float32 the original X: x_map reads its bf16 terms.")
    packed = field("const u8*", "Packed W: [row_tiles][k_tiles][Tile::kBytes].")
    bias = field("const void*", "Bias [m], or null.")
    scale_x = SCALES["scale_x"]
    scale_w = SCALES["scale_w"]
    y = field("void*", "Y[n, m], or Y[n, m / 2] if the epilogue is gated.")
    flags = field("u64*", "Stream-K: [CTAs][warpgroups], set to launch_id once the partial sums are stored.")
    partials = field(
        "float*",
        "Workspace [CTAs][row tiles][accumulators / 4][128][4]. Holds partial sums for stream-K, or "
        "accumulators that wait while another K chunk is multiplied.",
    )
    blocked_sums = field(
        "float*",
        "Workspace for sums over earlier groups of K tiles, or over earlier K chunks. It has the shape of "
        "partials twice: for work tiles that are not split, and for one that is.",
    )
    launch_id = field("u64", "Value of flags that no other launch uses.")
    n = field("i64", "Number of tokens.")
    m = field("i64", "Number of rows of W.")
    k = field("i64", "Number of columns of X.")
    x_stride = field("i64", "Elements from one row of X to the next, or column if X is column-major.")
    y_stride = field("i64", "Elements from one row of Y to the next, or column if Y is column-major.")
    row_tiles = field("i64", "Number of packed tiles along the rows of W.")
    k_tiles = field("i64", "Number of packed tiles along K.")
    alpha = field("float", "Factor of the product.")
    n_tiles = field("u32", "Number of token tiles that cover n.")
    work_tiles = field("u32", "Number of work tiles; each is one cluster's tile of Y.")
    y_aligned = field("u32", "1 if rows (columns) of Y begin, and for TMA also end, at 16-byte multiples.")
    x_tail_tokens = field("u32", "Number of tokens of X that a CTA loads for the last token tile.")
    data_parallel_tiles = field("u32", "Number of work tiles that no cluster shares; they come first.")
    units_per_cluster = field("u32", "Stream-K: number of units of K tiles that each cluster takes.")
    big_units = field("u32", "Stream-K: number of clusters that take one unit more; they come first.")
    opaque_zero = field("u32", "Always 0, unknown to the compiler: see opaque_zero() for its uses.")
    beta = field("float", "Factor of C.")
    c = field("const void*", "C, which lies as Y does, or null.")
    c_stride = field("i64", "Elements from one row of C to the next, or column if Y is column-major.")
    c_map = field("TensorMap", "C in the boxes of y_map. Used if TMA loads C.")
    c_aligned = field("u32", "1 if rows (columns) of C begin at 16-byte multiples.")
    group_tokens, groups, group_places = GROUPS.values()
    scale_y = SCALES["scale_y"]
    amax = SCALES["amax"]
    batches = field(
        BatchParams, "Batched: where each batch lies. All else is of one batch, but for work_tiles."
    )


class WgmmaKernel(GemmKernel):
    """Base of the backends that launch ``gemm/wgmma_sp.cu``, possibly after a pre-pass kernel over X."""

    alignments = {"weight": Alignment(16), "source": Alignment(16, 16)}  # noqa: RUF012
    workspace_alignment = 256

    def _load(
        self,
        desc: GemmSparse24Descriptor,
        schedule: WgmmaSpSchedule,
        device: DeviceProperties,
        *,
        x_bytes: int,
        prepass: str = "",
        tiles_per_unit: int = 1,
    ) -> None:
        """Compile the kernel for ``desc``, the problem after the pre-pass that ``prepass`` describes, if any.

        ``x_bytes`` is the size of the elements of X that it loads.
        """
        terms = self.entry.split_terms
        layouts = OperandLayouts.of(desc, self.tiles)
        self._schedule = schedule
        work_tiles = schedule.most_work_tiles(desc)
        self._ctas = schedule.ctas(work_tiles, device.multiprocessors)
        weight_stages, x_stages = schedule.stages(layouts, terms)
        self.details = (
            f"{f'{prepass}, ' if prepass else ''}"
            f"{'up to ' if desc.groups else ''}{work_tiles * schedule.cluster_m} tiles of "
            f"{schedule.rows} rows x {schedule.tokens} tokens on {self._ctas} CTAs"
            f"{' by stream-K' if schedule.stream_k else ''}, "
            f"K in {schedule.split_k * schedule.k_chunks} slices, clusters of {schedule.cluster}, "
            f"{weight_stages} + {x_stages} stages"
        )
        self._function = load(
            SOURCE,
            "gemm_wgmma_sp",
            128 * (schedule.warpgroups + 1),
            device,
            defines(desc, schedule, layouts, self.entry.promoted, terms, x_from_prepass=bool(prepass)),
            shared_bytes=schedule.shared_bytes(layouts, terms),
        )
        self._parameters = WgmmaParameters(desc, schedule, layouts, x_bytes, tiles_per_unit)

    def _multiply(self, parameters: WgmmaSpParams) -> Launch:
        return self._function.bind(self._ctas, parameters, overlapping=True)


def possible_schedules(choice: Choice, chunks: set[int]) -> Iterator[WgmmaSpSchedule]:
    """A superset of the schedules that may occur for 1 token up to the tokens of the choice's problem.

    ``chunks`` are the numbers of chunks of K that occur. A cluster that splits K needs no workspace, so only
    those without one are given. Stream-K has a work tile for every cluster, so it needs enough tokens.
    """
    desc = choice.descriptor
    sizes = itertools.product((1, 2, 3), (1, 2), range(8, WIDEST + 1, 8), (1, 2), chunks, (False, True))
    for warpgroups, m_tiles, tokens, cluster_m, k_chunks, stream_k in sizes:
        one = WgmmaSpSchedule(warpgroups, m_tiles, tokens, cluster_m, k_chunks=k_chunks)
        clusters = REFERENCE_SMS // cluster_m
        if stream_k and one.work_tiles(desc.n, desc.m) > clusters:
            one = one._replace(stream_k=clusters)
        if one.fits():
            yield one


def defines(
    desc: GemmSparse24Descriptor,
    schedule: WgmmaSpSchedule,
    layouts: OperandLayouts,
    promote: bool,
    terms: int = 0,
    *,
    x_from_prepass: bool = False,
) -> dict[str, int]:
    """The kernel's macros for a problem type and schedule.

    ``terms`` is the number of bf16 terms of a float32. ``x_from_prepass`` says that the launch before this
    one writes X, and nothing else that this one reads; without it the kernel itself splits a float32 X.
    """
    weight_stages, x_stages = schedule.stages(layouts, terms)
    return {
        **product_defines(desc),
        "WEIGHT": ELEMENT_CODES[desc.weight_element],
        "WEIGHT_GROUP": desc.weight_group or TILES_16BIT.tile_k,
        "WEIGHT_SCALE": ELEMENT_CODES[desc.weight_scale_element],
        "WARPGROUPS": schedule.warpgroups,
        "M_TILES_PER_WARPGROUP": schedule.m_tiles,
        "TILE_N": schedule.tokens,
        "CLUSTER_M": schedule.cluster_m,
        "SPLIT_K": schedule.split_k,
        "K_CHUNKS": schedule.k_chunks,
        "SAVED_ACCUMULATORS": schedule.saved_accumulators,
        "STREAM_K": int(schedule.stream_k > 0),
        "SPLIT_TERMS": terms,
        "TILES_PER_PROMOTION": SPLIT_SUM[terms] // SPLIT_TILE if terms else 1,
        "TILES_PER_BLOCKED_SUM": SPLIT_GROUP[terms] // SPLIT_TILE if terms and schedule.split_k == 1 else 0,
        "PROMOTE": int(promote),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
        **scale_defines(desc),
        "CTAS_PER_SM": schedule.ctas_per_sm,
        "WEIGHT_STAGES": weight_stages,
        "X_STAGES": x_stages,
        "SHARE_APART": int(schedule.has_share_apart(layouts)),
        "STEP_TOKENS": schedule.step_tokens(layouts),
        "C_STAGED": int(layouts.stages_c and schedule.split_k == 1),
        "GROUPED": int(desc.groups > 0),
        "BATCHED": int(desc.is_batched),
        "X_FROM_PREPASS": int(x_from_prepass),
        "X_SPLIT": int(terms > 0 and not x_from_prepass),
        "X_COLUMN_MAJOR": int(layouts.x_columns),
        "X_CP_ASYNC": int(layouts.x_columns and schedule.copied_by_threads(desc.n)),
        "Y_COLUMN_MAJOR": int(layouts.y_columns),
    }


# Tensor maps --------------------------------------------------------------------------------------


class Box(NamedTuple):
    """The box of one TMA instruction: some elements of some lines, which are contiguous rows or columns."""

    lines: int
    elements: int
    pitch: int
    """Bytes from one line to the next in shared memory."""
    groups: int = 0
    """Number of groups of ``elements`` in each line. The box holds all lines of one group after the other."""


def source_boxes(
    desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule, size: int
) -> tuple[Box, Box, Box, Box]:
    """Boxes of X: for a CTA tile, for the last tile, and for the partial groups that a column-major X leaves
    of both.

    ``size`` is the size in bytes of an element as it is loaded. Tokens past the last one are not loaded, not
    even as zeros, which TMA writes slowly.
    """
    line = 128
    if desc.x_order is MatrixOrder.ROW:
        tail = Box(tail_rows(desc, schedule), line // size, line)
        several = desc.n > schedule.tokens
        full = tail._replace(lines=schedule.tokens // schedule.cluster_m) if several else tail
        return full, tail, full, tail
    group, tail_tokens = schedule.group(size), schedule.tail_tokens(desc.n)
    box = Box(line // size, group, group * size)
    # A box that loads nothing has a valid size nevertheless.
    full, tail = (
        box._replace(groups=max(1, min(count, desc.n) // group)) for count in (schedule.tokens, tail_tokens)
    )
    left = schedule.tokens % group, schedule.tail_boxed(desc.n) - tail_tokens // group * group
    rest, tail_rest = (box._replace(elements=tokens or group, groups=1) for tokens in left)
    return full, tail, rest, tail_rest


def tail_rows(desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule) -> int:
    """Rows of X that a CTA loads for the last token tile. With groups, any tile may be a group's last one."""
    return schedule.tail_rows(schedule.tokens if desc.groups else desc.n)


def result_box(desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule, layouts: OperandLayouts) -> Box:
    """The box of Y and C: at most the results of an m64 tile for the tokens of one epilogue step."""
    size = desc.out_element.itemsize
    tokens, outputs = schedule.step_tokens(layouts), TILE_M // 2 if desc.epilogue.is_gated else TILE_M
    if desc.y_order is MatrixOrder.ROW:
        adjacent = min(outputs, 128 // size)
        return Box(tokens, adjacent, adjacent * size)
    return Box(outputs, tokens, pitch_of(tokens * size))


def view_map(view: TensorView, order: MatrixOrder, box: Box) -> bytes:
    """The tensor map of a matrix, or of batches, with contiguous lines, rows or columns, as ``order`` says.

    Batches are one more dimension, of size 1 if all of them are the same.
    """
    lines, elements = view.shape[-2:] if order is MatrixOrder.ROW else view.shape[:-3:-1]
    size = view.element.itemsize
    pitch = leading_dimension(view, order) * size
    if lines == 1:  # a single line has no next one, so any valid distance serves
        pitch = align_up(pitch, 16)
    batches: tuple[int, ...] = ()
    if len(view.shape) == 3:
        apart = view.strides[0] * size
        batches = (view.shape[0], apart) if apart else (1, 16)
    if box.groups:
        return cuda_driver_abi.swizzled_groups_map(view.address, (lines, elements), pitch, size, box, batches)
    return cuda_driver_abi.swizzled_matrix_map(
        view.address, (lines, elements), pitch, size, box[:2], box.pitch, batches
    )


class WgmmaParameters:
    """The parameters of one product's launches. All that doesn't depend on addresses is worked out once."""

    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        schedule: WgmmaSpSchedule,
        layouts: OperandLayouts,
        x_bytes: int,
        tiles_per_unit: int = 1,
    ) -> None:
        """Elements of X are loaded with ``x_bytes`` bytes. A stream-K unit has ``tiles_per_unit`` K tiles."""
        self._desc, self._schedule = desc, schedule
        self._x_boxes = source_boxes(desc, schedule, x_bytes)
        self._y_box = result_box(desc, schedule, layouts)
        k_tiles = -(-desc.k // layouts.layout.tile_k)
        data_parallel, units, big_units = schedule.stream_k_split(
            desc.n, desc.m, -(-k_tiles // tiles_per_unit)
        )
        self._fixed = WgmmaSpParams(
            n=desc.n,
            m=desc.m,
            k=desc.k,
            row_tiles=-(-desc.m // TILE_M),
            k_tiles=k_tiles,
            alpha=desc.alpha,
            beta=desc.beta,
            n_tiles=-(-desc.n // schedule.tokens),
            work_tiles=schedule.work_tiles(desc.n, desc.m) * desc.batch_count,
            x_tail_tokens=schedule.tail_boxed(desc.n) if layouts.x_columns else tail_rows(desc, schedule),
            data_parallel_tiles=data_parallel,
            units_per_cluster=units,
            big_units=big_units,
        )

    def of(self, views: Views, x: TensorView, workspace: int) -> WgmmaSpParams:
        """The parameters of a launch that loads ``x``, with stream-K's part of the workspace."""
        desc, schedule, source, result = self._desc, self._schedule, views["source"], views["result"]
        size, y_stride = result.element.itemsize, leading_dimension(result, desc.y_order)
        # TMA writes whole 16 bytes. If the lines of Y end between multiples of 16 bytes, threads store its
        # elements.
        by_tma = schedule.split_k == 1
        ends = (desc.outputs if desc.y_order is MatrixOrder.ROW else desc.n) * size if by_tma else 0
        apart = result.strides[0] * size if desc.is_batched else 0
        parameters = self._fixed.with_values(
            packed=views["packed"].address,
            x=source.address,
            x_stride=leading_dimension(source, desc.x_order),
            y=result.address,
            y_stride=y_stride,
            y_aligned=(result.address | y_stride * size | apart | ends) % 16 == 0,
            **{name: address_of(views, name) for name in ("bias", *SCALES)},
            **c_parameters(desc, views),
            **group_parameters(desc, views),
            batches=batch_parameters(desc, views, schedule.work_tiles(desc.n, desc.m)),
        )
        put_maps(parameters, self._maps, x, result if parameters.y_aligned and by_tma else None)
        if (c := views.get("c")) is not None and by_tma and c.element.itemsize == size:
            apart = parameters.c_stride * size | parameters.batches.c * size
            parameters.c_aligned = (c.address | apart) % 16 == 0
            if parameters.c_aligned:
                put_maps(parameters, view_map, c, desc.y_order, self._y_box, at=WgmmaSpParams.c_map.offset)
        if schedule.workspace_bytes():
            sums = workspace + schedule.flags_bytes()
            parameters.flags, parameters.partials = workspace, sums
            parameters.blocked_sums = sums + schedule.sums_bytes()
            parameters.launch_id = next(_launch_ids)
        return parameters

    def _maps(self, x: TensorView, result: TensorView | None) -> bytes:
        """The tensor maps of X and, if TMA stores it, of the result."""
        maps = {box: view_map(x, self._desc.x_order, box) for box in {*self._x_boxes}}
        found = b"".join(maps[box] for box in self._x_boxes)
        return found if result is None else found + view_map(result, self._desc.y_order, self._y_box)
