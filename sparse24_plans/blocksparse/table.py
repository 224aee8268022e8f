"""The table of kernels of block-sparse matrices: what each serves and what it promises."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.table import Row
from ..vocab import BLOCKS_LAYOUT, BackendKind, EpilogueKind, Tier
from . import guarantees
from .descriptor import MATMUL_ELEMENTS, BlockSparseMatmulDescriptor


@dataclass(frozen=True)
class MatmulRow(Row):
    """A row of products."""

    strict: bool = False
    """Of the host: fma by fma in a defined order; else BLAS."""

    def refusal(self, descriptor: BlockSparseMatmulDescriptor) -> str | None:
        if self.strict and descriptor.epilogue is EpilogueKind.BIAS_GELU_TANH:
            return f"does not serve epilogue {descriptor.epilogue}"
        return None


MATMUL_ROWS: tuple[MatmulRow, ...] = (
    MatmulRow(
        "host_blas",
        BackendKind.HOST,
        Tier.HOST,
        guarantees.host_blas,
        MATMUL_ELEMENTS,
        layout=BLOCKS_LAYOUT,
    ),
    MatmulRow(
        "host_strict",
        BackendKind.HOST,
        Tier.HOST,
        guarantees.strict,
        MATMUL_ELEMENTS,
        layout=BLOCKS_LAYOUT,
        strict=True,
    ),
)
