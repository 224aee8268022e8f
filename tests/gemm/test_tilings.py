"""Every way in which a kernel cuts a problem gives the right product."""

from __future__ import annotations

import pytest

from sparse24_plans import GemmSparse24Descriptor, PlanPreference
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.plan.schedule_choice import REFERENCE_SMS

from ..support import Case, make_case, same_bits

gpu = pytest.mark.gpu


def check(desc: GemmSparse24Descriptor, row: str, *, pad: int = 0) -> None:
    case = make_case(desc, row=row, pad=pad)
    assert case.plan.can_implement(case.args)
    case.check(case.run())


@gpu
@pytest.mark.parametrize("n", [1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200])
@pytest.mark.parametrize(("m", "k"), [(4096, 1024), (8448, 640), (20000, 136), (200, 16)])
def test_every_cut_of_mma_sp(n, m, k):
    """Every tile shape, full and ragged in n, m and k, in one wave and in several."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f16", epilogue="bias_silu", out_element="f32")
    check(desc, "mma_sp_many", pad=8)


WGMMA_CUTS = [
    (n, cut)
    for n in (1, 13, 60, 200, 1030)
    for cut in (*schedules.schedules_for(n), *schedules.schedules_in(8, n))
]


@gpu
@pytest.mark.parametrize(("n", "cut"), WGMMA_CUTS, ids=str)
@pytest.mark.parametrize("m", [2000, 2001])
@pytest.mark.parametrize("out_f32", [False, True])
def test_every_cut_of_wgmma_sp(monkeypatch, n, cut, m, out_f32):
    """Forced on a problem that is ragged in n, m and k, has several row blocks, and uneven slices.

    With m odd the rows of y begin anywhere.
    """
    element = ("f16", "bf16")[WGMMA_CUTS.index((n, cut)) % 2]
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    alpha = 1 + WGMMA_CUTS.index((n, cut)) / 64  # of its own: plans are cached
    out = "f32" if out_f32 else element
    desc = GemmSparse24Descriptor(
        n=n, m=m, k=1048, element=element, epilogue="bias_silu", out_element=out, alpha=alpha
    )
    check(desc, "wgmma_sp", pad=8)


@gpu
@pytest.mark.parametrize("n", [1, 7, 16, 33])
def test_launches_of_wgmma_sp_that_overlap(monkeypatch, n):
    """More blocks than fit at once, of kernels that start before the one in front of them has ended."""
    cuts = schedules.schedules_for(n, 28672)
    assert any(cut.stream_k for cut in cuts)
    for index, cut in enumerate(cuts):
        monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_, cut=cut: cut)
        alpha = 1 + index / 64  # of its own: plans are cached
        desc = GemmSparse24Descriptor(n=n, m=28672, k=1024, element="bf16", alpha=alpha)
        case = make_case(desc, row="wgmma_sp")
        first = case.run()
        case.check(first)
        bound = case.plan.bind(case.args, workspace=case.workspace and case.workspace.view)
        for _ in range(200):
            bound.launch()
        assert same_bits(case.fetch(), first)


ROWS = 9000
RANGED = [
    (n, cut)
    for n in (1, 60, 300, 520)
    for cut in schedules.schedules_for(n, ROWS)
    if cut.stream_k and cut.tokens >= n // 4
]
RANGED += [
    (n, cut)
    for n in (300, 520)
    for parts in (2, 3)
    for cut in schedules.schedules_in(parts, n, ROWS)
    if cut.stream_k and cut.tokens >= n // 4
]
"""Stream-K schedules with several K chunks, whose ends are not those of the ranges."""


def test_ranges_of_every_kind_are_under_test():
    assert {(cut.warpgroups, cut.m_tiles, cut.cluster_m) for _, cut in RANGED} == set(
        schedules._STREAM_K_SHAPES
    )
    assert {cut.k_chunks for _, cut in RANGED} == {1, 2, 3}
    assert any(cut.work_tiles(n, ROWS) > 2 * cut.stream_k for n, cut in RANGED), (
        "so that some work tiles are in no range"
    )


def plan_with(monkeypatch, n: int, cut: schedules.WgmmaSpSchedule, element: str, m: int) -> Case:
    """Return a case with a plan of its own: plans are cached by their problem and preference."""
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    at = RANGED.index((n, cut._replace(stream_k=REFERENCE_SMS // cut.cluster_m)))
    desc = GemmSparse24Descriptor(n=n, m=m, k=392, element=element, epilogue="bias_silu", alpha=1 + at / 64)
    parked = 1 << 30 if cut.k_chunks > 1 else 0
    preference = None if cut.stream_k else PlanPreference(max_workspace_bytes=parked)
    return make_case(desc, row="wgmma_sp", pad=8, preference=preference)


@gpu
@pytest.mark.parametrize(("n", "cut"), RANGED, ids=str)
@pytest.mark.parametrize("m", [ROWS, ROWS - 7])
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_ranges_have_the_bits_of_whole_items(monkeypatch, n, cut, m, element):
    case = plan_with(monkeypatch, n, cut, element, m)
    assert case.workspace is not None
    got = case.run()
    case.check(got)
    whole = plan_with(monkeypatch, n, cut._replace(stream_k=0), element, m)
    assert whole.workspace is None or cut.k_chunks > 1
    assert same_bits(whole.run(), got)


@gpu
@pytest.mark.parametrize(("n", "cut"), RANGED, ids=str)
def test_sums_are_handed_over_whatever_the_workspace_held(monkeypatch, n, cut):
    """The workspace holds what another plan or an earlier launch left there; graphs are replayed, too."""
    import cupy

    cases = [plan_with(monkeypatch, n, cut, "f16", m) for m in (ROWS - 1, ROWS - 100)]
    space = max((case.workspace for case in cases), key=lambda one: one.view.shape)
    want = [case.run().copy() for case in cases]
    for case, first in zip(cases, want, strict=True):
        case.check(first)
    bounds = [case.plan.bind(case.args, workspace=space.view) for case in cases]
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    for bound in bounds * 3:
        bound.launch(stream.ptr)
    graph = stream.end_capture()
    for byte in (0x00, 0xFF, 0x5A):
        with stream:  # elsewhere it would overwrite the first launch's flags
            space.view.bits()[...] = byte
        for _ in range(20):
            graph.launch(stream)
        stream.synchronize()
        space.numpy()
        assert all(same_bits(case.fetch(), first) for case, first in zip(cases, want, strict=True))
