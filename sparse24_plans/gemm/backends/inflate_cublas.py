"""Inflate into the workspace, then cuBLASLt with an algorithm pinned at select.

An epilogue beyond ``identity``, or C, takes float32 accumulators through ``gemm/inflate_cublas.cu``, so that
C, bias and activation see them unrounded.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import ClassVar

from ..._vendor.cublaslt_abi import Matmul
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.cublaslt import CublasKernel, Factor
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.operands import Alignment, Views, address_of, leading_dimension
from ...vocab import ElementKind, EpilogueKind, GemmOp, MatrixOrder
from ...weights.inflate import ALIGNMENT, SOURCE, Inflate
from ..descriptor import GemmSparse24Descriptor
from ..kernel import MAX_STRIDES, GemmKernel, c_parameters, product_defines
from ..limits import cublas_regions

_EPILOGUE = "gemm/inflate_cublas.cu"
_THREADS, _CHUNK, _MAX_BLOCKS = 256, 1024, 1 << 16


@kernel_params("gemm/params/inflate_cublas.cuh")
class EpilogueParams(KernelParams):
    """Parameters of ``gemm/inflate_cublas.cu``."""

    accumulators = field("const float*", "Sums [outer, inner], contiguous; null if all of them are 0.")
    bias = field("const void*", "Bias [m], or null.")
    out = field("void*", "Y[outer, inner].")
    outer = field("i64", "Number of rows of Y, or columns if Y is column-major.")
    inner = field("i64", "Number of contiguous elements in each of them.")
    out_stride = field("i64", "Elements from one row of Y to the next, or column if Y is column-major.")
    beta = field("float", "Factor of C.")
    c = field("const void*", "C, which lies as Y does, or null.")
    c_stride = field("i64", "Elements from one row of C to the next, or column if Y is column-major.")


class Kernel(CublasKernel[GemmSparse24Descriptor], GemmKernel):
    empty: ClassVar[dict[str, int]] = {"n": 0}
    alignments = dict.fromkeys(("weight", "source", "result"), Alignment(ALIGNMENT))
    sources = (SOURCE, _EPILOGUE)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice, *cublas_regions(choice.descriptor))
        desc, device = self.descriptor, choice.device
        self._fused = desc.epilogue is EpilogueKind.IDENTITY and not desc.has_c
        self._trivial = desc.n * desc.outputs == 0
        self._column_major = desc.x_order is MatrixOrder.COLUMN, desc.y_order is MatrixOrder.COLUMN
        # elements of a row or column of X and of Y
        self._widths = tuple(
            desc.n if columns else width
            for columns, width in zip(self._column_major, (desc.reduction, desc.outputs), strict=True)
        )
        self.launches = 1 if self._trivial or not desc.reduction else 2 if self._fused else 3
        self._matmul = lru_cache(MAX_STRIDES)(self._find_for_strides)
        self._inflate = Inflate(desc.element, device)
        # Not needed where cuBLASLt writes the result itself.
        self._epilogue = None
        if not self._fused or not desc.reduction:
            self._epilogue = load(
                _EPILOGUE,
                "epilogue_rows",
                _THREADS,
                device,
                {**product_defines(desc), "COLUMNS": int(self._column_major[1])},
            )
        multiplies = not self._trivial and desc.reduction > 0
        self._reserve(partial(self._matmul, *self._widths) if multiplies else None)

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        if self._trivial:
            return nothing
        if desc.reduction == 0:
            return self._finish(views, 0)
        dense, acc = workspace, workspace + self._dense_bytes
        stride = leading_dimension(result, desc.y_order) if self._fused else self._widths[1]
        inflate = self._inflate.bind(views["values"], views["metadata"], dense)
        factors = (source.address, dense) if self._column_major[1] else (dense, source.address)
        multiply = self._matmul(leading_dimension(source, desc.x_order), stride).bind(
            *factors, result.address if self._fused else acc, acc + self._acc_bytes
        )
        return launch_in_order(inflate, multiply, *([] if self._fused else [self._finish(views, acc)]))

    def _finish(self, views: Views, acc: int) -> Launch:
        desc, width = self.descriptor, self._widths[1]
        lines = desc.outputs if self._column_major[1] else desc.n
        assert self._epilogue is not None
        return self._epilogue.bind(
            min(lines * -(-width // _CHUNK), _MAX_BLOCKS),
            EpilogueParams(
                accumulators=acc,
                bias=address_of(views, "bias"),
                out=views["result"].address,
                outer=lines,
                inner=width,
                out_stride=leading_dimension(views["result"], desc.y_order),
                beta=desc.beta,
                **c_parameters(desc, views),
            ),
        )

    def _find_for_strides(self, source_stride: int, result_stride: int) -> Matmul:
        """The pinned product for these strides, found at select for contiguous operands, else at first use.

        A row-major matrix is a column-major transpose. For a row-major Y the library therefore computes
        Y^T = op(W) @ X^T, and for a column-major one Y = X @ op(W)^T.
        """
        desc = self.descriptor
        x_column_major, y_column_major = self._column_major
        weight = Factor(desc.outputs, desc.op is GemmOp.FORWARD, desc.k, 256)
        source = Factor(desc.n, x_column_major, source_stride)
        a, b = weight, source
        if y_column_major:  # the transpose of the product, whose factors change places
            a, b = (one._replace(transposed=not one.transposed) for one in (source, weight))
        return self._find_matmul(a, b, result_stride, desc.out_element if self._fused else ElementKind.F32)
