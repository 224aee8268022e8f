"""Every kernel computes Y = epilogue(alpha * X @ W^T) and dX = alpha * dY @ W inside its own error bound.

Outputs start as NaN, guard bytes surround every buffer, the reference is float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import GemmSparse24Descriptor, PlanPreference

from .support import ELEMENTS, EPILOGUES, HAS_GPU, make_case, same_bits

gpu = pytest.mark.gpu
STRICT = PlanPreference(require={"batch_invariant": True})
KERNELS = [
    pytest.param("host", PlanPreference(), id="host_blas"),
    pytest.param("host", STRICT, id="host_strict"),
    pytest.param(0, PlanPreference(prefer_backend="inflate_cublas"), id="inflate_cublas", marks=gpu),
    pytest.param(0, PlanPreference(prefer_backend="inflate_strict"), id="inflate_strict", marks=gpu),
]
kernels = pytest.mark.parametrize(("device", "preference"), KERNELS)


@kernels
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out_f32", [False, True])
def test_forward(device, preference, element, epilogue, out_f32):
    out = "f32" if out_f32 else element
    desc = GemmSparse24Descriptor(
        n=17, m=72, k=136, element=element, epilogue=epilogue, alpha=0.75, out_element=out
    )
    case = make_case(desc, device, preference)
    case.check(case.run())


@kernels
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("alpha", [1.0, -2.5])
def test_dgrad(device, preference, element, alpha):
    desc = GemmSparse24Descriptor(n=17, m=72, k=136, element=element, op="dgrad", alpha=alpha)
    case = make_case(desc, device, preference)
    case.check(case.run())


@kernels
@pytest.mark.parametrize("bias_element", ["f16", "f32"])
def test_bias_of_either_type(device, preference, bias_element):
    desc = GemmSparse24Descriptor(
        n=5, m=40, k=64, element="f16", epilogue="bias", bias_element=bias_element, out_element="f32"
    )
    case = make_case(desc, device, preference)
    case.check(case.run())


@kernels
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("n", [1, 3, 17, 1000])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (7, 8), (129, 264), (65, 40)])
def test_ragged_sizes(device, preference, op, n, m, k):
    if device == "host" and n == 1000 and m * k > 10000:
        m = 13  # the emulated fma takes its time
    case = make_case(GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", op=op), device, preference)
    case.check(case.run())


@kernels
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_row_strides(device, preference, op, element):
    desc = GemmSparse24Descriptor(n=19, m=48, k=64, element=element, op=op)
    case = make_case(desc, device, preference, pad=24)
    case.check(case.run())


@kernels
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_empty_reduction_is_the_epilogue_of_zero(device, preference, epilogue):
    case = make_case(
        GemmSparse24Descriptor(n=3, m=10, k=0, element="f32", epilogue=epilogue), device, preference
    )
    got = case.run()
    case.check(got)
    if epilogue == "identity":
        assert same_bits(got, np.zeros((3, 10), np.float32))


@kernels
def test_empty_reduction_of_dgrad(device, preference):
    case = make_case(GemmSparse24Descriptor(n=3, m=0, k=16, element="f32", op="dgrad"), device, preference)
    assert same_bits(case.run(), np.zeros((3, 16), np.float32))


@kernels
@pytest.mark.parametrize(("n", "m"), [(0, 16), (4, 0), (0, 0)])
def test_empty_result(device, preference, n, m):
    case = make_case(
        GemmSparse24Descriptor(n=n, m=m, k=16, element="f16", epilogue="bias_gelu"), device, preference
    )
    assert case.run().size == 0


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
    case = make_case(desc, device, preference, seed=seed, pad=pad)
    case.check(case.run())


@gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device that CuPy can use")
@pytest.mark.parametrize("preference", [p.values[1] for p in KERNELS[2:]], ids=["cublas", "strict"])
@pytest.mark.parametrize(("n", "m", "k"), [(200, 4096, 4096), (1000, 1536, 384), (16, 4096, 14336)])
@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_model_sized(preference, n, m, k, op):
    case = make_case(GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", op=op), 0, preference)
    case.check(case.run())
