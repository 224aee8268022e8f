"""The strict mode is defined to the bit: the fma, its order, the activations, on the host and on a GPU."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparse24_plans import GemmSparse24Descriptor, Sparse24Weight
from sparse24_plans.arithmetic.epilogue import apply_epilogue
from sparse24_plans.arithmetic.fma32 import fma_chain, fma_f32
from sparse24_plans.vocab import EpilogueKind

from ..float64 import activate
from ..support import ELEMENTS, EPILOGUES, check_each, make_case, same_bits

ROWS = ("host_strict", "inflate_strict")
f32_bits = st.integers(0, 2**32 - 1)
SPECIALS = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF]


def as_f32(bits: int) -> np.float32:
    return np.array([bits], np.uint32).view(np.float32)[0]


def round_to_f32(value: Fraction) -> np.float32:
    """Round an exact non-zero rational to the nearest float32, ties to even, by integer arithmetic alone."""
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 24, -149)
    for e in (exponent, exponent + 1, exponent + 2):
        mantissa = round(magnitude / Fraction(2) ** e)  # Python rounds halves to even
        if mantissa < 2**24 or (mantissa == 2**24 and round(magnitude / Fraction(2) ** (e + 1)) == 2**23):
            break
    result = float("inf") if mantissa * Fraction(2) ** e >= Fraction(2) ** 128 else math.ldexp(mantissa, e)
    return np.float32(-result if value < 0 else result)


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        with np.errstate(all="ignore"):  # the sign of zero follows IEEE addition of the signed zeros
            return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    return round_to_f32(exact)


@settings(max_examples=150)
@given(a=f32_bits | st.sampled_from(SPECIALS), b=f32_bits | st.sampled_from(SPECIALS), c=f32_bits)
def test_fma_rounds_once(a, b, c):
    a, b, c = as_f32(a), as_f32(b), as_f32(c)
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return
    with np.errstate(all="ignore"):
        got = fma_f32(np.array([a]), np.array([b]), np.array([c]))[0]
    assert same_bits(np.array(got), np.array(exact_fma(a, b, c)))


@settings(max_examples=150)
@given(
    a=st.integers(-(2**24), 2**24),
    b=st.integers(-(2**24), 2**24),
    shift=st.integers(-60, 60),
    nudge=st.integers(-1, 1),
)
def test_fma_near_ties(a, b, shift, nudge):
    """Sums built to lie on, or one tiny step beside, the midpoint between two float32: where a float64 sum
    rounded twice goes wrong."""
    a, b = np.float32(a), np.float32(math.ldexp(b, shift))
    product = Fraction(float(a)) * Fraction(float(b))
    if product == 0:
        return
    near = round_to_f32(product)
    assume(abs(near) < 2.0**100)
    c = np.float32(math.ldexp(float(near), 24) + nudge * float(near))
    with np.errstate(all="ignore"):
        got = fma_f32(np.array([a]), np.array([b]), np.array([c]))[0]
    assert same_bits(np.array(got), np.array(exact_fma(a, b, c)))


@settings(max_examples=100)
@given(part=st.integers(-600, 600), addend=st.integers(-(2**23), 2**23), scale=st.integers(-4, 0))
def test_fma_near_ties_of_subnormals(part, addend, scale):
    """Products of nearly half the least float32, or other powers of two, added to subnormal ones."""
    a, b = (np.float32(math.ldexp(2**24 + one, power)) for one, power in ((part, -98), (-part, scale - 98)))
    c = as_f32(abs(addend) | (addend < 0) << 31)
    got = fma_f32(np.array([a]), np.array([b]), np.array([c]))[0]
    assert same_bits(np.array(got), np.array(exact_fma(a, b, c)))


@given(st.lists(st.tuples(f32_bits, f32_bits, f32_bits), min_size=2, max_size=9))
def test_an_fma_does_not_depend_on_its_neighbours(rows):
    a, b, c = np.array(rows, np.uint32).T.copy().view(np.float32)
    with np.errstate(all="ignore"):
        got, alone = fma_f32(a, b, c), [fma_f32(*one)[0] for one in np.stack([a, b, c], axis=1)[..., None]]
    assert same_bits(got, np.array(alone))


OF_A_CHAIN = {
    "no sum halfway": lambda rng, shape: rng.standard_normal(shape),
    "some sums halfway": lambda rng, shape: np.where(
        rng.random(shape) < 0.05, 2.0**-24, rng.standard_normal(shape) // 2.0**-9 * 2.0**-9
    ),
    "most sums halfway": lambda rng, shape: 2.0**-12 * (rng.integers(0, 4, shape) + 1),
    "subnormal sums": lambda rng, shape: rng.integers(-9, 10, shape) * 2.0**-74,
    "zeros, Inf and NaN": lambda rng, shape: rng.choice([0.0, -0.0, 1.5, np.inf, np.nan], shape),
}


@pytest.mark.parametrize("kind", OF_A_CHAIN)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 40, 60), (170, 100)])
def test_a_chain_is_one_fma_after_the_other(kind, shape):
    """Whether its steps are checked together or one by one."""
    check_each(partial(check_chain, kind, shape), ({"steps": steps} for steps in (0, 1, 15, 16, 17, 700)))


def check_chain(kind: str, shape: tuple[int, ...], steps: int) -> None:
    steps = min(steps, 40) if np.prod(shape) > 1000 else steps
    rng = np.random.default_rng(steps)
    draw = OF_A_CHAIN[kind]
    a = draw(rng, (steps, *shape[:-1], 1)).astype(np.float32)
    b = draw(rng, (steps, *(1 for _ in shape[:-1]), shape[-1])).astype(np.float32)
    start = np.ones(shape, np.float32)
    with np.errstate(all="ignore"):
        got, want = fma_chain(steps, lambda some: (a[some], b[some]), start), start
        for one, other in zip(a, b, strict=True):
            want = fma_f32(one, other, want)
    assert same_bits(got, want)
    assert (start == 1).all()


def test_a_twice_rounded_sum_would_be_wrong():
    """The correction is needed: 2^-24 * (1 - 2^-46) lies just below half a unit of c: float64 misses it."""
    a, b, c = (np.array([v], np.float32) for v in (2**-24 * (1 + 2**-23), 1 - 2**-23, 1 + 2**-23))
    assert (a.astype(np.float64) * b + c).astype(np.float32)[0] == np.float32(1 + 2**-22)
    assert fma_f32(a, b, c)[0] == np.float32(1 + 2**-23)


def scalar_strict(x: np.ndarray, weight, n: int, m: int) -> np.float32:
    """The definition, one result, one fma after the other."""
    values, metadata = weight.values[m].astype(np.float32), weight.metadata[m].view(np.uint8)
    acc = np.float32(0)
    for group, byte in enumerate(metadata):
        for slot, position in enumerate((byte & 3, byte >> 2)):
            w = values[2 * group + slot]
            acc = exact_fma(np.float32(x[n, 4 * group + position]), w, acc)
    return acc


@pytest.mark.parametrize("element", ELEMENTS)
def test_order_is_increasing_k_over_kept_positions(element):
    case = make_case(
        GemmSparse24Descriptor(n=3, m=5, k=48, element=element, out_element="f32"), row="host_strict"
    )
    weight = Sparse24Weight(case.args.weight.buffers[0], case.args.weight.buffers[1])
    want = [[scalar_strict(case.x, weight, n, m) for m in range(5)] for n in range(3)]
    assert same_bits(case.run(), np.array(want, np.float32))


@pytest.mark.parametrize("kind", [EpilogueKind.GELU, EpilogueKind.SILU, EpilogueKind.GELU_TANH])
def test_activations_are_right_to_the_last_bits(kind):
    v = np.concatenate(
        [np.linspace(-130, 130, 20001), np.linspace(-16, 16, 20001), np.geomspace(1e-44, 1, 500)]
    ).astype(np.float32)
    got = apply_epilogue(v, 1.0, None, kind).astype(np.float64)
    exact = activate(v.astype(np.float64), kind)
    assert (np.abs(got - exact) <= np.abs(exact) * 2.0**-23.9 + 2.0**-149).all()


@pytest.mark.parametrize(
    ("kind", "v", "want"),
    [
        ("bias_relu", np.nan, np.nan),
        ("bias_relu", -np.inf, 0.0),
        ("bias_gelu", -np.inf, -0.0),
        ("bias_gelu", np.inf, np.inf),
        ("bias_gelu", np.nan, np.nan),
        ("bias_silu", -np.inf, -0.0),
        ("bias_silu", np.inf, np.inf),
        ("bias_silu", np.nan, np.nan),
        ("bias_silu", -0.0, -0.0),
        ("bias_gelu_tanh", -np.inf, -0.0),
        ("bias_gelu_tanh", np.inf, np.inf),
        ("bias_gelu_tanh", np.nan, np.nan),
        ("bias_gelu_tanh", -0.0, -0.0),
        ("bias_relu2", -np.inf, 0.0),
        ("bias_relu2", 1e30, np.inf),
        ("bias_relu2", np.nan, np.nan),
    ],
)
def test_activations_of_special_values(kind, v, want):
    bias = np.array([-0.0], np.float32)  # which changes no value
    with np.errstate(all="ignore"):
        got = apply_epilogue(np.array([v], np.float32), 1.0, bias, EpilogueKind(kind))
    np.testing.assert_array_equal(got, np.array([want], np.float32))
    if want == 0:
        assert np.signbit(got[0]) == np.signbit(want)


def hostile_inputs(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Values over the whole range of the type: subnormals, zeros of both signs, huge ones, Inf and NaN."""
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, dtype=np.uint64)
    wild = bits.astype(f"u{dtype.itemsize}").view(dtype)
    tame = rng.standard_normal(shape).astype(np.float32).astype(dtype)
    return np.where(rng.random(shape) < 0.05, wild, tame)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("n", [5, 130])
def test_gpu_equals_host(element, epilogue, n):
    desc = GemmSparse24Descriptor(
        n=n, m=133 if n == 5 else 20000, k=64, element=element, epilogue=epilogue, alpha=1.7
    )
    cases = [make_case(desc, row=row, seed=n) for row in ROWS]
    assert same_bits(*(case.run() for case in cases))


@pytest.mark.gpu
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize(("n", "m", "k"), [(9, 70, 136), (140, 9000, 40)])
def test_gpu_equals_host_on_hostile_values(element, op, n, m, k):
    if op == "dgrad":
        m, k = (70, 136) if n == 9 else (40, 9000)
    rng = np.random.default_rng(n)
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, op=op, out_element="f32")
    dense = hostile_inputs(rng, (m, k), desc.element.dtype)
    x = hostile_inputs(rng, (n, desc.reduction), desc.element.dtype)
    cases = [make_case(desc, row=row, dense=dense, x=x) for row in ROWS]
    assert same_bits(*(case.run() for case in cases))


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", [*EPILOGUES[1:], "bias_gelu_tanh", "bias_relu2"])
def test_gpu_equals_host_on_the_whole_range_of_an_activation(epilogue):
    """K = 0: the bias alone reaches the activation."""
    m = 1 << 20
    rng = np.random.default_rng(3)
    bias = np.concatenate([rng.uniform(-130, 130, m // 2), rng.uniform(-16, 16, m // 2)]).astype(np.float32)
    bias[:4] = [np.nan, np.inf, -np.inf, -0.0]
    desc = GemmSparse24Descriptor(n=1, m=m, k=0, element="f32", epilogue=epilogue)
    results = []
    for row in ROWS:
        case = make_case(desc, row=row)
        case.inputs[1].fill(bias)
        results.append(case.run())
    assert same_bits(*results)
