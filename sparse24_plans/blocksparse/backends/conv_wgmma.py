"""Launches ``blocksparse/conv_wgmma.cu``: convolutions with kept blocks of a filter, by wgmma."""

from __future__ import annotations

from ..._vendor import cuda_driver_abi
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import Function, load, put_maps
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views, address_of
from ...vocab import BlockSparseConvOp, DeviceProperties
from ..convolution import Axis, BlockSparseConv2dDescriptor
from ..lookup_tables import addresses, groups, words
from ..schedules.conv_wgmma import ConvSchedule, conv_workspace
from ..wgmma import rows_map

_SOURCE = "blocksparse/conv_wgmma.cu"
_STEP, _LINE_BYTES = 64, 128
"""Channels or pixels of a step; bytes of a box's row."""
_OPS = {BlockSparseConvOp.FORWARD: 0, BlockSparseConvOp.DGRAD: 1, BlockSparseConvOp.WGRAD: 2}
_TABLES = {
    BlockSparseConvOp.FORWARD: {
        "work_rows": "row_panels",
        "work_blocks": "row_panel_columns",
        "kept": "row_bits",
        "pointers": "row_pointers",
    },
    BlockSparseConvOp.DGRAD: {
        "kept": "column_bits",
        "pointers": "column_pointers",
        "value_index": "column_order",
    },
    BlockSparseConvOp.WGRAD: {
        "work_rows": "group_rows",
        "work_blocks": "group_firsts",
        "pointers": "row_pointers",
        "columns": "columns",
    },
}
"""Tables of each op, by the kernel's parameter."""
_THREADS, _VECTOR, _MAX_BLOCKS = 256, 4, 1 << 16
"""Threads, elements of a thread's vector, and most CTAs of reduce_split_k."""


@kernel_params("blocksparse/params/conv_wgmma.cuh")
class AxisParams(KernelParams):
    """One axis of the pixels, as ``blocksparse/conv_wgmma.cu`` walks it: see :class:`Axis`."""

    lower = field("int", "Pixel that result 0 of a phase reads at offset 0.")
    stride = field("int", "Pixels from one result's pixel to the next.")
    start = field("int", "Numerator of the offset of phase 0 and tap 0.")
    step = field("int", "Growth of the numerator from one tap to the next.")
    divide = field("int", "Denominator of the offset, and the number of phases.")
    results = field("u32", "Number of results of a phase.")
    size = field("u32", "Pixels of X along the axis.")
    multiplier = field("u32", "Factor of the division by results.")
    shift = field("u32", "Bits by which the division by results shifts the product.")

    @classmethod
    def of(cls, axis: Axis, size: int) -> AxisParams:
        shift = 31 + (axis.results - 1).bit_length()
        multiplier = -(-(1 << shift) // axis.results)  # times less than 2^31, shifted: the quotient
        walk = {
            name: getattr(axis, name) for name in ("lower", "stride", "start", "step", "divide", "results")
        }
        return cls(**walk, size=size, multiplier=multiplier, shift=shift)


@kernel_params("blocksparse/params/conv_wgmma.cuh")
class ConvWgmmaParams(KernelParams):
    """Parameters of ``blocksparse/conv_wgmma.cu``."""

    left_map = field("TensorMap", "Values of the filter [blocks * b, b], or dY [pixels, K] for wgrad.")
    right_map = field("TensorMap", "Pixels of X, or of dY for dgrad.")
    out_map = field("TensorMap", "Results [pixels, rows], or [split_k * blocks * b, b] for wgrad.")
    work_rows = field("const int*", "Row panels, longest first. For wgrad: block row of each group, or -1.")
    work_blocks = field("const int*", "Block columns of each panel. For wgrad: first block of each group.")
    kept = field("const u32*", "Bit c % 32 of word c / 32 is set where the block row keeps column c.")
    pointers = field("const int*", "Index where the blocks of each block row begin; of each tap, for dgrad.")
    columns = field("const int*", "Block column of each block: [blocks], for wgrad.")
    value_index = field("const int*", "Index of each block in the values: [blocks], for dgrad.")
    bias = field("const void*", "Bias [rows], or null.")
    out = field("void*", "Results [images, h, w, rows] of phases, or the reduced gradient of the filter.")
    partials = field("const float*", "Partial sums of split-K: [split_k, elements].")
    elements = field("i64", "Number of elements of the filter's gradient.")
    h = field(AxisParams, "Vertical axis.")
    w = field(AxisParams, "Horizontal axis.")
    alpha = field("float", "Factor of the product.")
    blocks = field("int", "Number of kept blocks.")
    block_rows = field("u32", "Number of block rows.")
    panels = field("u32", "Number of row panels of a phase.")
    bit_words = field("u32", "Number of words of a block row in kept.")
    tap_words = field("u32", "Number of words of one tap of a block row, for dgrad.")
    taps = field("u32", "Number of taps of the filter.")
    taps_w = field("u32", "Number of taps in one row of the filter.")
    phases = field("u32", "Number of phases.")
    images = field("u32", "Number of images.")
    pixels = field("u32", "Number of pixels of a phase in all images.")
    cluster_tiles = field("u32", "Number of clusters' tiles that cover the pixels; of a group, for wgrad.")
    raster_tiles = field("u32", "Number of pixel tiles of a raster group, which L2 holds.")
    groups = field("u32", "Number of groups of blocks, for wgrad.")
    split_k = field("u32", "Number of slices of the pixels that are summed apart, for wgrad.")
    k_steps = field("u32", "Number of steps of a slice, for wgrad.")


class Kernel(BaseKernel[BlockSparseConv2dDescriptor]):
    default_alignment = Alignment(16)
    workspace_alignment = 16
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._schedule = found = ConvSchedule.of(desc, device.multiprocessors)
        self._ctas = found.ctas(device.multiprocessors)
        self.workspace_size = conv_workspace(desc)
        self.launches = 2 if self.workspace_size else 1
        self.details = (
            f"{found.work_tiles * found.cut.cluster_n} tiles of {found.cut.rows} rows x {found.cut.tokens} "
            f"{'columns' if desc.op is BlockSparseConvOp.WGRAD else 'pixels'} on {self._ctas} CTAs, "
            f"clusters of {found.cut.cluster_n}, {found.cut.stages} stages, split-K {found.split_k}"
        )
        self._multiply = self._load("conv_wgmma", found.cut.threads, device, found.cut.shared_bytes())
        self._add = self._load("reduce_split_k", _THREADS, device) if self.workspace_size else None
        self._parameters = _of_shape(desc, found)

    def _load(self, name: str, threads: int, device: DeviceProperties, shared_bytes: int = 0) -> Function:
        macros = defines(self.descriptor, self._schedule)
        return load(_SOURCE, name, threads, device, macros, shared_bytes=shared_bytes)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._ctas == 0:
            return nothing
        desc = self.descriptor
        found = addresses(views["layout"].address, desc.layout)
        result = {"forward": "y", "dgrad": "dx", "wgrad": "dfilter"}[desc.op]
        parameters = self._parameters.with_values(
            **{parameter: found[name] for parameter, name in _TABLES[desc.op].items()},
            bias=address_of(views, "bias"),
            out=views[result].address,
        )
        put_maps(parameters, self._maps, views, workspace)
        multiply = self._multiply.bind(self._ctas, parameters, overlapping=True)
        return multiply if self._add is None else self._followed(multiply, self._add, parameters, workspace)

    def _followed(self, multiply: Launch, add: Function, before: ConvWgmmaParams, workspace: int) -> Launch:
        """Append the reduction of the splits, which alone applies alpha."""
        parameters = before.with_values(partials=workspace)
        before.alpha = 1.0
        blocks = min(-(-parameters.elements // (_THREADS * _VECTOR)), _MAX_BLOCKS)
        return launch_in_order(multiply, add.bind(blocks, parameters))

    def _maps(self, views: Views, workspace: int) -> bytes:
        """Tensor maps of the left operand, the right operand and the result."""
        desc, cut = self.descriptor, self._schedule.cut
        one, step = desc.layout, min(desc.layout.block, _STEP)
        read = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        if desc.op is BlockSparseConvOp.WGRAD:
            if one.blocks and desc.reduction:  # else nothing is read
                read = rows_map(views["dy"], (_STEP, _STEP)) + self._pixels_map(views["x"], (_STEP, _STEP))
            out, rows = views["dfilter"], self._schedule.split_k * one.blocks * one.block
            address, itemsize = (workspace, 4) if self.workspace_size else (out.address, out.element.itemsize)
            box = _STEP, _LINE_BYTES // itemsize
            return read + cuda_driver_abi.swizzled_matrix_map(
                address, (rows, one.block), one.block * itemsize, itemsize, box
            )
        forward = desc.op is BlockSparseConvOp.FORWARD
        if one.blocks:
            lines = (one.block if forward else step) // cut.cluster_n
            read = rows_map(views["filter"], (lines, step))
            read += self._pixels_map(views["x" if forward else "dy"], (cut.tokens, step))
        if desc.geometry.phases > 1:
            return read
        out = views["y" if forward else "dx"]
        wide = _LINE_BYTES // out.element.itemsize
        shape = 1, desc.batch * out.shape[1] * out.shape[2], out.shape[3]
        return read + cuda_driver_abi.swizzled_matrices_map(
            out.address, shape, out.element.itemsize, (wide, wide)
        )

    def _pixels_map(self, images: TensorView, box: tuple[int, int]) -> bytes:
        """Tensor map with boxes (pixels, channels) of the pixels that results read at a tap."""
        h, w = self.descriptor.geometry
        walk = cuda_driver_abi.PixelBox((h.lower, w.lower), (h.results, w.results), (h.stride, w.stride))
        count, height, width, channels = images.shape
        return cuda_driver_abi.swizzled_images_map(
            images.address, (count, height, width, channels), images.element.itemsize, walk, box
        )


def _of_shape(desc: BlockSparseConv2dDescriptor, found: ConvSchedule) -> ConvWgmmaParams:
    """Parameters that do not depend on addresses."""
    one, (h, w) = desc.layout, desc.geometry
    dgrad = desc.op is BlockSparseConvOp.DGRAD
    taps, tap_words = desc.geometry.taps, words(one.block_rows)
    return ConvWgmmaParams(
        elements=one.blocks * one.block**2,
        h=AxisParams.of(h, desc.height),
        w=AxisParams.of(w, desc.width),
        alpha=desc.alpha,
        blocks=one.blocks,
        block_rows=one.block_cols // taps if dgrad else one.block_rows,
        panels=found.panels,
        bit_words=taps * tap_words if dgrad else words(one.block_cols),
        tap_words=tap_words,
        taps=taps,
        taps_w=w.taps,
        phases=desc.geometry.phases,
        images=desc.batch,
        pixels=desc.batch * desc.geometry.pixels,
        cluster_tiles=found.pixel_clusters,
        raster_tiles=found.raster_tiles,
        groups=groups(one),
        split_k=found.split_k,
        k_steps=found.steps,
    )


def defines(desc: BlockSparseConv2dDescriptor, found: ConvSchedule) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    return {
        **type_defines(desc),
        "OP": _OPS[desc.op],
        "PHASES": int(desc.geometry.phases > 1),
        "SPLIT_K": int(found.split_k > 1),
        "BLOCK": desc.layout.block,
        "TILE_N": found.cut.tokens,
        "WARPGROUPS": found.cut.warpgroups,
        "CLUSTER_N": found.cut.cluster_n,
        "STAGES": found.cut.stages,
        "BUFFERS": found.cut.buffers,
    }
