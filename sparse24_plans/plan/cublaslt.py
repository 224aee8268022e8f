"""The base of kernels that inflate a sparse operand into the workspace and then call cuBLASLt."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeVar

from .._vendor import cublaslt_abi
from .._vendor.library_error import LibraryError
from ..device.devices import cuda_major, current_on, home_of
from ..device.install import install_advice
from ..device.jit.cache import CompiledKernel
from ..device.jit.launcher import is_sizing
from ..errors import UnsupportedError
from ..vocab import DeviceProperties, ElementKind
from .descriptor import ProductDescriptor
from .kernel import Choice, Kernel, align_up

_SPLIT_K_BYTES = 32 << 20
"""Most bytes of split-K scratch, as NVIDIA's documentation advises on Hopper; smaller devices use less."""
_TYPES = {
    ElementKind.F32: cublaslt_abi.R_32F,
    ElementKind.F16: cublaslt_abi.R_16F,
    ElementKind.BF16: cublaslt_abi.R_16BF,
}
"""Codes of the library for the elements that it multiplies here."""
_LARGEST_ALPHA = 2.0**20

P = TypeVar("P", bound=ProductDescriptor)


def beyond_alpha(alpha: float) -> str | None:
    """The reason why the library is not trusted with such an alpha, or None.

    Some of the library's kernels multiply an operand by alpha before they add: 1e37 gave inf * 0 = NaN.
    """
    if alpha == 0 or 1 / _LARGEST_ALPHA <= abs(alpha) <= _LARGEST_ALPHA:
        return None
    return f"serves alpha 0 and from 2^-20 to 2^20: cuBLAS may scale operands by it, got {alpha}"


def needs_cublaslt(device: DeviceProperties) -> str | None:
    """The reason why the library cannot be used, or None."""
    return None if device.cublaslt else f"cuBLASLt doesn't load; {install_advice('cuda')}"


class Factor(NamedTuple):
    """A factor of the library's column-major product."""

    size: int
    """Rows of the result for the left factor, columns for the right one."""
    transposed: bool
    leading: int
    """Elements from one stored column to the next."""
    alignment: int = 16
    """Bytes that the factor's address is a multiple of."""


class CublasKernel(Kernel[P]):
    """Base of a kernel that inflates: a dense operand, a product and scratch in the workspace.

    The workspace holds the dense operand first, and copies of other operands, then the product if it is not
    the result yet, such as float32 accumulators, then cuBLASLt's split-K scratch. The algorithm is pinned at
    select.
    """

    workspace_alignment = 256
    empty: ClassVar[dict[str, int]]
    """Fields of the descriptor that make a problem empty. The compiled kernels do not depend on them."""

    def __init__(self, choice: Choice, dense_bytes: int, accumulator_bytes: int) -> None:
        super().__init__(choice)
        self._device = choice.device
        self._dense_bytes, self._acc_bytes = dense_bytes, accumulator_bytes
        self._budget, most = _SPLIT_K_BYTES, choice.preference.max_workspace_bytes
        if most is not None:
            self._budget = min(self._budget, (most - dense_bytes - accumulator_bytes) // 256 * 256)

    def _reserve(self, find: Callable[[], cublaslt_abi.Matmul] | None) -> cublaslt_abi.Matmul | None:
        """Set the workspace size, and return the matmul that was found, None for an absent GPU.

        Later matmuls of this kernel may use as much scratch as the one found. For an absent GPU the library
        isn't asked, and all scratch that it may use is counted.
        """
        scratch, at_most, matmul = 0, "", None
        if find is not None and is_sizing():
            scratch, at_most, self.workspace_is_exact = self._budget, "at most ", False
        elif find is not None:
            matmul = find()
            scratch = self._budget = align_up(matmul.workspace_size)
        self.workspace_size = self._dense_bytes + self._acc_bytes + scratch
        self.details = f"cuBLASLt {self._device.cublaslt}, {at_most}{scratch} bytes of split-K scratch"
        return matmul

    @classmethod
    def compile(cls, choice: Choice) -> list[CompiledKernel]:
        """Compile for an empty problem, for which cuBLASLt is not asked for an algorithm."""
        empty = choice.descriptor.model_copy(update=cls.empty)
        return super().compile(choice._replace(descriptor=empty))

    def _find_matmul(
        self, a: Factor, b: Factor, result_leading: int, out: ElementKind, batch: int = 1
    ) -> cublaslt_abi.Matmul:
        """The library's product of ``a`` and ``b``, with the algorithm that it finds best."""
        desc = self.descriptor
        library = cublaslt_abi.load(cuda_major())
        assert library is not None  # selection saw it load
        try:
            with current_on(home_of(self._device)):
                return cublaslt_abi.Matmul(
                    library,
                    cublaslt_abi.handle(library, self._device.ordinal),
                    shape=(a.size, b.size, desc.reduction),
                    transpose_a=a.transposed,
                    transpose_b=b.transposed,
                    leading=(a.leading, b.leading, result_leading),
                    types=(_TYPES[desc.element], _TYPES[desc.element], _TYPES[out]),
                    alignments=(a.alignment, b.alignment, 16),
                    alpha=desc.alpha,
                    max_workspace=self._budget,
                    batch=batch,
                )
        except LibraryError as error:
            strides = f"{a.leading}, {b.leading}, {result_leading}"
            raise UnsupportedError(
                f"cuBLASLt has no algorithm for {desc!r} with leading dimensions {strides}: {error}"
            ) from error
