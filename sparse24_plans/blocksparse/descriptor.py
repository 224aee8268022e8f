"""Descriptors of block-sparse problems, and the operands that each takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, SupportsFloat, SupportsIndex

from pydantic import BeforeValidator, Field, model_validator

from ..plan.descriptor import BIAS_ELEMENT, OUT_ELEMENT, Descriptor, Factor, ProductDescriptor
from ..plan.operands import Operand, Role
from ..vocab import (
    INT64_MAX,
    AttentionMask,
    BlockSparseOp,
    BlockSparsePass,
    ElementKind,
    ElementLike,
    EpilogueKind,
    Flag,
    InnerPattern,
    Integer,
    OpCategory,
)
from ..vocab.fields import INT32_MAX, unboxed
from .dropout import MAX_DROPOUT
from .layout import BlockSparseLayout
from .lookup_tables import length, longest_panel
from .packed import BlocksPacking, TablesPacking
from .shape import BlockSparseShape

HALVES = (ElementKind.F16, ElementKind.BF16)
"""Floating-point elements of 16 bits."""
FLOATS = (ElementKind.F32, *HALVES)
"""Elements of softmax, attention and convolutions."""
MATMUL_ELEMENTS = (*FLOATS, ElementKind.S8, ElementKind.FP8_E4M3)
"""Elements of products."""

PATTERNED = HALVES
"""Elements of values whose blocks are 2:4; their metadata have one order."""
PATTERNED_BLOCKS = (64, 128)


def _shape_of(given: Any) -> Any:
    return given.shape if type(given) is BlockSparseLayout else given


Count = Annotated[int, Integer(most=INT32_MAX)]
LayoutLike = BlockSparseShape | BlockSparseLayout


class BlockSparseDescriptor(Descriptor):
    """Base of the family's descriptors."""

    layout: Annotated[BlockSparseShape, BeforeValidator(_shape_of)]
    """Sizes of the sparse matrix and its number of kept blocks. The arguments say which blocks are kept."""
    batch: Count = 1
    """Batch elements, Z, which share the layout."""

    category: ClassVar[OpCategory] = OpCategory.GEMM

    def _check_sizes(self, width: int) -> None:
        """Check that sizes fit; ``width`` is the largest side of a dense operand that the layout does not
        give."""
        one = self.layout
        most = max(one.blocks * one.block**2, one.heads * max(one.rows, one.cols) * width)
        self._check_largest(self.batch * most)

    def _check_largest(self, elements: int) -> None:
        """Check that an index of 64 bits reaches the elements of the largest operand."""
        if elements > INT64_MAX // 8:
            raise ValueError(
                "layout, batch: expected operands of fewer than 2^60 elements, "
                f"got {self.layout!r}, {self.batch}"
            )

    def _tables(self) -> Operand:
        size = (length(self.layout),)
        return Operand("layout", Role.TABLES, size, ElementKind.I32, packing=TablesPacking(self.layout))

    def _blocks(
        self, name: str, role: Role, element: ElementKind, may_be: str | None = None, *, width: int = 0
    ) -> Operand:
        """Operand of kept blocks, or of their rows with another width."""
        one = self.layout
        return Operand(
            name, role, (self.batch, one.blocks, one.block, width or one.block), element, may_be=may_be
        )

    def _dense(
        self, name: str, role: Role, rows: int, cols: int, element: ElementKind, *, transposed: bool = False
    ) -> Operand:
        sides = (cols, rows) if transposed else (rows, cols)
        return Operand(name, role, (self.batch, self.layout.heads, *sides), element)


class BlockSparseMatmulDescriptor(BlockSparseDescriptor, ProductDescriptor):
    """C = epilogue(alpha * op(A) @ op(B)) for Z batches of H heads, of which one matrix is block-sparse.

    Parameters
    ----------
    op : BlockSparseOp
        ``sdd``: C is sparse, only its kept blocks are computed. ``dsd``: A is sparse. ``dds``: B is sparse.
    layout : BlockSparseShape or BlockSparseLayout
        Layout of the sparse matrix as it is stored; the descriptor keeps its shape. Its heads are H.
    n : int
        The size that the layout doesn't give. ``sdd``: the length of the sums, A's columns. ``dsd``: B's and
        C's columns. ``dds``: A's and C's rows. May be 0.
    batch : int
        Z, 1 by default; may be 0.
    element : ElementKind
        Type of A and B: ``f32``, ``f16``, ``bf16``, ``s8`` or ``fp8_e4m3``.
    trans_a, trans_b : bool
        Whether op(A) is A transposed: A is stored as [Z, H, columns, rows]. The layout of a sparse matrix is
        that of what is stored. ``trans_b`` says the same of B.
    epilogue, alpha, out_element, bias_element : optional
        These are as in GemmSparse24Descriptor, for the same elements. A bias is one number for each row of C
        (``dsd``) or column (``dds``) of each head. ``sdd`` takes only ``identity``.
    inner : InnerPattern
        ``dense`` (default), or ``sparse24``: the kept blocks of A (``dsd``) or B (``dds``) are 2:4 along the
        sums, and stored as values [Z, blocks, block, block/2] and metadata [Z, blocks, block, block/8], as
        ``compress_blocks`` makes them, a line each row of op(A) or column of op(B). For ``f16`` and ``bf16``
        with blocks of 64 and 128.
    packed : bool
        Whether the sparse operand of ``dsd`` or ``dds`` is what ``plan.pack(layout, values)`` returned: for
        an operand that stays, such as a layer's weight. ``select`` may then choose a dense copy of it.
    longest_panel : int
        For ``dsd`` and ``dds``: the largest number of block columns in which 128 neighbouring rows of op(A)
        (``dds``: columns of op(B)) keep a block. It is computed from a BlockSparseLayout. 0 means that it
        isn't known, for instance because layouts change. It affects the speed, and whether sums of long rows
        are cut: a plan serves layouts with longer rows too, but more slowly.

    Raises
    ------
    InvalidProblemError
        The message names the field.
    """

    op: BlockSparseOp
    n: Count
    trans_a: Flag = False
    trans_b: Flag = False
    inner: InnerPattern = InnerPattern.DENSE
    packed: Flag = False
    longest_panel: Count = 0
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    alpha: Factor = 1.0
    out_element: ElementKind = OUT_ELEMENT
    bias_element: ElementKind = BIAS_ELEMENT

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
            inner: InnerPattern | str = ...,
            packed: bool = ...,
            longest_panel: SupportsIndex = ...,
            epilogue: EpilogueKind | str = ...,
            alpha: SupportsFloat = ...,
            out_element: ElementLike = ...,
            bias_element: ElementLike = ...,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _of_layout(cls, data: Any) -> Any:
        """Compute ``longest_panel`` from the layout, of which the descriptor keeps only the shape."""
        layout, op = (data.get(name) if isinstance(data, dict) else None for name in ("layout", "op"))
        if (
            type(layout) is not BlockSparseLayout
            or not isinstance(op, str)
            or op == BlockSparseOp.SDD
            or "longest_panel" in data
        ):
            return data
        on_the_right = op == BlockSparseOp.DDS
        transposed = unboxed(data.get("trans_b" if on_the_right else "trans_a", False))
        if type(transposed) is not bool:  # the field refuses it
            return data
        by_columns = transposed != on_the_right
        return {**data, "longest_panel": longest_panel(layout, by_columns=by_columns)}

    @model_validator(mode="after")
    def _consistent(self) -> BlockSparseMatmulDescriptor:
        self._expect("element", MATMUL_ELEMENTS)
        self._check_packed()
        self._expect_result_types()
        if self.op is BlockSparseOp.SDD and self.epilogue is not EpilogueKind.IDENTITY:
            raise ValueError(f"epilogue: expected identity for op sdd, got {self.epilogue}")
        if self.inner is InnerPattern.SPARSE24:
            self._check_inner()
        self._check_sizes(self.n)
        return self

    def _check_inner(self) -> None:
        if self.op is BlockSparseOp.SDD:
            raise ValueError("inner: expected dense for op sdd, whose result has no pattern, got sparse24")
        self._expect("element", PATTERNED)
        if self.layout.block not in PATTERNED_BLOCKS:
            raise ValueError(
                f"layout: expected blocks of 64 or 128 for inner sparse24, got {self.layout.block}"
            )

    def _check_packed(self) -> None:
        if self.packed and self.op is BlockSparseOp.SDD:
            raise ValueError("packed: expected False for op sdd, which has no sparse operand, got True")
        if self.packed and self.inner is not InnerPattern.DENSE:
            raise ValueError(f"packed: expected False for inner {self.inner}, got True")
        if self.longest_panel and self.op is BlockSparseOp.SDD:
            raise ValueError(f"longest_panel: expected 0 for op sdd, got {self.longest_panel}")
        if self.longest_panel > self.layout.blocks:
            most = f"at most the layout's {self.layout.blocks} blocks"
            raise ValueError(f"longest_panel: expected {most}, got {self.longest_panel}")

    @property
    def op_name(self) -> str:
        return f"matmul_blocksparse_{self.op}"

    @property
    def trans_sparse(self) -> bool:
        """Whether the sparse matrix enters the product transposed. C never does."""
        return {"sdd": False, "dsd": self.trans_a, "dds": self.trans_b}[self.op]

    @property
    def dense_k_last(self) -> bool:
        """Whether the rows of the dense operand (for ``sdd`` of b) are summed over."""
        return not self.trans_a if self.op is BlockSparseOp.DDS else self.trans_b

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the sparse matrix as it enters the product."""
        one = self.layout
        return (one.cols, one.rows) if self.trans_sparse else (one.rows, one.cols)

    @property
    def reduction(self) -> int:
        """Most products in a sum; blocks that are not kept add none."""
        rows, cols = self.sides
        return {"sdd": self.n, "dsd": cols, "dds": rows}[self.op]

    @property
    def sparse(self) -> str:
        """The name of the sparse matrix."""
        return {"sdd": "c", "dsd": "a", "dds": "b"}[self.op]

    def _packed(self, operand: Operand) -> Operand:
        """The operand, or the sparse one as plans pack it."""
        if operand.name != self.sparse:
            return operand
        packing = BlocksPacking(operand.name, self.layout, self.batch, self.element)
        return replace(operand, role=Role.PACKED, packing=packing)

    def operands(self) -> tuple[Operand, ...]:
        """Operands: the tables, ``a``, ``b``, ``c``, and if present ``metadata`` and ``bias``.

        A packed operand brings its tables.
        """
        (rows, cols), n, element, out = self.sides, self.n, self.element, self.out_element
        a, b = (
            partial(self._dense, name, Role.IN, element=element, transposed=transposed)
            for name, transposed in (("a", self.trans_a), ("b", self.trans_b))
        )
        tables = self._tables()
        if self.op is BlockSparseOp.SDD:
            return tables, a(rows, n), b(n, cols), self._blocks("c", Role.OUT, out)
        half, block = self.inner is InnerPattern.SPARSE24, self.layout.block
        values = partial(self._blocks, role=Role.IN, element=element, width=block // 2 if half else block)
        found: tuple[Operand, ...]
        if self.op is BlockSparseOp.DSD:
            found = values("a"), b(cols, n), self._dense("c", Role.OUT, rows, n, out)
        else:
            found = a(n, rows), values("b"), self._dense("c", Role.OUT, n, cols, out)
        found = tuple(map(self._packed, found)) if self.packed else (tables, *found)
        if half:
            found = *found, self._blocks("metadata", Role.IN, ElementKind.U8, width=block // 8)
        if not self.epilogue.has_bias:
            return found
        width = rows if self.op is BlockSparseOp.DSD else cols
        return *found, Operand("bias", Role.IN, (self.layout.heads, width), self.bias_element)


class BlockSparseSoftmaxDescriptor(BlockSparseDescriptor):
    """The softmax of each row over its kept cells, for Z batches of H heads; or its gradient.

    ``forward``: v = scale * x + rpe + key_padding_mask + attn_mask, y = exp(v) / sum(exp(v)) over the kept
    cells of the row. A row whose every v is -Inf is zeros. ``backward``: dx = scale * y * (dy - sum(y * dy)).

    Parameters
    ----------
    layout : BlockSparseShape or BlockSparseLayout
        Layout of x and y.
    batch : int
        Z, 1 by default; may be 0.
    element : ElementKind
        Type of every tensor: ``f32``, ``f16`` or ``bf16``. All is computed in float32.
    op : BlockSparsePass
        ``forward`` (default) or ``backward``. Of the parameters below, ``backward`` takes only ``scale``: y
        is already 0 where masks have dropped a cell.
    scale : float
        Finite in float32; 1 by default.
    rpe : bool
        Whether there is a relative position embedding: the same for every batch.
    key_padding_mask, attn_mask : AttentionMask
        ``none`` (default), ``add`` or ``mul``: of each batch's columns, and of each cell.
    causal : bool
        Whether cells whose column is beyond their row are dropped.

    Raises
    ------
    InvalidProblemError
        The message names the field.
    """

    category: ClassVar[OpCategory] = OpCategory.SOFTMAX

    op: BlockSparsePass = BlockSparsePass.FORWARD
    scale: Factor = 1.0
    rpe: Flag = False
    key_padding_mask: AttentionMask = AttentionMask.NONE
    attn_mask: AttentionMask = AttentionMask.NONE
    causal: Flag = False

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            layout: LayoutLike,
            element: ElementLike,
            batch: SupportsIndex = ...,
            op: BlockSparsePass | str = ...,
            scale: SupportsFloat = ...,
            rpe: bool = ...,
            key_padding_mask: AttentionMask | str = ...,
            attn_mask: AttentionMask | str = ...,
            causal: bool = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _consistent(self) -> BlockSparseSoftmaxDescriptor:
        self._expect("element", FLOATS)
        for name in ("rpe", "key_padding_mask", "attn_mask", "causal"):
            if self.op is BlockSparsePass.BACKWARD and getattr(self, name) not in (False, AttentionMask.NONE):
                raise ValueError(f"{name}: expected none for op backward, got {getattr(self, name)}")
        self._check_sizes(max(self.layout.rows, self.layout.cols))
        return self

    @property
    def op_name(self) -> str:
        return f"softmax_blocksparse_{self.op}"

    @property
    def reduction(self) -> int:
        """The most cells of a row."""
        return self.layout.cols

    def operands(self) -> tuple[Operand, ...]:
        """Operands: the tables; ``x``, ``y`` and what is added to x, or ``y``, ``dy``, ``dx``."""
        one, element = self.layout, self.element
        read, written = (partial(self._blocks, role=role, element=element) for role in (Role.IN, Role.OUT))
        if self.op is BlockSparsePass.BACKWARD:
            return self._tables(), read("y"), read("dy"), written("dx", may_be="dy")
        added = {
            "rpe": (self.rpe, (one.heads, one.rows, one.cols)),
            "key_padding_mask": (self.key_padding_mask is not AttentionMask.NONE, (self.batch, one.cols)),
            "attn_mask": (self.attn_mask is not AttentionMask.NONE, (one.rows, one.cols)),
        }
        masks = [Operand(name, Role.IN, shape, element) for name, (asked, shape) in added.items() if asked]
        return self._tables(), read("x"), written("y", may_be="x"), *masks


class BlockSparseAttentionDescriptor(BlockSparseDescriptor):
    """Attention over the kept cells of each head, for Z batches of H heads; or its gradients.

    ``forward``: O = softmax(scale * Q @ K^T) @ V, with the scores' kept cells alone, and the logarithm of the
    sum of each row's exponentials, which ``backward`` reads. ``backward``: dQ, dK and dV of dO.

    Parameters
    ----------
    layout : BlockSparseShape or BlockSparseLayout
        Layout of the scores: heads are those of Q, rows its tokens, cols the tokens of K and V.
    batch : int
        Z, 1 by default; may be 0.
    element : ElementKind
        Type of Q, K, V, O and their gradients: ``f32``, ``f16`` or ``bf16``.
    op : BlockSparsePass
        ``forward`` (default) or ``backward``.
    head_size : int
        Columns of Q, K, V and O, at least 1.
    kv_heads : int, optional
        Heads of K and V, H by default. H is a multiple of it: H / kv_heads neighbouring heads share theirs.
    scale : float, optional
        Finite in float32; 1 / sqrt(head_size) by default.
    causal : bool
        Whether cells whose column is beyond their row are dropped, inside of blocks too.
    lengths : bool
        Whether each batch has lengths of its own: rows and columns beyond them are dropped and not read.
    dropout : float
        Probability p that a cell of the softmax is replaced by 0; the others are multiplied by 1 / (1 - p).
        From 0 (default) to 1 - 2^-16. ``blocksparse/dropout.py`` defines which cells a seed and an offset
        drop, with p rounded to a multiple of 2^-16. ``lse`` is that of all cells.

    Raises
    ------
    InvalidProblemError
        The message names the field.
    """

    category: ClassVar[OpCategory] = OpCategory.ATTENTION

    head_size: Annotated[int, Integer(least=1, most=INT32_MAX)]
    op: BlockSparsePass = BlockSparsePass.FORWARD
    kv_heads: Count = Field(default_factory=lambda data: data["layout"].heads)
    scale: Factor = Field(default_factory=lambda data: float(data["head_size"]) ** -0.5)
    causal: Flag = False
    lengths: Flag = False
    dropout: Factor = 0.0

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            layout: LayoutLike,
            head_size: SupportsIndex,
            element: ElementLike,
            batch: SupportsIndex = ...,
            op: BlockSparsePass | str = ...,
            kv_heads: SupportsIndex = ...,
            scale: SupportsFloat = ...,
            causal: bool = ...,
            lengths: bool = ...,
            dropout: SupportsFloat = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _consistent(self) -> BlockSparseAttentionDescriptor:
        self._expect("element", FLOATS)
        if not 0 <= self.dropout <= MAX_DROPOUT:
            raise ValueError(f"dropout: expected a probability from 0 to 1 - 2^-16, got {self.dropout}")
        heads = self.layout.heads
        if heads % self.kv_heads if self.kv_heads else heads:
            raise ValueError(
                f"kv_heads: expected a divisor of the layout's {heads} heads, got {self.kv_heads}"
            )
        self._check_sizes(self.head_size)
        return self

    @property
    def op_name(self) -> str:
        return f"attention_blocksparse_{self.op}"

    @property
    def group(self) -> int:
        """Heads of Q that share one head of K and V."""
        return self.layout.heads // max(self.kv_heads, 1)

    @property
    def reduction(self) -> int:
        """The most cells of a row; scores are sums of ``head_size`` products."""
        return self.layout.cols

    def operands(self) -> tuple[Operand, ...]:
        """Operands: the tables; ``q``, ``k``, ``v``, ``o``, ``lse``; the gradients for ``backward``; the
        lengths; dropout's seed and offset."""
        one, read, written = self.layout, Role.IN, Role.OUT
        queries = (self.batch, one.heads, one.rows, self.head_size)
        keys = (self.batch, self.kv_heads, one.cols, self.head_size)
        backward = self.op is BlockSparsePass.BACKWARD
        made = read if backward else written
        found = [
            Operand("q", read, queries, self.element),
            Operand("k", read, keys, self.element),
            Operand("v", read, keys, self.element),
            Operand("o", made, queries, self.element),
            Operand("lse", made, queries[:3], ElementKind.F32),
        ]
        if backward:
            found.append(Operand("do", read, queries, self.element))
            found += [
                Operand(name, written, shape, self.element)
                for name, shape in (("dq", queries), ("dk", keys), ("dv", keys))
            ]
        if self.lengths:
            names = ("q_lengths", "kv_lengths")
            found += [Operand(name, read, (self.batch,), ElementKind.I32) for name in names]
        if self.dropout:
            found.append(Operand("seed_offset", read, (4,), ElementKind.I32))
        return self._tables(), *found
