"""Promises about subnormal numbers, and about Inf and NaN at the positions that were pruned."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import ElementKind

from .kernel_entries import ELEMENTS, FLOATS, case_of, promising

SCALES = {
    "f16": (1e-4, 1e-33),
    "fp8_e4m3": (2.0**-6, 2.0**-120),
    "fp8_e5m2": (2.0**-14, 2.0**-104),
    ("inflate_cublas", "f16"): (1e-5, 2.0**-20),  # the least alpha that it serves
}
"""Scales of the operands, and alpha."""


@promising("subnormals", "preserved", elements=FLOATS)
def test_subnormals_are_preserved(row, element, op, epilogue):
    """Results, products and sums are subnormal float32; with narrow elements the operands are subnormal."""
    dtype = ElementKind(element).dtype
    rng = np.random.default_rng(1)
    scale, alpha = SCALES.get((row, element)) or SCALES.get(element, (1e-21, 1.0))
    x, dense = ((rng.uniform(0.5, 1.0, (rows, 16)) * scale).astype(dtype) for rows in (4, 16))
    problem = {"n": 4, "m": 16, "k": 16, "element": element, "op": op, "out_element": "f32"}
    case = case_of(row, **problem, alpha=alpha, x=x, dense=dense)
    got = case.run()
    case.check(got)
    if (row, element) not in SCALES:
        assert (np.abs(got) < np.finfo(np.float32).tiny).all()
    assert (got != 0).all()


def nonfinite(row: str, element: str, op: str, value: float):
    """Columns 2 and 3 of every group of W are pruned. ``value`` stands where it meets nothing else."""
    rng = np.random.default_rng(2)
    dtype = ElementKind(element).dtype
    dense = rng.uniform(1.0, 2.0, (24, 64)).astype(dtype)
    dense[:, 2::4] = dense[:, 3::4] = 0
    x = rng.standard_normal((5, 64 if op == "forward" else 24)).astype(dtype)
    if op == "forward":
        x[:, 2::4] = value
    else:
        x[:, 7] = value  # meets row 7 of W: a pruned cell in half of the columns
    case = case_of(row, n=5, m=24, k=64, element=element, op=op, x=x, dense=dense)
    assert not np.isfinite(case.x.astype(np.float64)).all()
    return case


VALUES = pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])


def skip_infinities_of_fp8(element: str, value: float) -> None:
    if element == "fp8_e4m3" and np.isinf(value):
        pytest.skip("e4m3 has no infinity")


@promising("nonfinite", "skips_pruned", elements=FLOATS)
@VALUES
def test_nonfinite_at_pruned_positions_is_skipped(row, element, op, epilogue, value):
    skip_infinities_of_fp8(element, value)
    case = nonfinite(row, element, op, value)
    got = case.run()
    if op == "forward":
        case.x[:, 2::4] = 0
        case.check(got)
        return
    kept = np.zeros(64, bool)
    kept[0::4] = kept[1::4] = True
    assert not np.isfinite(got[:, kept].astype(np.float64)).any()
    assert (got[:, ~kept].astype(np.float64) == 0).all()


@promising("nonfinite", "propagates", elements=FLOATS)
@VALUES
def test_nonfinite_at_pruned_positions_propagates(row, element, op, epilogue, value):
    skip_infinities_of_fp8(element, value)
    got = nonfinite(row, element, op, value).run().astype(np.float64)
    pruned = np.isnan(got) if op == "forward" else np.isnan(got[:, 2::4])
    assert pruned.all()


@promising("nonfinite", "skips_pruned", elements=ELEMENTS)
def test_the_largest_numbers_at_pruned_positions_are_skipped(row, element, op, epilogue):
    """Times zero they'd be nothing; times what stands beside them, anything."""
    if op == "dgrad":
        pytest.skip("of X [N, K] alone")
    kind = ElementKind(element)
    rng = np.random.default_rng(3)
    dense = np.zeros((24, 64), kind.dtype)
    dense[:, 0::4] = dense[:, 1::4] = rng.integers(1, 4, (24, 16)).astype(kind.dtype)
    x = rng.integers(-4, 5, (5, 64)).astype(kind.dtype)
    x[:, 2::4] = min(kind.largest, 2.0**120)
    case = case_of(row, n=5, m=24, k=64, element=element, x=x, dense=dense)
    want = case.x.astype(np.float64) @ case.dense.T
    got = case.run()
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(got.dtype).astype(np.float64))
