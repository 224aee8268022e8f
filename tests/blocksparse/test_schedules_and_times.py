"""Schedules of blocks_wgmma, held against what all schedules took on an NVIDIA H200.

The times in benchmarks/schedules/ are those of the record's shapes, and of random sizes and densities. Some
layouts are bands, of which the choice doesn't know.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.block_fits import SAMPLED_BLOCKS, beside_inflated, block_lines, chosen_us, described
from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.kernel_problem import KernelProblem
from sparse24_plans.blocksparse.schedules.blocks_wgmma import (
    BlocksWgmmaSchedule,
    Cut,
    schedules_by_density,
)
from sparse24_plans.blocksparse.schedules.predicted_times import BLOCKS, dense_wins, sampled_loses

from ..sample_devices import H200

KINDS = [
    ("dsd", 16, 1.03, 1.16),
    ("dsd", 32, 1.03, 1.16),
    ("dds", 16, 1.04, 1.18),
    ("dds", 32, 1.03, 1.16),
    ("sdd", 16, 1.03, 1.12),
    ("sdd", 32, 1.02, 1.1),
    ("sdd", 64, 1.02, 1.12),
    ("sdd", 128, 1.03, 1.18),
]


UNEVEN = [("sdd", 16, 1.02, 1.08), ("sdd", 32, 1.03, 1.18), ("sdd", 64, 1.04, 1.21), ("sdd", 128, 1.04, 1.18)]
"""Bounds for rows of blocks whose counts follow 1 / rank, which a schedule of ``sdd`` does not know of."""


@cache
def problems(op: str, block: int, *, uneven: bool = False) -> list[Any]:
    lines = [row for row in block_lines("nvidia_h200") if (row["op"], row["block"]) == (op, block)]
    return [(described(row), row["us"]) for row in lines if (row["pattern"] == "uneven") == uneven]


def name_of(one: BlocksWgmmaSchedule) -> str:
    return f"{one.rows},{one.tokens},{one.cluster_n}"


@pytest.mark.parametrize(
    ("op", "block", "mean", "most", "uneven"),
    [*((*one, False) for one in KINDS), *((*one, True) for one in UNEVEN)],
)
def test_the_fastest_is_missed_by_little(op, block, mean, most, uneven):
    """On the mean, and by all but one of twenty."""
    found = np.array(
        [
            times[name_of(Cut.of(desc, H200.multiprocessors).schedule)] / min(times.values())
            for desc, times in problems(op, block, uneven=uneven)
        ]
    )
    assert len(found) > (40 if uneven else 50)
    assert np.exp(np.log(found).mean()) <= mean
    assert np.quantile(found, 0.95) <= most


TILES = [
    ("dsd", 8192, 8192, 256, 128, 830, 21, {64: 17.8, 128: 16.5}),
    ("dds", 8192, 8192, 256, 128, 830, 21, {64: 19.0, 128: 17.0}),
    ("dsd", 8192, 8192, 256, 128, 408, 14, {64: 10.4, 128: 11.6}),
    ("dds", 8192, 8192, 256, 128, 408, 12, {64: 10.3, 128: 10.8}),
    ("dsd", 8192, 8192, 256, 128, 212, 7, {64: 7.3, 128: 7.8}),
    ("dds", 8192, 8192, 256, 128, 212, 8, {64: 7.2, 128: 8.3}),
    ("dsd", 8192, 8192, 256, 64, 836, 21, {64: 9.1, 128: 7.9}),
    ("dsd", 14336, 4096, 256, 128, 730, 15, {64: 18.0, 128: 14.1}),
    ("dsd", 14336, 4096, 256, 128, 359, 9, {64: 11.1, 128: 9.0}),
    ("dsd", 14336, 4096, 256, 128, 185, 5, {64: 8.4, 128: 7.1}),
    ("dsd", 14336, 4096, 256, 64, 733, 14, {64: 10.0, 128: 7.7}),
    ("dsd", 4096, 1024, 7442, 128, 23, 7, {128: 47.1, 256: 41.8}),
    ("dsd", 8192, 5376, 582, 64, 2257, 84, {128: 35.3, 256: 42.6}),
    ("dsd", 3840, 15360, 517, 128, 225, 13, {64: 24.0, 128: 21.5}),
]  # fmt: skip
"""Large blocks: op, m, k, n, block, blocks, longest panel, and microseconds with two widths of a tile."""


def test_the_width_of_a_tile_of_large_blocks_weighs_waves_and_the_longest_panel():
    lost = []
    for op, m, k, n, block, blocks, longest, times in TILES:
        shape = BlockSparseShape(heads=1, rows=m, cols=k, block=block, blocks=blocks)
        desc = BlockSparseMatmulDescriptor(op=op, layout=shape, n=n, element="bf16", longest_panel=longest)
        schedule = Cut.of(desc, H200.multiprocessors).schedule
        lost.append(times[schedule.tokens] / min(times.values()))
    assert np.exp(np.log(lost).mean()) < 1.01
    assert max(lost) < 1.13


@pytest.mark.parametrize(("op", "block"), [one[:2] for one in KINDS])
def test_every_schedule_that_may_be_taken_was_measured(op, block):
    for desc, times in problems(op, block):
        assert {name_of(one) for one in schedules_by_density(desc)} <= times.keys()


def test_an_x_that_a_pre_pass_transposes_takes_the_time_of_one_stored_so():
    lines = [
        (described(row), row)
        for row in beside_inflated("nvidia_h200")
        if (row["op"], row["block"], row["pattern"]) == ("dds", 16, "random")
    ]
    transposed = [
        BLOCKS.microseconds(desc) / chosen_us((desc, row["us"]))
        for desc, row in lines
        if any(one.transposes for one in KernelProblem(desc).prepared_operands(None))
    ]
    assert len(transposed) > 20
    assert np.exp(np.abs(np.log(transposed)).mean()) < 1.15


@pytest.mark.parametrize(
    ("ops", "why_dense", "mean", "most"),
    [(("sdd",), sampled_loses, 1.025, 1.2), (("dsd", "dds"), dense_wins, 1.008, 1.03)],
    ids=["sdd", "dsd and dds"],
)
def test_the_faster_way_is_missed_by_little(ops, why_dense, mean, most):
    """Kept blocks of 16 and 32, or a dense product: of which they are copied, or of an inflated operand."""
    lost = []
    for row in beside_inflated("nvidia_h200"):
        if row["op"] in ops and row["block"] in SAMPLED_BLOCKS:
            desc = described(row)
            kept, inflated = chosen_us((desc, row["us"])), row["inflate_us"]
            lost.append((inflated if why_dense(desc) else kept) / min(kept, inflated))
    assert len(lost) > 200
    assert np.exp(np.log(lost).mean()) <= mean
    assert np.quantile(lost, 0.95) <= most
