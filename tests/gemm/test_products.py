"""Every kernel computes Y = epilogue(alpha * X @ W^T) and dX = alpha * dY @ W inside its own error bound.

Outputs start as NaN, guard bytes surround every buffer, the reference is float64. The row under test is the
row that runs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import GemmSparse24Descriptor, UnsupportedError

from ..support import ELEMENTS, EPILOGUES, device_of_row, plan_of_row, same_bits
from .kernel_entries import OWN, case_of, gpu, marked, on_host, row_of, serves, tokens

ROWS = [name for name in OWN if "bf16" in row_of(name).elements]
"""Kernels for elements of 16 and 32 bits; test_wgmma_8bit.py has those for 8 bits."""
kernels = pytest.mark.parametrize("row", [marked(name) for name in ROWS])


def refusal_of(row: str, desc: GemmSparse24Descriptor) -> str | None:
    """Return the expected refusal of the kernel, by the documents and not by its own table."""
    tensor_cores = row_of(row).tier == "sparse_tensor_core"
    if tensor_cores and desc.element == "f32":
        return "serves elements f16, bf16, not f32"
    if tensor_cores and desc.op == "dgrad":
        return "does not serve op dgrad"
    if row.startswith("wgmma") and desc.k == 0:
        return "serves no empty sums"
    return None


def run_and_check(desc: GemmSparse24Descriptor, row: str, **options) -> None:
    """The result is right; or the row doesn't serve the element, the op or empty sums, and says so."""
    desc = desc.model_copy(update={"n": tokens(row, desc.n)})
    words = refusal_of(row, desc)
    if words is not None:
        with pytest.raises(UnsupportedError, match=rf"{row}: {words}"):
            plan_of_row(row).select(desc, device=device_of_row(row))
        return
    assert serves(row, desc)
    case = case_of(row, **desc.model_dump(), **options)
    got = case.run()
    case.check(got)
    if desc.reduction == 0 and desc.epilogue == "identity":
        assert same_bits(got, np.zeros(got.shape, got.dtype))


@kernels
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out_f32", [False, True])
def test_forward(row, element, epilogue, out_f32):
    out = "f32" if out_f32 else element
    desc = GemmSparse24Descriptor(
        n=17, m=72, k=136, element=element, epilogue=epilogue, alpha=0.75, out_element=out
    )
    run_and_check(desc, row)


@kernels
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("alpha", [1.0, -2.5])
def test_dgrad(row, element, alpha):
    desc = GemmSparse24Descriptor(n=17, m=72, k=136, element=element, op="dgrad", alpha=alpha)
    run_and_check(desc, row)


@kernels
@pytest.mark.parametrize("bias_element", ["f16", "f32"])
def test_bias_of_either_type(row, bias_element):
    desc = GemmSparse24Descriptor(
        n=5, m=40, k=64, element="f16", epilogue="bias", bias_element=bias_element, out_element="f32"
    )
    run_and_check(desc, row)


@kernels
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("n", [1, 3, 17, 1000])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (7, 8), (129, 264), (65, 40)])
def test_ragged_sizes(row, op, n, m, k):
    if on_host(row) and n == 1000 and m * k > 10000:
        m = 13  # the emulated fma takes its time
    run_and_check(GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", op=op), row)


@kernels
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_row_strides(row, op, element):
    desc = GemmSparse24Descriptor(n=19, m=48, k=64, element=element, op=op)
    run_and_check(desc, row, pad=24)


@kernels
@pytest.mark.parametrize("element", ["f32", "bf16"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_empty_reduction_is_the_epilogue_of_zero(row, element, epilogue):
    run_and_check(GemmSparse24Descriptor(n=3, m=10, k=0, element=element, epilogue=epilogue), row)


@kernels
def test_empty_reduction_of_dgrad(row):
    run_and_check(GemmSparse24Descriptor(n=3, m=0, k=16, element="f32", op="dgrad"), row)


@kernels
@pytest.mark.parametrize(("n", "m"), [(0, 16), (4, 0), (0, 0)])
def test_empty_result(row, n, m):
    run_and_check(GemmSparse24Descriptor(n=n, m=m, k=16, element="f16", epilogue="bias_gelu"), row)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 150), st.integers(1, 40).map(lambda units: 8 * units))


@kernels
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=sizes,
    element=st.sampled_from(ELEMENTS),
    op=st.sampled_from(["forward", "dgrad"]),
    alpha=st.floats(-4, 4, width=32).map(lambda alpha: round(alpha, 6)),  # cuBLAS gets 0 or 2^-20 at least
    pad=st.sampled_from([0, 8, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_problem(row, shape, element, op, alpha, pad, seed):
    n, m, k = shape
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, op=op, alpha=alpha)
    run_and_check(desc, row, seed=seed, pad=pad)


@pytest.mark.parametrize("row", [marked(name) for name in ROWS if not on_host(name)])
@pytest.mark.parametrize(("n", "m", "k"), [(200, 4096, 4096), (1000, 1536, 384), (16, 4096, 14336)])
@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_model_sized(row, n, m, k, op):
    run_and_check(GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", op=op), row)


@gpu
@pytest.mark.parametrize("row", ["mma_sp", "mma_sp_many"])
@pytest.mark.parametrize("n", [1, 8, 9, 16])
def test_few_tokens(row, n):
    """At which every row of mma_sp serves."""
    desc = GemmSparse24Descriptor(n=n, m=20000, k=1032, element="f16", epilogue="bias_gelu", alpha=0.5)
    run_and_check(desc, row, pad=8)
