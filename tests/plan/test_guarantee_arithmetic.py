"""The arithmetic of guarantees: gamma_n, promoted sums, tolerances, and requirements as filters on them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    InvalidProblemError,
    PrecisionGuarantee,
)

U32 = Fraction(1, 2**24)


def promise(**change: object) -> PrecisionGuarantee:
    fields = {
        "math_precision": "f32",
        "accumulator": "f32",
        "deterministic": True,
        "bit_stable_on_same_hardware": True,
        "batch_invariant": True,
        "bit_stable_across_hardware": True,
        "subnormals": "preserved",
        "nonfinite": "skips_pruned",
        "unit_roundoff": 2.0**-24,
        "terms_per_k": 0.5,
    }
    return PrecisionGuarantee(**{**fields, **change})


def gamma(n: Fraction, u: Fraction) -> Fraction | None:
    """Higham's gamma_n, exactly; None where it is infinite."""
    return n * u / (1 - n * u) if n * u < 1 else None


# Bounds -------------------------------------------------------------------------------------------


@given(k=st.integers(0, 2**30), exponent=st.integers(8, 24), halved=st.booleans())
def test_the_bound_is_gamma_of_the_steps(k, exponent, halved):
    guarantee = promise(unit_roundoff=2.0**-exponent, terms_per_k=0.5 if halved else 1.0)
    exact = gamma(Fraction(k, 2 if halved else 1), Fraction(1, 2**exponent))
    bound = guarantee.error_bound(k)
    if exact is None:
        assert bound == float("inf")
    else:
        assert bound == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(
    ("k", "steps"), [(0, 0), (64, 32), (128, 64), (129, 64), (256, 64), (4096, 64), (2**20, 64)]
)
def test_sums_that_are_promoted_grow_by_one_step_a_stretch(k, steps):
    """The first is bounded by its own columns; one rounding in float32 for each sum that is added."""
    guarantee = promise(unit_roundoff=2.0**-13, promoted_every=128)
    relative = Fraction(steps, 2**13) + -(-k // 128) * U32
    assert guarantee.error_bound(k) == pytest.approx(float(relative / (1 - relative)), rel=1e-9)


def test_integers_are_summed_exactly():
    guarantee = promise(unit_roundoff=0.0)
    assert [guarantee.error_bound(k) for k in (0, 8, 2**30)] == [0, 0, 0]


@pytest.mark.parametrize(("field", "value"), [("unit_roundoff", -1.0), ("terms_per_k", 0.0)])
def test_bounds_that_are_none(field, value):
    with pytest.raises(InvalidProblemError, match=field):
        promise(**{field: value})


# Magnitudes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["f16", "bf16", "fp8_e4m3"])
def test_subnormal_operand_counts_as_smallest_normal_one_on_tensor_cores(element):
    kind = ElementKind(element)
    least = kind.smallest_normal
    values = np.array([0.0, kind.smallest_subnormal, -least / 2, least, -3.0, np.inf])
    on_cores = promise(math_precision=element).magnitudes(values, kind)
    assert on_cores.tolist() == [0.0, least, least, least, 3.0, np.inf]
    assert promise().magnitudes(values, kind).tolist() == np.abs(values).tolist()


def test_without_that_the_bound_of_fp8_would_be_false():
    """A step of Hopper's, as arXiv 2511.10909 has it: products cut to 13 bits below the largest exponent."""
    x, w = np.full(32, 2.0**-6), np.full(32, 2.0**-6 * 1.875)
    x[0], w[0] = 448.0, 2.0**-9  # a subnormal: its exponent counts as -6
    unit = 2.0 ** (8 - 6 - 13)
    got, exact = (np.trunc(x * w / unit) * unit).sum(), (x * w).sum()
    cores = promise(math_precision="fp8_e4m3", unit_roundoff=2.0**-13, terms_per_k=0.5)
    plain, raised = (
        cores.tolerance(64, exact, sizes[0] @ sizes[1], ElementKind.F32)
        for sizes in ((x, w), [cores.magnitudes(one, ElementKind.FP8_E4M3) for one in (x, w)])
    )
    assert plain < abs(got - exact) <= raised


# Tolerances ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["f32", "f16", "bf16"])
def test_tolerance_covers_rounding_of_result_and_little_more(out):
    """Without accumulation the exact value may be rounded to the type, and nothing is two places off."""
    kind = ElementKind(out)
    exact = np.array([0.0, 1.0, -3.14159, 65000.0, 1 + 2.0**-12])
    allowed = promise().tolerance(0, exact, np.zeros(5), kind)
    rounded = exact.astype(np.float32).astype(kind.dtype).astype(np.float64)
    assert (np.abs(rounded - exact) <= allowed).all()
    assert (allowed <= 4 * np.maximum(np.abs(exact) * kind.unit_roundoff, kind.smallest_subnormal)).all()


@pytest.mark.parametrize(("out", "half"), [("s8", 0.5), ("i32", 0.5)])
def test_a_tolerance_of_integers_is_half_a_unit(out, half):
    exact = np.array([0.25, 7.5, -100.5])
    allowed = promise(unit_roundoff=0.0).tolerance(64, exact, np.abs(exact), ElementKind(out))
    assert ((allowed >= half) & (allowed < half + 1e-4)).all()


@given(
    terms=st.lists(
        st.tuples(st.floats(-8, 8, width=16), st.floats(-8, 8, width=16)), min_size=1, max_size=40
    ),
    alpha=st.sampled_from([1.0, -2.5, 0.75, 2.0**-30, 1 / 3, 1e-40, -1.5e-45]),
)
def test_a_tolerance_covers_a_sum_in_float32_whatever_the_terms(terms, alpha):
    """Step by step, in the order given: a model that knows nothing of the package."""
    acc, exact, size = np.float32(0), Fraction(0), Fraction(0)
    for x, w in terms:
        exact += Fraction(x) * Fraction(w)
        size += abs(Fraction(x) * Fraction(w))
        acc = np.float32(acc + np.float32(np.float64(x) * w))  # two roundings a step: more than an fma
    got = float(np.float32(alpha) * acc)
    want = float(Fraction(alpha) * exact)
    steps = promise(terms_per_k=2.0)
    allowed = steps.tolerance(len(terms), np.array([want]), np.array([float(size)]), ElementKind.F32, alpha)
    assert abs(got - want) <= allowed[0]


# Requirements -------------------------------------------------------------------------------------


@given(bound=st.floats(1e-9, 1.0), k=st.integers(0, 2**20))
def test_bounds_up_to_the_requirement_satisfy_it(bound, k):
    exact = gamma(Fraction(k, 2), U32)
    assume(exact is None or abs(float(exact) / bound - 1) > 1e-9)
    unmet = GuaranteeRequirement(max_error_bound=bound).unmet(promise(), k)
    assert (unmet is None) == (exact is not None and exact < Fraction(bound))
    assert unmet is None or f"error_bound({k})" in unmet


FLAGS = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_required_must_be_promised(flag):
    required = GuaranteeRequirement(**{flag: True})
    assert required.unmet(promise(), 8) is None
    assert required.unmet(promise(**{flag: False}), 8) == f"does not guarantee {flag}"
    assert GuaranteeRequirement().unmet(promise(**dict.fromkeys(FLAGS, False)), 8) is None


@pytest.mark.parametrize(
    ("field", "given", "other"),
    [
        ("subnormals", "preserved", "flushed"),
        ("nonfinite", "skips_pruned", "propagates"),
        ("math_precision", "bf16", "tf32"),
        ("accumulator", "f32", "i32"),
    ],
)
def test_a_value_that_is_required_must_be_the_one(field, given, other):
    required = GuaranteeRequirement(**{field: given})
    assert required.unmet(promise(**{field: given}), 8) is None
    assert required.unmet(promise(**{field: other}), 8) == f"{field} is {other}, required {given}"


@pytest.mark.parametrize("flag", ["deterministic", "batch_invariant", "bit_stable_across_hardware"])
def test_select_filters_by_it(flag):
    desc = GemmSparse24Descriptor(n=4, m=8, k=16, element="f32")
    assert not getattr(GemmSparse24Plan.select(desc, device="host").guarantee, flag)
    strict = GemmSparse24Plan.select(desc, device="host", preference={"require": {flag: True}})
    assert strict.explain().chosen == "host_strict"
    assert getattr(strict.guarantee, flag)


def test_select_filters_by_the_bound_of_the_reduction():
    desc = GemmSparse24Descriptor(n=4, m=8, k=4096, element="f32")
    loose = GemmSparse24Plan.select(desc, device="host")
    assert loose.guarantee.error_bound(4096) == pytest.approx(float(gamma(Fraction(4096), U32)))
    tight = {"require": {"max_error_bound": 0.9 * float(gamma(Fraction(4096), U32))}}
    chosen = GemmSparse24Plan.select(desc, device="host", preference=tight)
    assert (loose.explain().chosen, chosen.explain().chosen) == ("host_blas", "host_strict")
    assert chosen.guarantee.error_bound(4096) == pytest.approx(float(gamma(Fraction(2048), U32)))
