"""Tensor maps and parameters of the backends on Hopper's tensor cores."""

from __future__ import annotations

from .._vendor import cuda_driver_abi
from ..device.jit.structs import field
from ..device.tensors import TensorView
from .kernel_problem import K_MAJOR

NO_MAP = bytes(cuda_driver_abi.TENSOR_MAP_BYTES)
"""A map that the kernel does not use."""
_GROUP = 64
"""Tokens of a box of an X whose tokens are contiguous."""
PANEL_TABLES = {
    "panel_order": field("const int*", "Row panels, longest first: [panels]."),
    "panel_columns": field("const int*", "Number of block columns that each panel keeps: [panels]."),
    "kept": field("const u32*", "Bit c % 32 of word c / 32 is set where the block row keeps column c."),
}
PANEL_SIZES = {
    "alpha": field("float", "Factor of the product."),
    "panels": field("u32", "Number of row panels of all heads."),
    "head_panels": field("u32", "Number of row panels of a head."),
    "head_block_rows": field("u32", "Number of block rows of a head."),
    "bit_words": field("u32", "Number of words of a block row in kept."),
    "heads": field("u32", "Number of heads, H."),
    "batch": field("u32", "Number of batch elements, Z."),
    "tokens": field("u32", "Number of columns of X."),
}
"""Parameters of the kernels that take row panels: what KernelProblem.tables and sizes give."""


def matrices_map(view: TensorView, box: tuple[int, int]) -> bytes:
    """Tensor map of a view [Z, heads, rows, columns], whose box (rows, columns) lies in one matrix.

    Raises LibraryError.
    """
    batch, heads, rows, columns = view.shape
    return cuda_driver_abi.swizzled_matrices_map(
        view.address, (batch * heads, rows, columns), view.element.itemsize, box
    )


def tokens_map(view: TensorView, major: int, tokens: int, step: int) -> bytes:
    """Tensor map of X with boxes of ``step`` k of some tokens, or of 64 of them if they are contiguous.

    Without tokens it is NO_MAP. Raises LibraryError.
    """
    if tokens == 0:
        return NO_MAP
    return matrices_map(view, (tokens, step) if major == K_MAJOR else (step, _GROUP))


def rows_map(view: TensorView, box: tuple[int, int]) -> bytes:
    """Tensor map of a view of four sizes as one matrix with the last as columns. Raises LibraryError."""
    first, second, third, columns = view.shape
    size = view.element.itemsize
    return cuda_driver_abi.swizzled_matrix_map(
        view.address, (first * second * third, columns), columns * size, size, box
    )
