"""float32 in bf16 terms: what the terms are, what their products lose, and what becomes of Inf and NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan, Sparse24Weight
from sparse24_plans.gemm.arithmetic.bf16_terms import MAX_TERMS, term_pairs, terms_of
from sparse24_plans.plan.arithmetic import Arithmetic
from sparse24_plans.plan.guarantee import MIN_IN_PARTS

from ..support import Data, case_of, make_case
from .f32_split_cases import NAMES
from .kernel_entries import row_of

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


# Parts ----------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(floats)
def test_split_terms_of_a_number(x):
    if abs(x) > float(ml_dtypes.finfo(ml_dtypes.bfloat16).max):
        return  # it rounds to an infinity: below
    high, middle, low = (part.astype(np.float64) for part in terms_of(np.array([x], np.float32)))
    for part in (high, middle, low):
        assert float(part[0].astype(ml_dtypes.bfloat16)) == part[0]
    whole = high + middle + low
    assert whole == x if abs(x) >= 2.0**-110 or x == 0 else abs(whole - x) <= 2.0**-134
    least = max(abs(x), MIN_IN_PARTS)
    assert abs(middle) <= 2.0**-8 * least
    assert abs(low) <= 2.0**-17 * least


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan, 3.4e38, -3.4028235e38])
def test_what_has_no_finite_parts_shows_in_every_product(x):
    """A product of such terms is NaN, whatever the other factor is."""
    with np.errstate(all="ignore"):
        for count in (2, 3):
            mine = terms_of(np.array([x], np.float32))[:count]
            for other in (0.0, 1.0, -2.5, 1e-45, np.inf, 3.4e38):
                theirs = terms_of(np.array([other], np.float32))[:count]
                total = sum(mine[i].astype(np.float64) * theirs[j] for i, j in term_pairs(count))
                assert np.isnan(total).all()


@pytest.mark.parametrize(("parts", "products"), [(2, 3), (3, 6)])
def test_small_products_are_added_first(parts, products):
    order = term_pairs(parts)
    assert len(set(order)) == products
    assert all(i + j < parts for i, j in order)
    assert order[-1] == (0, 0)
    assert [i for i, _ in order] == sorted((i for i, _ in order), reverse=True)


# Errors ---------------------------------------------------------------------------------------------


def sums_of(parts: int, slices: int, x: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """Return the sums that the arithmetic gives on the host."""
    desc = GemmSparse24Descriptor(n=x.shape[0], m=dense.shape[0], k=x.shape[1], element="f32")
    require = {"arithmetic": str(Arithmetic.split(parts, slices))}
    plan = GemmSparse24Plan.select(desc, preference={"require": require}, device="host")
    assert plan.guarantee.arithmetic == f"{NAMES[parts]}/slices={slices}"
    return case_of(plan, Data(dense, x)).run()


def largest_error(got: np.ndarray, x: np.ndarray, dense: np.ndarray) -> float:
    exact = x.astype(np.float64) @ dense.astype(np.float64).T
    return float(np.abs(got - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("kind", ["normal", "positive", "mixed magnitudes"])
@pytest.mark.parametrize("k", [512, 4096])
def test_six_products_err_less_than_float32_in_order(kind, k):
    rng = np.random.default_rng(k)
    x, dense = rng.standard_normal((4, k)), rng.standard_normal((12, k))
    if kind == "positive":
        x, dense = np.abs(x), np.abs(dense)
    if kind == "mixed magnitudes":
        x, dense = (values * 2.0 ** rng.integers(-20, 20, values.shape) for values in (x, dense))
    desc = GemmSparse24Descriptor(n=4, m=12, k=k, element="f32")
    strict = make_case(
        desc, preference={"require": {"arithmetic": "fma32_in_order"}},
        dense=dense.astype(np.float32), x=x.astype(np.float32),
    )  # fmt: skip
    kept = strict.dense.astype(np.float32)
    in_order = largest_error(strict.run(), strict.x, kept)
    assert largest_error(sums_of(3, 1, strict.x, kept), strict.x, kept) <= max(in_order, 2.0**-23)
    assert largest_error(sums_of(2, 1, strict.x, kept), strict.x, kept) <= 2.0**-15


def test_inf_and_nan_are_where_float32_has_them():
    """Not where parts of them meet zeros, or others of another sign."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((6, 72)).astype(np.float32)
    dense = Sparse24Weight.prune_compress(rng.standard_normal((9, 72)).astype(np.float32)).decompress()
    x[1, 3], x[2, 40], x[3, 7], x[4, 8], x[4, 9] = np.inf, np.nan, 3.4e38, -np.inf, np.inf
    for row, value in ((2, np.inf), (4, -np.inf), (5, np.nan), (6, -3.4e38)):
        dense[row, np.flatnonzero(dense[row])[row]] = value
    dense[7, np.flatnonzero(dense[7])[:3]] = 1e-40, -1e-45, 2.0**-130
    kept = dense != 0
    with np.errstate(all="ignore"):
        products = x[:, None, :].astype(np.float64) * dense[None].astype(np.float64)
        exact = np.where(kept[None], products, 0).sum(axis=2).astype(np.float32)
        for parts in (2, 3):
            for slices in (1, 3):
                got = sums_of(parts, slices, x, dense)
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(exact))
                special = ~np.isfinite(exact)
                np.testing.assert_array_equal(got[special], exact[special])
                np.testing.assert_allclose(got[~special], exact[~special], rtol=0.02, atol=1e-4)


def test_the_bounds_are_below_those_of_float32_in_order():
    desc = GemmSparse24Descriptor(n=1, m=64, k=8192, element="f32")
    six, three, strict, cublas = (
        row_of(name).guarantee(desc)
        for name in ("f32_split6", "f32_split3", "inflate_strict", "inflate_cublas")
    )
    for k in (2048, 4096, 28672):
        assert six.error_bound(k) < three.error_bound(k) < strict.error_bound(k) < cublas.error_bound(k)
    assert three.error_bound(8) > 2.0**-15  # products of low parts are missing, however few are added
    assert MAX_TERMS == 3
