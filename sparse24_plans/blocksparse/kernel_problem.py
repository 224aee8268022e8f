"""A product in the terms of the kernels that multiply kept blocks."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..device.pad_rows import padded
from ..device.transpose import Matrices
from ..plan.kernel import align_up
from ..plan.operands import Operand
from ..plan.schedule_choice import constants
from ..vocab import BlockSparseOp, ElementKind, EpilogueKind
from .descriptor import BlockSparseMatmulDescriptor
from .lookup_tables import addresses, words
from .panels import (
    NARROW_PANEL_ROWS,
    PANEL_ROWS,
    Slicing,
    expected_occupancy,
    head_panels,
    is_small,
    narrow_panel_block_rows,
    panel_block_rows,
)
from .shape import BLOCK_SIZES

K_MAJOR, MN_MAJOR = 0, 1
TMA_BYTES, LINE_BYTES = 16, 128
"""Bytes that the length of a TMA row must be a multiple of; bytes of a line of L2."""
_TILE, _TOKEN_GROUP = 64, 8
"""Rows and tokens of the smallest tile; tokens whose sums the workspace holds together."""
COUNTER_BYTES = 8
"""Workspace bytes of a counter of claimed work tiles, or of arrivals."""
_WHOLE = 8
"""Elements of 16 bits in as many bytes."""


class Prepared(NamedTuple):
    """An operand that a pre-pass copies into the workspace before it is multiplied."""

    name: str
    matrices: Matrices
    """The operand as the caller stores it."""
    transposes: bool
    """Whether the copy is transposed. Otherwise each of its rows has zeros at its end."""
    sides: tuple[int, int]
    """Rows and columns of a matrix of the copy."""

    @classmethod
    def of(cls, operand: Operand, *, transposes: bool, row_bytes: int = TMA_BYTES) -> Prepared:
        """A copy that is transposed, or whose rows are padded to multiples of ``row_bytes`` bytes."""
        *outer, rows, columns = operand.shape
        size = operand.element.itemsize
        sides = (columns, rows) if transposes else (rows, align_up(columns * size, row_bytes) // size)
        return cls(operand.name, Matrices(rows, columns, size, prod(outer)), transposes, sides)

    @classmethod
    def with_rows(cls, operand: Operand, rows: int) -> Prepared:
        """A copy that has more rows, behind the operand's."""
        *outer, before, columns = operand.shape
        whole = Matrices(1, before * columns, operand.element.itemsize, prod(outer))
        return cls(operand.name, whole, transposes=False, sides=(1, rows * columns))

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return prod(self.sides) * self.matrices.batch * self.matrices.itemsize


class KernelProblem:
    """A product as the kernels compute it: op(S) times X, or for ``dds`` the transpose of that.

    For ``sdd`` the left operand is op(A) and the right one op(B).
    """

    def __init__(self, desc: BlockSparseMatmulDescriptor) -> None:
        self.desc, op, one = desc, desc.op, desc.layout
        self.sampled, on_the_right = op is BlockSparseOp.SDD, op is BlockSparseOp.DDS
        self.left, self.right = ("b", "a") if on_the_right else ("a", "b")
        self.by_columns = desc.trans_sparse != on_the_right
        """Whether the sparse matrix enters transposed: its block columns are the kernel's block rows."""
        lines, across = (
            (one.block_cols, one.block_rows) if self.by_columns else (one.block_rows, one.block_cols)
        )
        self.head_block_rows, self.words = lines, words(across)
        left_transposed = desc.trans_a if self.sampled else self.by_columns
        self.left_major = MN_MAJOR if left_transposed else K_MAJOR
        self.right_major = K_MAJOR if desc.dense_k_last else MN_MAJOR
        self.tokens_contiguous = not on_the_right
        self.small = is_small(one)

    def prepared_operands(self, spare: int | None = 0) -> tuple[Prepared, ...]:
        """Operands that a pre-pass copies: those that must be, and within ``spare`` bytes those that should
        be.

        Tensor cores take 8-bit elements K-major alone. TMA reads rows that begin at multiples of 16 bytes.
        With 16-bit elements and blocks of 16, a K-major X is read in pieces of 16 k (for ``sdd`` an MN-major
        one in pieces of 16 columns), which are 32 bytes. L2 delivers half as many bytes in such pieces as in
        pieces of 128 bytes.
        """
        desc, majors = self.desc, {self.left: self.left_major, self.right: self.right_major}
        size, factors = desc.element.itemsize, [one for one in desc.operands() if one.name in majors]
        found = [
            Prepared.of(one, transposes=size == 1 and majors[one.name] == MN_MAJOR, row_bytes=LINE_BYTES)
            for one in factors
            if (size == 1 and majors[one.name] == MN_MAJOR) or padded(one.shape[-1], size) != one.shape[-1]
        ]
        if size == 1 or found:
            return tuple(found)
        one = desc.layout
        if not self._has_pieces or desc.n % _WHOLE:
            return ()
        x = Prepared.of(next(one for one in factors if one.name == self.right), transposes=True)
        lines = narrow_panel_block_rows(one) if self.sampled else panel_block_rows(one)
        panels = self.head_panels(lines * one.block)
        limits = constants("blocks_transpose")  # X must be large and read often for it to be worth it
        often = (
            x.nbytes >= limits["min_bytes"] and panels * expected_occupancy(one, lines) >= limits["min_reads"]
        )
        return (x,) if often and (spare is None or align_up(x.nbytes) <= spare) else ()

    @property
    def _has_pieces(self) -> bool:
        """Whether X as the caller stores it is read in pieces of 32 bytes."""
        small = self.desc.layout.block == min(BLOCK_SIZES) and self.desc.element.itemsize > 1
        return small and self.right_major == (MN_MAJOR if self.sampled else K_MAJOR)

    @property
    def in_pieces(self) -> bool:
        """Whether X is read in pieces of 32 bytes, since no pre-pass transposes it."""
        return self._has_pieces and not any(one.transposes for one in self.prepared_operands(None))

    @property
    def _wants_aligned_rows(self) -> bool:
        """Whether cuBLAS takes up to eight times as long for rows that are no multiples of 16 bytes."""
        return self.desc.n > 1 and self.desc.element.itemsize == 2

    @property
    def aligned_operands(self) -> tuple[Prepared, ...]:
        """Copies of dense operands of 16 bits for cuBLAS, if rows of n elements are no multiples of 16 bytes.

        For ``dsd`` n is padded, which pads C, too. Otherwise an operand with such rows is transposed: rows
        of the copy are whole blocks, and no size is padded.
        """
        desc = self.desc
        size, dense = desc.element.itemsize, {self.left, self.right} - {desc.sparse}
        factors = [one for one in desc.operands() if one.name in dense]
        if desc.op is BlockSparseOp.DSD and desc.trans_b:
            pads = self.product_tokens != desc.n
            return tuple(Prepared.with_rows(one, self.product_tokens) for one in factors if pads)
        return tuple(
            Prepared.of(one, transposes=desc.op is not BlockSparseOp.DSD)
            for one in factors
            if self._wants_aligned_rows and padded(one.shape[-1], size) != one.shape[-1]
        )

    @property
    def product_element(self) -> ElementKind:
        """Element of a dense product: an epilogue reads float32 sums; without one cuBLAS rounds them."""
        desc = self.desc
        return desc.out_element if desc.epilogue is EpilogueKind.IDENTITY else ElementKind.F32

    @property
    def product_tokens(self) -> int:
        """Tokens of a dense product: n, or for ``dsd`` as many as make rows of X and of C aligned."""
        desc = self.desc
        if desc.op is not BlockSparseOp.DSD or not self._wants_aligned_rows:
            return desc.n
        return padded(desc.n, (self.product_element if desc.trans_b else desc.element).itemsize)

    @property
    def product_bytes(self) -> int:
        """Bytes of a dense product of ``dsd`` or ``dds`` that is padded, or that an epilogue turns into C."""
        desc, tokens = self.desc, self.product_tokens
        if desc.epilogue is EpilogueKind.IDENTITY and tokens == desc.n:
            return 0
        width = desc.sides[0 if desc.op is BlockSparseOp.DSD else 1]
        return desc.batch * desc.layout.heads * width * tokens * self.product_element.itemsize

    def majors(self, prepared: tuple[Prepared, ...]) -> tuple[int, int]:
        """Major dimensions of the left and the right operand as they are multiplied."""
        names = {one.name for one in prepared if one.transposes}
        return (
            _other(self.left_major) if self.left in names else self.left_major,
            _other(self.right_major) if self.right in names else self.right_major,
        )

    @property
    def unaligned_rows(self) -> bool:
        """Whether rows of C begin where TMA cannot store them, so that warps do."""
        row_bytes = self.desc.n * self.desc.out_element.itemsize
        return self.tokens_contiguous and not self.sampled and row_bytes % TMA_BYTES != 0

    def slicing(self, rows: int = PANEL_ROWS) -> Slicing | None:
        """How long panels of ``rows`` rows are cut into slices; None for ``sdd``, or if none can be long.

        No panel can be long if all that the shape allows, or the known longest panel, are too short to be
        cut. With blocks of 16 and 32, panels of 64 rows decide; with larger blocks, panels of 128 rows.
        """
        asking, found = (
            Slicing.of(self.desc.layout, by_columns=self.by_columns, rows=one)
            for one in (NARROW_PANEL_ROWS if self.small else PANEL_ROWS, rows)
        )
        none_is_long = 0 < self.desc.longest_panel <= asking.uncut
        return found if asking.more and not (self.sampled or none_is_long) else None

    def head_panels(self, rows: int) -> int:
        """Row panels of a head, each with ``rows`` rows of op(S)."""
        return head_panels(self.head_block_rows * self.desc.layout.block, rows)

    def sizes(self, rows: int) -> dict[str, Any]:
        """Sizes and factor for the parameters of kernels that take row panels of ``rows`` rows."""
        desc, head_panels = self.desc, self.head_panels(rows)
        return {
            "blocks": desc.layout.blocks,
            "alpha": desc.alpha,
            "panels": desc.layout.heads * head_panels,
            "head_panels": head_panels,
            "head_block_rows": self.head_block_rows,
            "bit_words": self.words,
            "heads": desc.layout.heads,
            "batch": desc.batch,
            "tokens": desc.n,
        }

    def tables(self, start: int, rows: int = PANEL_ROWS) -> dict[str, int]:
        """Addresses of the kernel's table parameters, for tables at ``start`` and panels of ``rows`` rows."""
        found = addresses(start, self.desc.layout)
        side, other = ("column", "row") if self.by_columns else ("row", "column")
        panel = f"{side}_{'panel' if rows == PANEL_ROWS else 'narrow_panel'}"
        names = {"panel_order": f"{panel}s", "panel_columns": f"{panel}_{other}s", "kept": f"{side}_bits"}
        names["pointers"] = f"{side}_pointers"
        if self.sampled:
            names["columns"] = "columns"
        elif self.by_columns:
            names["value_index"] = "column_order"
        if self.small:
            names |= {
                "pointers": f"{panel}_pointers",
                "columns": f"{panel}_kept",
                "value_index": f"{panel}_places",
            }
        return {field: found[name] for field, name in names.items()}

    def slices(self, start: int, rows: int = PANEL_ROWS) -> dict[str, int]:
        """Addresses of the kernel's tables of slices, for tables at ``start`` and panels of ``rows`` rows."""
        found, side = addresses(start, self.desc.layout), "column" if self.by_columns else "row"
        name = f"{side}_{'' if rows == PANEL_ROWS else 'narrow_'}slice"
        return {
            "slices": found[f"{name}s"],
            "slice_count": found[f"{name}_count"],
            "panel_slices": found[f"{side}_panel_slices"],
            "long_panels": found[f"{side}_{'' if rows == PANEL_ROWS else 'narrow_'}long_panels"],
        }

    def entries(self, start: int, *, ordered: bool = False) -> dict[str, int]:
        """Addresses of the table parameters of a kernel that reads a block row's blocks one by one.

        ``ordered``: the kernel takes the longest block rows of a head first.
        """
        found = addresses(start, self.desc.layout)
        names = {"pointers": "row_pointers", "columns": "columns"}
        if self.sampled:
            names |= {"group_rows": "group_rows", "group_firsts": "group_firsts"}
        elif self.by_columns:
            names = {"pointers": "column_pointers", "columns": "column_rows", "value_index": "column_order"}
        if ordered:
            names["order"] = "columns_by_length" if self.by_columns else "rows_by_length"
        return {field: found[name] for field, name in names.items()}


def _other(major: int) -> int:
    return MN_MAJOR if major == K_MAJOR else K_MAJOR


def slice_bytes(problem: KernelProblem, rows: int) -> tuple[int, int]:
    """Workspace bytes of the counters and of the sums of slices of panels of ``rows`` rows, summed apart.

    If a panel has several slices, the kernel stores the sums of each slice, four bytes each, and counts
    arrivals for each of the panel's tiles of 64 rows and 64 tokens. It also counts claimed work tiles.
    """
    slicing = problem.slicing(rows)
    if slicing is None:
        return 0, 0
    tiles = slicing.cut * (rows // _TILE) * problem.desc.batch
    tokens = -(-problem.desc.n // _TOKEN_GROUP) * _TOKEN_GROUP
    return align_up(COUNTER_BYTES * (1 + tiles * -(-tokens // _TILE))), 4 * tiles * _TILE * tokens


def launched(prepared: tuple[Prepared, ...]) -> tuple[Prepared, ...]:
    """The copies that pre-passes make. An empty operand has none."""
    return tuple(one for one in prepared if one.nbytes)


def prepared_bytes(prepared: tuple[Prepared, ...]) -> int:
    """Workspace bytes of the operands that a pre-pass copies."""
    return sum(align_up(one.nbytes) for one in prepared)
