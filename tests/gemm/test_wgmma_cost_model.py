"""The model that ranks wgmma_sp's schedules, held against what they took on an NVIDIA H200.

The times are those of random shapes and n, off the grid of the benchmarks' record; they lie in
benchmarks/schedules/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.schedules.wgmma_sp import MAX_MEMORY_BOUND_N, WgmmaSpSchedule, schedules_for
from sparse24_plans.plan.schedule_choice import fastest

from .kernel_entries import row_of

TIMES = Path(__file__).parents[2] / "benchmarks" / "schedules" / "h200-times.jsonl"
MAX_TOKENS = 1 << 30


@cache
def cells() -> list[dict]:
    return [json.loads(line) for line in TIMES.read_text().splitlines()]


def problem_of(cell: dict) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(**{name: cell[name] for name in ("n", "m", "k", "element")})


def times_of(cell: dict) -> dict[WgmmaSpSchedule, float]:
    return {WgmmaSpSchedule(*map(int, name.split(","))): us for name, us in cell["us"].items()}


def choice(tried: Sequence[WgmmaSpSchedule], desc: GemmSparse24Descriptor) -> WgmmaSpSchedule:
    return fastest(tried, lambda some: WGMMA_SP.predicted(some, desc))


def lost(elements: tuple[str, ...], least: int, most: int) -> Iterator[float]:
    """For each problem what the model's choice took, over the fastest of all that were measured."""
    for cell in cells():
        if cell["element"] not in elements or not least <= cell["n"] <= most:
            continue
        desc, times = problem_of(cell), times_of(cell)
        tried = [schedule for schedule in schedules_for(desc.n, desc.m) if schedule in times]
        yield times[choice(tried, desc)] / min(times.values())


EIGHT_BITS = ("s8", "fp8_e4m3")


@pytest.mark.parametrize("few", [True, False], ids=["few tokens", "more tokens"])
@pytest.mark.parametrize("elements", [("bf16",), EIGHT_BITS], ids=["16 bits", "8 bits"])
def test_the_best_schedule_is_missed_by_little(elements, few):
    found = np.array(
        list(
            lost(elements, 1, MAX_MEMORY_BOUND_N)
            if few
            else lost(elements, MAX_MEMORY_BOUND_N + 1, MAX_TOKENS)
        )
    )
    assert len(found) > 60
    assert np.exp(np.log(found).mean()) <= 1.04
    assert np.quantile(found, 0.95) <= 1.16


@pytest.mark.parametrize("element", EIGHT_BITS)
@pytest.mark.parametrize("most", [256, 512])
def test_8_bit_choices_at_some_tokens_lose_less(element, most):
    """One warpgroup that multiplies all tokens beats two that share as many."""
    found = np.array(list(lost((element,), MAX_MEMORY_BOUND_N + 1, most)))
    assert len(found) >= 48
    assert np.exp(np.log(found).mean()) <= 1.008
    assert np.quantile(found, 0.95) <= 1.05
    assert found.max() <= 1.12


def chosen_and_times(
    m: int, k: int, n: int, elements: tuple[str, ...] = EIGHT_BITS
) -> tuple[WgmmaSpSchedule, list[dict[WgmmaSpSchedule, float]]]:
    """The model's choice among all schedules, and what they took each time that these were measured."""
    found = [cell for cell in cells() if (cell["m"], cell["k"], cell["n"]) == (m, k, n)]
    found = [cell for cell in found if cell["element"] in elements]
    return choice(schedules_for(n, m), problem_of(found[0])), [times_of(cell) for cell in found]


@pytest.mark.parametrize(
    ("m", "k", "n"), [(4096, 14336, 128), (4096, 14336, 129), (4096, 4096, 256), (6144, 4096, 129)]
)
def test_8_bit_schedules_use_one_warpgroup_where_fastest(m, k, n):
    chosen, measured = chosen_and_times(m, k, n)
    assert chosen.warpgroups == 1
    assert all(times[chosen] == min(times.values()) for times in measured)


@pytest.mark.parametrize(("m", "k", "n"), [(32930, 656, 142), (15810, 9328, 128)])
def test_ctas_share_x_with_unaligned_rows(m, k, n):
    """Each asks for its part of them, which takes longer than of rows that start at lines of memory."""
    chosen, measured = chosen_and_times(m, k, n)
    assert chosen.cluster_m == 2
    assert all(times[chosen] == min(times.values()) for times in measured)


def test_few_tokens_of_a_short_k_are_not_sliced():
    """Until a cluster has met and folded takes longer than half of so few columns."""
    chosen, (times,) = chosen_and_times(4096, 1024, 63, ("bf16",))
    assert chosen.split_k == 1
    assert times[chosen] == min(times.values())


def invariant_costs(few: bool) -> Iterator[float]:
    """Yield the time of batch-invariant 16-bit choices over the free ones, if both were measured."""
    for cell in cells():
        desc, times = problem_of(cell), times_of(cell)
        if desc.element in EIGHT_BITS or (desc.n <= MAX_MEMORY_BOUND_N) != few:
            continue
        free = [one for one in schedules_for(desc.n, desc.m) if one in times]
        chosen = WGMMA_SP.best(desc, row_of("wgmma_sp_invariant"))
        if free and chosen in times:
            yield times[chosen] / times[choice(free, desc)]


@pytest.mark.parametrize(("few", "mean", "most"), [(True, 1.025, 1.26), (False, 1.015, 1.43)])
def test_slices_that_any_n_has_cost_little(few, mean, most):
    """For few tokens more slices would be faster, for many less."""
    found = np.array(list(invariant_costs(few)))
    assert len(found) > 400
    assert np.exp(np.log(found).mean()) <= mean
    assert found.max() <= most
    assert np.quantile(found, 0.99) <= 1.21


def test_every_problem_was_measured_with_schedules_that_are_tried():
    for cell in cells():
        tried = set(schedules_for(cell["n"], cell["m"]))
        # The measured schedules include ranges that aren't worth trying, and widths that no longer fit.
        known = [one for one in times_of(cell) if one in tried or one._replace(stream_k=0) in tried]
        gone = [one for one in times_of(cell) if not one.fits()]
        assert len(known) >= 2
        assert len({*known, *gone}) >= 3


def pairs() -> Iterator[tuple[GemmSparse24Descriptor, WgmmaSpSchedule, float]]:
    """Stream-K schedules, and the time of the same schedule with whole work tiles, relative to theirs."""
    for cell in cells():
        times = times_of(cell)
        for one, us in times.items():
            if one.stream_k and one.k_chunks == 1 and (whole := times.get(one._replace(stream_k=0))):
                yield problem_of(cell), one, whole / us


def test_stream_k_is_tried_where_it_wins():
    """For each pair the model chooses, if the stream-K schedule is tried at all."""
    found = []
    for desc, one, gain in pairs():
        ranged, whole = WGMMA_SP.predicted((one, one._replace(stream_k=0)), desc)
        takes = one in schedules_for(desc.n, desc.m) and ranged < whole
        found.append(max(1.0, 1 / gain if takes else gain))
    assert len(found) > 100
    assert np.exp(np.log(found).mean()) <= 1.006


# Stores --------------------------------------------------------------------------------------------

SIZES = [(n, m) for n in (8, 64, 300, 512, 4096) for m in (4096, 8192)]
"""Sizes of each class of tokens; rows of Y are multiples of 16 bytes, also for gated products."""


def time_of(n: int, m: int, element: str, **fields: str) -> np.ndarray:
    """Return the time of each schedule. K is small, so that stores matter."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=128, element=element, **fields)
    return WGMMA_SP.predicted(schedules_for(n, m), desc)


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("element", ["bf16", *EIGHT_BITS])
def test_with_a_gate_no_schedule_takes_longer(element, n, m):
    """A gated product multiplies as much, and stores half as many results."""
    plain, gated = (
        time_of(n, m, element, out_element="bf16", epilogue=one) for one in ("bias", "bias_swiglu")
    )
    assert (gated <= plain).all()


@pytest.mark.parametrize(("n", "m"), [one for one in SIZES if one[0] > MAX_MEMORY_BOUND_N])
@pytest.mark.parametrize("element", ["bf16", *EIGHT_BITS])
def test_with_a_gate_storing_takes_less(element, n, m):
    plain, gated = (
        time_of(n, m, element, out_element="bf16", epilogue=one) for one in ("bias", "bias_swiglu")
    )
    whole = [one.split_k == 1 for one in schedules_for(n, m)]  # others spend the time on adding up slices
    assert (gated[whole] < plain[whole]).all()


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_with_gate_results_of_twice_bytes_take_as_long(n, m):
    """A gated product stores half as many results as its two matrices have rows."""
    plain = time_of(n, m, "bf16", out_element="bf16", epilogue="bias")
    gated = time_of(n, m, "bf16", out_element="f32", epilogue="bias_swiglu")
    assert gated == pytest.approx(plain)


def one_warpgroup_over_two(desc: GemmSparse24Descriptor) -> float:
    """Return the ratio for CTA tiles of the same rows and tokens."""
    tokens = min(desc.n, MAX_MEMORY_BOUND_N)
    one, two = WGMMA_SP.predicted([WgmmaSpSchedule(1, 2, tokens), WgmmaSpSchedule(2, 1, tokens)], desc)
    return one / two


@pytest.mark.parametrize("n", [8, 64, 300, 512, 4096])
@pytest.mark.parametrize("element", ["bf16", *EIGHT_BITS])
def test_ragged_rows_take_one_warpgroup_longer_than_two(element, n):
    """Each stores results one by one, which takes it its own time."""
    desc = GemmSparse24Descriptor(n=n, m=4097, k=128, element=element, out_element="bf16")
    assert one_warpgroup_over_two(desc) > 1


@pytest.mark.parametrize("n", [8, 64, 300, 512, 4096])
@pytest.mark.parametrize("element", ["bf16", *EIGHT_BITS])
def test_other_rows_take_one_warpgroup_as_long_as_two(element, n):
    """The copy engine stores them."""
    desc = GemmSparse24Descriptor(n=n, m=4096, k=128, element=element, out_element="bf16")
    assert one_warpgroup_over_two(desc) == pytest.approx(1)


@pytest.mark.parametrize(("epilogue", "ragged"), [("bias", False), ("bias_swiglu", True)])
def test_with_a_gate_ragged_rows_are_those_of_the_results(epilogue, ragged):
    """The 8208 rows of both matrices give 4104 results, which are no multiple of 16 bytes."""
    desc = GemmSparse24Descriptor(n=300, m=8208, k=128, element="s8", out_element="s8", epilogue=epilogue)
    assert (one_warpgroup_over_two(desc) > 1.01) == ragged
