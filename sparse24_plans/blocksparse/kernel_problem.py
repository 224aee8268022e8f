"""How the operands of a product lie, in the terms of the kernels that multiply kept blocks."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ..device.transpose import Matrices
from ..plan.kernel import align_up
from ..plan.operands import Operand
from ..plan.schedule_choice import constants
from ..vocab import BlockSparseOp
from .descriptor import BlockSparseMatmulDescriptor
from .lookup_tables import FEW_LINES, STRIP, addresses, head_strips, met_share, strip_lines, tile_lines, words
from .shape import BLOCK_SIZES

K_MAJOR, MN_MAJOR = 0, 1
_WHOLE = 8
"""Elements of 16 bits that the copy engine's rows are multiples of."""


class Transposed(NamedTuple):
    """An operand that is transposed before it is multiplied."""

    name: str
    matrices: Matrices

    @classmethod
    def of(cls, operand: Operand) -> Transposed:
        *outer, rows, columns = operand.shape
        return cls(operand.name, Matrices(rows, columns, operand.element.itemsize, prod(outer)))


class Form:
    """A product as the kernels take it: op(S) times X, of ``dds`` its transpose.

    Of ``sdd`` the left operand is op(A) and the right one op(B).
    """

    def __init__(self, desc: BlockSparseMatmulDescriptor) -> None:
        op, one = desc.op, desc.layout
        self.sampled, on_the_right = op is BlockSparseOp.SDD, op is BlockSparseOp.DDS
        self.left, self.right = ("b", "a") if on_the_right else ("a", "b")
        self.turned = desc.trans_sparse != on_the_right
        """Whether the sparse matrix enters transposed: its columns of blocks are the kernel's lines."""
        lines, across = (one.block_cols, one.block_rows) if self.turned else (one.block_rows, one.block_cols)
        self.head_lines, self.words = lines, words(across)
        left_turned = desc.trans_a if self.sampled else self.turned
        self.left_major = MN_MAJOR if left_turned else K_MAJOR
        self.right_major = K_MAJOR if desc.dense_k_last else MN_MAJOR
        self.tokens_contiguous = not on_the_right
        self.small = strip_lines(one) > FEW_LINES
        """Whether a strip has so many lines that its columns are looked up together."""

    def turns(self, desc: BlockSparseMatmulDescriptor, spare: int | None = 0) -> tuple[Transposed, ...]:
        """What is transposed before tensor cores multiply it, and what better is: that up to ``spare`` bytes.

        They take 8-bit elements K-major alone. Of 16-bit ones in blocks of 16 a K-major X is read 16
        neighbouring k at a time, and of ``sdd`` another 16 neighbouring columns: in pieces of 32 bytes, of
        which L2 gives half as many bytes as of 128.
        """
        majors = {self.left: self.left_major, self.right: self.right_major}
        if desc.element.itemsize == 1:
            return tuple(Transposed.of(one) for one in desc.operands() if majors.get(one.name) == MN_MAJOR)
        one, in_pieces = desc.layout, MN_MAJOR if self.sampled else K_MAJOR
        if one.block != min(BLOCK_SIZES) or self.right_major != in_pieces or desc.n % _WHOLE:
            return ()
        x = Transposed.of(next(one for one in desc.operands() if one.name == self.right))
        lines = tile_lines(one) if self.sampled else strip_lines(one)
        strips = self.head_strips(lines * one.block, one.block)
        limits = constants("blocks_transpose")  # X must be large and read often for it to be worth it
        often = (
            x.matrices.nbytes >= limits["min_bytes"] and strips * met_share(one, lines) >= limits["min_reads"]
        )
        return (x,) if often and (spare is None or align_up(x.matrices.nbytes) <= spare) else ()

    def majors(self, turns: tuple[Transposed, ...]) -> tuple[int, int]:
        """Of the left and the right operand, once these are transposed."""
        names = {one.name for one in turns}
        return (
            _other(self.left_major) if self.left in names else self.left_major,
            _other(self.right_major) if self.right in names else self.right_major,
        )

    def head_strips(self, rows: int, block: int) -> int:
        """Of so many rows of op(S), in a head."""
        return head_strips(self.head_lines * block, rows)

    def tables(self, start: int, desc: BlockSparseMatmulDescriptor, rows: int = STRIP) -> dict[str, int]:
        """The kernel's parameters that are tables, of those at ``start``, for strips of so many rows."""
        found = addresses(start, desc.layout)
        side, other = ("column", "row") if self.turned else ("row", "column")
        strip = f"{side}_{'strip' if rows == STRIP else 'tile'}"
        names = {"panel_order": f"{strip}s", "panel_columns": f"{strip}_{other}s", "kept": f"{side}_bits"}
        names["pointers"] = f"{side}_pointers"
        if self.sampled:
            names["columns"] = "columns"
        elif self.turned:
            names["value_index"] = "column_order"
        if self.small:
            names |= {
                "pointers": f"{strip}_pointers",
                "columns": f"{strip}_met",
                "value_index": f"{strip}_places",
            }
        return {field: found[name] for field, name in names.items()}

    def entries(self, start: int, desc: BlockSparseMatmulDescriptor) -> dict[str, int]:
        """The same of a kernel that takes a line's blocks one by one."""
        found = addresses(start, desc.layout)
        names = {"pointers": "row_pointers", "columns": "columns"}
        if self.sampled:
            names |= {"group_rows": "group_rows", "group_firsts": "group_firsts"}
        elif self.turned:
            names = {"pointers": "column_pointers", "columns": "column_rows", "value_index": "column_order"}
        return {field: found[name] for field, name in names.items()}


def _other(major: int) -> int:
    return MN_MAJOR if major == K_MAJOR else K_MAJOR


def turned_bytes(turns: tuple[Transposed, ...]) -> int:
    """Of workspace."""
    return sum(align_up(one.matrices.nbytes) for one in turns)
