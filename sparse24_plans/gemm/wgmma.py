"""What the host hands ``gemm/wgmma_sp.cu``, whichever backend launches it: macros, maps, parameters."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import NamedTuple

from .._vendor import cuda_driver_abi
from ..device.jit.enum_codes import type_defines
from ..device.jit.launcher import put_maps
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.tensors import TensorView
from ..plan.kernel import align_up
from ..plan.operands import Views, leading_dimension
from ..vocab import DeviceProperties, ElementKind, MatrixOrder, ScaleKind
from ..weights.packed_layouts import TILE_M
from .arithmetic.split import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE
from .descriptor import GemmSparse24Descriptor
from .kernel import address
from .schedules.mma_sp import H200_MULTIPROCESSORS
from .schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule, pitch_of

SOURCE = "gemm/wgmma_sp.cu"
_launch_ids = itertools.count(secrets.randbits(63) | 1)
"""One for each bound launch. No workspace holds it by chance, and after a run no flag holds it any longer."""


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
    scale_x = field("const float*", "Scales of X: [1], or [n] with one for each token.")
    scale_w = field("const float*", "Scales of W: [1], or [m] with one for each row.")
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
    opaque_zero = field("u32", "Always 0, unknown to the compiler: see opaque_zero() for its two uses.")


_SCALE_CODES = {ScaleKind.NONE: 0, ScaleKind.TENSOR: 1, ScaleKind.ROW: 2}


def defines(
    desc: GemmSparse24Descriptor,
    schedule: WgmmaSpSchedule,
    lines: OperandLayouts,
    promote: bool,
    parts: int = 0,
    *,
    after_pass: bool = False,
) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule. ``parts``: of every float32; ``after_pass``:
    whether the launch before it writes the X that it reads, and nothing else that it does.
    """
    weight_stages, source_stages = schedule.stages(lines, parts)
    return {
        **type_defines(desc),
        "WARPGROUPS": schedule.warpgroups,
        "M_TILES_PER_WARPGROUP": schedule.m_tiles,
        "TILE_N": schedule.tokens,
        "CLUSTER_M": schedule.cluster_m,
        "SPLIT_K": schedule.split_k,
        "K_CHUNKS": schedule.k_chunks,
        "SAVED_ACCUMULATORS": schedule.saved_accumulators,
        "STREAM_K": int(schedule.stream_k > 0),
        "SPLIT_TERMS": parts,
        "TILES_PER_PROMOTION": SPLIT_SUM[parts] // SPLIT_TILE if parts else 1,
        "TILES_PER_BLOCKED_SUM": SPLIT_GROUP[parts] // SPLIT_TILE if parts and schedule.split_k == 1 else 0,
        "PROMOTE": int(promote),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
        "SCALE_X": _SCALE_CODES[desc.scale_x],
        "SCALE_W": _SCALE_CODES[desc.scale_w],
        "CTAS_PER_SM": schedule.ctas_per_sm,
        "WEIGHT_STAGES": weight_stages,
        "X_STAGES": source_stages,
        "STEP_TOKENS": schedule.step_tokens(lines.out_bytes),
        "X_FROM_PREPASS": int(after_pass),
        "X_COLUMN_MAJOR": int(lines.x_columns),
        "X_CP_ASYNC": int(lines.x_columns and schedule.copied_by_threads(desc.n)),
        "Y_COLUMN_MAJOR": int(lines.y_columns),
    }


def grid_size(schedule: WgmmaSpSchedule, n: int, m: int, device: DeviceProperties) -> int:
    """Of a launch. With one slice they stay and take tile after tile; with ranges there is one for each."""
    items = schedule.items(n, m)
    # What is parked has room in the workspace of an H200's blocks.
    most = H200_MULTIPROCESSORS if schedule.saved_accumulators else device.multiprocessors
    resident = schedule.stream_k or schedule.resident_clusters(min(most, device.multiprocessors))
    stay = resident if schedule.stream_k else min(items, resident)
    return (stay if schedule.split_k == 1 else items) * schedule.cluster


def fixed_parameters(
    desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule, lines: OperandLayouts, tiles_of_range: int = 1
) -> WgmmaSpParams:
    """Those that don't depend on where the operands lie. Ranges are of ``tiles_of_range`` tiles each."""
    k_tiles = -(-desc.k // lines.layout.tile_k)
    whole, range_units, longer = schedule.stream_k_split(desc.n, desc.m, -(-k_tiles // tiles_of_range))
    return WgmmaSpParams(
        n=desc.n,
        m=desc.m,
        k=desc.k,
        row_tiles=-(-desc.m // TILE_M),
        k_tiles=k_tiles,
        alpha=desc.alpha,
        n_tiles=-(-desc.n // schedule.tokens),
        work_tiles=schedule.items(desc.n, desc.m),
        x_tail_tokens=schedule.tail_boxed(desc.n) if lines.x_columns else schedule.tail_rows(desc.n),
        data_parallel_tiles=whole,
        units_per_cluster=range_units,
        big_units=longer,
    )


# Tensor maps --------------------------------------------------------------------------------------


class Box(NamedTuple):
    """What the copy engine moves at a time: lines, which are rows or columns, and elements of each."""

    lines: int
    elements: int
    pitch: int
    """Bytes from one line to the next in shared memory."""
    groups: int = 0
    """Of so many elements, one after the other in a line: first all lines of one, then those of the next."""


def source_boxes(
    desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule, size: int
) -> tuple[Box, Box, Box, Box]:
    """Of X: of all blocks of tokens; of the last block; in columns: what is left past their whole groups.

    ``size``: bytes of an element as it is copied. What lies past the last token is not copied, not even as
    zeros: those the copy engine writes slowly.
    """
    line = 128
    if desc.x_order is MatrixOrder.ROW:
        tail = Box(schedule.tail_rows(desc.n), line // size, line)
        whole = (
            tail._replace(lines=schedule.tokens // schedule.cluster_m) if desc.n > schedule.tokens else tail
        )
        return whole, tail, whole, tail
    group, tail_tokens = schedule.group(size), schedule.tail_tokens(desc.n)
    box = Box(line // size, group, group * size)
    # A box that nothing is copied with is a whole one.
    whole, tail = (
        box._replace(groups=max(1, min(count, desc.n) // group)) for count in (schedule.tokens, tail_tokens)
    )
    left = schedule.tokens % group, schedule.tail_boxed(desc.n) - tail_tokens // group * group
    rest, tail_rest = (box._replace(elements=tokens or group, groups=1) for tokens in left)
    return whole, tail, rest, tail_rest


def result_box(desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule) -> Box:
    """Of Y: at most what a row tile of W makes."""
    size = desc.out_element.itemsize
    tokens, outputs = schedule.step_tokens(size), TILE_M // 2 if desc.epilogue.is_gated else TILE_M
    if desc.y_order is MatrixOrder.ROW:
        adjacent = min(outputs, 128 // size)
        return Box(tokens, adjacent, adjacent * size)
    return Box(outputs, tokens, pitch_of(tokens * size))


def lines_map(at: int, shape: tuple[int, ...], stride: int, size: int, box: Box) -> bytes:
    """Of lines ``shape`` (count, elements) that begin ``stride`` elements of ``size`` bytes apart."""
    apart = stride * size
    if shape[0] == 1:  # nothing lies a line further, so any distance serves
        apart = align_up(apart, 16)
    if box.groups:
        return cuda_driver_abi.swizzled_groups_map(at, (shape[0], shape[1]), apart, size, box)
    return cuda_driver_abi.swizzled_matrix_map(at, (shape[0], shape[1]), apart, size, box[:2], box.pitch)


def view_map(view: TensorView, order: MatrixOrder, box: Box) -> bytes:
    shape = view.shape if order is MatrixOrder.ROW else view.shape[::-1]
    return lines_map(view.address, shape, leading_dimension(view, order), view.element.itemsize, box)


def launch_parameters(
    fixed: WgmmaSpParams,
    desc: GemmSparse24Descriptor,
    schedule: WgmmaSpSchedule,
    views: Views,
    source_maps: Callable[[], list[bytes]],
    y_box: Box,
    handed: int,
) -> WgmmaSpParams:
    """Of a launch. ``source_maps``: makes X's four; ``handed``: where what blocks hand over may lie."""
    parameters = WgmmaSpParams.from_buffer_copy(fixed)
    source, result = views["source"], views["result"]
    size, result_stride = result.element.itemsize, leading_dimension(result, desc.y_order)
    # The copy engine writes whole 16 bytes: where a line of Y ends within them, elements go one by one.
    copied = schedule.split_k == 1
    ends = (desc.outputs if desc.y_order is MatrixOrder.ROW else desc.n) * size if copied else 0
    parameters.y_aligned = (result.address | result_stride * size | ends) % 16 == 0

    def maps() -> bytes:
        found = b"".join(source_maps())
        return found + view_map(result, desc.y_order, y_box) if parameters.y_aligned and copied else found

    put_maps(parameters, maps)
    parameters.x = source.address
    parameters.x_stride = leading_dimension(source, desc.x_order)
    parameters.packed = views["packed"].address
    parameters.bias = address(views.get("bias"))
    parameters.scale_x = address(views.get("scale_x"))
    parameters.scale_w = address(views.get("scale_w"))
    parameters.y = result.address
    parameters.y_stride = result_stride
    if schedule.workspace_bytes():
        parameters.flags = handed
        parameters.partials = partials = handed + schedule.flags_bytes()
        parameters.blocked_sums = partials + schedule.sums_bytes()
        parameters.launch_id = next(_launch_ids)
    return parameters
