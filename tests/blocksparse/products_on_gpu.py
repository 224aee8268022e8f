"""Checks for every GPU kernel of products, whether its blocks are dense inside or 2:4.

``plan_of`` makes the plan under test of a descriptor's fields; what isn't given has its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    DeviceProperties,
    explain,
)

from ..sample_devices import H200
from ..strategies import results_of
from ..support import EPILOGUES, same_bits
from .problems import Operands, captured_launches_follow_the_mask, case_of, random_operands
from .sample_layouts import EDGES, random_layout
from .test_products import check

PlanOf = Callable[..., BlockSparseMatmulPlan]

TRANSPOSITIONS = [(False, False), (False, True), (True, False), (True, True)]
WITH_BIAS = tuple(name for name in EPILOGUES if name != "identity")
EDGES_OF_TILES = (1, 7, 8, 56, 63, 64, 65, 72, 128, 136, 248, 255, 256, 264, 333, 520, 1040)
"""Values of n near the tokens of every tile. Some give rows that begin between multiples of 16 bytes."""

gpu = pytest.mark.gpu
every_transposition = pytest.mark.parametrize("transposed", TRANSPOSITIONS)
every_edge = pytest.mark.parametrize("name", EDGES)
every_size = pytest.mark.parametrize("sizes", [{}, {"n": 0}, {"batch": 0}, {"n": 8, "batch": 1}])
every_edge_of_tiles = pytest.mark.parametrize("n", EDGES_OF_TILES)
every_density = pytest.mark.parametrize("density", [0.03, 0.3, 1.0])
every_epilogue = pytest.mark.parametrize("epilogue", WITH_BIAS)


def chosen(
    layout: BlockSparseShape, device: DeviceProperties = H200, preference: Any = None, **fields: Any
) -> str | None:
    """The row that ``select`` would take, for n = 4096."""
    desc = BlockSparseMatmulDescriptor(
        **{"op": "dsd", "layout": layout, "n": 4096, "element": "bf16", **fields}
    )
    return explain(desc, preference=preference, device=device).chosen


def random_check(plan_of: PlanOf, layout: BlockSparseLayout, **fields: Any) -> np.ndarray:
    plan = plan_of(layout=layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


# Results ------------------------------------------------------------------------------------------


def layouts_and_sizes_at_their_edges(
    plan_of: PlanOf, op: str, name: str, block: int, sizes: dict[str, int]
) -> None:
    """Sums over nothing are zeros, and results are written wherever there are any."""
    layout = BlockSparseLayout(EDGES[name].bitmap, block)
    random_check(plan_of, layout, op=op, **sizes)
    random_check(plan_of, layout, op=op, trans_a=True, trans_b=True, **sizes)


def edges_of_tiles(plan_of: PlanOf, op: str, n: int, block: int) -> None:
    layout = random_layout(seed=n, heads=1, rows=9, cols=7, block=block)
    for transposed in (False, True):
        random_check(plan_of, layout, op=op, n=n, trans_b=transposed, batch=1)


def block_rows_of_many_bit_words(plan_of: PlanOf, op: str, block: int, density: float) -> None:
    """A layout has more block columns than a word of the tables has bits, and block rows differ in length."""
    layout = random_layout(seed=1, heads=1, rows=11, cols=75, block=block, density=density)
    kept = layout.bitmap.copy()
    kept[:, 3], kept[:, 4, 5:], kept[:, 7] = True, False, False
    random_check(plan_of, BlockSparseLayout(kept, block), op=op, n=40, batch=1)


def any_n_with_every_result(plan_of: PlanOf, op: str) -> None:
    for n in (1, 7, 65, 333):
        for out in results_of("f16"):
            layout = random_layout(heads=2, block=64)
            random_check(plan_of, layout, op=op, n=n, element="f16", out_element=out, trans_a=op == "dds")


def epilogues(plan_of: PlanOf, op: str, epilogue: str, element: str) -> None:
    """Each epilogue is checked with every result of the element."""
    for out in results_of(element):
        layout = random_layout(rows=3, cols=4, block=64)
        fields = {"element": element, "out_element": out, "alpha": 0.01 if element == "s8" else 0.25}
        random_check(plan_of, layout, op=op, epilogue=epilogue, **fields)


def cells_without_a_kept_partner_are_not_read(
    plan_of: PlanOf, op: str, block: int, worst: Sequence[tuple[slice, float]]
) -> None:
    """Keep the first of two blocks in a row. ``worst``: values of dense terms that meet no block."""
    layout = BlockSparseLayout([[[1, 0], [1, 0]]], block)
    layout = layout if op == "dsd" else layout.transposed()
    plan = plan_of(layout=layout, op=op, batch=1, n=16)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    if "metadata" in operands.arrays:
        operands["metadata"][...] = 0x44  # positions 0 and 1 of every group
    dense = operands["b"] if op == "dsd" else operands["a"].swapaxes(-1, -2)
    for terms, value in worst:
        dense[:, :, terms] = value
    assert np.isfinite(_result(plan, operands)).all()


def an_empty_block_row_next_to_one_with_infinities(plan_of: PlanOf, block: int) -> None:
    """Check that a block of one row does not reach another row that lacks it."""
    kept = np.zeros((1, 128 // block + 1, 3), bool)
    kept[0, 0, :2] = True
    layout = BlockSparseLayout(kept, block)
    plan = plan_of(layout=layout, op="dsd", batch=1, n=64)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    operands["a"][...] = np.inf
    got = _result(plan, operands)
    assert not np.isfinite(got[0, 0, :block]).any()
    assert (got[0, 0, block:] == 0).all()


def _result(plan: BlockSparseMatmulPlan, operands: Operands) -> np.ndarray:
    return case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype).astype(np.float32)


# Bits ---------------------------------------------------------------------------------------------


def bits_do_not_depend_on_neighbours(plan_of: PlanOf, op: str, block: int) -> None:
    """Batch invariance: a token's results are the same for every n, tile and place, and in a batch of one."""
    layout = random_layout(seed=3, heads=2, rows=10, cols=9, block=block)
    plan = plan_of(layout=layout, op=op, batch=2, n=1040)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    whole = check(plan, operands)
    name, axis = ("b", 3) if op == "dsd" else ("a", 2)
    for n in EDGES_OF_TILES[:-1]:
        few = plan_of(layout=layout, op=op, batch=1, n=n)
        tokens = np.random.default_rng(n).permutation(1040)[:n]
        part = {key: one[1:].copy() for key, one in operands.arrays.items()}
        part[name] = np.ascontiguousarray(np.take(part[name], tokens, axis))
        got = case_of(few, Operands(layout, part)).run()["c"]
        assert np.array_equal(got[0], np.take(whole[1], tokens, axis - 1).view(got.dtype))


def bits_of_another_run(plan_of: PlanOf, op: str) -> None:
    layout = random_layout(seed=4, heads=2, rows=20, cols=20, block=64, density=0.3)
    further_runs_give_the_same_bits(plan_of(layout=layout, op=op, n=512), layout, 5)


def further_runs_give_the_same_bits(
    plan: BlockSparseMatmulPlan, layout: BlockSparseLayout, runs: int
) -> None:
    """In results and a workspace that held other things."""
    case = case_of(plan, random_operands(plan.descriptor, layout, np.random.default_rng(1)))
    first = case.run()["c"].copy()
    for _ in range(runs):
        case.poison()
        assert same_bits(case.run()["c"].copy(), first)


# Tables -------------------------------------------------------------------------------------------


def another_mask_reaches_what_was_captured(plan_of: PlanOf, op: str) -> None:
    first = random_layout(seed=6, heads=2, rows=6, cols=8, block=64, density=0.4)
    captured_launches_follow_the_mask(plan_of(layout=first, op=op, batch=1), first)
