"""Launches ``blocksparse/conv_wgmma.cu``: kept blocks of a filter and the pixels that they meet, by wgmma."""

from __future__ import annotations

import ctypes

from ..._vendor import cuda_driver_abi
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import Function, load, put_maps
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import BlockSparseConvOp, DeviceProperties
from ..conv_geometry import Axis
from ..convolution import BlockSparseConv2dDescriptor
from ..limits import conv_workspace
from ..lookup_tables import addresses, groups, words
from ..schedules.conv_wgmma import ConvSchedule, schedule_of
from ..wgmma import rows_map

_SOURCE = "blocksparse/conv_wgmma.cu"
_STEP, _LINE_BYTES = 64, 128
"""Channels or pixels of a step; bytes of a line of a box."""
_OPS = {BlockSparseConvOp.FORWARD: 0, BlockSparseConvOp.DGRAD: 1, BlockSparseConvOp.WGRAD: 2}
_TABLES = {
    BlockSparseConvOp.FORWARD: {
        "order": "row_strips",
        "counts": "row_strip_columns",
        "kept": "row_bits",
        "pointers": "row_pointers",
    },
    BlockSparseConvOp.DGRAD: {
        "kept": "column_bits",
        "pointers": "column_pointers",
        "places": "column_order",
    },
    BlockSparseConvOp.WGRAD: {
        "order": "group_rows",
        "counts": "group_firsts",
        "pointers": "row_pointers",
        "columns": "columns",
    },
}
"""By the kernel's parameter."""
_THREADS, _VECTOR, _MOST_BLOCKS = 256, 4, 1 << 16
"""Of add_parts."""


class _Axis(ctypes.Structure):
    """Axis of the kernel."""

    _fields_ = [
        ("lower", ctypes.c_int32),
        ("stride", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("divide", ctypes.c_int32),
        ("count", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("multiplier", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    ]

    @classmethod
    def of(cls, axis: Axis, size: int) -> _Axis:
        shift = 31 + (axis.results - 1).bit_length()
        multiplier = -(-(1 << shift) // axis.results)  # times less than 2^31, shifted: the quotient
        walk = axis.lower, axis.stride, axis.start, axis.step, axis.divide
        return cls(*walk, axis.results, size, multiplier, shift)


class _Parameters(ctypes.Structure):
    """ConvWgmmaParams of the kernel."""

    _fields_ = [
        ("left_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("right_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("out_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("order", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("cells", ctypes.c_int64),
        ("h", _Axis),
        ("w", _Axis),
        ("alpha", ctypes.c_float),
        ("blocks", ctypes.c_int32),
        ("lines", ctypes.c_uint32),
        ("strips", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("tap_words", ctypes.c_uint32),
        ("taps", ctypes.c_uint32),
        ("taps_w", ctypes.c_uint32),
        ("phases", ctypes.c_uint32),
        ("images", ctypes.c_uint32),
        ("pixels", ctypes.c_uint32),
        ("pixel_clusters", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("steps", ctypes.c_uint32),
        ("padding", ctypes.c_char * 40),  # a tensor map's alignment is the struct's
    ]


class Kernel(BaseKernel[BlockSparseConv2dDescriptor]):
    default_alignment = Alignment(16)
    workspace_alignment = 16
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._schedule = found = schedule_of(desc, device.multiprocessors)
        self._blocks = found.blocks(device.multiprocessors)
        self.workspace_size = conv_workspace(desc)
        self.launches = 2 if self.workspace_size else 1
        self.details = (
            f"{found.items * found.cut.share} tiles of {found.cut.rows} rows x {found.cut.tokens} "
            f"{'columns' if desc.op is BlockSparseConvOp.WGRAD else 'pixels'} on {self._blocks} blocks, "
            f"clusters of {found.cut.share}, {found.cut.stages} stages, {found.parts} parts"
        )
        self._multiply = self._load("conv_wgmma", found.cut.threads, device, found.cut.shared_bytes())
        self._add = self._load("add_parts", _THREADS, device) if self.workspace_size else None
        self._parameters = _of_shape(desc, found)

    def _load(self, name: str, threads: int, device: DeviceProperties, shared_bytes: int = 0) -> Function:
        macros = defines(self.descriptor, self._schedule)
        return load(_SOURCE, name, threads, device, macros, _Parameters, shared_bytes=shared_bytes)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._blocks == 0:
            return nothing
        desc = self.descriptor
        parameters = _Parameters.from_buffer_copy(self._parameters)
        found = addresses(views["layout"].address, desc.layout)
        for field, name in _TABLES[desc.op].items():
            setattr(parameters, field, found[name])
        put_maps(parameters, self._maps, views, workspace)
        result = {"forward": "y", "dgrad": "dx", "wgrad": "dfilter"}[desc.op]
        parameters.results = views[result].address
        if "bias" in views:
            parameters.bias = views["bias"].address
        multiply = self._multiply.bind(self._blocks, parameters, overlapping=True)
        return multiply if self._add is None else self._followed(multiply, self._add, parameters, workspace)

    def _followed(self, multiply: Launch, add: Function, before: _Parameters, workspace: int) -> Launch:
        """By the sum of the parts, which alone takes alpha."""
        parameters = _Parameters.from_buffer_copy(before)
        before.alpha, parameters.sums = 1.0, workspace
        blocks = min(-(-parameters.cells // (_THREADS * _VECTOR)), _MOST_BLOCKS)
        return launch_in_order(multiply, add.bind(blocks, parameters))

    def _maps(self, views: Views, workspace: int) -> bytes:
        """Of the left and the right operand and the result."""
        desc, cut = self.descriptor, self._schedule.cut
        one, step = desc.layout, min(desc.layout.block, _STEP)
        read = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        if desc.op is BlockSparseConvOp.WGRAD:
            if one.blocks and desc.reduction:  # else nothing is read
                read = rows_map(views["dy"], (_STEP, _STEP)) + self._pixels_map(views["x"], (_STEP, _STEP))
            out, rows = views["dfilter"], self._schedule.parts * one.blocks * one.block
            address, itemsize = (workspace, 4) if self.workspace_size else (out.address, out.element.itemsize)
            box = _STEP, _LINE_BYTES // itemsize
            return read + cuda_driver_abi.swizzled_matrix_map(
                address, (rows, one.block), one.block * itemsize, itemsize, box
            )
        forward = desc.op is BlockSparseConvOp.FORWARD
        if one.blocks:
            lines = (one.block if forward else step) // cut.share
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
        """Boxes (pixels, channels) of what the results' pixels meet at a tap."""
        h, w = self.descriptor.geometry
        walk = cuda_driver_abi.PixelBox((h.lower, w.lower), (h.results, w.results), (h.stride, w.stride))
        count, height, width, channels = images.shape
        return cuda_driver_abi.swizzled_images_map(
            images.address, (count, height, width, channels), images.element.itemsize, walk, box
        )


def _of_shape(desc: BlockSparseConv2dDescriptor, found: ConvSchedule) -> _Parameters:
    """What doesn't depend on where operands are."""
    one, (h, w) = desc.layout, desc.geometry
    turned = desc.op is BlockSparseConvOp.DGRAD
    taps, tap_words = desc.geometry.taps, words(one.block_rows)
    return _Parameters(
        cells=one.blocks * one.block**2,
        h=_Axis.of(h, desc.height),
        w=_Axis.of(w, desc.width),
        alpha=desc.alpha,
        blocks=one.blocks,
        lines=one.block_cols // taps if turned else one.block_rows,
        strips=found.strips,
        words=taps * tap_words if turned else words(one.block_cols),
        tap_words=tap_words,
        taps=taps,
        taps_w=w.taps,
        phases=desc.geometry.phases,
        images=desc.batch,
        pixels=desc.batch * desc.geometry.pixels,
        pixel_clusters=found.pixel_clusters,
        band=found.band,
        groups=groups(one),
        parts=found.parts,
        steps=found.steps,
    )


def defines(desc: BlockSparseConv2dDescriptor, found: ConvSchedule) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    return {
        **type_defines(desc),
        "OP": _OPS[desc.op],
        "PHASES": int(desc.geometry.phases > 1),
        "SPLIT_K": int(found.parts > 1),
        "BLOCK": desc.layout.block,
        "TILE_N": found.cut.tokens,
        "WARPGROUPS": found.cut.warpgroups,
        "CLUSTER_N": found.cut.share,
        "STAGES": found.cut.stages,
        "BUFFERS": found.cut.buffers,
    }
