"""Kernels of the GPU compute the arithmetic that they name: millions of results, bit for bit.

Every replay counts into the record of GPU tests, through the test's properties ``replayed`` and
``replay_mismatches`` (bench/record_tests.py). The host's row runs the same tests in small.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    PlanPreference,
    Sparse24Weight,
)
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.plan.arithmetic import Arithmetic
from sparse24_plans.plan.kernel import Choice

from ..sample_devices import HOPPER
from ..support import case_of, device_of_row, plan_of_row, random_data
from .kernel_entries import marked, on_host, row_of, tokens
from .test_error_bounds import KINDS, operands

IN_STEPS = ("identity", "bias", "bias_relu")
TIER2 = [
    row.name
    for row in ENTRIES
    if row.tier == "sparse_tensor_core" and row.backend != "cusparselt" and not row.only_groups
    if row.name != "mma_sp_fp8"  # names no arithmetic
]
EACH = [
    marked(row.name, str(element))
    for row in ENTRIES
    if row.name in (*TIER2, "inflate_strict", "inflate_strict_fp8", "host_strict")
    for element in row.elements
]
every_row = pytest.mark.parametrize(("row", "element"), EACH)


def wild_bits(rng: np.random.Generator, shape: tuple[int, int], kind: ElementKind) -> np.ndarray:
    """A few of any bits at all, Inf and NaN among them, in a sea of normal values."""
    bits = rng.integers(0, 2 ** (8 * kind.itemsize), shape, dtype=np.uint64).astype(kind.bits_dtype)
    tame = rng.standard_normal(shape).astype(np.float32).astype(kind.dtype)
    return np.where(rng.random(shape) < 0.001, bits.view(kind.dtype), tame)


def subnormals(rng: np.random.Generator, shape: tuple[int, int], kind: ElementKind) -> np.ndarray:
    """Subnormal and small values, some large ones, some zeros."""
    exponent = rng.integers(-12, 2, shape).astype(float)
    values = rng.uniform(-1, 1, shape) * kind.smallest_normal * 2.0**exponent
    values = np.where(rng.random(shape) < 0.02, rng.standard_normal(shape) * 64, values)
    return np.where(rng.random(shape) < 0.1, 0, values).astype(np.float32).astype(kind.dtype)


def zeros_beside_large(rng: np.random.Generator, shape: tuple[int, int], kind: ElementKind) -> np.ndarray:
    """Half are zeros, of both signs; of the others some are as large as they come."""
    large = 2.0 ** {"f16": 14, "bf16": 60, "fp8_e4m3": 8, "fp8_e5m2": 14}.get(str(kind), 60)
    values = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.02, large, 1)
    values = np.where(rng.random(shape) < 0.5, np.copysign(0, rng.standard_normal(shape)), values)
    return np.clip(values, -1.75 * large, 1.75 * large).astype(np.float32).astype(kind.dtype)


def overflowing(rng: np.random.Generator, shape: tuple[int, int], kind: ElementKind) -> np.ndarray:
    """Sums of bf16 near and beyond 2^128; of the others just large."""
    low, high = {"f16": (8, 15), "fp8_e4m3": (4, 8), "fp8_e5m2": (8, 15)}.get(str(kind), (60, 64))
    exponent = rng.integers(low, high, shape).astype(float)
    values = rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape) * 2.0**exponent
    return np.clip(values, -float(2.0**high), float(2.0**high)).astype(np.float32).astype(kind.dtype)


def tiny(rng: np.random.Generator, shape: tuple[int, int], kind: ElementKind) -> np.ndarray:
    """Products of bf16 below float32's range, so that sums are subnormal, zero or of unknown sign."""
    low, high = {"f16": (-24, -10), "fp8_e4m3": (-9, -4), "fp8_e5m2": (-16, -8)}.get(str(kind), (-85, -62))
    exponent = rng.integers(low, high, shape).astype(float)
    values = rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape) * 2.0**exponent
    return np.where(rng.random(shape) < 0.1, 0, values).astype(np.float32).astype(kind.dtype)


VALUES = {
    "wild bits": wild_bits,
    "subnormals": subnormals,
    "zeros beside large": zeros_beside_large,
    "overflowing": overflowing,
    "tiny": tiny,
}


def replays(row: str, record_property, samples: int, x=None, dense=None, seed: int = 0, **problem) -> None:
    """Runs the row, replays ``samples`` of its results, counts them, and asserts that all are equal."""
    desc = GemmSparse24Descriptor(**problem)
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    assert plan.explain().chosen == row
    assert plan.guarantee.arithmetic is not None
    given = {name: value for name, value in (("x", x), ("dense", dense)) if value is not None}
    with np.errstate(all="ignore"):
        data = replace(random_data(np.random.default_rng(seed), desc), **given)
        y = case_of(plan, data).run()
        weight = Sparse24Weight.prune_compress(data.dense)
    args = GemmSparse24Args(weight, data.x, y, data.bias, data.scale_x, data.scale_w)
    found = plan.replay(args, samples, seed=seed)
    record_property("replayed", found.compared)
    record_property("replay_mismatches", found.differing)
    assert found.compared == min(samples, y.size)
    assert found.equal, found.first


def sizes(row: str, element: str, n: int, m: int, k: int) -> dict[str, int]:
    """Return sizes that the kernel serves: 8-bit elements need a K in multiples of 16."""
    if on_host(row):
        n, m, k = min(n, 3), min(m, 16), min(k, 2064) // 16 * 8
    unit = 16 if ElementKind(element).itemsize == 1 else 8
    return {"n": tokens(row, n), "m": m, "k": -(-k // unit) * unit}


@every_row
@pytest.mark.parametrize("kind", [*VALUES, *KINDS])
def test_gpu_results_have_the_bits_of_their_arithmetic(row, element, kind, record_property):
    size, of = sizes(row, element, 64, 1056, 1096), ElementKind(element)
    if element == "s8":
        rng = np.random.default_rng(len(kind))
        x, dense = (
            rng.integers(-128, 128, shape).astype(np.int8)
            for shape in ((size["n"], size["k"]), (size["m"], size["k"]))
        )
    elif kind in VALUES:
        rng = np.random.default_rng(len(kind))
        shapes = (size["n"], size["k"]), (size["m"], size["k"])
        with np.errstate(all="ignore"):
            x, dense = (VALUES[kind](rng, shape, of) for shape in shapes)
    else:
        x, dense = operands(kind, "forward", size["n"], size["m"], size["k"], element)
    replays(row, record_property, 30_000, x, dense, element=element, out_element="f32", **size)


SHAPES = [
    (1, 4096, 4096),
    (7, 8448, 1040),
    (16, 4104, 1040),
    (40, 20000, 520),
    (64, 2440, 4112),
    (129, 1416, 4112),
    (300, 264, 28688),
    (1100, 700, 328),
    (33, 191, 2264),
]
"""N, M, K: one token and many, K that no tile divides, weights of all numbers of slices."""
PRODUCTS = 24_000_000
"""Products that the host recomputes for one shape, in about two seconds: a long K has fewer samples."""


def _shapes_of(row: str, element: str) -> list[tuple[int, int, int]]:
    """Return the shapes whose sizes differ: on the host some are alike."""
    return list({tuple(sizes(row, element, *shape).values()): shape for shape in SHAPES}.values())


@pytest.mark.parametrize(
    ("row", "element", "shape"),
    [marked(*one.values, shape) for one in EACH for shape in _shapes_of(*one.values)],
    ids=str,
)
def test_shapes_and_epilogues(row, element, shape, record_property):
    scaled = element in ("s8", "fp8_e4m3", "fp8_e5m2") and row != "host_strict"
    scales = {"scale_x": "row", "scale_w": "row"} if scaled else {}
    for i, epilogue in enumerate(IN_STEPS):
        out = {"s8": "bf16", "fp8_e4m3": "bf16", "fp8_e5m2": "bf16"}.get(element, element) if i else "f32"
        problem = {**sizes(row, element, *shape), "element": element, "out_element": out, "alpha": 0.75}
        samples = min(20_000, PRODUCTS // problem["k"])
        replays(row, record_property, samples, seed=i, epilogue=epilogue, **problem, **scales)


@pytest.mark.parametrize("row", [row for row in TIER2 if row != "wgmma_sp_s8"])
def test_the_shapes_call_for_several_numbers_of_slices(row):
    """No kernel is therefore replayed with a single number of slices."""
    named = set()
    for shape in SHAPES:
        for element in row_of(row).elements:
            desc = GemmSparse24Descriptor(**sizes(row, element, *shape), element=element)
            choice = Choice(desc, HOPPER, row_of(row), PlanPreference(), {})
            named.add(Arithmetic.of(row_of(row).kernel.arithmetic(choice)))
    assert (len(named) > 1) == (row != "wgmma_sp_fp8_promoted")


# Single steps: each settles one rule ----------------------------------------------------------------

RULES = {
    # Operands of one step, the others zero: pairs of (x, w), and whether a zero addend is among them.
    "a zero product has exponent -133": [(2.0**-74, 2.0**-74), (2.0**-75, 2.0**-75), (2.0**-76, 2.0**-82)],
    "a zero operand beside a large one is no large addend": [(2.0**127, 0.0), (2.0**-60, 2.0**-60)],
    "an underflow is +0": [(-(2.0**-76), 2.0**-76)],
    "negative zeros give +0": [(-0.0, 1.0), (0.0, -1.0)],
    "terms that cancel give +0": [(3.0, 1.0), (-3.0, 1.0)],
    "an overflow is infinite": [(2.0**64, 2.0**63), (2.0**64, 2.0**63)],
    "a sum just below 2^128 is not": [(2.0**63, 1.9921875 * 2.0**64), (2.0**63, 2.0**56 * 1.9921875)],
    "products beyond float32 may cancel": [(2.0**100, 2.0**100), (-(2.0**100), 2.0**100), (1.0, 1.0)],
    "infinity times zero is NaN": [(np.inf, 0.0)],
    "infinities of both signs are NaN": [(np.inf, 1.0), (np.inf, -1.0)],
    "an infinity stays": [(-np.inf, 1.0), (3.0, 3.0)],
}


@pytest.mark.parametrize("row", [marked(row) for row in ("mma_sp", "wgmma_sp", "host_strict")])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_a_step_in_bf16(row, rule, record_property):
    """K of one step, so no other one hides what it did; f32 results show every bit."""
    kind = ElementKind.BF16
    x, dense = np.zeros((1, 32), np.float32), np.zeros((64, 32), np.float32)
    for i, (a, b) in enumerate(RULES[rule]):
        x[0, 2 * i], dense[:, 2 * i] = a, b
    problem = {"n": 1, "m": 64, "k": 32, "element": "bf16", "out_element": "f32"}
    x, dense = x.astype(kind.dtype), dense.astype(kind.dtype)
    replays(row, record_property, 64, x, dense, **problem)
