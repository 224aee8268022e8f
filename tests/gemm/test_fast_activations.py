"""Activations of kernels that aren't strict: errors, limits and signs of every kind of float32."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.plan.tolerance import ReluBounds, of_epilogue
from sparse24_plans.vocab import EpilogueKind

from ..float64 import activate
from ..support import case_of, device_of_row, plan_of_row, random_data
from .fast_math import APPROXIMATE, fast_gelu, fast_gelu_tanh, fast_silu

U, TINY = 2.0**-24, 2.0**-149
VANISHES = np.float32(14.375)
FAST = {"silu": fast_silu, "gelu": fast_gelu, "gelu_tanh": fast_gelu_tanh}
activations = pytest.mark.parametrize("activation", FAST)


def every_size(rng: np.random.Generator, count: int) -> np.ndarray:
    """Float32 values: of random bits, close to each other where gelu isn't trivial, and all special ones."""
    wild = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    parts = [
        wild,
        rng.uniform(-1.02 * VANISHES, 1.02 * VANISHES, 4 * count),
        np.linspace(-6, 6, 2 * count),
        *(sign * np.geomspace(TINY, VANISHES, count) for sign in (-1, 1)),
    ]
    edges = [0.0, TINY, 2.0**-126, VANISHES, np.nextafter(VANISHES, np.float32(0)), 3e38, np.inf]
    special = np.array([*edges, *(-one for one in edges), np.nan, -np.nan], np.float32)
    return np.concatenate([*(one.astype(np.float32) for one in parts), special])


def check(activation: str, v: np.ndarray, got: np.ndarray) -> None:
    """The error is what ``tolerance`` allows of exact arguments. Below zero the limit is -0."""
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(v))
    assert (got[v == np.inf] == np.inf).all()
    assert (got[v == -np.inf] == 0).all()
    numbers = ~np.isnan(v)
    assert (np.signbit(got) == np.signbit(v))[numbers].all()
    finite = np.isfinite(v)
    wide = v[finite].astype(np.float64)
    _, most = of_epilogue(wide, np.zeros_like(wide), EpilogueKind(activation), ReluBounds(), 0.0)
    assert (np.abs(got[finite] - activate(np.clip(wide, -1e30, None), activation)) <= most).all()
    if activation == "gelu":
        check_gelu(v, got)


def check_gelu(v: np.ndarray, got: np.ndarray) -> None:
    """The error is a few units in the last place, and in the tail what a rounded exponent makes of it."""
    exact = activate(np.clip(v, -1e30, 1e30).astype(np.float64), "gelu")
    far = np.abs(v) >= VANISHES
    assert (got[far & (v > 0)] == v[far & (v > 0)]).all()
    assert (got[far & (v < 0)] == 0).all()
    near = ~np.isnan(v) & ~far
    wide, error = v[near].astype(np.float64), np.abs(got[near] - exact[near])
    least = TINY * (1 + np.abs(wide))
    assert (error <= (20 + 2 * wide**2) * U * np.abs(exact[near]) + least).all()
    above = wide > 0
    assert (error <= 20 * U * exact[near] + least)[above].all()
    assert (error <= 1.001 * U * exact[near])[wide > 4].all()


@activations
@pytest.mark.parametrize(("power", "inverse"), [*itertools.product((-1, 0, 1), repeat=2)])
def test_errors_stay_within_tolerance_for_any_hardware_functions(activation, power, inverse):
    v = every_size(np.random.default_rng(), 10_000)
    with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs, and powers of two
        check(activation, v, FAST[activation](v, power * APPROXIMATE, inverse * APPROXIMATE))


def test_exact_functions_leave_error_of_approximation_and_of_roundings():
    v = np.linspace(-4, 4, 100_001, dtype=np.float32)
    exact = activate(v.astype(np.float64), "gelu")
    assert (
        np.abs(fast_gelu(v, 0.0, 0.0) - exact) <= (8 + 1.5 * v.astype(float) ** 2) * U * np.abs(exact)
    ).all()


@pytest.mark.gpu
@activations
@pytest.mark.parametrize("row", ["mma_sp", "wgmma_sp", "inflate_cublas"])
def test_a_gpu_is_as_right(activation, row):
    """Sums of zeros leave the bias alone to be activated."""
    rng = np.random.default_rng()
    v = every_size(rng, 100_000)
    v = np.resize(v, len(v) + 15 & -16)
    desc = GemmSparse24Descriptor(
        n=1,
        m=len(v),
        k=64,
        element="bf16",
        out_element="f32",
        bias_element="f32",
        epilogue=f"bias_{activation}",
    )
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    data = random_data(rng, desc)
    zeros = {name: np.zeros_like(getattr(data, name)) for name in ("dense", "x")}
    got = case_of(plan, replace(data, **zeros, bias=v)).run()[0]
    positive = np.where(v == 0, np.float32(0), v)  # the sum is +0, and so is its sum with -0
    with np.errstate(invalid="ignore"):
        check(activation, positive, got)
