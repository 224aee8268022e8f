"""relu with bounds: min(t, upper bound) where t exceeds the threshold, else 0. NaN stays NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import GemmSparse24Descriptor, InvalidProblemError, explain
from sparse24_plans.arithmetic.epilogue import apply_epilogue
from sparse24_plans.vocab import EpilogueKind

from ..sample_devices import HOPPER
from ..support import case_of, device_of_row, plan_of_row, random_data, same_bits
from .kernel_entries import OWN, marked, on_host, row_of, tokens

FIELDS = {"n": 2, "m": 16, "k": 8, "element": "bf16", "epilogue": "bias_relu"}
floats = st.floats(width=32)


@given(
    v=st.lists(floats, min_size=1, max_size=40),
    threshold=st.floats(-100, 100, width=32),
    above=st.floats(0.5, 1e6, width=32) | st.just(np.inf),
)
def test_it_is_the_definition(v, threshold, above):
    values, most = np.array(v, np.float32), float(np.float32(threshold + above))
    bounds = (threshold + 0.0, most)
    found = apply_epilogue(values, 1.0, None, EpilogueKind.RELU, None, bounds)
    for one, got in zip(v, found.tolist(), strict=True):
        want = one if one != one else min(one, most) if one > threshold else 0.0
        assert got == want or (got != got and want != want)


def test_the_ordinary_relu_has_no_bounds():
    plain = GemmSparse24Descriptor(**FIELDS)
    assert plain.relu_bounds == (0.0, np.inf)
    assert GemmSparse24Descriptor(**FIELDS, relu_threshold=-0.0, relu_upper_bound=None) == plain
    bounded = GemmSparse24Descriptor(**FIELDS, relu_upper_bound=6)
    assert GemmSparse24Descriptor.model_validate_json(bounded.model_dump_json()) == bounded
    assert GemmSparse24Descriptor.model_validate_json(plain.model_dump_json()) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"epilogue": "gelu", "relu_upper_bound": 6.0},
            "relu_upper_bound: expected none for epilogue gelu, got 6",
        ),
        (
            {"epilogue": "relu2", "relu_threshold": 1.0},
            "relu_threshold: expected none for epilogue relu2, got 1",
        ),
        (
            {"relu_threshold": 6.0, "relu_upper_bound": 6.0},
            "relu_upper_bound: expected more than relu_threshold",
        ),
        ({"relu_upper_bound": np.inf}, "relu_upper_bound"),
        ({"relu_upper_bound": np.nan}, "relu_upper_bound"),
        ({"relu_threshold": np.inf}, "relu_threshold"),
    ],
)
def test_bounds_without_a_meaning_are_refused(change, message):
    with pytest.raises(InvalidProblemError, match=message):
        GemmSparse24Descriptor(**{**FIELDS, **change})


def test_the_library_is_refused_by_name():
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", epilogue="relu", relu_upper_bound=6.0)
    reasons = {row: reason for row, _, reason in explain(desc, device=HOPPER).rows}
    assert reasons["cusparselt"] == "serves relu without bounds, not (0.0, 6.0)"


@pytest.mark.parametrize("row", [marked(name) for name in OWN])
@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-1.5, 4.0), (2.0, None)])
def test_kernels_serve_bounds(row, bounds):
    """Sums are zeros in the first token, so that the bias alone is between the bounds, at them, and NaN."""
    sizes = {"n": 5, "m": 48, "k": 64} if on_host(row) else {"n": tokens(row, 77), "m": 1040, "k": 528}
    fields = {"element": row_of(row).elements[0], "out_element": "f32", "bias_element": "f32"}
    limits = dict(zip(("relu_threshold", "relu_upper_bound"), bounds, strict=True))
    desc = GemmSparse24Descriptor(**sizes, **fields, epilogue="bias_relu", **limits)
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    data = random_data(np.random.default_rng(3), desc)
    case = case_of(plan, data)
    case.check(case.run())
    bias = data.bias.copy()
    most = np.float32(np.inf if bounds[1] is None else bounds[1])
    bias[:8] = [np.nan, np.inf, -np.inf, bounds[0], min(most, 3e38), 0.0, -1e30, 1e30]
    found = case_of(plan, replace(data, x=np.zeros_like(data.x), bias=bias)).run()
    want = np.where(bias > np.float32(bounds[0]), np.minimum(bias, most), np.float32(0))
    want[0] = np.uint32(0x7FFFFFFF).view(np.float32)
    assert all(same_bits(one, want) for one in found)
