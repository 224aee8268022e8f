"""Tolerances of epilogues, softmax and attention: they hold for hostile values, and are hardly wider."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseAttentionArgs,
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseLayout,
    BlockSparseSoftmaxArgs,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    ElementKind,
    EpilogueKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
)
from sparse24_plans.arithmetic.epilogue import encoded
from sparse24_plans.gemm import guarantees
from sparse24_plans.plan import tolerance

from ..float64 import activate, rows_of_gates, saturated, tanh_exponent
from ..gemm.fast_math import APPROXIMATE, fast_gelu, fast_gelu_tanh, fast_silu

U, TINY = 2.0**-24, 2.0**-149
N, M, K = 13, 32, 24
FINITE = float(np.finfo(np.float32).max)
kinds = pytest.mark.parametrize("kind", list(EpilogueKind), ids=str)
seeds = st.integers(0, 2**32 - 1)


def hostile(rng: np.random.Generator, shape: tuple[int, ...], element: ElementKind) -> np.ndarray:
    """Numbers of every size, near each other and cancelling, subnormal and zero. Sums don't overflow."""
    if element is ElementKind.S8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    span = {"f16": 6, "fp8_e4m3": 3}.get(element, 25)
    sizes = 2.0 ** rng.uniform(-span, rng.choice([1, span / 3]), shape)
    values = rng.choice([-1.0, 1.0], shape) * np.where(
        rng.random(shape) < 0.3, sizes, rng.uniform(0, 4, shape)
    )
    values = np.where(rng.random(shape) < 0.1, element.smallest_subnormal * rng.integers(0, 9, shape), values)
    return values.astype(np.float32).astype(element.dtype)


def exact_result(v: np.ndarray, kind: EpilogueKind) -> np.ndarray:
    """The epilogue in float64."""
    if not kind.is_gated:
        return activate(v, kind)
    gate, up = rows_of_gates(v)
    return activate(gate, kind) * up


# Products -----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("kernel", ["host_blas", "host_strict"])
@settings(max_examples=6)
@given(data=st.data(), seed=seeds)
def test_a_result_is_within_the_tolerance(kernel, kind, data, seed):
    """Against float64, far from the grid of round numbers."""
    element = data.draw(st.sampled_from([ElementKind(e) for e in ("f32", "f16", "bf16", "s8", "fp8_e4m3")]))
    outs = {"s8": ("s8", "f32", "bf16"), "fp8_e4m3": ("bf16", "f16", "f32")}.get(element, (element, "f32"))
    rng = np.random.default_rng(seed)
    fields = {
        "out_element": data.draw(st.sampled_from(outs)),
        "epilogue": kind,
        "alpha": data.draw(st.sampled_from([1.0, -0.37, 2.0**-30, 3.1, 1e-39])),
        "bias_element": "f32",
        "scale_x": data.draw(st.sampled_from(["none", "tensor", "row"])),
        "scale_w": data.draw(st.sampled_from(["none", "tensor", "row"])),
    }
    desc = GemmSparse24Descriptor(n=N, m=M, k=K, element=element, **fields)
    plan = GemmSparse24Plan.select(desc, preference={"prefer_kernel": kernel}, device="host")
    weight = Sparse24Weight.prune_compress(hostile(rng, (M, K), element))
    x, y = hostile(rng, (N, K), element), np.zeros((N, desc.outputs), desc.out_element.dtype)
    bias = hostile(rng, (M,), ElementKind.F32) if kind.has_bias else None
    scales = {
        name: (10 ** rng.uniform(-3, 1, 1 if desc_kind == "tensor" else rows)).astype(np.float32)
        for name, desc_kind, rows in (("scale_x", desc.scale_x, N), ("scale_w", desc.scale_w, M))
        if desc_kind != "none"
    }
    with np.errstate(all="ignore"):
        plan.run(GemmSparse24Args(plan.pack(weight), x, y, bias, **scales))
    columns = {"scale_x": (-1, 1), "scale_w": (1, -1)}
    wide = {name: one.astype(np.float64).reshape(columns[name]) for name, one in scales.items()}
    factor = math.prod(wide.values(), start=desc.alpha)
    dense, of_x = weight.decompress().astype(np.float64), x.astype(np.float64)
    sizes = [plan.guarantee.magnitudes(one, element) for one in (of_x, dense.T)]
    exact = factor * (of_x @ dense.T)
    allowed = plan.guarantee.tolerance(
        K,
        exact,
        sizes[0] @ sizes[1],
        desc.out_element,
        desc.alpha,
        epilogue=kind,
        bias=bias,
        **wide,
    )
    want = exact_result(exact if bias is None else exact + bias, kind)
    assert allowed.shape == y.shape == want.shape
    covered = (
        np.abs(want) + allowed < min(FINITE, float(ml_dtypes.finfo(desc.out_element.dtype).max))
        if (not desc.out_element.is_integer)
        else np.abs(want) < 2.0**31
    )
    error = np.abs(y.astype(np.float64) - saturated(want, desc.out_element))
    assert (error[covered] <= allowed[covered]).all()


@kinds
@pytest.mark.parametrize(
    "zero", [{}, {"alpha": 0.0}, {"scale_x": 0.0}, {"scale_w": 0.0}, {"scale_y": 0.0}], ids=str
)
def test_zero_times_an_unbounded_error_is_zero(kind, zero):
    """Sums of fp8 this long have no bound, unless all their products are zeros, as in rows of padding."""
    promise = guarantees.wgmma_sp_fp8(GemmSparse24Descriptor(n=1, m=32, k=16384, element="fp8_e4m3"))
    assert promise.error_bound(16384) == float("inf")
    abs_sum = np.array([[0.0] * 32, [1.0] * 32])
    bias = np.zeros(32) if kind.has_bias else None
    allowed = promise.tolerance(16384, 0 * abs_sum, abs_sum, "bf16", epilogue=kind, bias=bias, **zero)
    assert (allowed[0] < 1e-30).all()
    assert (allowed[1] < 1e-30).all() if zero else np.isposinf(allowed[1]).all()


@pytest.mark.parametrize("weights", [[0.0], [2.0]])
def test_zero_times_an_unbounded_error_adds_nothing(weights):
    promise = guarantees.wgmma_sp_fp8(GemmSparse24Descriptor(n=1, m=32, k=8, element="fp8_e4m3"))
    allowed = promise.summed_tolerance(np.ones((1, 2)), np.array([[1e-9, np.inf]]), "f32", np.array(weights))
    assert np.isposinf(allowed[1]) if weights[0] else (allowed < 1e-30).all()


@pytest.mark.parametrize("kernel", ["host_blas", "host_strict"])
@pytest.mark.parametrize("element", ["f32", "bf16"])
@settings(max_examples=15)
@given(steps=st.floats(0.51, 2), seed=seeds)
def test_an_alpha_that_float32_stores_roughly_is_within_the_tolerance(element, kernel, steps, seed):
    """A subnormal alpha is rounded by up to its size. The sums are large, so that results are normal."""
    rng, alpha, kind = np.random.default_rng(seed), steps * TINY, ElementKind(element)
    desc = GemmSparse24Descriptor(n=N, m=M, k=K, element=element, alpha=alpha)
    plan = GemmSparse24Plan.select(desc, preference={"prefer_kernel": kernel}, device="host")
    w, x = (
        (1e18 * rng.uniform(1, 2, shape)).astype(np.float32).astype(kind.dtype) for shape in ((M, K), (N, K))
    )
    weight, y = Sparse24Weight.prune_compress(w), np.zeros((N, M), kind.dtype)
    plan.run(GemmSparse24Args(plan.pack(weight), x, y))
    sums = x.astype(np.float64) @ weight.decompress().astype(np.float64).T
    allowed = plan.guarantee.tolerance(K, alpha * sums, sums, element, alpha)
    assert (np.abs(y.astype(np.float64) - alpha * sums) <= allowed).all()
    rounded = abs(float(np.float32(alpha)) - alpha) / alpha
    most = rounded + (40 * U + 1.1 * kind.unit_roundoff) * (1 + rounded)
    assert (allowed <= most * alpha * sums).all()


@pytest.mark.parametrize("kernel", ["host_blas", "host_strict"])
@pytest.mark.parametrize("kind", ["bias_swiglu", "bias_geglu"])
@settings(max_examples=15)
@given(exponent=st.floats(-149, -140), large=st.floats(0, 60), seed=seeds)
def test_subnormal_gate_of_large_value_is_within_tolerance(kind, kernel, exponent, large, seed):
    """A subnormal alpha makes the gates subnormal, and the bias makes what they multiply large."""
    rng, alpha = np.random.default_rng(seed), 2.0**exponent
    desc = GemmSparse24Descriptor(n=N, m=M, k=K, element="f32", epilogue=kind, alpha=alpha)
    plan = GemmSparse24Plan.select(desc, preference={"prefer_kernel": kernel}, device="host")
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (N, K)))
    bias = (2.0**large * (np.arange(M) // 8 % 2)).astype(np.float32)
    weight, y = Sparse24Weight.prune_compress(w), np.zeros((N, desc.outputs), np.float32)
    plan.run(GemmSparse24Args(plan.pack(weight), x, y, bias))
    sizes = [one.astype(np.float64) for one in (x, weight.decompress().T)]
    exact, abs_sum = alpha * (sizes[0] @ sizes[1]), np.abs(sizes[0]) @ np.abs(sizes[1])
    allowed = plan.guarantee.tolerance(K, exact, abs_sum, "f32", alpha, epilogue=kind, bias=bias)
    assert (np.abs(y - exact_result(exact + bias, EpilogueKind(kind))) <= allowed).all()


def cuda_activation(v: np.ndarray, kind: EpilogueKind, rng: np.random.Generator) -> np.ndarray:
    """FastMath of common/epilogue.cuh, with functions that are as wrong as the hardware may make them."""
    fast = {"silu": fast_silu, "swiglu": fast_silu, "gelu": fast_gelu, "geglu": fast_gelu}
    fast |= {"gelu_tanh": fast_gelu_tanh, "geglu_tanh": fast_gelu_tanh}
    if kind.activation in fast:
        with np.errstate(over="ignore", under="ignore"):
            return fast[kind.activation](v, *rng.choice([-APPROXIMATE, APPROXIMATE], (2, *v.shape)))
    if kind.activation == "relu2":
        return np.maximum(v, np.float32(0)) ** 2
    return np.maximum(v, np.float32(0)) if kind.activation == "relu" else v


@kinds
@settings(max_examples=15)
@given(seed=seeds, widest=st.sampled_from([1e-3, 1.0, 8.0, 40.0, 140.0, 1e4]))
def test_activations_of_cuda_at_their_worst_are_within_the_tolerance(kind, seed, widest):
    """The sum is one product without an error of its own, so that the epilogue alone decides."""
    rng = np.random.default_rng(seed)
    sums = (widest * rng.standard_normal((16, 64))).astype(np.float32)
    bias = (
        (widest * rng.standard_normal(64)).astype(np.float32) if kind.has_bias else np.zeros(64, np.float32)
    )
    v = sums + bias
    if kind.is_gated:
        gate, up = rows_of_gates(v)
        got = cuda_activation(gate, kind, rng) * up
    else:
        got = cuda_activation(v, kind, rng)
    assert got.dtype == np.float32
    promise = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=4, m=64, k=8, element="bf16"), device="h200"
    ).guarantee
    exact = sums.astype(np.float64)
    given_bias = {"bias": bias} if kind.has_bias else {}
    allowed = promise.tolerance(0, exact, np.abs(exact), "f32", epilogue=kind, **given_bias)
    want = exact_result(exact + bias, kind)
    assert (np.abs(got - want) <= allowed).all()
    # Nothing is allowed that an error of a few units in the last place of the operands doesn't explain.
    sizes = np.abs(exact) + np.abs(bias)
    if kind.activation == "relu2":
        sizes = sizes**2
    if kind.is_gated:
        of_gate, of_up = rows_of_gates(sizes)
        sizes = of_gate * of_up * 2
    assert (allowed <= 40 * U * sizes + 2.0**-119 * (1 + sizes)).all()


@settings(max_examples=15)
@given(seed=seeds, widest=st.sampled_from([1e-3, 1.0, 8.0]))
def test_the_tanh_of_a_library_is_within_its_guarantee(seed, widest):
    """cuSPARSELt's GELU takes the hardware's tanh, whose error its guarantee has as a field."""
    rng = np.random.default_rng(seed)
    v = (widest * rng.standard_normal((16, 64))).astype(np.float32)
    tanh = np.tanh(tanh_exponent(v.astype(np.float64)) / 2) + 2.0**-11 * rng.uniform(-1, 1, v.shape)
    got = np.float32(0.5) * v * (np.float32(1) + tanh.astype(np.float32))
    problem = GemmSparse24Descriptor(n=4, m=64, k=8, element="bf16")
    exact, kind = v.astype(np.float64), EpilogueKind.GELU_TANH
    library, own = (
        guarantee(problem).tolerance(0, exact, np.abs(exact), "f32", epilogue=kind)
        for guarantee in (guarantees.cusparselt, guarantees.wgmma_sp)
    )
    assert (np.abs(got - activate(exact, kind)) <= library).all()
    assert (library - own <= 1.01 * 2.0**-11 * np.abs(exact)).all()
    assert (library - own >= 2.0**-11 * np.abs(exact)).all()


@settings(max_examples=25)
@given(seed=seeds, beta=st.sampled_from([1.0, -0.37, 1e-39, 3e8]), out=st.sampled_from(["f32", "bf16"]))
def test_c_is_within_the_tolerance(seed, beta, out):
    """C, beta, their product and the sum are rounded, and all of this is allowed but hardly more."""
    rng, element = np.random.default_rng(seed), ElementKind(out)
    c, sums = (hostile(rng, (16, 64), ElementKind.F32) for _ in range(2))
    promise = guarantees.strict(GemmSparse24Descriptor(n=4, m=64, k=8, element="f32"))
    exact = sums.astype(np.float64)
    allowed = promise.tolerance(0, exact, np.abs(exact), out, beta=beta, c=c)
    found = (sums + np.float32(beta) * c).astype(element.dtype).astype(np.float64)
    want = exact + beta * c.astype(np.float64)
    assert (np.abs(found - want) <= allowed).all()
    of_beta = abs(float(np.float32(beta)) - beta) / abs(beta)
    parts = np.abs(exact) + np.abs(beta * c.astype(np.float64)) * (1 + of_beta)
    rough = (8 * U + of_beta + 1.02 * element.unit_roundoff) * parts
    assert (allowed <= rough + 16 * TINY + element.smallest_subnormal).all()


@settings(max_examples=25)
@given(
    seed=seeds, scale=st.sampled_from([1.0, 0.37, 300.0, 1e-6]), out=st.sampled_from(["fp8_e4m3", "fp8_e5m2"])
)
def test_a_scaled_fp8_result_is_within_the_tolerance(seed, scale, out):
    """The scaled product with its rounding is allowed, hardly more; also for values that saturate."""
    rng, element, scale = np.random.default_rng(seed), ElementKind(out), float(np.float32(scale))
    sums = hostile(rng, (16, 64), ElementKind.F32)
    promise = guarantees.strict(GemmSparse24Descriptor(n=4, m=64, k=8, element="f32"))
    exact = sums.astype(np.float64)
    allowed = promise.tolerance(0, exact, np.abs(exact), out, scale_y=scale)
    found = encoded(sums * np.float32(scale), element).view(element.dtype).astype(np.float64)
    assert (np.abs(found - saturated(exact * scale, element)) <= allowed).all()
    rough = (8 * U + 1.02 * element.unit_roundoff) * np.abs(exact * scale)
    assert (allowed <= rough + 16 * (1 + scale) * TINY + element.smallest_subnormal).all()


@settings(max_examples=25)
@given(seed=seeds, threshold=st.sampled_from([0.0, 0.5, -1.5]), most=st.sampled_from([2.0, 6.0, None]))
def test_bounds_of_relu_are_within_the_tolerance(seed, threshold, most):
    """A sum that is wrong by what is allowed may lie on the other side of the threshold."""
    rng, bounds = np.random.default_rng(seed), (threshold, np.inf if most is None else most)
    problem = GemmSparse24Descriptor(n=4, m=64, k=64, element="bf16")
    exact = np.where(rng.random((16, 64)) < 0.5, threshold, rng.uniform(-8, 8, (16, 64)))
    abs_sum, promise = 100 * np.abs(exact), guarantees.wgmma_sp(problem)
    wrong = exact + rng.choice([-1, 0, 1], exact.shape) * promise.error_bound(64) * abs_sum
    names = {"relu_threshold": threshold, "relu_upper_bound": most}
    allowed = promise.tolerance(64, exact, abs_sum, "f32", epilogue="relu", **names)
    error = np.abs(activate(wrong, "relu", bounds) - activate(exact, "relu", bounds))
    assert (error <= allowed).all()
    near = np.abs(exact - threshold) <= 1.1 * promise.error_bound(64) * abs_sum + 8 * U
    smooth = 1.1 * promise.error_bound(64) * abs_sum + 20 * U * (1 + np.abs(exact)) + 8 * U * abs(threshold)
    assert (allowed <= smooth + np.where(near, 1.01 * abs(threshold) + smooth, 0)).all()


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_tanh"])
def test_no_slope_is_steeper_than_constant_and_none_much_flatter(name):
    v = np.linspace(-30, 30, 400_001)
    slopes = np.abs(np.diff(activate(v, name)) / np.diff(v))
    assert slopes.max() <= tolerance._SLOPES[name] <= slopes.max() + 0.01
    values = np.abs(activate(v, name))
    assert (values <= tolerance._size_of(v, name) + 1e-15 * np.abs(v)).all()


@settings(max_examples=12)
@given(seed=seeds, sign=st.sampled_from([-1.0, 1.0]))
@kinds
def test_an_error_of_the_sum_is_passed_on(kind, seed, sign):
    """A sum that is as wrong as the error bound allows still gives a result within the tolerance."""
    rng = np.random.default_rng(seed)
    exact, bias = rng.uniform(-6, 6, (15, 32)), rng.uniform(-2, 2, 32)
    promise = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=4, m=64, k=4096, element="fp8_e4m3"), device="h200"
    ).guarantee
    abs_sum = np.abs(exact) * rng.uniform(1, 100, exact.shape)
    bound = promise.error_bound(4096)
    assert bound > 0.1
    bias = bias if kind.has_bias else 0 * bias
    wrong = exact + sign * bound * abs_sum
    given_bias = {"bias": bias} if kind.has_bias else {}
    allowed = promise.tolerance(4096, exact, abs_sum, "f32", epilogue=kind, **given_bias)
    found, want = exact_result(wrong + bias, kind), exact_result(exact + bias, kind)
    assert (np.abs(found - want) <= allowed).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epilogue": "squash"}, "epilogue: expected one of identity, relu"),
        ({"epilogue": np.zeros(2)}, "epilogue: expected one of identity, relu"),
        ({"epilogue": functools.reduce(lambda inner, _: [inner], range(100_000), [])}, "epilogue: expected"),
        ({"epilogue": "bias_silu"}, "bias: expected an array for epilogue bias_silu, got None"),
        ({"bias": np.ones(32)}, "bias: expected None for epilogue identity"),
        ({"c": np.ones(32)}, "c: expected None for beta 0.0"),
        ({"beta": 0.5}, "c: expected an array for beta 0.5, got None"),
        ({"relu_threshold": "low"}, "relu_threshold: expected numbers"),
        (
            {"epilogue": "bias", "bias": np.ones(31)},
            r"bias: expected a shape that broadcasts to the \(2, 32\) of exact",
        ),
        ({"scale_x": np.ones(2)}, "scale_x: expected a shape"),
        ({"scale_w": "x"}, "scale_w: expected numbers"),
        ({"abs_sum": np.ones((1, 2, 32))}, "abs_sum: expected a shape"),
        (
            {"epilogue": "bias_swiglu", "bias": 1.0, "exact": np.ones(8), "abs_sum": 1.0},
            "exact: expected columns in groups of 16",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    promise = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=2, m=32, k=8, element="f32"), device="host"
    ).guarantee
    fields = {"k": 8, "exact": np.ones((2, 32)), "abs_sum": np.ones((2, 32)), "out": "f32", **change}
    with pytest.raises(InvalidProblemError, match=said):
        promise.tolerance(**fields)


# Softmax and attention ----------------------------------------------------------------------------


def a_layout(rng: np.random.Generator, heads: int, rows: int, cols: int, block: int) -> BlockSparseLayout:
    bitmap = rng.random((heads, rows // block, cols // block)) < 0.6
    bitmap[:, :, 0] = True
    return BlockSparseLayout(bitmap, block)


@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
@settings(max_examples=10)
@given(seed=seeds, widest=st.sampled_from([0.1, 3.0, 60.0]), scale=st.sampled_from([1.0, -0.3, 1 / 7]))
def test_a_softmax_is_within_the_tolerance(element, seed, widest, scale):
    rng = np.random.default_rng(seed)
    layout = a_layout(rng, 1, 32, 64, 16)
    desc = BlockSparseSoftmaxDescriptor(layout=layout.shape, batch=1, element=element, scale=scale)
    plan = BlockSparseSoftmaxPlan.select(desc, device="host")
    dtype = ElementKind(element).dtype
    x = (widest * rng.standard_normal((1, layout.shape.blocks, 16, 16))).astype(np.float32).astype(dtype)
    y = np.empty_like(x)
    plan.run(BlockSparseSoftmaxArgs(plan.pack(layout), x, y))
    kept = layout.bitmap.repeat(16, 1).repeat(16, 2)
    scores = np.where(kept, scale * layout.to_dense(x.astype(np.float32)).astype(np.float64), -np.inf)
    sizes = np.where(kept, np.abs(scores), 0.0)
    allowed = plan.guarantee.softmax_tolerance(desc.reduction, scores, sizes, element)
    want = np.exp(scores - scores.max(-1, keepdims=True))
    want /= want.sum(-1, keepdims=True)
    got = layout.to_dense(y.astype(np.float32)).astype(np.float64)
    assert (np.abs(got - want) <= allowed).all()
    out = ElementKind(element)
    relative = 1e-5 * (1 + widest) + 1.1 * out.unit_roundoff
    assert (allowed <= want * relative + 2 * (out.smallest_subnormal + TINY)).all()


@pytest.mark.parametrize("kernel", ["host_blas", "host_strict"])
@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
@settings(max_examples=10)
@given(seed=seeds, widest=st.sampled_from([0.1, 1.0, 3.0]))
def test_attention_is_within_the_tolerance(kernel, element, seed, widest):
    rng = np.random.default_rng(seed)
    layout, depth = a_layout(rng, 2, 32, 64, 16), 16
    desc = BlockSparseAttentionDescriptor(
        layout=layout.shape, batch=1, element=element, head_size=depth, scale=0.21
    )
    plan = BlockSparseAttentionPlan.select(desc, preference={"prefer_kernel": kernel}, device="host")
    kind = ElementKind(element)
    q, k, v = (hostile(rng, (1, 2, rows, depth), kind) for rows in (32, 64, 64))
    q = (widest * np.clip(q.astype(np.float32), -4, 4)).astype(kind.dtype)
    o, lse = np.empty((1, 2, 32, depth), kind.dtype), np.empty((1, 2, 32), np.float32)
    plan.run(BlockSparseAttentionArgs(plan.pack(layout), q, k, v, o, lse))
    kept = layout.bitmap.repeat(16, 1).repeat(16, 2)[None]
    wide = [one.astype(np.float64) for one in (q, k, v)]
    sizes = [plan.guarantee.magnitudes(one, kind) for one in wide[:2]]
    scores = np.where(kept, desc.scale * (wide[0] @ wide[1].swapaxes(-1, -2)), -np.inf)
    of_scores = desc.scale * (sizes[0] @ sizes[1].swapaxes(-1, -2))
    allowed, of_lse = plan.guarantee.attention_tolerance(
        desc.reduction, scores, of_scores, wide[2], element, head_size=depth
    )
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - top)
    want = powers / powers.sum(-1, keepdims=True) @ wide[2]
    assert (np.abs(o.astype(np.float64) - want) <= allowed).all()
    assert (np.abs(lse - (top + np.log(powers.sum(-1, keepdims=True)))[..., 0]) <= of_lse).all()


@pytest.mark.parametrize("size", [1e7, 1e9, 1e12])
def test_softmax_weights_err_by_at_most_about_1(size):
    promise = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=2, m=32, k=8, element="f32"), device="host"
    ).guarantee
    scores = np.array([[size, 0.0, -np.inf], [size, size, size]])
    sizes, values = np.full((2, 3), size), np.array([[3.0], [5.0], [7.0]])
    found = promise.softmax_tolerance(3, scores, sizes, "f32")
    assert (found <= 1.00001).all()
    assert found[0, 2] <= 4 * TINY
    # The first row may become any mean of 3 and 5, and the second one of all three.
    o, _ = promise.attention_tolerance(3, scores, sizes, values, "f32", head_size=4)
    assert (o >= [[2 * (size > 1e8)], [2 * (size > 1e8)]]).all()
    assert (o <= [[8.001], [15.001]]).all()


def test_rows_of_which_nothing_is_kept():
    promise = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=2, m=32, k=8, element="f32"), device="host"
    ).guarantee
    hidden = np.full((2, 3), -np.inf)
    allowed = promise.softmax_tolerance(3, hidden, np.zeros((2, 3)), "f32")
    assert (allowed <= 4 * TINY).all()
    for cols in (0, 3):
        scores, values = np.full((2, cols), -np.inf), np.ones((cols, 4))
        o, lse = promise.attention_tolerance(cols, scores, 0 * scores.clip(0), values, "f32", head_size=4)
        assert np.isfinite(o).all()
        assert o.shape == (2, 4)
        assert lse.shape == (2,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scores": 1.0}, r"scores: expected at least 2 axes, got shape \(\)"),
        ({"scores": np.ones(4)}, r"scores: expected at least 2 axes, got shape \(4,\)"),
        ({"sizes": np.ones((3, 5))}, "sizes: expected a shape"),
        ({"values": np.ones(4)}, "values: expected 4 rows"),
        ({"values": np.ones((5, 8))}, "values: expected 4 rows"),
        ({"values": np.ones((2, 4, 8))}, "values: expected a shape"),
    ],
)
def test_scores_sizes_and_values_that_do_not_fit_are_refused(change, said):
    promise = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=2, m=32, k=8, element="f32"), device="host"
    ).guarantee
    given = {"scores": np.ones((3, 4)), "sizes": np.ones((3, 4)), "values": np.ones((4, 8))} | change
    with pytest.raises(InvalidProblemError, match=said):
        promise.attention_tolerance(4, **given, element="f32", head_size=8)
