"""Which way of multiplying by kept blocks is the fastest: a cost model of each predicts its time.

The constants are those of the H200 on every device, because the choice decides guarantees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ...plan.schedule_choice import REFERENCE_SMS, CostModel, constants
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem, Prepared
from ..panels import NARROW_PANEL_ROWS, expected_occupancy, head_panels
from . import blocks_wgmma_cost
from .blocks_mma import MODEL as FEW_TOKENS_MODEL
from .blocks_mma import TERMS as FEW_TOKENS_TERMS
from .blocks_mma import BlocksMmaSchedule
from .blocks_wgmma import BlocksWgmmaSchedule, sdd_time
from .blocks_wgmma import model_of as blocks_wgmma_model
from .blocks_wgmma_cost import by_order_and_block, by_prepared_order, dense_bytes, mean_panel
from .blocks_wgmma_cuts import Cut, as_run, cut_work, cuts_us

INFLATING, SAMPLED_LIMIT = "inflate_blocks", "sampled_choice"
"""The names of the model of inflating, and of the limit up to which ``sdd`` is multiplied by kept blocks."""
_TILE_ROWS, _TILE_TOKENS = 128, 256
"""The tile of a large dense product."""
_STEP_TERMS = 64
"""Terms of a sum of ``sdd`` that a step multiplies."""


class Way(NamedTuple):
    """A way to compute a product, and the kinds of work that it consists of."""

    name: str
    """Prefix of the names of its models."""
    terms: tuple[str, ...]
    """The names of the kinds of work."""
    work: Callable[[BlockSparseMatmulDescriptor], tuple[float, ...]]
    """Gives the amount of each kind of work."""
    copies_us: Callable[[BlockSparseMatmulDescriptor], float] = lambda desc: 0.0
    """Microseconds of pre-passes and other copies that the model's work doesn't include."""
    model_of: Callable[[str, BlockSparseMatmulDescriptor], str] = by_order_and_block
    """Returns the name of the model that serves a problem, given the name of the way."""

    def model(self, desc: BlockSparseMatmulDescriptor) -> str:
        """The name of the model that serves the problem."""
        return self.model_of(self.name, desc)

    def microseconds(self, desc: BlockSparseMatmulDescriptor) -> float:
        model = CostModel.of(self.model(desc), self.terms)
        return model.microseconds(self.work(desc)) + self.copies_us(desc)


def _blocks_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of a product by ``blocks_wgmma``, as it is cut if panels are not cut evenly."""
    return cut_work(desc, Cut.of(desc, REFERENCE_SMS).narrowed(desc))


def blocks_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Predicted microseconds by ``blocks_wgmma``."""
    (us,) = cuts_us(desc, [as_run(desc, REFERENCE_SMS)])
    return us + _pre_pass_us(desc)


def _pre_pass_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Microseconds of the pre-passes that copy dense operands before kept blocks are multiplied."""
    return sum(map(_prepared_us, KernelProblem(desc).prepared_operands(None)))


def _dense_copies_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Microseconds of the copies by which a dense product has aligned rows: operands', and the result's."""
    problem = KernelProblem(desc)
    of_result = _copy_us("pads", problem.product_bytes) if problem.product_tokens != desc.n else 0.0
    return sum(map(_prepared_us, problem.aligned_operands)) + of_result


def _prepared_us(one: Prepared) -> float:
    return _copy_us("transposes" if one.transposes else "pads", one.nbytes)


def _copy_us(kind: str, nbytes: int) -> float:
    """Microseconds of a copy that pads rows, or transposes, behind the launch before it."""
    given = constants("packed_choice")[kind]
    return float(given["launch"] + nbytes / given["bytes_per_us"])


def _dense_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of a product with the dense copy."""
    one = desc.layout
    matrices, cells = desc.batch * one.heads, one.rows * one.cols
    rows = cells // max(desc.reduction, 1)
    return (
        float(matrices * cells * desc.element.itemsize),
        dense_bytes(desc),
        float(matrices * cells * desc.n),
        _wave_cells(matrices, rows, desc.n) * desc.reduction,
    )


def _wave_cells(matrices: int, rows: int, columns: int) -> float:
    """Cells of the tiles of a dense product's results, in whole waves."""
    tiles = matrices * -(-rows // _TILE_ROWS) * -(-columns // _TILE_TOKENS)
    return float(-(-tiles // REFERENCE_SMS) * REFERENCE_SMS * _TILE_ROWS * _TILE_TOKENS)


def _few_tokens_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of a product by ``blocks_mma``."""
    return BlocksMmaSchedule.of(desc, REFERENCE_SMS).work(desc, REFERENCE_SMS)


FEW = Way(FEW_TOKENS_MODEL, FEW_TOKENS_TERMS, _few_tokens_work)
BLOCKS = Way(
    blocks_wgmma_cost.MODEL,
    blocks_wgmma_cost.TERMS,
    _blocks_work,
    _pre_pass_us,
    by_prepared_order,
)
DENSE = Way(
    "packed_dense",
    ("weight_bytes", "token_bytes", "cells", "wave_cells"),
    _dense_work,
    _dense_copies_us,
    lambda name, desc: name,
)


def _sampled_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of ``sdd`` by ``blocks_wgmma``: rows that its busiest CTA loads, and bytes.

    Memory delivers A and B and takes the values. L2 delivers to each work tile the rows of a panel and the
    columns of its blocks.
    """
    schedule, one = BlocksWgmmaSchedule.of(desc, REFERENCE_SMS), desc.layout
    (rows,) = sdd_time([schedule], desc, REFERENCE_SMS, constants(blocks_wgmma_model(desc)))
    values = desc.batch * one.blocks * one.block**2 * desc.out_element.itemsize
    columns = one.cols * expected_occupancy(one, schedule.rows // one.block)
    lines = head_panels(one.rows, schedule.rows) * columns * (1 + schedule.rows / schedule.tokens)
    return (
        rows * ceil(desc.n / _STEP_TERMS),
        rows,
        values + _factor_bytes(desc),
        desc.batch * one.heads * lines * desc.n * desc.element.itemsize,
    )


def _sampled_dense_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of ``sdd`` as a dense product whose kept blocks are copied."""
    one, matrices = desc.layout, desc.batch * desc.layout.heads
    cells = matrices * one.rows * one.cols
    return (
        float(cells * desc.n),
        _wave_cells(matrices, one.rows, one.cols) * desc.n,
        float(cells * KernelProblem(desc).product_element.itemsize),
        _factor_bytes(desc),
        float(desc.batch * one.blocks * one.block**2 * desc.out_element.itemsize),
    )


def _factor_bytes(sdd: BlockSparseMatmulDescriptor) -> float:
    """Bytes of A and B."""
    one = sdd.layout
    return float(sdd.batch * one.heads * (one.rows + one.cols) * sdd.n * sdd.element.itemsize)


def _by_pieces(name: str, desc: BlockSparseMatmulDescriptor) -> str:
    """The name of the model for the size of a block, and for whether X is read in pieces of 32 bytes."""
    return f"{name}_{desc.layout.block}{'_in_pieces' if KernelProblem(desc).in_pieces else ''}"


SAMPLED = Way(
    "sampled_blocks",
    ("step_rows", "rows", "memory_bytes", "l2_bytes"),
    _sampled_work,
    _pre_pass_us,
    _by_pieces,
)
SAMPLED_DENSE = Way(
    "sampled_dense",
    ("cells", "wave_cells", "product_bytes", "factor_bytes", "value_bytes"),
    _sampled_dense_work,
    _dense_copies_us,
    lambda name, desc: f"{name}_{desc.layout.block}",
)


def inflated_bytes(desc: BlockSparseMatmulDescriptor) -> int:
    """Bytes that are moved to inflate an operand: its kept blocks are read, a dense matrix is written."""
    one = desc.layout
    cells = one.blocks * one.block**2 + one.heads * one.rows * one.cols
    return desc.batch * cells * desc.element.itemsize


def inflating_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Microseconds in which an operand is inflated."""
    given = constants(INFLATING)
    return float(given["launch"] + given["bytes"] * inflated_bytes(desc))


def dense_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Predicted microseconds as a dense product. A packed operand has a dense copy, others are inflated."""
    return DENSE.microseconds(desc) + (0.0 if desc.packed else inflating_us(desc))


def both_us(desc: BlockSparseMatmulDescriptor) -> tuple[float, float]:
    """Predicted microseconds by kept blocks, and as a dense product, of which ``sdd`` copies kept blocks."""
    if desc.op is BlockSparseOp.SDD:
        return SAMPLED.microseconds(desc), SAMPLED_DENSE.microseconds(desc)
    return blocks_us(desc), dense_us(desc)


class _Chosen(NamedTuple):
    """The faster of kept blocks and a dense product for any number of tokens."""

    is_dense: bool
    blocks_us: float
    dense_us: float


@lru_cache(maxsize=4096)
def _chosen(desc: BlockSparseMatmulDescriptor) -> _Chosen:
    blocks, dense = both_us(desc)
    if desc.packed:
        most = constants("packed_choice")["most_of_dense"]
    else:
        most = constants(INFLATING)["most_of_dense"][nearness(desc)]
    return _Chosen(blocks > most * dense, blocks, dense)


def nearness(desc: BlockSparseMatmulDescriptor) -> str:
    """How near to each other blocks are known to lie: ``random``, ``close``, as in a band, or ``unknown``.

    Close ones are faster than predicted. The longest of random row panels is longer than the mean.
    """
    if not desc.longest_panel:
        return "unknown"
    return "close" if desc.longest_panel < mean_panel(desc) else "random"


def dense_wins(desc: BlockSparseMatmulDescriptor) -> str | None:
    """The reason why a dense product of ``dsd`` or ``dds`` is faster than kept blocks, or None.

    Tensor cores multiply 8-bit elements by kept blocks alone.
    """
    if desc.element.itemsize == 1 or not desc.n or not desc.batch:
        return None
    found = _chosen(desc)
    if not found.is_dense:
        return None
    dense = "a dense copy" if desc.packed else "inflating"
    return f"would take about {found.blocks_us:.1f} us, {dense} {found.dense_us:.1f} us"


@lru_cache(maxsize=4096)
def sampled_loses(desc: BlockSparseMatmulDescriptor) -> str | None:
    """The reason why ``sdd`` is faster as a dense product whose kept blocks are copied, or None.

    Large blocks never lose: even if all are kept, it is a dense product without the copy.
    """
    if desc.element.itemsize == 1 or desc.layout.block >= NARROW_PANEL_ROWS or not desc.n or not desc.batch:
        return None
    us, other = both_us(desc)
    if us <= constants(SAMPLED_LIMIT)["most_of_dense"] * other:
        return None
    return f"would take about {us:.1f} us, a dense product {other:.1f} us"


@lru_cache(maxsize=4096)
def few_tokens_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Predicted microseconds by the kernel for few tokens, which two entries of the kernel table ask for."""
    return FEW.microseconds(desc)


def few_tokens(block: int) -> int:
    """Most tokens that a kernel for few of them is preferred for."""
    return int(constants("blocks_mma_max_n")[str(block)])


def few_tokens_lose(desc: BlockSparseMatmulDescriptor, *, beside_wgmma: bool) -> str | None:
    """The reason why ``dsd`` or ``dds`` is faster by another kernel than one for few tokens, or None."""
    few = few_tokens(desc.layout.block)
    if not 0 < desc.n <= few:
        return f"is preferred for n up to {few} here, not {desc.n}"
    us, other = few_tokens_us(desc), _chosen(desc)
    name, other_us, most = "wgmma", other.blocks_us, 1.0
    if other.is_dense or not beside_wgmma:
        name, other_us, most = "a dense product", other.dense_us, constants("packed_choice")["most_of_dense"]
    return None if us <= most * other_us else f"would take about {us:.1f} us, {name} {other_us:.1f} us"
