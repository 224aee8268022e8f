"""How ``dsd`` and ``dds`` of small blocks are cut for the kernel that multiplies them, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.schedules.blocks_wgmma import BlocksWgmmaSchedule
from sparse24_plans.plan.schedule_choice import SHARED_BYTES

DENSITIES = (0.05, 0.1, 0.2, 0.5)
every_op = pytest.mark.parametrize("op", ["dsd", "dds"])
every_block = pytest.mark.parametrize("block", [16, 32])


def problem(
    op: str, block: int, n: int, density: float = 0.1, batch: int = 1, **sizes: Any
) -> BlockSparseMatmulDescriptor:
    """``sizes`` count blocks, and heads."""
    heads, rows, cols = (sizes.get(name, usual) for name, usual in (("heads", 1), ("rows", 0), ("cols", 0)))
    shape = BlockSparseShape(
        heads=heads,
        rows=rows * block,
        cols=cols * block,
        block=block,
        blocks=int(density * heads * rows * cols),
    )
    return BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, batch=batch, element="bf16")


def square(op: str, block: int, n: int, density: float) -> BlockSparseMatmulDescriptor:
    return problem(op, block, n, density, rows=4096 // block, cols=4096 // block)


problems = st.builds(
    problem,
    op=st.sampled_from(["dsd", "dds"]),
    block=st.sampled_from([16, 32]),
    n=st.integers(0, 300) | st.integers(0, 20000),
    density=st.sampled_from([0.0, *DENSITIES, 1.0]) | st.floats(0, 1),
    batch=st.integers(0, 9),
    heads=st.integers(0, 9),
    rows=st.integers(0, 600),
    cols=st.integers(0, 600),
)
multiprocessors = st.sampled_from([1, 66, 114, 132])


@every_op
@every_block
@pytest.mark.parametrize("n", [1, 40, 64, 256])
def test_tiles_are_small_for_few_tokens_and_blocks(op, block, n):
    """Narrow panels meet fewer columns, and there are multiprocessors for more tiles."""
    rows, tokens, *_ = BlocksWgmmaSchedule.of(square(op, block, n, density=0.05), 132)
    assert rows * tokens <= 64 * 128


@every_op
@every_block
@pytest.mark.parametrize("density", DENSITIES)
def test_of_many_tokens_tiles_are_the_largest(op, block, density):
    """Every multiprocessor has several: what counts is how much of an operand is read once."""
    assert BlocksWgmmaSchedule.of(square(op, block, 4096, density), 132)[:2] == (128, 256)


@given(problems, multiprocessors)
def test_a_warpgroup_has_whole_groups_of_tokens(desc, multiprocessors):
    """The kernel asserts it when it is compiled: 64 rows, and a multiple of 64 tokens."""
    one = BlocksWgmmaSchedule.of(desc, multiprocessors)
    assert one.tokens * (one.rows // 64) % (one.warpgroups * 64) == 0


@given(problems, multiprocessors)
def test_stages_are_copied_while_others_are_multiplied(desc, multiprocessors):
    """Two at least; a warp that copies has a bit of 64 for each of 8 stages and 8 pieces."""
    assert 2 <= BlocksWgmmaSchedule.of(desc, multiprocessors).stages <= 8


@given(problems, multiprocessors)
def test_a_block_of_threads_fits_in_shared_memory(desc, multiprocessors):
    assert BlocksWgmmaSchedule.of(desc, multiprocessors).shared_bytes() <= SHARED_BYTES[1]


@every_op
@every_block
@pytest.mark.parametrize(
    "sizes",
    [
        *({"rows": 0}, {"cols": 0}, {"rows": 0, "cols": 0}, {"heads": 0}, {"batch": 0}),
        *({"density": 0}, {"n": 0}, {"n": 1}),
    ],
    ids=str,
)
def test_there_is_work_exactly_where_there_is_a_result(op, block, sizes):
    """Sums over nothing are zeros, which have to be written."""
    desc = problem(op, block, **{"n": 64, "rows": 20, "cols": 20, **sizes})
    result = next(one for one in desc.operands() if one.name == "c")
    assert (BlocksWgmmaSchedule.of(desc, 132).work_tiles(desc) > 0) == all(result.shape)
