"""The table of kernels of block-sparse matrices: what each serves and what it promises."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.table import Row
from ..vocab import BLOCKS_LAYOUT, BackendKind, EpilogueKind, Tier
from . import guarantees
from .descriptor import FLOATS, MATMUL_ELEMENTS, BlockSparseMatmulDescriptor


@dataclass(frozen=True)
class BlockSparseRow(Row):
    """A row of the family."""

    layout: str = BLOCKS_LAYOUT
    strict: bool = False
    """Of the host: every step in a defined order; else BLAS multiplies."""


@dataclass(frozen=True)
class MatmulRow(BlockSparseRow):
    """A row of products."""

    def refusal(self, descriptor: BlockSparseMatmulDescriptor) -> str | None:
        if self.strict and descriptor.epilogue is EpilogueKind.BIAS_GELU_TANH:
            return f"does not serve epilogue {descriptor.epilogue}"
        return None


_HOST = (BackendKind.HOST, Tier.HOST)
MATMUL_ROWS: tuple[MatmulRow, ...] = (
    MatmulRow("host_blas", *_HOST, guarantees.host_blas, MATMUL_ELEMENTS),
    MatmulRow("host_strict", *_HOST, guarantees.strict_matmul, MATMUL_ELEMENTS, strict=True),
)
SOFTMAX_ROWS: tuple[BlockSparseRow, ...] = (
    BlockSparseRow("host_strict", *_HOST, guarantees.strict, FLOATS, strict=True),
)
ATTENTION_ROWS: tuple[BlockSparseRow, ...] = (
    BlockSparseRow("host_blas", *_HOST, guarantees.host_blas, FLOATS),
    BlockSparseRow("host_strict", *_HOST, guarantees.strict, FLOATS, strict=True),
)
