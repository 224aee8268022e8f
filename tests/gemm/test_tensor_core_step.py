"""One step of the tensor cores: the vectorised model against exact rational arithmetic, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import ElementKind
from sparse24_plans.gemm.arithmetic.tensor_core import STEPS, add_products, cut, exponents

from . import scalar_arithmetic as scalar

ELEMENTS = ("f16", "bf16", "fp8_e4m3", "fp8_e5m2")
INF, NAN = math.inf, math.nan


def stepped(a: np.ndarray, b: np.ndarray, c: np.ndarray, element: str) -> np.ndarray:
    """The model on operands [products, P] of the element, and accumulators float32 [P]."""
    kind = ElementKind(element)
    with np.errstate(all="ignore"):  # ml_dtypes warns of NaN
        wide = [part.astype(np.float32).astype(np.float64) for part in (a, b)]
        total = exponents(wide[0], kind) + exponents(wide[1], kind)
        return add_products(wide[0] * wide[1], total, c.astype(np.float64), STEPS[kind])


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray, element: str) -> np.ndarray:
    """Asserts that the model gives the bits of the exact arithmetic; returns them."""
    got = stepped(a, b, c, element)
    with np.errstate(all="ignore"):
        a, b = a.astype(np.float32).astype(np.float64), b.astype(np.float32).astype(np.float64)
    want = [
        scalar.step(x.tolist(), y.tolist(), float(z), element) for x, y, z in zip(a.T, b.T, c, strict=True)
    ]
    np.testing.assert_array_equal(got.astype(np.float32).astype(np.float64), got)  # all are float32's
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    there = ~np.isnan(got)
    assert got[there].tobytes() == np.array(want)[there].tobytes()  # signs of zeros too
    return got


MANTISSA_BITS = {"f16": 10, "bf16": 7, "fp8_e4m3": 3, "fp8_e5m2": 2}
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), 1.0, INF, -INF, NAN])


def any_bits(rng: np.random.Generator, element: str, shape: tuple[int, int]) -> np.ndarray:
    """Operands of any bits, among which zeros and subnormal numbers of both signs are frequent."""
    kind = ElementKind(element)
    size = 8 * kind.itemsize
    small = rng.integers(0, 1 << MANTISSA_BITS[element], shape) | rng.choice([0, 1 << size - 1], shape)
    zeros = rng.choice([0, 1 << size - 1], shape)
    bits = np.choose(rng.integers(0, 4, shape), (rng.integers(0, 1 << size, shape), zeros, small, small))
    return bits.astype(kind.bits_dtype).view(kind.dtype)


@pytest.mark.parametrize("element", ELEMENTS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), accumulators=st.lists(FLOATS, min_size=5, max_size=5))
def test_any_operands(element, seed, accumulators):
    rng, shape = np.random.default_rng(seed), (scalar.PRODUCTS[element], len(accumulators))
    a, b = (any_bits(rng, element, shape) for _ in range(2))
    check(a, b, np.array(accumulators, np.float32), element)


def spread(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    exponent = rng.integers(low, high, shape).astype(float)
    return (rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape) * 2.0**exponent).astype(np.float32)


MAGNITUDES = {
    "f16": {"near": (-2, 2), "mixed": (-14, 15), "subnormal": (-25, -12)},
    "bf16": {"near": (-2, 2), "mixed": (-40, 40), "subnormal": (-134, -120), "huge": (50, 64)},
    "fp8_e4m3": {"near": (-2, 2), "mixed": (-6, 8), "subnormal": (-10, -4)},
    "fp8_e5m2": {"near": (-2, 2), "mixed": (-14, 15), "subnormal": (-17, -12)},
}


@pytest.mark.parametrize(
    ("element", "kind"), [(element, kind) for element in ELEMENTS for kind in MAGNITUDES[element]]
)
@pytest.mark.parametrize("seed", range(3))
def test_magnitudes_that_meet(element, kind, seed):
    """Many addends count here: near, mixed, subnormal, with one large term, with terms that cancel."""
    rng, dtype = np.random.default_rng(seed), ElementKind(element).dtype
    shape = scalar.PRODUCTS[element], 200
    a, b = (spread(rng, shape, *MAGNITUDES[element][kind]).astype(dtype) for _ in range(2))
    with np.errstate(all="ignore"):
        largest = np.abs(a.astype(np.float32) * b.astype(np.float32)).max(axis=0)
    largest = np.where(np.isfinite(largest), largest, 1.0)
    a[1:5, 50:100], b[1:5, 50:100] = a[5:9, 50:100], -b[5:9, 50:100]  # cancel
    a[:, 100:150][rng.random((shape[0], 50)) < 0.4] = 0
    a[0, 150:], b[0, 150:] = dtype.type(2.0 ** MAGNITUDES[element]["mixed"][1] / 2), dtype.type(4.0)
    with np.errstate(over="ignore"):
        c = largest * spread(rng, (200,), -30, 10)
    c[::7] = 0
    c[3::7] = rng.integers(0, 2**25, c[3::7].shape).astype(np.uint32).view(np.float32)  # subnormal, or nearly
    got = check(a, b, c.astype(np.float32), element)
    assert np.isfinite(got).mean() > 0.4


def one(element: str, pairs: list[tuple[float, float]], c: float = 0.0) -> float:
    """A step of these products and zeros."""
    kind = ElementKind(element)
    a, b = np.zeros((2, scalar.PRODUCTS[element], 1), np.float32)
    for i, (x, y) in enumerate(pairs):
        a[i], b[i] = x, y
    with np.errstate(all="ignore"):
        return float(check(a.astype(kind.dtype), b.astype(kind.dtype), np.array([c], np.float32), element)[0])


@pytest.mark.parametrize(
    ("element", "pairs", "c", "want"),
    [
        # Cut, not rounded: what lies below 25 bits (fp8: 13) under the largest is lost, with either sign.
        ("f16", [(2.0**-12, 2.0**-13)] * 4, 1.0, 1.0 + 2.0**-23),
        ("f16", [(2.0**-13, 2.0**-13)] * 2, 1.0, 1.0),
        ("f16", [(2.0**-12, 2.0**-12)] * 2, 1.0, 1.0 + 2.0**-23),
        ("f16", [(2.0**-12, -(2.0**-12))], 1.0, 1.0 - 2.0**-24),
        ("f16", [(2.0**-13, -(2.0**-13))], 1.0, 1.0),
        ("fp8_e4m3", [(2.0**-7, 2.0**-6)] * 2, 1.0, 1.0 + 2.0**-12),
        ("fp8_e4m3", [(2.0**-7, 2.0**-7)] * 31, 1.0, 1.0),
        # The sum is cut to a float32; of fp8, to 13 bits: 1 + 2^-13 is the accumulator's best.
        ("f16", [(1.5, 1.0), (2.0**-12, 2.0**-12)], 1.0, 2.5),
        ("fp8_e4m3", [], 1.0 + 2.0**-14, 1.0),
        # A subnormal operand is aligned as if it were normal: 2^-24 * 2^15 has exponent 1, not -9.
        ("f16", [(2.0**-24, 2.0**15), (2.0**-12, 2.0**-13)], 0.0, 2.0**-9),
        ("f16", [(2.0**-9, 1.0), (2.0**-12, 2.0**-13)], 0.0, 2.0**-9 + 2.0**-25),
        # A zero operand doesn't: its product has exponent -133 whatever the other one is.
        ("f16", [(0.0, 2.0**15), (2.0**-9, 1.0), (2.0**-12, 2.0**-13)], 0.0, 2.0**-9 + 2.0**-25),
        ("bf16", [(0.0, 2.0**127), (2.0**-60, 2.0**-60)], 0.0, 2.0**-120),
        # A product is not normalised: 1.5 * 1.5 = 2.25 has exponent 0.
        ("f16", [(1.5, 1.5), (-1.5, 1.5), (2.0**-12, 2.0**-13)], 0.0, 2.0**-25),
        # With a zero addend nothing below 2^(-133 - 25) counts.
        ("bf16", [(2.0**-100, 2.0**-59)], 0.0, 0.0),
        ("bf16", [(2.0**-76, 2.0**-76), (-(2.0**-76), 2.0**-76), (2.0**-75, 2.0**-74)], 0.0, 2.0**-149),
        # Zeros and underflow are +0, overflow is infinite, although the sum is cut toward zero.
        ("bf16", [(-0.0, 1.0)] * 16, -0.0, 0.0),
        ("bf16", [(-(2.0**-75), 2.0**-75)], 0.0, 0.0),
        ("bf16", [(2.0**64, 2.0**63)] * 2, 0.0, INF),
        ("bf16", [(-(2.0**120), 2.0**120)], 0.0, -INF),
        ("bf16", [(2.0**120, 2.0**120), (-(2.0**120), 2.0**120)], 1.0, 0.0),
        ("bf16", [(1.0, 1.0)], 3.4028234663852886e38, 3.4028234663852886e38),
        # Inf and NaN.
        ("f16", [(INF, 1.0), (1.0, 1.0)], 0.0, INF),
        ("f16", [(INF, -1.0)], 1.0, -INF),
        ("f16", [(INF, 1.0), (INF, -1.0)], 0.0, NAN),
        ("f16", [(INF, 0.0)], 0.0, NAN),
        ("f16", [(INF, 1.0)], -INF, NAN),
        ("bf16", [(1.0, 1.0)], INF, INF),
        ("fp8_e4m3", [(NAN, 0.0)], 0.0, NAN),
        ("bf16", [(1.0, 1.0)], NAN, NAN),
    ],
)
def test_sums_computed_by_hand(element, pairs, c, want):
    got = one(element, pairs, c)
    np.testing.assert_array_equal(got, want)
    assert math.isnan(want) or math.copysign(1, got) == math.copysign(1, want)


@pytest.mark.parametrize("element", ELEMENTS)
def test_fewer_products_stand_for_themselves_and_zeros(element):
    rng, kind = np.random.default_rng(5), ElementKind(element)
    products = scalar.PRODUCTS[element]
    a, b = (spread(rng, (products, 50), -3, 3).astype(kind.dtype) for _ in range(2))
    c = spread(rng, (50,), -3, 3)
    a[products // 2 :] = 0
    few = stepped(a[: products // 2], b[: products // 2], c, element)
    assert few.tobytes() == check(a, b, c, element).tobytes()


@settings(max_examples=150)
@given(value=st.floats(allow_nan=False, allow_infinity=False), bits=st.sampled_from([13, 23]))
def test_cut_is_toward_zero(value, bits):
    got = float(cut(np.array([value]), bits)[0])
    if math.isinf(got):
        assert abs(value) >= 2.0**128
        return
    assert abs(got) <= abs(value)
    unit = 2.0 ** (max(math.frexp(value)[1] - 1, -126) - bits)
    assert abs(value) - abs(got) < unit
    assert (got / unit).is_integer()
    assert got or math.copysign(1, got) == 1
