"""Whether a sparse operand is multiplied by its kept blocks or as a dense matrix: the faster by a cost model.

The constants are those of the H200 on every device, because the choice decides guarantees.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from ...plan.schedule_choice import constants
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import KernelProblem, prepared_bytes
from ..panels import PANEL_ROWS, expected_occupancy
from .blocks_wgmma import APART, IN_TURN, MULTIPROCESSORS, Cut, panel_count

DENSE = "packed_dense"
"""The name of the model of the dense copy."""
INFLATING = "inflate_blocks"
"""The name of the model of inflating."""
TERMS = ("step", "step_cells", "kept_cells", "l2_bytes", "memory_bytes", "wave")
"""The work that takes time in a product of kept blocks, as :func:`blocks_work` counts it."""
DENSE_TERMS = ("weight_bytes", "token_bytes", "cells")
"""The work that takes time in a dense product, as :func:`dense_work` counts it."""


class Model(NamedTuple):
    """The time of a product: ``launch`` microseconds and the norm of its terms, each with a cost."""

    launch: float
    exponent: float
    costs: tuple[float, ...]

    def microseconds(self, work: tuple[float, ...]) -> float:
        norm = sum((cost * one) ** self.exponent for cost, one in zip(self.costs, work, strict=True))
        return self.launch + float(norm ** (1 / self.exponent))


def blocks_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of a product by ``blocks_wgmma``."""
    one, problem = desc.layout, KernelProblem(desc)
    cut = Cut.of(desc, MULTIPROCESSORS)
    schedule = cut.schedule
    across = one.block_rows if problem.by_columns else one.block_cols
    panels, tiles = panel_count(desc, schedule.rows), -(-desc.n // schedule.tokens)
    mean = across * expected_occupancy(one, max(schedule.rows // one.block, 1))
    alike = across * expected_occupancy(one, max(PANEL_ROWS // one.block, 1))
    longest_slice = desc.longest_panel
    if cut.slices in (APART, IN_TURN) and problem.slicing:
        longest_slice = min(longest_slice, problem.slicing.longest)
    longest = mean * max(1.0, longest_slice / alike if alike else 1.0)
    mean = min(mean, float(desc.longest_panel)) if desc.longest_panel else mean
    work_tiles = panels * tiles
    waves = max(work_tiles / MULTIPROCESSORS, 1.0)
    # A partial wave takes a part of a whole one, and no CTA ends before its longest slice does.
    steps = max((waves + ceil(waves)) / 2 * mean, longest) * one.block / 64
    values = desc.batch * one.blocks * one.block**2 * desc.element.itemsize
    gathered = work_tiles * mean * one.block * schedule.tokens * desc.element.itemsize
    return (
        steps,
        steps * schedule.rows * schedule.tokens,
        float(desc.batch * one.blocks * one.block**2 * tiles * schedule.tokens),
        gathered + values * tiles,
        values + _token_bytes(desc),
        waves,
    )


def pre_pass_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Microseconds of the pre-passes that copy dense operands before kept blocks are multiplied."""
    prepared = KernelProblem(desc).prepared_operands(None)
    return _copies_us(len(prepared), prepared_bytes(prepared))


def dense_copies_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Microseconds of the copies by which a dense product has aligned rows: operands', and the result's."""
    problem = KernelProblem(desc)
    prepared, pads = problem.aligned_operands, problem.product_tokens != desc.n
    nbytes = prepared_bytes(prepared) + (problem.product_bytes if pads else 0)
    return _copies_us(len(prepared) + pads, nbytes)


def _copies_us(copies: int, nbytes: int) -> float:
    given = constants("packed_choice")
    return float(copies * given["pre_pass_us"] + nbytes / given["pre_pass_bandwidth"])


def dense_work(desc: BlockSparseMatmulDescriptor) -> tuple[float, ...]:
    """The terms of a product with the dense copy."""
    one = desc.layout
    cells = desc.batch * one.heads * one.rows * one.cols
    return float(cells * desc.element.itemsize), _token_bytes(desc), float(cells * desc.n)


def _token_bytes(desc: BlockSparseMatmulDescriptor) -> float:
    """Bytes of the dense operand and of the result."""
    one, on_the_right = desc.layout, desc.op is BlockSparseOp.DDS
    rows, cols = desc.sides[::-1] if on_the_right else desc.sides
    matrices = desc.batch * one.heads * desc.n
    return float(matrices * (cols * desc.element.itemsize + rows * desc.out_element.itemsize))


def model_of(desc: BlockSparseMatmulDescriptor) -> str:
    """The name of the model of kept blocks that serves the problem."""
    return f"packed_blocks_{'k' if desc.dense_k_last else 'n'}_last_{desc.layout.block}"


def _model(name: str, terms: tuple[str, ...]) -> Model:
    found: Any = constants(name)
    return Model(found["launch"], found["exponent"], tuple(found[term] for term in terms))


def inflated_bytes(desc: BlockSparseMatmulDescriptor) -> int:
    """Bytes that are moved to inflate an operand: its kept blocks are read, a dense matrix is written."""
    one = desc.layout
    cells = one.blocks * one.block**2 + one.heads * one.rows * one.cols
    return desc.batch * cells * desc.element.itemsize


def inflating_us(desc: BlockSparseMatmulDescriptor) -> float:
    """Microseconds in which an operand is inflated."""
    given = constants(INFLATING)
    return float(given["launch"] + given["bytes"] * inflated_bytes(desc))


def times_of(desc: BlockSparseMatmulDescriptor) -> tuple[float, float]:
    """Predicted microseconds of the product by kept blocks, and as a dense product."""
    blocks = _model(model_of(desc), TERMS).microseconds(blocks_work(desc)) + pre_pass_us(desc)
    dense = _model(DENSE, DENSE_TERMS).microseconds(dense_work(desc)) + dense_copies_us(desc)
    return blocks, dense + (0.0 if desc.packed else inflating_us(desc))


@lru_cache(maxsize=4096)
def dense_wins(desc: BlockSparseMatmulDescriptor) -> str | None:
    """The reason why a dense product of ``dsd`` or ``dds`` is faster than kept blocks, or None.

    A packed operand has a dense copy, any other one is inflated first. Blocks of such a layout may lie close
    to each other, which no descriptor says and which makes kept blocks faster: few are never inflated.
    Tensor cores multiply 8-bit elements by kept blocks alone.
    """
    if desc.element.itemsize == 1 or not desc.n or not desc.batch:
        return None
    packed, given = desc.packed, constants("packed_choice" if desc.packed else INFLATING)
    if not packed and desc.layout.density <= given["least_density"]:
        return None
    blocks, dense = times_of(desc)
    if blocks <= given["most_of_dense"] * dense:
        return None
    return f"would take about {blocks:.1f} us, {'a dense copy' if packed else 'inflating'} {dense:.1f} us"
