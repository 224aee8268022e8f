"""Error bounds hold for inputs that are made to break them, and are all but reached by some.

Terms are chosen at the kept positions, so that nothing of them is pruned away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sparse24_plans import ElementKind

from .kernel_entries import FLOATS, case_of, on_host, promising, tokens

Terms = tuple[np.ndarray, np.ndarray]
"""The source [n, r] and the weight [outputs, r]: products of their columns are summed over r."""

HALF_RANGE = {"f16": 12, "fp8_e4m3": 8, "fp8_e5m2": 12, "bf16": 40, "f32": 40}
"""Exponents e for which the product 2^e * 2^e is far from overflow."""
LEAST = {"f16": -12, "fp8_e4m3": -5, "fp8_e5m2": -12, "bf16": -40, "f32": -40}
STEPS = {"fp8_e4m3": 13, "fp8_e5m2": 13}
"""Approximate number of bits below the largest addend that an accumulator keeps; 24 for other elements."""
LARGE = {"f16": 15, "bf16": 75, "fp8_e4m3": 8, "fp8_e5m2": 15, "f32": 75}
"""Exponents of operands that meet subnormal ones. Sums with operands of any other kind stay finite."""


def normal(rng, n, outputs, r, element) -> Terms:
    return rng.standard_normal((n, r)), rng.standard_normal((outputs, r))


def one_sign(rng, n, outputs, r, element) -> Terms:
    return tuple(np.abs(part) + 0.5 for part in normal(rng, n, outputs, r, element))


def cancelling(rng, n, outputs, r, element) -> Terms:
    """The second half takes away what the first has given."""
    a, b = normal(rng, n, outputs, r, element)
    half = r // 2
    a[:, half : 2 * half], b[:, half : 2 * half] = a[:, :half], -b[:, :half]
    return a, b


def one_large(rng, n, outputs, r, element) -> Terms:
    a, b = normal(rng, n, outputs, r, element)
    at = int(rng.integers(r))
    a[:, at] = b[:, at] = 2.0 ** HALF_RANGE[element] / 4
    return a, b


def two_large_that_cancel(rng, n, outputs, r, element) -> Terms:
    """Summands between the two large ones are rounded to the precision of the first, and alone remain."""
    a, b = normal(rng, n, outputs, r, element)
    a[:, 0] = a[:, -1] = b[:, 0] = 2.0 ** HALF_RANGE[element] / 4
    b[:, -1] = -b[:, 0]
    return a, b


def stagnating(small: float) -> Callable[..., Terms]:
    """A large first term, then many of half its unit in the last place, or nearly the whole of it."""

    def terms(rng, n, outputs, r, element) -> Terms:
        steps = STEPS.get(element, 24)
        a, b = np.ones((n, r)), np.ones((outputs, r))
        a[:, 0], b[:, 0] = 2.0 ** (steps // 2), 2.0 ** (steps - steps // 2)
        kind = ElementKind(element)
        b[:, 1:] = small if small <= 1 else small * (1 - 2 * kind.unit_roundoff)
        return a, b

    return terms


def mixed(rng, n, outputs, r, element) -> Terms:
    """Magnitudes over the whole range, both signs."""
    low, high = LEAST[element], HALF_RANGE[element] - 2

    def part(rows: int) -> np.ndarray:
        exponents = rng.integers(low, high, (rows, r)).astype(float)
        return rng.uniform(1, 2, (rows, r)) * rng.choice([-1, 1], (rows, r)) * 2.0**exponents

    return part(n), part(outputs)


def rising(rng, n, outputs, r, element) -> Terms:
    a, b = (np.abs(part) for part in mixed(rng, n, outputs, r, element))
    order = np.argsort(a[0] * b[0])
    return a[:, order], b[:, order]


def falling(rng, n, outputs, r, element) -> Terms:
    a, b = rising(rng, n, outputs, r, element)
    return a[:, ::-1].copy(), b[:, ::-1].copy()


def alternating(rng, n, outputs, r, element) -> Terms:
    """Neighbours cancel but for their last bits."""
    a, b = one_sign(rng, n, outputs, r, element)
    half = r // 2
    a[:, 1 : 2 * half : 2] = a[:, 0 : 2 * half : 2]
    b[:, 1 : 2 * half : 2] = -b[:, 0 : 2 * half : 2] * (1 + 2 * ElementKind(element).unit_roundoff)
    return a, b


def subnormal_first(rng, n, outputs, r, element) -> Terms:
    """Terms that begin with a subnormal one. Its product is small, but tensor cores align to it as if it were
    the product of the smallest normal number. Many terms follow, the largest ones that are then cut away."""
    kind = ElementKind(element)
    a, b = np.empty((n, r)), np.empty((outputs, r))
    least = LARGE[element] + int(np.log2(kind.smallest_normal)) - STEPS.get(element, 25)
    a[:], b[:] = 2.0 ** (least // 2), 2.0 ** (least - 1 - least // 2) * (2 - 2 * kind.unit_roundoff)
    a[:, 0], b[:, 0] = 2.0 ** LARGE[element], kind.smallest_subnormal
    return a, b


def subnormal(rng, n, outputs, r, element) -> Terms:
    """Nearly all of the weight is subnormal."""
    kind = ElementKind(element)
    a, b = mixed(rng, n, outputs, r, element)
    small = rng.integers(-8, 9, (outputs, r)) * kind.smallest_subnormal
    return a, np.where(rng.random((outputs, r)) < 0.9, small, b)


KINDS: dict[str, Callable[..., Terms]] = {
    "normal": normal,
    "one sign": one_sign,
    "cancelling": cancelling,
    "one large term": one_large,
    "two large terms that cancel": two_large_that_cancel,
    "stagnating on ties": stagnating(1.0),
    "stagnating below a unit": stagnating(2.0),
    "stagnating on quarters": stagnating(0.25),
    "mixed magnitudes": mixed,
    "rising magnitudes": rising,
    "falling magnitudes": falling,
    "alternating": alternating,
    "a subnormal first": subnormal_first,
    "subnormal": subnormal,
}
KEPT = np.array([0, 1])
"""Kept positions of every group of four."""


def operands(kind: str, op: str, n: int, outputs: int, reduction: int, element: str, seed: int = 7) -> Terms:
    """X (dY) and the dense W. ``outputs`` of dgrad: columns of W that hold anything."""
    rng = np.random.default_rng(seed)
    r = reduction // 2 if op == "forward" else reduction
    a, b = KINDS[kind](rng, n, outputs, r, element)
    dtype = ElementKind(element).dtype
    if op == "forward":
        x, dense = rng.standard_normal((n, reduction)), np.zeros((outputs, reduction))
        at = (4 * np.arange(reduction // 4)[:, None] + KEPT).reshape(-1)
        x[:, at], dense[:, at] = a, b
    else:
        x, dense = a, np.zeros((reduction, 2 * outputs))
        dense[:, (4 * np.arange(outputs // 2)[:, None] + KEPT).reshape(-1)] = b.T
    return x.astype(dtype), dense.astype(dtype)


def of_kinds(
    kinds: Sequence[str], op: str, n: int, outputs: int, reduction: int, element: str
) -> tuple[np.ndarray, np.ndarray]:
    """The operands of one product in which the rows of each kind's X meet the weight of every kind."""
    found = [operands(kind, op, n, outputs, reduction, element) for kind in kinds]
    sources, weights = zip(*found, strict=True)
    return np.concatenate(sources), np.concatenate(weights, axis=0 if op == "forward" else 1)


def worst(
    row: str, kinds: Sequence[str], op: str, sizes: tuple[int, int, int], element: str, out: str
) -> float:
    """The largest error, of what is allowed; over 1 is an error. ``sizes`` are those of each kind."""
    x, dense = of_kinds(kinds, op, *sizes, element)
    (m, k), n = dense.shape, len(x)
    problem = {"n": n, "m": m, "k": k, "element": element, "op": op, "out_element": out}
    case = case_of(row, **problem, x=x, dense=dense)
    np.testing.assert_array_equal(case.dense, dense.astype(np.float64))  # nothing was pruned away
    ratio = case.check(case.run())
    assert ratio <= 1
    return ratio


def sizes_of(row: str, op: str) -> list[tuple[int, int, int]]:
    if on_host(row):
        return [(1, 4, 16), (1, 4, 48), (1, 2, 1024)]
    n = tokens(row, 48)
    long = [(n, 128, 8192), (min(n, 8), 64, 65536)] if op == "forward" else [(n, 128, 8192)]
    return [(n, 128, 16), (n, 128, 48), (tokens(row, 300), 256, 1024), *long]


SETS = {"every kind": tuple(KINDS), **{kind: (kind,) for kind in KINDS}}
"""Kinds that one product has, by name."""


def with_kinds(rows: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Rows of devices with each kind. The host's get all at once, which takes it little more than one."""
    names, found = rows.args
    return pytest.mark.parametrize(
        (*names, "kinds"),
        [
            pytest.param(*one.values, kinds, marks=one.marks)
            for one in found
            for kinds in (["every kind"] if on_host(one.values[0]) else KINDS)
        ],
    )


@with_kinds(promising("accumulator", "f32", elements=FLOATS))
def test_error_bound(row, element, op, epilogue, kinds, record_property):
    found = [worst(row, SETS[kinds], op, sizes, element, "f32") for sizes in sizes_of(row, op)]
    record_property(f"bound of {row}", max(found))  # record_tests keeps the largest


@with_kinds(promising("accumulator", "f32", elements=["bf16", "fp8_e4m3"]))
def test_error_bound_of_rounded_results(row, element, op, epilogue, kinds):
    for sizes in sizes_of(row, op)[1:3]:
        worst(row, SETS[kinds], op, sizes, element, "bf16")


@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_the_strict_bound_is_nearly_reached(op):
    """A bound of half the size would fail for these adversarial inputs."""
    sizes = (2, 8, 4096 if op == "forward" else 2048)
    assert worst("host_strict", ["stagnating on ties"], op, sizes, "f32", "f32") > 0.9
    assert worst("host_strict", ["normal"], op, sizes, "f32", "f32") < 0.1


def test_an_error_beyond_the_bound_would_be_seen():
    sizes = (2, 8, 256)
    x, dense = operands("one sign", "forward", *sizes, "f32")
    case = case_of("host_strict", n=2, m=8, k=256, element="f32", x=x, dense=dense)
    got = case.run().copy()
    got[1, 3] *= 1 + 2.0**-14
    with pytest.raises(AssertionError, match="of what is allowed"):
        case.check(got)
