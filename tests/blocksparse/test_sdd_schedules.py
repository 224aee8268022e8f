"""Schedules of ``sdd``: the work that every cluster gets, without a GPU."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.backends.blocks_wgmma import defines
from sparse24_plans.blocksparse.schedules import blocks_wgmma
from sparse24_plans.blocksparse.schedules.blocks_wgmma import (
    BlocksWgmmaSchedule,
    sampled_schedules,
)
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import Cut
from sparse24_plans.plan.schedule_choice import constants

from ..kernels.index_functions import Table, check_tables

BLOCKS = (16, 32, 64, 128)


def shape_of(block: int, rows: int = 4096, cols: int = 4096, density: float = 0.1) -> BlockSparseShape:
    blocks = round(density * rows * cols / block**2)
    return BlockSparseShape(heads=1, rows=rows, cols=cols, block=block, blocks=blocks)


class Deal(NamedTuple):
    """How the work of ``sdd`` is divided: a piece is a block column of a row panel, or a part."""

    pieces_per_block: int
    most: int
    """Pieces of a work tile at most."""

    ctas: int
    """CTAs of a cluster."""

    @classmethod
    def of(cls, one: BlocksWgmmaSchedule, block: int) -> Deal:
        return cls(
            block // min(block, one.tokens), max(one.tokens // block, 1) * one.cluster_n, one.cluster_n
        )

    def each(self, columns: int) -> int:
        """Return the pieces of each CTA of a row panel."""
        pieces = columns * self.pieces_per_block
        return -(-pieces // (-(-pieces // self.most) * self.ctas))

    def clusters(self, columns: list[int], clusters: int) -> list[list[tuple[int, int]]]:
        """Return the work tiles of each cluster: the row panel and the pieces of each CTA."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(clusters)]
        order = (index for visit in itertools.count() for index in work_tiles(clusters, visit).argsort())
        group = 0
        while having := sum(count * self.pieces_per_block > group * self.most for count in columns):
            for panel in range(having):
                found[next(order)].append((panel, self.each(columns[panel])))
            group += 1
        return found


def work_tiles(clusters: int, visit: int) -> np.ndarray:
    """Return the work tile of each cluster in one round: rounds go through the clusters to and fro."""
    order = np.arange(clusters)
    return visit * clusters + (order[::-1] if visit % 2 else order)


@pytest.mark.parametrize(
    ("block", "which"),
    [(128, which) for which in range(6)]
    + [(16, 0), (16, 3), (16, 4), (32, 1), (32, 2), (32, 5), (64, 0), (64, 3)],
)
def test_the_kernel_divides_work_as_the_model_does(block, which):
    one = sampled_schedules(shape_of(block))[which]
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=shape_of(block), n=64, element="bf16")
    deal, most, ranks = Deal.of(one, block), 300, np.arange(one.cluster_n)
    each = np.array([deal.each(columns) for columns in range(1, most)])
    first = (np.arange(5)[:, None] * one.cluster_n + ranks) * each[:, None, None]
    check_tables(
        "blocksparse/blocks_wgmma/tile_scheduler.cuh",
        defines(desc, Cut(one), ()),
        Table("i0 == 0 ? Config::kPiecesPerBlock : Config::kClusterN", [deal.pieces_per_block, deal.ctas]),
        Table("TileScheduler::pieces_before(i0)", np.arange(9) * deal.most),
        Table("TileScheduler::pieces_of_cta(1 + i0)", each),
        Table("TileScheduler::first_piece(TileScheduler::pieces_of_cta(1 + i0), i1, i2)", first),
    )


@pytest.mark.parametrize("clusters", [1, 2, 7, 132])
def test_clusters_take_work_tiles_to_and_fro(clusters):
    want = np.stack([work_tiles(clusters, visit) for visit in range(6)])
    table = Table(f"work_tile_of(i0, i1, {clusters})", want)
    check_tables("blocksparse/pipeline.cuh", {}, table)


columns_of_panels = st.lists(st.integers(0, 40), max_size=60).map(lambda one: sorted(one, reverse=True))


@given(columns_of_panels, st.sampled_from(BLOCKS), st.integers(0, 5), st.sampled_from([2, 7, 132]))
def test_the_busiest_cluster_is_known(columns, block, which, multiprocessors):
    one = sampled_schedules(shape_of(block))[which]
    items = Deal.of(one, block).clusters(columns, one.resident_clusters(multiprocessors))
    fit = constants(f"blocks_wgmma_sdd_{block}")
    rows = one.rows * (fit["shared_rows"] if one.cluster_n == 2 else 1)
    slower = fit["few_stages"] if one.stages < 4 else 1
    wanted = max(
        sum((rows + each * min(block, one.tokens)) * slower + fit["tile"] for _, each in cluster)
        for cluster in items
    )
    loads = blocks_wgmma.cluster_loads(one, np.array(columns, np.int64), block, multiprocessors)
    found = blocks_wgmma.busiest(one, loads, fit)
    assert found == pytest.approx(wanted)


@given(columns_of_panels, st.sampled_from(BLOCKS), st.integers(0, 5))
def test_every_block_column_of_a_panel_is_computed(columns, block, which):
    layout = shape_of(block, cols=40 * block)
    one = sampled_schedules(layout)[which]
    parts_of_block, seen = block // min(block, one.tokens), [0] * len(columns)
    for cluster in Deal.of(one, block).clusters(columns, 3):
        for panel, each in cluster:
            assert each * min(block, one.tokens) <= one.tokens
            seen[panel] += each * one.cluster_n
    for all_pieces, kept in zip(seen, columns, strict=True):
        assert all_pieces >= kept * parts_of_block
    assert one.block_columns(block) * min(block, one.tokens) == one.tokens
    most = one.block_columns(block) * one.cluster_n
    assert all(-(-kept * parts_of_block // most) <= one.groups(layout) for kept in columns)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_modelled_columns_are_those_of_random_layouts(block):
    """The quantiles that the model assumes are close to those of random layouts."""
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
def test_at_most_2048_panels_are_modelled(block, monkeypatch):
    original, looked_at = blocks_wgmma._kept_columns, []

    def met_columns(layout: BlockSparseShape, panels: int, share: float) -> blocks_wgmma.Columns:
        looked_at.append(panels)
        return original(layout, panels, share)

    monkeypatch.setattr(blocks_wgmma, "_kept_columns", met_columns)
    desc = BlockSparseMatmulDescriptor(
        op="sdd", layout=shape_of(block, rows=1 << 18, cols=512), n=64, batch=8, element="bf16"
    )
    BlocksWgmmaSchedule.of(desc, 132)
    assert set(looked_at) == {2048}


@pytest.mark.parametrize("blocks", [0, 1])
def test_layouts_of_no_block_and_of_one(blocks):
    layout = BlockSparseShape(heads=1, rows=64, cols=64, block=32, blocks=blocks)
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=layout, n=64, element="bf16")
    found = BlocksWgmmaSchedule.of(desc, 132)
    assert (found.work_tiles(desc) == 0) == (blocks == 0)
