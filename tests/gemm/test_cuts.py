"""Every way in which a kernel cuts a problem gives the right product."""

from __future__ import annotations

import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules import wgmma_sp as schedules

from ..support import make_case, same_bits

pytestmark = pytest.mark.gpu


def check(desc: GemmSparse24Descriptor, row: str, *, pad: int = 0) -> None:
    case = make_case(desc, row=row, pad=pad)
    case.check(case.run())


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


@pytest.mark.parametrize(("n", "cut"), WGMMA_CUTS, ids=str)
@pytest.mark.parametrize("m", [2000, 2001])
@pytest.mark.parametrize("out_f32", [False, True])
def test_every_cut_of_wgmma_sp(monkeypatch, n, cut, m, out_f32):
    """Forced on a problem that is ragged in n, m and k, has several row blocks, and uneven slices.

    With m odd the rows of y begin anywhere.
    """
    element = ("f16", "bf16")[WGMMA_CUTS.index((n, cut)) % 2]
    monkeypatch.setattr(wgmma_sp, "best_schedule", lambda *_: cut)
    alpha = 1 + WGMMA_CUTS.index((n, cut)) / 64  # of its own: plans are cached
    out = "f32" if out_f32 else element
    desc = GemmSparse24Descriptor(
        n=n, m=m, k=1048, element=element, epilogue="bias_silu", out_element=out, alpha=alpha
    )
    check(desc, "wgmma_sp", pad=8)


@pytest.mark.parametrize("n", [1, 7, 16, 33])
def test_launches_of_wgmma_sp_that_overlap(monkeypatch, n):
    """More blocks than fit at once, of kernels that start before the one in front of them has ended."""
    for index, cut in enumerate(schedules.schedules_for(n)):
        monkeypatch.setattr(wgmma_sp, "best_schedule", lambda *_, cut=cut: cut)
        alpha = 1 + index / 64  # of its own: plans are cached
        desc = GemmSparse24Descriptor(n=n, m=28672, k=1024, element="bf16", alpha=alpha)
        case = make_case(desc, row="wgmma_sp")
        first = case.run()
        case.check(first)
        bound = case.plan.bind(case.args)
        for _ in range(200):
            bound.launch()
        assert same_bits(case.fetch(), first)
