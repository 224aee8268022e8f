"""What is to be computed with block-sparse matrices: descriptors, and the operands that each asks for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, SupportsFloat, SupportsIndex

import numpy as np
from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..arithmetic.elements import biases_of, results_of
from ..plan.descriptor import Descriptor
from ..plan.operands import Operand, Role
from ..vocab import (
    INT64_MAX,
    BlockSparseOp,
    ElementKind,
    ElementLike,
    EpilogueKind,
    Flag,
    Integer,
    Number,
    OpCategory,
)
from .layout import BlockSparseLayout
from .shape import MOST, BlockSparseShape
from .tables import length, view_of

MATMUL_ELEMENTS = (
    ElementKind.F32,
    ElementKind.F16,
    ElementKind.BF16,
    ElementKind.S8,
    ElementKind.FP8_E4M3,
)
"""The elements that can be multiplied."""


def _shape_of(given: Any) -> Any:
    return given.shape if type(given) is BlockSparseLayout else given


Count = Annotated[int, Integer(most=MOST)]
LayoutLike = BlockSparseShape | BlockSparseLayout


class BlockSparseDescriptor(Descriptor):
    """What the family's descriptors share."""

    layout: Annotated[BlockSparseShape, BeforeValidator(_shape_of)]
    """Sizes of the sparse matrix and how many blocks it keeps. Which, the arguments say."""
    batch: Count = 1
    """Z: problems that share the layout."""

    category: ClassVar[OpCategory] = OpCategory.GEMM

    def _tables(self) -> Operand:
        size = (length(self.layout),)
        return Operand("layout", Role.TABLES, size, ElementKind.I32, of=partial(view_of, self.layout))

    def _blocks(self, name: str, role: Role, element: ElementKind, may_be: str | None = None) -> Operand:
        one = self.layout
        return Operand(name, role, (self.batch, one.blocks, one.block, one.block), element, may_be=may_be)

    def _dense(
        self, name: str, role: Role, rows: int, cols: int, element: ElementKind, *, transposed: bool = False
    ) -> Operand:
        sides = (cols, rows) if transposed else (rows, cols)
        return Operand(name, role, (self.batch, self.layout.heads, *sides), element)


class BlockSparseMatmulDescriptor(BlockSparseDescriptor):
    """C = epilogue(alpha * op(A) @ op(B)) for Z batches of H heads, of which one matrix is block-sparse.

    Parameters
    ----------
    op : BlockSparseOp
        ``sdd``: C is sparse, only its kept blocks are computed. ``dsd``: A is. ``dds``: B is.
    layout : BlockSparseShape or BlockSparseLayout
        Of the sparse matrix as it is stored. Its heads are H; of a layout its shape is taken.
    n : int
        The size that the layout doesn't give. ``sdd``: the length of the sums, A's columns. ``dsd``: B's and
        C's columns. ``dds``: A's and C's rows. May be 0.
    batch : int
        Z, 1 by default; may be 0.
    element : ElementKind
        Type of A and B: ``f32``, ``f16``, ``bf16``, ``s8`` or ``fp8_e4m3``.
    trans_a, trans_b : bool
        op(A) is A transposed: A is stored as [Z, H, columns, rows]; of a sparse one the layout is that of
        what is stored. So with B.
    epilogue, alpha, out_element, bias_element : optional
        As of GemmSparse24Descriptor, for the same elements. A bias is one number for each row of C (``dsd``)
        or column (``dds``) of each head. ``sdd`` takes only ``identity``.

    Raises
    ------
    InvalidProblemError
        Naming the field.
    """

    op: BlockSparseOp
    n: Count
    trans_a: Flag = False
    trans_b: Flag = False
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    alpha: Annotated[float, Number(finite=True)] = 1.0
    out_element: ElementKind = Field(default_factory=lambda data: results_of(data["element"])[0])
    bias_element: ElementKind = Field(
        default_factory=lambda data: biases_of(data["element"], data["out_element"])[0]
    )

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            op: BlockSparseOp | str,
            layout: LayoutLike,
            n: SupportsIndex,
            element: ElementLike,
            batch: SupportsIndex = ...,
            trans_a: bool = ...,
            trans_b: bool = ...,
            epilogue: EpilogueKind | str = ...,
            alpha: SupportsFloat = ...,
            out_element: ElementLike = ...,
            bias_element: ElementLike = ...,
        ) -> None: ...

    @field_validator("alpha")
    @classmethod
    def _one_zero(cls, alpha: float) -> float:
        return alpha + 0.0  # -0.0 becomes +0.0: equal descriptors must mean the same bits

    @model_validator(mode="after")
    def _consistent(self) -> BlockSparseMatmulDescriptor:
        for name, allowed in (
            ("element", MATMUL_ELEMENTS),
            ("out_element", results_of(self.element)),
            ("bias_element", biases_of(self.element, self.out_element)),
        ):
            if getattr(self, name) not in allowed:
                words = " or ".join(dict.fromkeys(allowed))
                raise ValueError(f"{name}: expected {words}, got {getattr(self, name)}")
        if abs(self.alpha) > float(np.finfo(np.float32).max):
            raise ValueError(f"alpha: expected a value finite in float32, got {self.alpha}")
        if self.op is BlockSparseOp.SDD and self.epilogue.has_bias:
            raise ValueError(f"epilogue: expected identity for op sdd, got {self.epilogue}")
        one = self.layout
        side = max(one.rows, one.cols)
        if self.batch * max(one.blocks * one.block**2, one.heads * side * self.n) > INT64_MAX // 8:
            raise ValueError("layout, n, batch: expected operands of fewer than 2^60 elements")
        return self

    @property
    def op_name(self) -> str:
        return f"matmul_blocksparse_{self.op}"

    @property
    def is_plain(self) -> bool:
        """Whether the result is the sum itself, rounded to its type."""
        return self.epilogue is EpilogueKind.IDENTITY and self.alpha == 1

    @property
    def trans_sparse(self) -> bool:
        """Whether the sparse matrix enters the product transposed; C never does."""
        return {"sdd": False, "dsd": self.trans_a, "dds": self.trans_b}[self.op]

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the sparse matrix as it enters the product."""
        one = self.layout
        return (one.cols, one.rows) if self.trans_sparse else (one.rows, one.cols)

    @property
    def reduction(self) -> int:
        """The most products of a sum; blocks that aren't kept add none."""
        rows, cols = self.sides
        return {"sdd": self.n, "dsd": cols, "dds": rows}[self.op]

    def operands(self) -> tuple[Operand, ...]:
        """The layout's tables, ``a``, ``b``, ``c``, and ``bias`` [H, rows or columns] where there is one."""
        (rows, cols), n, element, out = self.sides, self.n, self.element, self.out_element
        a, b = (
            partial(self._dense, name, Role.IN, element=element, transposed=transposed)
            for name, transposed in (("a", self.trans_a), ("b", self.trans_b))
        )
        tables = self._tables()
        if self.op is BlockSparseOp.SDD:
            return tables, a(rows, n), b(n, cols), self._blocks("c", Role.OUT, out)
        if self.op is BlockSparseOp.DSD:
            found = self._blocks("a", Role.IN, element), b(cols, n), self._dense("c", Role.OUT, rows, n, out)
        else:
            found = a(n, rows), self._blocks("b", Role.IN, element), self._dense("c", Role.OUT, n, cols, out)
        if not self.epilogue.has_bias:
            return tables, *found
        width = rows if self.op is BlockSparseOp.DSD else cols
        return tables, *found, Operand("bias", Role.IN, (self.layout.heads, width), self.bias_element)
