"""How ``sdd`` is cut for the kernel that multiplies kept blocks: what every cluster gets, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.schedules import blocks_wgmma
from sparse24_plans.blocksparse.schedules.blocks_wgmma import (
    BlocksWgmmaSchedule,
    best_schedule,
    sampled_schedules,
)
from sparse24_plans.plan.schedule_choice import constants

BLOCKS = (16, 32, 64, 128)


def shape_of(block: int, rows: int = 4096, cols: int = 4096, density: float = 0.1) -> BlockSparseShape:
    blocks = round(density * rows * cols / block**2)
    return BlockSparseShape(heads=1, rows=rows, cols=cols, block=block, blocks=blocks)


def dealt_out(
    one: BlocksWgmmaSchedule, columns: list[int], block: int, clusters: int
) -> list[list[tuple[int, int]]]:
    """Dealer and Item of blocksparse/blocks_wgmma.cu, written down again: of each cluster its items.

    An item is its strip, and what each block of threads has of the strip's columns of blocks, in parts.
    """
    parts_of_block = block // min(block, one.tokens)
    most = max(one.tokens // block, 1) * one.share
    found: list[list[tuple[int, int]]] = [[] for _ in range(clusters)]
    group = index = 0
    while having := sum(count * parts_of_block > group * most for count in columns):
        for strip in range(having):
            parts = columns[strip] * parts_of_block
            each = -(-parts // (-(-parts // most) * one.share))
            turn, at = divmod(index, clusters)
            found[clusters - 1 - at if turn % 2 else at].append((strip, each))
            index += 1
        group += 1
    return found


columns_of_strips = st.lists(st.integers(0, 40), max_size=60).map(lambda one: sorted(one, reverse=True))


@given(columns_of_strips, st.sampled_from(BLOCKS), st.integers(0, 5), st.sampled_from([2, 7, 132]))
def test_the_busiest_block_is_known(columns, block, which, multiprocessors):
    one = sampled_schedules(shape_of(block))[which]
    items = dealt_out(one, columns, block, one.resident_clusters(multiprocessors))
    fit = constants(f"blocks_wgmma_sdd_{block}")
    rows = one.rows * (fit["shared_rows"] if one.share == 2 else 1)
    slower = fit["few_stages"] if one.stages < 4 else 1
    wanted = max(
        sum((rows + each * min(block, one.tokens)) * slower + fit["tile"] for _, each in cluster)
        for cluster in items
    )
    found = blocks_wgmma._busiest(one, np.array(columns, np.int64), block, multiprocessors, fit)
    assert found == pytest.approx(wanted)


@given(columns_of_strips, st.sampled_from(BLOCKS), st.integers(0, 5))
def test_every_column_of_a_strip_is_in_a_piece(columns, block, which):
    layout = shape_of(block, cols=40 * block)
    one = sampled_schedules(layout)[which]
    parts_of_block, seen = block // min(block, one.tokens), [0] * len(columns)
    for cluster in dealt_out(one, columns, block, 3):
        for strip, each in cluster:
            assert each * min(block, one.tokens) <= one.tokens
            seen[strip] += each * one.share
    for all_pieces, kept in zip(seen, columns, strict=True):
        assert all_pieces >= kept * parts_of_block
    assert one.parts(block) * min(block, one.tokens) == one.tokens
    most = one.parts(block) * one.share
    assert all(-(-kept * parts_of_block // most) <= one.groups(layout) for kept in columns)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_columns_of_random_layouts(block):
    """Their quantiles, beside layouts that were drawn."""
    layout = shape_of(block, rows=8192, density=0.07)
    rng, lines = np.random.default_rng(block), max(64 // block, 1)
    drawn = [
        rng.random((lines, layout.block_cols, 128)) < layout.density for _ in range(8192 // max(64, block))
    ]
    met = np.sort([one.any(0).sum(0) for one in drawn], axis=0)[::-1].mean(1)
    found = blocks_wgmma._kept_columns(layout, len(drawn))
    assert np.abs(found - met).mean() <= 0.03 * met.mean() + 0.3
    assert (np.diff(found) <= 0).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_more_strips_than_are_looked_at(block, monkeypatch):
    original, looked_at = blocks_wgmma._kept_columns, []

    def met_columns(layout: BlockSparseShape, strips: int, share: float) -> blocks_wgmma.Columns:
        looked_at.append(strips)
        return original(layout, strips, share)

    monkeypatch.setattr(blocks_wgmma, "_kept_columns", met_columns)
    desc = BlockSparseMatmulDescriptor(
        op="sdd", layout=shape_of(block, rows=1 << 18, cols=512), n=64, batch=8, element="bf16"
    )
    best_schedule(desc, 132)
    assert set(looked_at) == {2048}


@pytest.mark.parametrize("blocks", [0, 1])
def test_hardly_anything_kept(blocks):
    layout = BlockSparseShape(heads=1, rows=64, cols=64, block=32, blocks=blocks)
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=layout, n=64, element="bf16")
    found = best_schedule(desc, 132)
    assert (found.items(desc) == 0) == (blocks == 0)
