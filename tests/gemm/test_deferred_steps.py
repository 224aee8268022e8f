"""``wgmma_sp`` computes a part of a work tile's activations while it multiplies the next work tile."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, PlanPreference
from sparse24_plans.gemm.backends import wgmma_sp, wgmma_sp_grouped
from sparse24_plans.gemm.schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from sparse24_plans.gemm.wgmma import defines

from ..kernels.index_functions import Table, check_tables
from ..support import Case, case_of, plan_of_row, random_data, same_bits
from .batched_cases import batched_case
from .grouped_cases import grouped_case

gpu = pytest.mark.gpu
HEADER = "gemm/wgmma_sp/deferred_steps.cuh"
PLAIN = ("identity", "bias", "bias_relu", "bias_relu2")
"""Epilogues that cost so little that nothing of them is deferred."""


def macros(schedule: WgmmaSpSchedule, **problem: object) -> dict[str, int]:
    desc = GemmSparse24Descriptor(n=2048, m=4096, k=4096, **problem)
    return defines(desc, schedule, OperandLayouts.of(desc), False)


@pytest.mark.parametrize("tokens", [72, 80, 96, 112, 144, 176, 208, 240, 256])
@pytest.mark.parametrize(
    ("epilogue", "element"), [("bias_silu", "bf16"), ("bias_swiglu", "f16"), ("bias_gelu", "bf16")]
)
def test_pieces_are_the_last_groups_and_each_lies_in_one_step(tokens, epilogue, element):
    """At most half of a tile's groups of 8 tokens are deferred, and all that ``write`` leaves out."""
    given = macros(WgmmaSpSchedule(2, 1, tokens), element=element, epilogue=epilogue)
    step = given["STEP_TOKENS"] // 8
    most = 10 if step < 4 else 14
    deferred = min(tokens // 16, most) // 2 * 2
    groups = np.arange(tokens // 8 - deferred, tokens // 8)
    firsts = groups[:: 2 if step % 2 == 0 else 1]
    assert step % 2 or not (firsts % 2).any(), "a piece of two groups would lie in two steps"
    check_tables(
        HEADER,
        given,
        Table("DeferredSteps<Config::Out>::first_group(i0)", firsts),
        Table("DeferredSteps<Config::Out>::kPieces + i0", [len(firsts)]),
        Table("EpilogueStore<Config::Out>::kWrittenGroups + i0", [tokens // 8 - deferred]),
    )


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        *((WgmmaSpSchedule(2, 1, 256), {"epilogue": epilogue}) for epilogue in PLAIN),
        (WgmmaSpSchedule(2, 1, 256), {"epilogue": "bias_silu", "beta": 1.0}),
        (WgmmaSpSchedule(2, 1, 256), {"epilogue": "bias_silu", "out_element": "f32"}),
        (WgmmaSpSchedule(2, 1, 256), {"epilogue": "bias_silu", "element": "s8", "out_element": "s8"}),
        (
            WgmmaSpSchedule(2, 1, 256),
            {"epilogue": "bias_silu", "element": "fp8_e4m3", "out_element": "fp8_e5m2"},
        ),
        (WgmmaSpSchedule(2, 1, 64), {"epilogue": "bias_silu"}),
        (WgmmaSpSchedule(1, 1, 256), {"epilogue": "bias_silu"}),
        (WgmmaSpSchedule(3, 1, 128), {"epilogue": "bias_silu"}),
        (WgmmaSpSchedule(2, 1, 128, split_k=2), {"epilogue": "bias_silu"}),
        (WgmmaSpSchedule(2, 1, 96, k_chunks=2), {"epilogue": "bias_silu"}),
    ],
    ids=str,
)
def test_nothing_is_deferred_where_registers_or_time_are_short(schedule, problem):
    given = macros(schedule, **{"element": "bf16", **problem})
    check_tables(HEADER, given, Table("Config::kDeferredGroups + i0", [0]))


CUTS = [
    WgmmaSpSchedule(2, 1, tokens, cluster_m, stream_k=stream_k)
    for (tokens, cluster_m), stream_k in itertools.product(
        [(256, 1), (256, 2), (208, 2), (144, 1), (80, 1)], (0, 11)
    )
]
"""Persistent clusters, each with several work tiles; by stream-K also with pieces of two."""
KINDS = [
    ("wgmma_sp", {"element": "bf16", "epilogue": "bias_silu"}),
    ("wgmma_sp", {"element": "f16", "epilogue": "bias_geglu", "x_order": "column", "y_order": "column"}),
    ("wgmma_sp", {"element": "bf16", "epilogue": "bias_gelu"}),
    ("wgmma_sp_fp8", {"element": "fp8_e4m3", "epilogue": "bias_swiglu", "out_element": "bf16"}),
    ("wgmma_sp_fp8", {"element": "fp8_e4m3", "epilogue": "bias_gelu_tanh", "out_element": "f16"}),
    ("wgmma_sp_s8", {"element": "s8", "epilogue": "bias_swiglu", "out_element": "f16"}),
]
UNCUT = WgmmaSpSchedule(1, 1, 128)
"""A schedule that defers nothing and gives the same bits."""
_numbers = itertools.count(1 << 30)
"""A preference of its own for each plan, since plans are cached."""


def case_with(monkeypatch, row: str, cut: WgmmaSpSchedule, pad: int, **problem: object) -> Case:
    if row != "wgmma_sp":
        problem |= {"scale_x": "row", "scale_w": "row"}
    monkeypatch.setattr(wgmma_sp, "best_schedule", lambda *_: cut)
    desc = GemmSparse24Descriptor(**problem)
    preference = PlanPreference(max_workspace_bytes=next(_numbers))
    plan = plan_of_row(row).select(desc, device=0, preference=preference)
    return case_of(plan, random_data(np.random.default_rng(desc.k), desc), (16, pad))


@gpu
@pytest.mark.parametrize(("row", "problem"), KINDS, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("k", [80, 528, 2064])
def test_deferred_results_have_the_bits_of_others(monkeypatch, row, problem, cut, k):
    """Work tiles of one K tile, whose rest is computed at once, and of more K tiles than there are pieces.

    The last rows and the last tokens end within a tile, and a whole warpgroup lies outside of Y. Lines of Y
    are aligned, or their elements are stored one by one.
    """
    for pad in (16, 3):
        size = {"n": 1032, "m": 4400, "k": k, **problem}
        case = case_with(monkeypatch, row, cut, pad, **size)
        got = case.run()
        case.check(got)
        whole = case_with(monkeypatch, row, UNCUT, pad, **size)
        assert same_bits(whole.run(), got)
        assert same_bits(case.run(), got)


@gpu
@pytest.mark.parametrize("epilogue", ["bias_silu", "bias_swiglu"])
@pytest.mark.parametrize("element", ["bf16", "fp8_e4m3"])
def test_deferred_results_of_groups(monkeypatch, epilogue, element):
    """Groups end within tiles, whose other tokens belong to the next group; some have no tokens."""
    monkeypatch.setattr(wgmma_sp_grouped, "best_schedule", lambda _: WgmmaSpSchedule(2, 1, 128))
    row = "wgmma_sp_grouped" if element == "bf16" else "wgmma_sp_grouped_fp8"
    desc = GemmSparse24Descriptor(
        n=3000, m=1088, k=1040, groups=30, element=element, out_element="bf16", epilogue=epilogue, alpha=7 / 8
    )
    tokens = [0, 1, 127, 128, 129, 300, 5, 0, 64, 260] * 2 + [77] * 10
    case = grouped_case(plan_of_row(row).select(desc, device=0), np.cumsum([0, *tokens]).tolist())
    case.check(case.run())


@gpu
@pytest.mark.parametrize("epilogue", ["bias_silu", "bias_swiglu"])
def test_deferred_results_of_batches(monkeypatch, epilogue):
    monkeypatch.setattr(wgmma_sp, "batched_schedule", lambda *_: WgmmaSpSchedule(2, 1, 128))
    monkeypatch.setattr(wgmma_sp, "best_schedule", lambda *_: UNCUT)
    desc = GemmSparse24Descriptor(
        n=300, m=1088, k=1040, batches=9, element="bf16", epilogue=epilogue, alpha=13 / 16
    )
    case = batched_case(plan_of_row("wgmma_sp").select(desc, device=0))
    got = case.run()
    for batch in range(9):
        assert same_bits(case.single(batch).run(), got[batch])
