"""Inflates the block-sparse matrix into the workspace, then calls cuBLASLt with a pinned algorithm.

A packed operand is inflated once by ``pack``, into memory that the caller keeps.
For ``sdd`` the workspace holds the whole dense product, and its kept blocks are copied out. An epilogue reads
float32 accumulators in ``blocksparse/inflate_cublas.cu``, so that it sees them unrounded.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..._vendor.cublaslt_abi import Matmul
from ...device.install import import_cupy
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import Function, load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...errors import BackendUnavailableError
from ...plan.cublaslt import CublasKernel, Factor
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.operands import Alignment, Views
from ...vocab import BlockSparseOp, DeviceProperties, ElementKind
from ..descriptor import BlockSparseMatmulDescriptor
from ..limits import inflated_regions
from ..lookup_tables import addresses, words

_SOURCE = "blocksparse/inflate_cublas.cu"
_VECTOR_BYTES = 16
"""Bytes that a thread of gather_blocks copies at a time."""
_ITEM_ROWS = 16
"""Rows of a block in a work item of inflate_blocks."""
_THREADS, _MOST_BLOCKS = 256, 1 << 16


@kernel_params("blocksparse/params/inflate_cublas.cuh")
class InflateBlocksParams(KernelParams):
    """Parameters of the kernels of ``blocksparse/inflate_cublas.cu``."""

    kept = field("const int*", "Bit c % 32 of word c / 32 is set where the block row keeps column c.")
    pointers = field("const int*", "Index where the blocks of each block row begin: [block_rows + 1].")
    rows = field("const int*", "Block row of each block: [blocks].")
    columns = field("const int*", "Block column of each block: [blocks].")
    values = field("void*", "Values [Z, blocks, b, b]; written by gather_blocks.")
    dense = field("void*", "Dense matrices [Z, H, rows, row_cells]; read by gather_blocks.")
    accumulators = field("const float*", "Sums [Z, H, out_rows, out_columns], or null if all are 0.")
    bias = field("const void*", "Bias [H, out_rows] or [H, out_columns], or null.")
    out = field("void*", "C [Z, H, out_rows, out_columns].")
    block_rows = field("i64", "Number of block rows of all heads.")
    blocks = field("i64", "Number of kept blocks of a batch element.")
    row_cells = field("i64", "Number of cells of a row of the dense matrix.")
    work_items = field("i64", "inflate_blocks: Z * block_rows * bit_words * b/16; gather_blocks: Z * blocks.")
    heads = field("i64", "Number of heads, H.")
    out_rows = field("i64", "Number of rows of C.")
    out_columns = field("i64", "Number of columns of C.")
    out_elements = field("i64", "Number of elements of all of C.")
    bit_words = field("u32", "Number of words of a block row in kept.")
    bias_per_row = field("u32", "1 if each row of C has a bias, 0 if each column has.")


class Kernel(CublasKernel[BlockSparseMatmulDescriptor]):
    empty: ClassVar[dict[str, int]] = {"batch": 0}
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice, *inflated_regions(choice.descriptor))
        desc, device = self.descriptor, choice.device
        one, dense = desc.layout, desc.op is not BlockSparseOp.SDD
        rows, cols, _ = self._sizes
        self._results = desc.batch * (one.heads * rows * cols if dense else one.blocks * one.block**2)
        self._before = self._function("inflate_blocks" if dense else "gather_blocks", device)
        self._finish = self._function("finish", device)
        multiplies = self._results and desc.reduction
        if multiplies:
            self.launches = 1 + (not desc.packed) + (self._acc_bytes > 0)
        self._matmul = self._reserve(self._product if multiplies else None)
        if desc.packed:
            nbytes = desc.batch * one.heads * one.rows * one.cols * desc.element.itemsize
            self.details += f"; a dense copy of {nbytes} bytes, {one.density:.1%} of it kept"

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows and columns of C as a dense matrix, and the length of its sums."""
        desc = self.descriptor
        (rows, cols), n = desc.sides, desc.n
        return {"sdd": (rows, cols, n), "dsd": (rows, n, cols), "dds": (n, cols, rows)}[desc.op]

    def _function(self, name: str, device: DeviceProperties) -> Function:
        block = {"BLOCK": self.descriptor.layout.block}
        return load(_SOURCE, name, _THREADS, device, {**type_defines(self.descriptor), **block})

    def _product(self) -> Matmul:
        """The pinned product. Row-major operands are column-major transposes: C^T = op(B)^T @ op(A)^T."""
        desc, (rows, cols, k) = self.descriptor, self._sizes
        a = Factor(cols, desc.trans_b, k if desc.trans_b else cols)
        b = Factor(rows, desc.trans_a, rows if desc.trans_a else k)
        out = ElementKind.F32 if self._acc_bytes else desc.out_element
        return self._find_matmul(a, b, cols, out, desc.batch * desc.layout.heads)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if not self._results:
            return nothing
        if self._matmul is None:
            return self._finished(views, 0)
        dense, acc = workspace, workspace + self._dense_bytes
        scratch = acc + self._acc_bytes
        places = {name: views[name].address for name in ("a", "b", "c")}
        if self.descriptor.op is BlockSparseOp.SDD:
            multiply = self._matmul.bind(places["b"], places["a"], dense, scratch)
            return launch_in_order(multiply, self._blocks(views, dense))
        before = []
        if not self.descriptor.packed:
            places[self.descriptor.sparse] = dense
            before = [self._blocks(views, dense)]
        result = acc if self._acc_bytes else places["c"]
        multiply = self._matmul.bind(places["b"], places["a"], result, scratch)
        return launch_in_order(*before, multiply, *([self._finished(views, acc)] if self._acc_bytes else []))

    def pack(self, values: TensorView, tables: TensorView) -> TensorView:
        """A dense copy of a packed operand in new memory, written on CuPy's current stream."""
        desc, one = self.descriptor, self.descriptor.layout
        cupy = import_cupy()
        shape = desc.batch, one.heads, one.rows, one.cols
        try:
            memory = cupy.empty(math.prod(shape) * desc.element.itemsize, np.uint8)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise BackendUnavailableError(f"no memory for a dense copy {list(shape)}: {error}") from error
        owner = TensorView.of(memory)
        if owner.address:
            views = {desc.sparse: values, "layout": tables}
            self._blocks(views, owner.address)(cupy.cuda.get_current_stream().ptr)
        return TensorView(owner.address, shape, desc.element, values.device, owner=owner.owner)

    def _blocks(self, views: Views, dense: int) -> Launch:
        """Return the launch that copies between values and the dense matrix."""
        desc, one = self.descriptor, self.descriptor.layout
        found = addresses(views["layout"].address, one)
        lines, across = one.heads * one.block_rows, words(one.block_cols)
        blocks = items = desc.batch * lines * across * (one.block // _ITEM_ROWS)
        if desc.op is BlockSparseOp.SDD:
            items = desc.batch * one.blocks
            gathered = items * one.block**2 * desc.out_element.itemsize
            blocks = -(-gathered // (_VECTOR_BYTES * _THREADS))
        parameters = InflateBlocksParams(
            kept=found["row_bits"],
            pointers=found["row_pointers"],
            rows=found["rows"],
            columns=found["columns"],
            values=views[desc.sparse].address,
            dense=dense,
            block_rows=lines,
            blocks=one.blocks,
            row_cells=one.cols,
            work_items=items,
            bit_words=across,
        )
        return self._before.bind(min(blocks, _MOST_BLOCKS), parameters)

    def _finished(self, views: Views, acc: int) -> Launch:
        rows, cols, _ = self._sizes
        bias = views.get("bias")
        parameters = InflateBlocksParams(
            accumulators=acc,
            bias=bias.address if bias is not None else 0,
            out=views["c"].address,
            heads=self.descriptor.layout.heads,
            out_rows=rows,
            out_columns=cols,
            out_elements=self._results,
            bias_per_row=self.descriptor.op is BlockSparseOp.DSD,
        )
        return self._finish.bind(min(-(-self._results // _THREADS), _MOST_BLOCKS), parameters)
