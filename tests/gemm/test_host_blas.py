"""The host's BLAS: packed dense weights and canonical ones, exact sums of s8, bounded memory, dense speed."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import (
    DgradSparse24Args,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PackedWeight,
    Sparse24Weight,
    TensorView,
)
from sparse24_plans.gemm.backends import host

from ..support import make_case, random_values, same_bits

ELEMENTS = ("f32", "f16", "bf16", "s8", "fp8_e4m3")
every_element = pytest.mark.parametrize("element", ELEMENTS)
every_op = pytest.mark.parametrize("op", ["forward", "dgrad"])


def weight_of(element: str, m: int, k: int, seed: int = 0) -> Sparse24Weight:
    return Sparse24Weight.prune_compress(
        random_values(np.random.default_rng(seed), (m, k), ElementKind(element))
    )


def select(**problem: object) -> GemmSparse24Plan:
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(**problem), device="host")
    assert plan.explain().chosen == "host_blas"
    return plan


@every_element
def test_a_packed_weight_is_the_dense_matrix_in_float32(element):
    weight = weight_of(element, 24, 40)
    packed = select(n=3, m=24, k=40, element=element).pack(weight)
    assert (packed.layout_id, packed.nbytes, str(packed.device)) == ("dense_f32", 4 * 24 * 40, "host")
    assert same_bits(packed.buffers[0].array(), weight.decompress().astype(np.float32))


def test_every_value_of_an_element_is_widened_exactly():
    for element in map(ElementKind, ELEMENTS[1:]):
        every = np.arange(2 ** (8 * element.itemsize)).astype(element.bits_dtype)
        dense = np.zeros((every.size // 2, 8), element.bits_dtype)
        dense[:, [0, 2]] = every.reshape(-1, 2)
        weight = Sparse24Weight.compress(dense, element=element)
        packed = select(n=1, m=weight.m, k=8, element=element).pack(weight)
        got = packed.buffers[0].array()[:, [0, 2]].reshape(-1)
        with np.errstate(invalid="ignore"):
            want = every.view(element.dtype).astype(np.float32)
        assert np.array_equal(got, want, equal_nan=True)
        assert np.array_equal(np.signbit(got)[got == 0], np.signbit(want)[want == 0])


@every_element
@every_op
@pytest.mark.parametrize("n", [1, 9])
def test_packed_and_canonical_weights_give_what_the_guarantee_allows(monkeypatch, element, op, n):
    """Tokens, and rows of a canonical weight, come in several blocks here."""
    monkeypatch.setattr(host, "_CELLS", 1)
    monkeypatch.setattr(host, "_MIN_TOKENS", 4)
    monkeypatch.setattr(host, "_INFLATED_CELLS", 5 * 96)
    more = {"epilogue": "bias_gelu"} if op == "forward" else {}
    case = make_case(GemmSparse24Descriptor(n=n, m=72, k=96, element=element, op=op, **more), "host", pad=3)
    assert case.args.weight.layout_id == "dense_f32"
    case.check(case.run())
    kept = Sparse24Weight.compress(case.dense.astype(ElementKind(element).dtype))
    for weight in (kept, PackedWeight.canonical(kept)):
        case.args = replace(case.args, weight=weight)
        case.result.fill(np.zeros_like(case.result.numpy()))
        case.check(case.run())


def test_one_packed_weight_serves_every_n_both_directions_and_orders():
    weight = weight_of("f16", 32, 64)
    packed = select(n=1, m=32, k=64, element="f16").pack(weight)
    rng, w = np.random.default_rng(1), weight.decompress().astype(np.float64)
    for n in (1, 2, 17):
        x = rng.standard_normal((n, 64)).astype(np.float16)
        y = np.full((32, n), np.nan, np.float32).T
        plan = select(n=n, m=32, k=64, element="f16", out_element="f32", y_order="column")
        plan.run(GemmSparse24Args(packed, x, y))
        np.testing.assert_allclose(y, x.astype(np.float64) @ w.T, rtol=1e-5, atol=1e-4)
        dy, dx = rng.standard_normal((n, 32)).astype(np.float16), np.full((n, 64), np.nan, np.float16)
        select(n=n, m=32, k=64, element="f16", op="dgrad").run(DgradSparse24Args(packed, dy, dx))
        np.testing.assert_allclose(dx.astype(np.float64), dy.astype(np.float64) @ w, rtol=2e-3, atol=2e-3)


def test_the_strict_plan_refuses_the_packed_one():
    """The packed form rounds no value, but the strict plan reads positions, which a dense matrix lacks."""
    problem = {"n": 2, "m": 8, "k": 16, "element": "f32"}
    strict = GemmSparse24Plan.select(
        GemmSparse24Descriptor(**problem), device="host", preference={"require": {"deterministic": True}}
    )
    packed = select(**problem).pack(weight_of("f32", 8, 16))
    args = GemmSparse24Args(packed, np.ones((2, 16), np.float32), np.ones((2, 8), np.float32))
    verdict = strict.can_implement(args)
    assert isinstance(verdict.error, InvalidProblemError)
    assert "expected layout 'canonical', got 'dense_f32'; call plan.pack(weight)" in str(verdict.error)


@pytest.mark.parametrize(
    "wrong", [None, 3, np.ones((8, 16), np.float32)], ids=lambda value: type(value).__name__
)
def test_other_weights_are_refused_by_both_names(wrong):
    args = GemmSparse24Args(wrong, np.ones((2, 16), np.float32), np.ones((2, 8), np.float32))
    verdict = select(n=2, m=8, k=16, element="f32").can_implement(args)
    wanted = "weight: expected a PackedWeight of layout 'dense_f32' or a Sparse24Weight, got "
    assert str(verdict.error) == wanted + type(wrong).__name__


def test_the_result_may_not_lie_in_the_weight():
    plan = select(n=2, m=8, k=16, element="f32")
    packed = plan.pack(weight_of("f32", 8, 16))
    view = packed.buffers[0]
    y = TensorView(view.address + 64, (2, 8), "f32", view.device, owner=view.owner)
    verdict = plan.can_implement(GemmSparse24Args(packed, np.ones((2, 16), np.float32), y))
    assert "y: expected memory apart from weight" in str(verdict.error)


@pytest.mark.parametrize(("op", "m", "k"), [("forward", 8, 8192), ("dgrad", 4096, 8)])
@pytest.mark.parametrize("packed", [True, False])
def test_sums_of_s8_are_exact_however_long(op, m, k, packed):
    """All of one sign and of the largest magnitude: beyond 2^24, where float32 alone would round."""
    dense = np.zeros((m, k), np.int8)
    dense[:, 0::4] = dense[:, 1::4] = -128
    weight = Sparse24Weight.compress(dense)
    plan = select(n=2, m=m, k=k, element="s8", op=op)
    source = np.full((2, plan.descriptor.reduction), -128, np.int8)
    source[1] -= np.arange(source.shape[1], dtype=np.int8) % 2  # -128 - 1 wraps to 127
    result = np.zeros((2, plan.descriptor.outputs), np.int32)
    kind = GemmSparse24Args if op == "forward" else DgradSparse24Args
    plan.run(kind(plan.pack(weight) if packed else weight, source, result))
    wide = dense.astype(np.int64)
    want = source.astype(np.int64) @ (wide.T if op == "forward" else wide)
    assert abs(want).max() > 2**24
    assert np.array_equal(result, want)


def test_scratch_memory_is_bounded():
    """The product has many tokens and a canonical weight, which would take 32 MiB when packed."""
    m, k = 2048, 4096
    weight = weight_of("bf16", m, k)
    x, y = np.ones((1, k), ml_dtypes.bfloat16), np.empty((1, m), ml_dtypes.bfloat16)
    plan = select(n=1, m=m, k=k, element="bf16")

    def peak(run: Callable[[], object]) -> int:
        tracemalloc.start()
        run()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    packed = plan.pack(weight)
    assert peak(lambda: plan.run(GemmSparse24Args(packed, x, y))) < 1 << 20
    assert peak(lambda: plan.run(GemmSparse24Args(weight, x, y))) < 28 << 20


def test_a_packed_weight_is_not_inflated_again(monkeypatch):
    plan = select(n=2, m=8, k=16, element="bf16")
    packed = plan.pack(weight_of("bf16", 8, 16))
    monkeypatch.setattr(host.dense, "inflate", None)
    x, y = np.ones((2, 16), ml_dtypes.bfloat16), np.empty((2, 8), ml_dtypes.bfloat16)
    plan.run(GemmSparse24Args(packed, x, y))


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def test_a_packed_product_takes_little_more_than_numpys():
    """On a quiet machine 1.1 times at most; inflating the weight on the way would take twenty times."""
    m = k = 4096
    weight = weight_of("f32", m, k)
    plan = select(n=1, m=m, k=k, element="f32")
    x, y = np.ones((1, k), np.float32), np.empty((1, m), np.float32)
    args, dense = GemmSparse24Args(plan.pack(weight), x, y), weight.decompress()
    pairs = [(seconds(lambda: plan.run(args)), seconds(lambda: x @ dense.T)) for _ in range(60)]
    ours, theirs = (min(times) for times in zip(*pairs, strict=True))
    assert ours < 6 * theirs
