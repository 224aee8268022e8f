"""Every kernel computes Y = epilogue(alpha * X @ W^T) and dX = alpha * dY @ W inside its own error bound.

Outputs start as NaN, guard bytes surround every buffer, the reference is float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan, PlanPreference, UnsupportedError
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules import wgmma_sp as schedules

from ..support import ELEMENTS, EPILOGUES, make_case, same_bits

gpu = pytest.mark.gpu
STRICT = PlanPreference(require={"batch_invariant": True})
ROWS = [
    pytest.param("host", PlanPreference(), id="host_blas"),
    pytest.param("host", STRICT, id="host_strict"),
    pytest.param(0, PlanPreference(prefer_backend="inflate_cublas"), id="inflate_cublas", marks=gpu),
    pytest.param(0, PlanPreference(prefer_backend="inflate_strict"), id="inflate_strict", marks=gpu),
    pytest.param(0, PlanPreference(prefer_backend="mma_sp"), id="mma_sp", marks=gpu),
    pytest.param(0, PlanPreference(prefer_backend="wgmma_sp"), id="wgmma_sp", marks=gpu),
    pytest.param(
        0,
        PlanPreference(prefer_backend="wgmma_sp", require={"batch_invariant": True}),
        id="wgmma_sp_invariant",
        marks=gpu,
    ),
]
kernels = pytest.mark.parametrize(("device", "preference"), ROWS)


def run_and_check(desc: GemmSparse24Descriptor, device, preference, **options) -> None:
    """The result is right; or the kernel doesn't list the element, the op or empty results, and says so."""
    backend = preference.prefer_backend
    empty = desc.n * desc.m == 0 or (backend == "wgmma_sp" and desc.k == 0)
    if backend in ("mma_sp", "wgmma_sp") and (desc.element == "f32" or desc.op == "dgrad" or empty):
        with pytest.raises(UnsupportedError, match=rf"{backend}: (serves|does not serve)"):
            GemmSparse24Plan.select(desc, device=device, preference=preference)
        return
    case = make_case(desc, device, preference, **options)
    got = case.run()
    case.check(got)
    if desc.reduction == 0 and desc.epilogue == "identity":
        assert same_bits(got, np.zeros(got.shape, got.dtype))


@kernels
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out_f32", [False, True])
def test_forward(device, preference, element, epilogue, out_f32):
    out = "f32" if out_f32 else element
    desc = GemmSparse24Descriptor(
        n=17, m=72, k=136, element=element, epilogue=epilogue, alpha=0.75, out_element=out
    )
    run_and_check(desc, device, preference)


@kernels
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("alpha", [1.0, -2.5])
def test_dgrad(device, preference, element, alpha):
    desc = GemmSparse24Descriptor(n=17, m=72, k=136, element=element, op="dgrad", alpha=alpha)
    run_and_check(desc, device, preference)


@kernels
@pytest.mark.parametrize("bias_element", ["f16", "f32"])
def test_bias_of_either_type(device, preference, bias_element):
    desc = GemmSparse24Descriptor(
        n=5, m=40, k=64, element="f16", epilogue="bias", bias_element=bias_element, out_element="f32"
    )
    run_and_check(desc, device, preference)


@kernels
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("n", [1, 3, 17, 1000])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (7, 8), (129, 264), (65, 40)])
def test_ragged_sizes(device, preference, op, n, m, k):
    if device == "host" and n == 1000 and m * k > 10000:
        m = 13  # the emulated fma takes its time
    run_and_check(GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", op=op), device, preference)


@kernels
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_row_strides(device, preference, op, element):
    desc = GemmSparse24Descriptor(n=19, m=48, k=64, element=element, op=op)
    run_and_check(desc, device, preference, pad=24)


@kernels
@pytest.mark.parametrize("element", ["f32", "bf16"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_empty_reduction_is_the_epilogue_of_zero(device, preference, element, epilogue):
    run_and_check(
        GemmSparse24Descriptor(n=3, m=10, k=0, element=element, epilogue=epilogue), device, preference
    )


@kernels
def test_empty_reduction_of_dgrad(device, preference):
    run_and_check(GemmSparse24Descriptor(n=3, m=0, k=16, element="f32", op="dgrad"), device, preference)


@kernels
@pytest.mark.parametrize(("n", "m"), [(0, 16), (4, 0), (0, 0)])
def test_empty_result(device, preference, n, m):
    run_and_check(
        GemmSparse24Descriptor(n=n, m=m, k=16, element="f16", epilogue="bias_gelu"), device, preference
    )


@kernels
def test_bind_launches_what_run_runs(device, preference):
    desc = GemmSparse24Descriptor(n=6, m=32, k=64, element="bf16", epilogue="bias_silu")
    case = make_case(desc, device, preference)
    once = case.run()
    bound = case.plan.bind(case.args, workspace=case.workspace and case.workspace.view)
    for _ in range(3):
        case.result.fill(np.full(once.shape, np.nan, once.dtype))
        bound.launch()
        assert same_bits(case.fetch(), once)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 150), st.integers(1, 40).map(lambda units: 8 * units))


@kernels
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=sizes,
    element=st.sampled_from(ELEMENTS),
    op=st.sampled_from(["forward", "dgrad"]),
    alpha=st.floats(-4, 4, width=32),
    pad=st.sampled_from([0, 8, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_problem(device, preference, shape, element, op, alpha, pad, seed):
    n, m, k = shape
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, op=op, alpha=alpha)
    run_and_check(desc, device, preference, seed=seed, pad=pad)


@gpu
@pytest.mark.parametrize("preference", [p.values[1] for p in ROWS[2:]], ids=[p.id for p in ROWS[2:]])
@pytest.mark.parametrize(("n", "m", "k"), [(200, 4096, 4096), (1000, 1536, 384), (16, 4096, 14336)])
@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_model_sized(preference, n, m, k, op):
    run_and_check(GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", op=op), 0, preference)


@gpu
@pytest.mark.parametrize("n", [1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200])
@pytest.mark.parametrize(("m", "k"), [(4096, 1024), (8448, 640), (20000, 136), (200, 16)])
def test_every_cut_of_mma_sp(n, m, k):
    """Every tile shape, full and ragged in n, m and k, in one wave and in several."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f16", epilogue="bias_silu", out_element="f32")
    run_and_check(desc, 0, PlanPreference(prefer_backend="mma_sp"), pad=8)


WGMMA_CUTS = [
    (n, cut)
    for n in (1, 13, 60, 200, 1030)
    for cut in (*schedules.schedules_for(n), *schedules.schedules_in_parts(n, 8))
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
    monkeypatch.setattr(wgmma_sp, "best_schedule", lambda desc, row: cut)
    alpha = 1 + WGMMA_CUTS.index((n, cut)) / 64  # of its own: plans are cached
    out = "f32" if out_f32 else element
    desc = GemmSparse24Descriptor(
        n=n, m=m, k=1048, element=element, epilogue="bias_silu", out_element=out, alpha=alpha
    )
    run_and_check(desc, 0, PlanPreference(prefer_backend="wgmma_sp"), pad=8)


@gpu
@pytest.mark.parametrize("n", [1, 7, 16, 33])
def test_launches_of_wgmma_sp_that_overlap(monkeypatch, n):
    """More blocks than fit at once, of kernels that start before the one in front of them has ended."""
    for index, cut in enumerate(schedules.schedules_for(n)):
        monkeypatch.setattr(wgmma_sp, "best_schedule", lambda desc, row, cut=cut: cut)
        alpha = 1 + index / 64  # of its own: plans are cached
        desc = GemmSparse24Descriptor(n=n, m=28672, k=1024, element="bf16", alpha=alpha)
        case = make_case(desc, 0, PlanPreference(prefer_backend="wgmma_sp"))
        first = case.run()
        case.check(first)
        bound = case.plan.bind(case.args)
        for _ in range(200):
            bound.launch()
        assert same_bits(case.fetch(), first)
