"""Cost model of ``dsd`` and ``dds`` by ``blocks_wgmma``, for tiles of any size.

It chooses the tile for blocks of 64 and 128, and compares kept blocks with other ways to multiply.
``tuning/models`` holds the costs.
"""

from __future__ import annotations

from math import ceil

from ...plan.schedule_choice import CostModel
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import K_MAJOR, KernelProblem
from ..panels import MAX_DEVIATIONS, PANEL_ROWS, expected_columns, head_panels

MODEL = "packed_blocks"
"""The name of the cost models, one for each block size and each order of X after all pre-passes."""
TERMS = ("step", "step_cells", "kept_cells", "l2_bytes", "memory_bytes", "wave")
"""The names of the kinds of work that take time."""
_STEP_BYTES = 128
"""Bytes of a row of S that a step multiplies."""
_ELEMENT_BYTES = 2
"""Bytes of the elements that costs of cells are fitted for. Other elements cost in proportion to theirs."""


def work(
    desc: BlockSparseMatmulDescriptor, rows: int, tokens: int, most: float, ctas: int, cluster_slices: int = 1
) -> tuple[float, ...]:
    """The amount of each kind of work in ``TERMS`` with tiles of ``rows`` x ``tokens``, ``ctas`` at once.

    No CTA computes more than ``most`` block columns of a panel, and every panel or slice is computed in
    ``cluster_slices``.
    """
    one, size = desc.layout, desc.element.itemsize
    panels, tiles = panel_count(desc, rows), -(-desc.n // tokens)
    mean, longest = mean_panel(desc, rows), min(expected_longest_panel(desc, rows), most)
    if desc.longest_panel:  # blocks may be kept close together, so that no panel is as long as the mean
        mean = min(mean, float(desc.longest_panel))
    waves = max(panels * cluster_slices * tiles / ctas, 1.0)
    # A partial wave takes a part of a whole one, and no CTA ends before its longest slice does.
    steps = max((waves + ceil(waves)) / 2 * mean, longest) / cluster_slices * one.block * size / _STEP_BYTES
    cells = desc.batch * one.blocks * one.block**2
    return (
        steps,
        steps * rows * tokens,
        float(cells * tiles * tokens) * size / _ELEMENT_BYTES,
        panels * mean * one.block * desc.n * size + float(cells * size * tiles),
        cells * size + dense_bytes(desc),
        waves,
    )


def cost_model(desc: BlockSparseMatmulDescriptor) -> CostModel:
    """The model that serves the problem."""
    return CostModel.of(by_prepared_order(MODEL, desc), TERMS)


def by_prepared_order(name: str, desc: BlockSparseMatmulDescriptor) -> str:
    """The name of the model for the problem's blocks, and for X's order after all pre-passes."""
    problem = KernelProblem(desc)
    _, right = problem.majors(problem.prepared_operands(None))
    return by_order_and_block(name, desc, right == K_MAJOR)


def by_order_and_block(name: str, desc: BlockSparseMatmulDescriptor, k_last: bool | None = None) -> str:
    """The name of the cost model for the problem's blocks and order of X, by default the caller's order."""
    last = "k" if (desc.dense_k_last if k_last is None else k_last) else "n"
    return f"{name}_{last}_last_{desc.layout.block}"


def dense_bytes(desc: BlockSparseMatmulDescriptor) -> float:
    """Bytes of the dense operand and of the result."""
    one, on_the_right = desc.layout, desc.op is BlockSparseOp.DDS
    rows, cols = desc.sides[::-1] if on_the_right else desc.sides
    matrices = desc.batch * one.heads * desc.n
    return float(matrices * (cols * desc.element.itemsize + rows * desc.out_element.itemsize))


def mean_panel(desc: BlockSparseMatmulDescriptor, rows: int = PANEL_ROWS) -> float:
    """Columns that are expected of a panel of ``rows`` rows, or of one block row, if blocks are kept at
    random."""
    return _columns(desc, rows)[0]


def _columns(desc: BlockSparseMatmulDescriptor, rows: int) -> tuple[float, float]:
    """Mean and standard deviation of the columns of random panels of ``rows`` rows, or of a block row."""
    layout = desc.layout
    return expected_columns(layout, desc.reduction // layout.block, max(rows // layout.block, 1))


def expected_longest_panel(desc: BlockSparseMatmulDescriptor, rows: int) -> float:
    """Expected columns of the longest panel of ``rows`` rows, from the known longest panel of ``PANEL_ROWS``.

    If blocks may be kept at random, both panels exceed their means by as many deviations. Otherwise one
    long block row is taken to be in both panels, and the known panel's other block rows add columns as at
    random.
    """
    layout, across = desc.layout, desc.reduction // desc.layout.block
    known, others = min(desc.longest_panel, across), (PANEL_ROWS - max(rows, layout.block)) // layout.block
    (mean, deviation), (known_mean, known_deviation) = _columns(desc, rows), _columns(desc, PANEL_ROWS)
    if known <= known_mean:
        return min(mean, known or mean)
    if known <= known_mean + MAX_DEVIATIONS * known_deviation:
        return min(mean + (known - known_mean) / known_deviation * deviation, known)
    return max(mean, across - (across - known) / (1 - layout.density) ** others)


def panel_count(desc: BlockSparseMatmulDescriptor, rows: int = PANEL_ROWS) -> int:
    """Row panels of op(S), or for ``dds`` of its transpose, in all batches and heads."""
    side = desc.sides[1 if desc.op is BlockSparseOp.DDS else 0]
    return desc.batch * desc.layout.heads * head_panels(side, rows)
