"""Shapes of layouts: sizes and the number of kept blocks, all that the choice of a kernel sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, SupportsIndex

from pydantic import model_validator

from ..vocab import Integer, Model
from ..vocab.fields import INT32_MAX

BLOCK_SIZES = (16, 32, 64, 128)

_Counted = Annotated[int, Integer(most=INT32_MAX)]  # look-up tables are int32


class BlockSparseShape(Model):
    """The sizes of a block-sparse matrix: ``heads`` matrices of ``rows`` x ``cols`` cells.

    Layouts of one shape share plans, and tables can be updated from one to the other.
    """

    heads: _Counted
    """Matrices, each with a mask of its own."""
    rows: _Counted
    """Cells, a multiple of the block's size."""
    cols: _Counted
    """Cells, a multiple of the block's size."""
    block: Annotated[int, Integer(most=INT32_MAX)]
    """Side of a block in cells: 16, 32, 64 or 128."""
    blocks: _Counted
    """Kept blocks, of all heads together."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            heads: SupportsIndex,
            rows: SupportsIndex,
            cols: SupportsIndex,
            block: SupportsIndex,
            blocks: SupportsIndex,
        ) -> None: ...

    @model_validator(mode="after")
    def _consistent(self) -> BlockSparseShape:
        if self.block not in BLOCK_SIZES:
            raise ValueError(f"block: expected one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block}")
        for name in ("rows", "cols"):
            size = getattr(self, name)
            if size % self.block:
                raise ValueError(f"{name}: expected a multiple of block {self.block}, got {size}")
        if self.heads * max(self.block_rows, self.block_cols) >= INT32_MAX:
            raise ValueError(
                "heads: expected fewer than 2^31 - 1 rows and columns of blocks in all heads, got "
                f"{self.heads} heads of {self.block_rows} x {self.block_cols}"
            )
        if self.blocks > self.heads * self.block_rows * self.block_cols:
            most = self.heads * self.block_rows * self.block_cols
            raise ValueError(f"blocks: expected at most {most}, as many as there are, got {self.blocks}")
        return self

    @property
    def block_rows(self) -> int:
        """Block rows of a head."""
        return self.rows // self.block

    @property
    def block_cols(self) -> int:
        """Block columns of a head."""
        return self.cols // self.block

    @property
    def density(self) -> float:
        """Kept blocks over all blocks; 0 where there are none."""
        return self.blocks / max(self.heads * self.block_rows * self.block_cols, 1)
