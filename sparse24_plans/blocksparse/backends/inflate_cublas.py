"""Inflates the block-sparse matrix into the workspace, then calls cuBLASLt with a pinned algorithm.

A packed operand is inflated once by ``pack``, into memory that the caller keeps.
For ``sdd`` the workspace holds the whole dense product, and its kept blocks are copied out. An epilogue reads
float32 accumulators in ``blocksparse/inflate_cublas.cu``, so that it sees them unrounded. With several
tokens, all rows that the library sees are multiples of 16 bytes: dense operands with others are copied into
the workspace first, behind the dense matrix, and padded rows of a product are copied to C.
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
from ...plan.operands import Alignment, Views, address_of
from ...vocab import BlockSparseOp, DeviceProperties
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem
from ..limits import inflated_regions
from ..lookup_tables import addresses, words
from ..prepasses import SOURCES, PrePasses

_SOURCE = "blocksparse/inflate_cublas.cu"
_VECTOR_BYTES = 16
"""Bytes that a thread of gather_blocks or finish stores at a time."""
_ITEM_ROWS = 16
"""Rows of a block in a work item of inflate_blocks."""
_THREADS, _MAX_BLOCKS = 256, 1 << 16


@kernel_params("blocksparse/params/inflate_cublas.cuh")
class InflateBlocksParams(KernelParams):
    """Parameters of the kernels of ``blocksparse/inflate_cublas.cu``."""

    kept = field("const int*", "Bit c % 32 of word c / 32 is set where the block row keeps column c.")
    pointers = field("const int*", "Index where the blocks of each block row begin: [block_rows + 1].")
    rows = field("const int*", "Block row of each block: [blocks].")
    columns = field("const int*", "Block column of each block: [blocks].")
    values = field("void*", "Values [Z, blocks, b, b]; written by gather_blocks.")
    dense = field("void*", "Dense matrices [Z, H, rows, row_cells]; read by gather_blocks.")
    product = field(
        "const void*",
        "Product [Z, H, out_rows, product_columns], float32 if an epilogue follows, or null if all is 0.",
    )
    product_columns = field("i64", "Number of elements from one row of the product to the next.")
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
    sources = (_SOURCE, *SOURCES)

    def __init__(self, choice: Choice) -> None:
        dense_bytes, prepared_bytes, product_bytes = inflated_regions(choice.descriptor)
        super().__init__(choice, dense_bytes + prepared_bytes, product_bytes)
        desc, device = self.descriptor, choice.device
        one, dense = desc.layout, desc.op is not BlockSparseOp.SDD
        problem = KernelProblem(desc)
        prepared = problem.aligned_operands
        self._prepasses = PrePasses(prepared, desc.element.itemsize, device)
        self._transposed = {copy.name for copy in prepared if copy.transposes}
        self._product_element = problem.product_element
        rows, cols, _ = self._sizes
        self._product_columns = problem.product_tokens if desc.op is BlockSparseOp.DSD else cols
        self._results = desc.batch * (one.heads * rows * cols if dense else one.blocks * one.block**2)
        self._before = self._function("inflate_blocks" if dense else "gather_blocks", device)
        self._finish = self._function("finish", device)
        multiplies = self._results and desc.reduction
        if multiplies:
            self.launches = 1 + (not desc.packed) + len(prepared) + (self._acc_bytes > 0)
        self._matmul = self._reserve(self._product if multiplies else None)
        self.details += self._prepasses.details
        if self._product_columns != cols:
            self.details += f"; rows of c are padded to {self._product_columns} elements, then copied"
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
        desc, (rows, _, k) = self.descriptor, self._sizes
        trans_a, trans_b = (
            transposed != (name in self._transposed)
            for name, transposed in (("a", desc.trans_a), ("b", desc.trans_b))
        )
        # The tokens of b are padded with those of the product.
        width = self._product_columns
        a = Factor(width, trans_b, k if trans_b else width)
        b = Factor(rows, trans_a, rows if trans_a else k)
        return self._find_matmul(a, b, width, self._product_element, desc.batch * desc.layout.heads)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if not self._results:
            return nothing
        if self._matmul is None:
            return self._finished(views, 0)
        dense, product = workspace, workspace + self._dense_bytes
        scratch = product + self._acc_bytes
        copies, prepasses = self._prepasses.bind(views, product - self._prepasses.workspace_size)
        places = {name: copies[name].address for name in ("a", "b", "c")}
        if self.descriptor.op is BlockSparseOp.SDD:
            multiply = self._matmul.bind(places["b"], places["a"], dense, scratch)
            return launch_in_order(*prepasses, multiply, self._blocks(views, dense))
        before = []
        if not self.descriptor.packed:
            places[self.descriptor.sparse] = dense
            before = [self._blocks(views, dense)]
        after = [self._finished(views, product)] if self._acc_bytes else []
        multiply = self._matmul.bind(places["b"], places["a"], product if after else places["c"], scratch)
        return launch_in_order(*before, *prepasses, multiply, *after)

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
        return self._before.bind(min(blocks, _MAX_BLOCKS), parameters)

    def _finished(self, views: Views, product: int) -> Launch:
        rows, cols, _ = self._sizes
        parameters = InflateBlocksParams(
            product=product,
            product_columns=self._product_columns,
            bias=address_of(views, "bias"),
            out=views["c"].address,
            heads=self.descriptor.layout.heads,
            out_rows=rows,
            out_columns=cols,
            out_elements=self._results,
            bias_per_row=self.descriptor.op is BlockSparseOp.DSD,
        )
        blocks = -(-self._results * self.descriptor.out_element.itemsize // (_VECTOR_BYTES * _THREADS))
        return self._finish.bind(min(blocks, _MAX_BLOCKS), parameters)
