"""The host tier in NumPy: ``host_blas`` calls BLAS, ``host_strict`` is the oracle.

The modules in ``blocksparse/arithmetic/`` define the bits of the strict mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...arithmetic.epilogue import encoded, finished
from ...device.streams import Launch
from ...device.subnormals import check_subnormals
from ...device.tensors import TensorView
from ...plan.kernel import Choice
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Views
from ...vocab import (
    AttentionMask,
    BlockSparseConvOp,
    BlockSparseOp,
    BlockSparsePass,
    ElementKind,
    InnerPattern,
)
from ...weights import dense
from .. import pattern24
from ..arithmetic import convolution, products, softmax
from ..arithmetic.attention import Attention
from ..convolution import BlockSparseConv2dDescriptor, Geometry
from ..descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)
from ..lookup_tables import LookUp

Array = np.ndarray[Any, Any]


class Kernel(BaseKernel[BlockSparseDescriptor]):
    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._work = _WORK[type(choice.descriptor)](choice)
        self.details = self._work.details

    def launcher(self, views: Views, workspace: int) -> Launch:
        return lambda stream: self._run(views)

    def _run(self, views: Views) -> None:
        check_subnormals()
        tables = LookUp.of(views["layout"].array(), self.descriptor.layout)  # as they are now
        with np.errstate(all="ignore"):  # overflow, Inf and NaN are results here, not accidents
            self._work.run(views, tables)


class _Work:
    """The work of a plan on the host."""

    def __init__(self, choice: Choice) -> None:
        self.descriptor: Any = choice.descriptor
        self.strict: bool = choice.entry.strict
        self.multiply = products.in_order if self.strict else products.blas
        self.details = "NumPy, emulated float32 fma" if self.strict else "NumPy, BLAS"

    def run(self, views: Views, tables: LookUp) -> None:
        raise NotImplementedError


class _Matmul(_Work):
    descriptor: BlockSparseMatmulDescriptor

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        if self.descriptor.element is ElementKind.S8:
            self.multiply = products.exact

    def run(self, views: Views, tables: LookUp) -> None:
        if self.descriptor.op is BlockSparseOp.SDD:
            self._sdd(views, tables)
        else:
            self._one_sparse(views, tables)

    def _sdd(self, views: Views, tables: LookUp) -> None:
        desc, c = self.descriptor, views["c"].bits()
        left, right = (
            _transposed(_widened(views["a"]), desc.trans_a),
            _transposed(_widened(views["b"]), desc.trans_b),
        )
        for row in products.block_rows(desc.layout, tables, transposed=False):
            sums = products.dense_times_dense(row, left, right, self.multiply, desc.layout.block)
            c[:, row.places] = finished(sums, desc)

    def _one_sparse(self, views: Views, tables: LookUp) -> None:
        """Compute ``dsd``, or ``dds`` as its transpose: C^T = op(S)^T op(A)^T."""
        desc, on_the_right = self.descriptor, self.descriptor.op is BlockSparseOp.DDS
        sparse, other = ("b", "a") if on_the_right else ("a", "b")
        transposed = desc.trans_a if on_the_right else desc.trans_b
        values, matrix = (
            _widened(views[sparse]),
            _transposed(_widened(views[other]), transposed != on_the_right),
        )
        c = _transposed(views["c"].bits(), on_the_right)
        bias = views["bias"].array()[:, :, None] if "bias" in views else None
        transposed = desc.trans_sparse != on_the_right
        patterned = desc.inner is InnerPattern.SPARSE24
        transpose = transposed and not patterned
        multiply = partial(products.sparse_times_dense, multiply=self.multiply, transposed=transpose)
        if patterned:
            codes = pattern24.codes_of(views["metadata"].bits())
            if self.strict:
                multiply = partial(products.kept_times_dense, columns=pattern24.positions(codes))
            else:
                values = pattern24.whole(values, codes)
        for row in products.block_rows(desc.layout, tables, transposed=transposed):
            sums = multiply(row, values, matrix)
            added = None if bias is None else bias[row.head, row.cells]
            c[:, row.head, row.cells] = finished(sums, desc, bias=added)


class _Softmax(_Work):
    descriptor: BlockSparseSoftmaxDescriptor

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.details = "NumPy"

    def run(self, views: Views, tables: LookUp) -> None:
        desc = self.descriptor
        forward = desc.op is BlockSparsePass.FORWARD
        result = "y" if forward else "dx"
        out = views[result].bits()
        read = {name: _widened(view) for name, view in views.items() if name not in ("layout", result)}
        for row in products.block_rows(desc.layout, tables, transposed=False):
            if forward:
                found = softmax.softmax(self._scores(read, row)).probabilities
            else:
                y, dy = (products.side_by_side(read[name][:, row.places]) for name in ("y", "dy"))
                found = softmax.gradient(y, dy, desc.scale)
            out[:, row.places] = products.in_blocks(encoded(found, desc.element))

    def _scores(self, read: dict[str, Array], row: products.BlockRow) -> Array:
        desc, columns_read = self.descriptor, row.cells_across(self.descriptor.layout.block)
        v = products.side_by_side(read["x"][:, row.places]) * np.float32(desc.scale)
        if desc.rpe:
            v = v + read["rpe"][row.head, row.cells][:, columns_read]
        if desc.key_padding_mask is not AttentionMask.NONE:
            v = v + softmax.added(read["key_padding_mask"][:, None, columns_read], desc.key_padding_mask)
        if desc.attn_mask is not AttentionMask.NONE:
            v = v + softmax.added(read["attn_mask"][row.cells][:, columns_read], desc.attn_mask)
        if desc.causal:
            rows = np.arange(row.cells.start, row.cells.stop)
            v = np.where(columns_read > rows[:, None], np.float32(-np.inf), v)
        return v


class _Attention(_Work):
    descriptor: BlockSparseAttentionDescriptor

    def run(self, views: Views, tables: LookUp) -> None:
        forward = self.descriptor.op is BlockSparsePass.FORWARD
        results = ("o", "lse") if forward else ("dq", "dk", "dv")
        read = {
            name: view.array() if view.element is ElementKind.I32 else _widened(view)
            for name, view in views.items()
            if name not in results
        }
        work = Attention(self.descriptor, tables, self.multiply, read)
        for name, found in zip(results, work.forward() if forward else work.backward(), strict=True):
            views[name].bits()[...] = encoded(found, views[name].element)


class _Convolution(_Work):
    descriptor: BlockSparseConv2dDescriptor

    def run(self, views: Views, tables: LookUp) -> None:
        desc, geometry = self.descriptor, self.descriptor.geometry
        transposed = desc.op is BlockSparseConvOp.DGRAD
        read = "dy" if transposed else "x"
        pixels = convolution.Pixels(_widened(views[read]), geometry)
        gradient = (desc.height, desc.width) if transposed else None
        filter_rows = convolution.filter_rows(desc.layout, tables, geometry, gradient)
        if desc.op is BlockSparseConvOp.WGRAD:
            dy, out = _widened(views["dy"]).reshape(desc.reduction, desc.layout.rows), views["dfilter"].bits()
            for one in filter_rows:
                sums = convolution.of_filter(one, dy, pixels, self.multiply)
                out[0, one.places] = finished(sums, desc)
            return
        values, out = _widened(views["filter"])[0], views["dx" if transposed else "y"].bits()
        bias = views["bias"].array() if "bias" in views else None
        for one in filter_rows:
            sums = convolution.of_results(one, values, pixels, self.multiply, transposed=transposed)
            found = finished(sums, desc, bias=None if bias is None else bias[one.cells])
            _place(geometry, found, one, out)


def _place(geometry: Geometry, found: Array, one: convolution.FilterRow, out: Array) -> None:
    """Store the results of a phase, as many as exist."""
    h, w = geometry
    row, column = divmod(one.phase, w.divide)
    into = out[:, row :: h.divide, column :: w.divide, one.cells]
    made = found.reshape(out.shape[0], h.results, w.results, found.shape[-1])
    into[...] = made[:, : into.shape[1], : into.shape[2]]


_WORK: dict[type[BlockSparseDescriptor], type[_Work]] = {
    BlockSparseMatmulDescriptor: _Matmul,
    BlockSparseSoftmaxDescriptor: _Softmax,
    BlockSparseAttentionDescriptor: _Attention,
    BlockSparseConv2dDescriptor: _Convolution,
}


def _widened(view: TensorView) -> Array:
    return dense.widened(view.bits(), view.element)


def _transposed(matrices: Array, transpose: bool) -> Array:
    return matrices.swapaxes(-1, -2) if transpose else matrices
