"""Inflate into the workspace, then cuBLASLt with an algorithm pinned at select.

An epilogue beyond ``identity`` takes float32 accumulators through ``gemm/inflate_cublas.cu``, so that bias
and activation see them unrounded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..._vendor import cublaslt_abi
from ..._vendor.library_error import LibraryError
from ...device.devices import cuda_major
from ...device.jit.cache import CompiledKernel
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...device.tensors import import_cupy
from ...errors import UnsupportedError
from ...plan.cublaslt import SPLIT_K_BYTES, TYPES
from ...plan.kernel import Choice, align_up, launch_in_order, nothing
from ...plan.operands import Alignment, Views, leading_dimension
from ...vocab import ElementKind, GemmOp, MatrixOrder
from ...weights.inflate import ALIGNMENT, SOURCE, Inflate
from ..kernel import MOST_STRIDES, GemmKernel, address
from ..limits import cublas_regions

_EPILOGUE = "gemm/inflate_cublas.cu"
_THREADS, _CHUNK, _MOST_BLOCKS = 256, 1024, 1 << 16


@kernel_params("gemm/params/inflate_cublas.cuh")
class EpilogueParams(KernelParams):
    """Parameters of ``gemm/inflate_cublas.cu``."""

    accumulators = field("const float*", "Sums [outer, inner], contiguous; null if all of them are 0.")
    bias = field("const void*", "Bias [m], or null.")
    out = field("void*", "Y[outer, inner].")
    outer = field("i64", "Number of rows of Y, or columns if Y is column-major.")
    inner = field("i64", "Number of contiguous elements in each of them.")
    out_stride = field("i64", "Elements from one row of Y to the next, or column if Y is column-major.")


class _Factor(NamedTuple):
    """Of the library's product, as it lies."""

    size: int
    """Of the result, along this factor."""
    transposed: bool
    leading: int
    alignment: int


class Kernel(GemmKernel):
    workspace_alignment = 256
    alignments = dict.fromkeys(("weight", "source", "result"), Alignment(ALIGNMENT))
    sources = (SOURCE, _EPILOGUE)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device, preference = self.descriptor, choice.device, choice.preference
        self._ordinal = device.ordinal
        self._dense_bytes, self._acc_bytes = cublas_regions(desc)
        self._fused = not desc.epilogue.has_bias
        self._trivial = desc.n * desc.outputs == 0
        self._in_columns = desc.x_order is MatrixOrder.COLUMN, desc.y_order is MatrixOrder.COLUMN
        # Of X and Y: elements of a row, or of a column.
        self._widths = tuple(
            desc.n if columns else width
            for columns, width in zip(self._in_columns, (desc.reduction, desc.outputs), strict=True)
        )
        self.launches = 1 if self._trivial or not desc.reduction else 2 if self._fused else 3
        self._matmul = lru_cache(MOST_STRIDES)(self._find_matmul)
        self._inflate = Inflate(desc.element, device)
        # Not needed where cuBLASLt writes the result itself.
        self._epilogue = None
        if not self._fused or not desc.reduction:
            self._epilogue = load(
                _EPILOGUE,
                "epilogue_rows",
                _THREADS,
                device,
                {**type_defines(desc), "COLUMNS": int(self._in_columns[1])},
            )
        self._budget = SPLIT_K_BYTES
        if preference.max_workspace_bytes is not None:
            spare = preference.max_workspace_bytes - self._dense_bytes - self._acc_bytes
            self._budget = min(self._budget, spare // 256 * 256)
        scratch = 0
        if not self._trivial and desc.reduction:
            scratch = self._budget = align_up(self._matmul(*self._widths).workspace_size)
        self.workspace_size = self._dense_bytes + self._acc_bytes + scratch
        self.details = f"cuBLASLt {device.cublaslt}, {scratch} bytes of split-K scratch"

    @classmethod
    def compile(cls, choice: Choice) -> list[CompiledKernel]:
        """The kernels are the same for every n, and for n = 0 cuBLASLt isn't asked for an algorithm."""
        empty = choice.descriptor.model_copy(update={"n": 0})
        return super().compile(choice._replace(descriptor=empty))

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        if self._trivial:
            return nothing
        if desc.reduction == 0:
            return self._finish(views, 0)
        dense, acc = workspace, workspace + self._dense_bytes
        stride = leading_dimension(result, desc.y_order) if self._fused else self._widths[1]
        inflate = self._inflate.bind(views["values"], views["metadata"], dense)
        factors = (source.address, dense) if self._in_columns[1] else (dense, source.address)
        multiply = self._matmul(leading_dimension(source, desc.x_order), stride).bind(
            *factors, result.address if self._fused else acc, acc + self._acc_bytes
        )
        return launch_in_order(inflate, multiply, *([] if self._fused else [self._finish(views, acc)]))

    def _finish(self, views: Views, acc: int) -> Launch:
        desc, width = self.descriptor, self._widths[1]
        lines = desc.outputs if self._in_columns[1] else desc.n
        assert self._epilogue is not None
        return self._epilogue.bind(
            min(lines * -(-width // _CHUNK), _MOST_BLOCKS),
            EpilogueParams(
                accumulators=acc,
                bias=address(views.get("bias")),
                out=views["result"].address,
                outer=lines,
                inner=width,
                out_stride=leading_dimension(views["result"], desc.y_order),
            ),
        )

    def _find_matmul(self, source_stride: int, result_stride: int) -> cublaslt_abi.Matmul:
        """The pinned product for these strides: found at select for packed lines, else at first use.

        What lies in rows is, in the library's columns, the transpose: result^T = op(W) @ source^T. Of a
        result in columns it is the result itself: result = source @ op(W)^T.
        """
        desc = self.descriptor
        library = cublaslt_abi.load(cuda_major())
        assert library is not None  # selection saw it load
        out = desc.out_element if self._fused else ElementKind.F32
        x_in_columns, y_in_columns = self._in_columns
        weight = _Factor(desc.outputs, desc.op is GemmOp.FORWARD, desc.k, 256)
        source = _Factor(desc.n, x_in_columns, source_stride, ALIGNMENT)
        a, b = weight, source
        if y_in_columns:  # the transpose of the product, whose factors change places
            a, b = (one._replace(transposed=not one.transposed) for one in (source, weight))
        try:
            with import_cupy().cuda.Device(self._ordinal):
                return cublaslt_abi.Matmul(
                    library,
                    cublaslt_abi.handle(library, self._ordinal),
                    shape=(a.size, b.size, desc.reduction),
                    transpose_a=a.transposed,
                    transpose_b=b.transposed,
                    leading=(a.leading, b.leading, result_stride),
                    types=(TYPES[desc.element], TYPES[desc.element], TYPES[out]),
                    alignments=(a.alignment, b.alignment, ALIGNMENT),
                    alpha=desc.alpha,
                    max_workspace=self._budget,
                )
        except LibraryError as error:
            raise UnsupportedError(
                f"cuBLASLt has no algorithm for strides {source_stride}, {result_stride}: {error}"
            ) from error
