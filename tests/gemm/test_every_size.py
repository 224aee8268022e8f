"""Sizes that no tile divides: what select accepts run takes, and nothing but Y is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Weight,
    UnsupportedError,
    explain,
)
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.plan.kernel_table import choose, consider

from ..sample_devices import H200
from ..support import Guarded, make_case

WGMMA = PlanPreference(prefer_backend="wgmma_sp")


def refusals(desc: GemmSparse24Descriptor) -> dict[str, str | None]:
    return {name: reason for name, _, reason in explain(desc, device=H200).rows}


# Rows of X that the copy engine can't read ----------------------------------------------------------


@given(k=st.integers(1, 4096).map(lambda groups: 8 * groups), n=st.integers(1, 300))
def test_select_refuses_misaligned_8_bit_rows(k, n):
    for element, row in (("s8", "wgmma_sp_s8"), ("fp8_e4m3", "wgmma_sp_fp8")):
        desc = GemmSparse24Descriptor(n=n, m=256, k=k, element=element)
        reason = refusals(desc)[row]
        assert (reason is None) == (k % 16 == 0)
        assert reason is None or f"got k = {k}" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["s8", "fp8_e4m3", "bf16"])
@pytest.mark.parametrize("k", [16, 48, 1008, 4112])
def test_one_token_of_any_k(element, k):
    case = make_case(GemmSparse24Descriptor(n=1, m=300, k=k, element=element), 0, WGMMA)
    case.check(case.run())


# Rows of Y that end within 16 bytes -----------------------------------------------------------------


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    n=st.integers(1, 600),
    m=st.integers(1, 700),
    groups=st.integers(1, 80),
    types=st.sampled_from(
        [("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16")]
        + [("s8", out) for out in ("i32", "s8", "f32")]
        + [("fp8_e4m3", "bf16"), ("fp8_e4m3", "f32")]
    ),
    epilogue=st.sampled_from(["identity", "bias_relu"]),
    invariant=st.booleans(),
)
def test_the_padding_between_rows_of_y_is_not_written(n, m, groups, types, epilogue, invariant):
    """Rows of the result lie multiples of 16 bytes apart, as in slices of a wider matrix."""
    element, out = types
    desc = GemmSparse24Descriptor(
        n=n, m=m, k=16 * groups, element=element, out_element=out, bias_element="f32", epilogue=epilogue
    )
    wanted = PlanPreference(prefer_backend="wgmma_sp", require={"batch_invariant": invariant})
    case = make_case(desc, 0, wanted)
    unit = 16 // desc.out_element.itemsize
    case.result = Guarded((n, m), desc.out_element, 0, -(-(m + 1) // unit) * unit)
    case.args = replace(case.args, y=case.result.view)
    case.check(case.run())


# Sums of s8 that int32 can't hold -------------------------------------------------------------------


@pytest.mark.parametrize("k", [2**18 - 8, 2**18, 2**20])
def test_sums_of_s8_are_exact_or_refused(k):
    rows = refusals(GemmSparse24Descriptor(n=32, m=32, k=k, element="s8"))
    for row in ("wgmma_sp_s8", "cusparselt"):
        assert ("int32" in (rows[row] or "")) == (k >= 2**18)
    considered = consider(ENTRIES, GemmSparse24Descriptor(n=32, m=32, k=k, element="s8"), WGMMA, H200)
    if k >= 2**18:
        with pytest.raises(UnsupportedError, match="sums of s8 may exceed int32"):
            choose(considered)


@pytest.mark.parametrize("out", ["i32", "f32", "s8"])
def test_the_host_saturates_the_exact_sum(out):
    k = 2**18
    dense = np.tile(np.array([-128, -128, 0, 0], np.int8), k // 4)[None].repeat(8, axis=0)
    x = np.full((2, k), -128, np.int8)
    desc = GemmSparse24Descriptor(n=2, m=8, k=k, element="s8", out_element=out)
    plan = GemmSparse24Plan.select(desc, device="host")
    y = np.zeros((2, 8), desc.out_element.dtype)
    plan.run(GemmSparse24Args(plan.pack(Sparse24Weight.compress(dense)), x, y))
    exact = 2**31
    top = np.iinfo(desc.out_element.dtype).max if desc.out_element is not ElementKind.F32 else exact
    assert (y == min(exact, top)).all()
