"""Launches ``blocksparse/blocks_wgmma.cu`` as a convolution: X's rows are pixels that the copy engine finds.

The parts of a filter's gradient are added by ``blocksparse/conv_wgmma.cu``.
"""

from __future__ import annotations

import ctypes

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...device.jit.codes import type_defines
from ...device.jit.launcher import load
from ...device.streams import Launch, driver_error
from ...device.tensors import TensorView
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import BlockSparseConvOp, ElementKind
from ..convolution import BlockSparseConv2dDescriptor
from ..descriptor import BlockSparseMatmulDescriptor
from ..images import Axis
from ..limits import conv_workspace, filter_parts
from ..schedule import best_schedule, filter_schedule
from ..shape import BlockSparseShape
from ..tables import groups, words
from ..wgmma import K_MAJOR, LINE_BYTES, PARAMETERS, SOURCE, STEP, Form, defines, dense_map, values_map

_ADD_SOURCE = "blocksparse/conv_wgmma.cu"
_THREADS, _VECTOR, _MOST_BLOCKS = 256, 4, 1 << 16


class _Axis(ctypes.Structure):
    """ImageAxis of the kernel."""

    _fields_ = [
        ("lower", ctypes.c_int32),
        ("stride", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("divide", ctypes.c_int32),
        ("count", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
    ]

    @classmethod
    def of(cls, axis: Axis, size: int) -> _Axis:
        return cls(axis.lower, axis.stride, axis.start, axis.step, axis.divide, axis.count, size)


class _Images(ctypes.Structure):
    """Images of the kernel."""

    _fields_ = [
        ("results", ctypes.c_void_p),
        ("h", _Axis),
        ("w", _Axis),
        ("taps", ctypes.c_uint32),
        ("taps_w", ctypes.c_uint32),
        ("tap_words", ctypes.c_uint32),
        ("images", ctypes.c_uint32),
    ]


class _Parameters(ctypes.Structure):
    """BlocksWgmmaParams of a convolution."""

    _fields_ = [*PARAMETERS, ("images", _Images)]


class _AddParameters(ctypes.Structure):
    """ConvWgmmaParams of the kernel."""

    _fields_ = [
        ("sums", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cells", ctypes.c_int64),
        ("parts", ctypes.c_uint32),
        ("alpha", ctypes.c_float),
    ]


def product_of(desc: BlockSparseConv2dDescriptor) -> BlockSparseMatmulDescriptor:
    """The product that the kernel computes: its rows of dense matrices are pixels.

    Of ``forward`` and ``dgrad`` the layout is that of one tap, as far as the kernel's cut depends on it;
    heads are phases. Of ``wgrad`` batches are parts of the pixels.
    """
    one, found = desc.layout, desc.geometry
    if desc.op is BlockSparseConvOp.WGRAD:
        parts, steps = filter_parts(desc)
        whole = {"alpha": desc.alpha, "out_element": desc.out_element}
        return BlockSparseMatmulDescriptor(
            op="sdd",
            layout=one,
            n=steps * STEP,
            batch=parts,
            element=desc.element,
            trans_a=True,
            **(whole if parts == 1 else {"out_element": ElementKind.F32}),
        )
    blocks = min(one.blocks, found.phases * one.block_rows * (desc.channels // one.block))
    return BlockSparseMatmulDescriptor(
        op="dds",
        layout=BlockSparseShape(
            heads=found.phases, rows=one.rows, cols=desc.channels, block=one.block, blocks=blocks
        ),
        n=desc.batch * found.pixels,
        element=desc.element,
        trans_b=desc.op is BlockSparseConvOp.FORWARD,
        epilogue=desc.epilogue,
        alpha=desc.alpha,
        out_element=desc.out_element,
        bias_element=desc.bias_element,
    )


class Kernel(BaseKernel[BlockSparseConv2dDescriptor]):
    default_alignment = Alignment(16)
    workspace_alignment = 16
    sources = (SOURCE, _ADD_SOURCE)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._product = product = product_of(desc)
        self._form = form = Form(product)
        schedule = (
            filter_schedule(product) if form.sampled else best_schedule(product, device.multiprocessors)
        )
        self._schedule = schedule
        self._phases = desc.geometry.phases
        items = schedule.items(product)
        self._blocks = min(items, schedule.resident_clusters(device.multiprocessors)) * schedule.share
        self.details = (
            f"{items * schedule.share} tiles of {schedule.rows} rows x {schedule.tokens} "
            f"{'columns' if form.sampled else 'pixels'} on {self._blocks} blocks, "
            f"clusters of {schedule.share}, {schedule.stages} stages, {product.batch} parts"
        )
        self._function = load(
            SOURCE,
            "blocks_wgmma",
            schedule.threads,
            device,
            defines(product, schedule, images=2 if self._phases > 1 else 1),
            _Parameters,
            shared_bytes=schedule.shared_bytes(),
        )
        self.workspace_size = conv_workspace(desc)
        self._add = None
        if self.workspace_size:
            self.launches = 2
            self._add = load(_ADD_SOURCE, "add_parts", _THREADS, device, type_defines(desc), _AddParameters)
        self._parameters = self._of_shape()

    def _of_shape(self) -> _Parameters:
        """What doesn't depend on where operands are."""
        desc, product, form, schedule = self.descriptor, self._product, self._form, self._schedule
        one, (h, w) = desc.layout, desc.geometry
        taps, tap_words = desc.geometry.taps, words(one.block_rows)
        forward = desc.op is BlockSparseConvOp.FORWARD
        return _Parameters(
            blocks=one.blocks,
            alpha=product.alpha,
            strips=form.strips,
            head_strips=form.head_strips,
            head_lines=form.head_lines,
            words=words(one.block_cols) if forward else taps * tap_words,
            heads=product.layout.heads,
            batch=product.batch,
            tokens=product.n,
            token_clusters=schedule.token_clusters(product),
            band=schedule.band(product),
            groups=groups(one),
            steps=-(-product.n // STEP),
            images=_Images(
                h=_Axis.of(h, desc.height),
                w=_Axis.of(w, desc.width),
                taps=taps,
                taps_w=w.taps,
                tap_words=tap_words,
                images=desc.batch,
            ),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._blocks == 0:
            return nothing
        parameters = _Parameters.from_buffer_copy(self._parameters)
        for field, at in self._form.tables(views["layout"].address, self.descriptor.layout).items():
            setattr(parameters, field, at)
        try:
            maps = self._maps(views, workspace)
        except LibraryError as error:
            raise driver_error(error) from error
        ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))  # the maps come first
        if "bias" in views:
            parameters.bias = views["bias"].address
        if "dx" in views:
            parameters.images.results = views["dx"].address
        multiply = self._function.bind(self._blocks, parameters, overlapping=True)
        return multiply if self._add is None else self._with_add(multiply, views["dweight"], workspace)

    def _with_add(self, multiply: Launch, dweight: TensorView, workspace: int) -> Launch:
        assert self._add is not None
        desc = self.descriptor
        cells = desc.layout.blocks * desc.layout.block**2
        parameters = _AddParameters(workspace, dweight.address, cells, self._product.batch, desc.alpha)
        blocks = min(-(-cells // (_THREADS * _VECTOR)), _MOST_BLOCKS)
        add = self._add.bind(blocks, parameters)

        def launch(stream: int) -> None:
            multiply(stream)
            add(stream)

        return launch

    def _maps(self, views: Views, workspace: int) -> bytes:
        """Of the left and the right operand and the result."""
        desc, form, one = self.descriptor, self._form, self._schedule
        found = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        block = desc.layout.block
        if form.sampled:
            if desc.layout.blocks and desc.reduction:
                found = dense_map(_as_matrix(views["dy"]), form.left_major, block)
                found += self._pixels_map(views["x"], STEP, STEP)
            out = views["dweight"]
            if self.workspace_size:
                shape = (self._product.batch, *out.shape[1:])
                out = TensorView(workspace, shape, ElementKind.F32, out.device)
            return found + values_map(out, (STEP, LINE_BYTES // out.element.itemsize))
        step = min(block, STEP)
        if desc.layout.blocks:  # else nothing is read
            lines = block if form.left_major == K_MAJOR else step
            found = values_map(views["weight"], (lines // one.share, step))
            read = views["x" if desc.op is BlockSparseConvOp.FORWARD else "dy"]
            found += self._pixels_map(read, one.tokens, step)
        if self._phases > 1:
            return found
        out = _as_matrix(views["y" if desc.op is BlockSparseConvOp.FORWARD else "dx"])
        wide = LINE_BYTES // out.element.itemsize
        return found + cuda_driver_abi.swizzled_matrices_map(
            out.address, (1, *out.shape[2:]), out.element.itemsize, (wide, wide)
        )

    def _pixels_map(self, images: TensorView, pixels: int, channels: int) -> bytes:
        """Boxes of what the results' pixels meet at a tap."""
        h, w = self.descriptor.geometry
        walk = cuda_driver_abi.PixelBox((h.lower, w.lower), (h.count, w.count), (h.stride, w.stride))
        count, height, width, depth = images.shape
        return cuda_driver_abi.swizzled_images_map(
            images.address, (count, height, width, depth), images.element.itemsize, walk, (pixels, channels)
        )


def _as_matrix(images: TensorView) -> TensorView:
    """[1, 1, pixels, channels]."""
    batch, height, width, channels = images.shape
    shape = (1, 1, batch * height * width, channels)
    return TensorView(images.address, shape, images.element, images.device)
