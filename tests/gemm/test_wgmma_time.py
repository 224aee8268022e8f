"""The model that ranks wgmma_sp's schedules, held against what they took on an NVIDIA H200.

The times are those of random shapes and n, off the grid of the benchmarks' record; they lie in
benchmarks/schedules/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_sp import FEW, Schedule, schedules_for
from sparse24_plans.gemm.schedules.wgmma_time import predicted

TIMES = Path(__file__).parents[2] / "benchmarks" / "schedules" / "h200-times.jsonl"


@cache
def cells() -> list[dict]:
    return [json.loads(line) for line in TIMES.read_text().splitlines()]


def lost(elements: tuple[str, ...], few: bool) -> Iterator[float]:
    """For each problem what the model's choice took, over the fastest of all that were measured."""
    for cell in cells():
        if cell["element"] not in elements or (cell["n"] <= FEW) != few:
            continue
        desc = GemmSparse24Descriptor(**{name: cell[name] for name in ("n", "m", "k", "element")})
        times = {Schedule(*map(int, name.split(","))): us for name, us in cell["us"].items()}
        tried = [schedule for schedule in schedules_for(desc.n, desc.m) if schedule in times]
        yield times[tried[int(predicted(tried, desc).argmin())]] / min(times.values())


@pytest.mark.parametrize("few", [True, False], ids=["few tokens", "more tokens"])
@pytest.mark.parametrize("elements", [("bf16",), ("s8", "fp8_e4m3")], ids=["16 bits", "8 bits"])
def test_the_best_schedule_is_missed_by_little(elements, few):
    found = np.array(list(lost(elements, few)))
    assert len(found) > 60
    assert np.exp(np.log(found).mean()) <= 1.04
    assert np.quantile(found, 0.95) <= 1.16


def test_every_problem_was_measured_with_schedules_that_are_tried():
    for cell in cells():
        measured = {Schedule(*map(int, name.split(","))) for name in cell["us"]}
        assert len(measured & set(schedules_for(cell["n"], cell["m"]))) >= 2


def pairs() -> Iterator[tuple[GemmSparse24Descriptor, Schedule, float]]:
    """Schedules with ranges, and what the same whole items took over them."""
    for cell in cells():
        desc = GemmSparse24Descriptor(**{name: cell[name] for name in ("n", "m", "k", "element")})
        times = {Schedule(*map(int, name.split(","))): us for name, us in cell["us"].items()}
        for one, us in times.items():
            if one.ranges and one.parts == 1 and (whole := times.get(one._replace(ranges=0))):
                yield desc, one, whole / us


def test_ranges_are_tried_where_they_win():
    """Each pair is a choice: of the model, where the ranges are tried at all."""
    found = []
    for desc, one, gain in pairs():
        ranged, whole = predicted((one, one._replace(ranges=0)), desc)
        takes = one in schedules_for(desc.n, desc.m) and ranged < whole
        found.append(max(1.0, 1 / gain if takes else gain))
    assert len(found) > 100
    assert np.exp(np.log(found).mean()) <= 1.006
