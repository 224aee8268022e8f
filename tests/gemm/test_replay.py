"""Replay: equal bits are found equal, and a single wrong bit is found, with its place and its step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    DgradSparse24Args,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    UnsupportedError,
)
from sparse24_plans.gemm.arithmetic import tensor_core
from sparse24_plans.gemm.arithmetic.sums import step_places
from sparse24_plans.plan.arithmetic import Arithmetic

from ..support import random_data, weight_of

NAMES = {
    "f32": ["fma32_in_order", "hopper_tc_f32x6/slices=2", "hopper_tc_f32x3/slices=1"],
    "f16": ["fma32_in_order", "hopper_tc/slices=4"],
    "bf16": ["fma32_in_order", "hopper_tc/slices=1"],
    "s8": ["exact_sum"],
    "fp8_e4m3": ["hopper_tc_fp8/slices=3", "hopper_tc_fp8/promoted=128"],
    "fp8_e5m2": ["hopper_tc_fp8/slices=1"],
}
EACH = [(element, name) for element, names in NAMES.items() for name in names]


def ran(arithmetic: str, seed: int = 0, **problem: object):
    """A host plan of the arithmetic, and the arguments that it was run with."""
    desc = GemmSparse24Descriptor(**{"n": 5, "m": 24, "k": 520, **problem})
    plan = GemmSparse24Plan.select(desc, preference={"require": {"arithmetic": arithmetic}}, device="host")
    data = random_data(np.random.default_rng(seed), desc)
    weight = weight_of(data.dense, desc)
    result = np.zeros((desc.n, desc.outputs), desc.out_element.dtype)
    if desc.op == "dgrad":
        args = DgradSparse24Args(weight, data.x, result)
    else:
        args = GemmSparse24Args(weight, data.x, result, data.bias, data.scale_x, data.scale_w, data.c)
    plan.run(args)
    return plan, args, result.view(desc.out_element.bits_dtype)


@pytest.mark.parametrize(("element", "name"), EACH)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"epilogue": "bias_relu", "alpha": 0.7, "out_element": "f32"},
        {"epilogue": "relu2", "beta": 0.7, "c_element": "f32"},
    ],
)
def test_what_was_computed_replays(element, name, more):
    plan, args, _ = ran(name, element=element, **more)
    found = plan.replay(args)
    assert found.equal
    assert (found.arithmetic, found.compared, found.results) == (name, 120, 120)
    assert (found.differing, found.first) == (0, None)


@pytest.mark.parametrize("element", ["f32", "bf16", "s8"])
def test_dgrad_replays(element):
    name = "exact_sum" if element == "s8" else "fma32_in_order"
    plan, args, bits = ran(name, element=element, op="dgrad", k=40, m=70)
    assert plan.replay(args).equal
    bits[2, 31] ^= 1
    assert (plan.replay(args).first.token, plan.replay(args).first.output) == (2, 31)


@pytest.mark.parametrize(("element", "name"), EACH)
@settings(max_examples=5)
@given(data=st.data())
def test_a_single_wrong_bit_is_found(element, name, data):
    plan, args, bits = ran(name, element=element)
    token, output = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 23))
    right = int(bits[token, output])
    bits[token, output] ^= 1 << data.draw(st.integers(0, 8 * bits.itemsize - 1))
    found = plan.replay(args)
    assert (found.equal, found.differing) == (False, 1)
    first = found.first
    assert (first.token, first.output) == (token, output)
    assert (first.recorded_bits, first.recomputed_bits) == (int(bits[token, output]), right)
    kind = plan.descriptor.out_element.dtype
    np.testing.assert_array_equal(first.recorded, float(args.y[token, output].astype(kind)))


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([(9, 3), (2, 150), (2, 149), (39, 0)], (2, 149)),  # in several blocks of results
        ([(9, 3), (2, 5)], (2, 5)),  # in one block, whose results are ordered by output
    ],
)
def test_the_first_difference_by_token_and_output_is_told(places, first):
    plan, args, bits = ran("hopper_tc/slices=4", element="bf16", n=40, m=200)
    for at in places:
        bits[at] ^= 1
    found = plan.replay(args)
    assert found.differing == len(places)
    assert (found.first.token, found.first.output) == first


# Samples --------------------------------------------------------------------------------------------


def test_samples_are_random_results_each_once_and_follow_the_seed():
    plan, args, bits = ran("hopper_tc/slices=4", element="bf16", n=20, m=100)
    bits ^= 1  # all of them
    seen = {}
    for seed in range(3):
        found = plan.replay(args, 50, seed=seed)
        assert (found.compared, found.differing) == (50, 50)
        seen[seed] = found.first
        assert plan.replay(args, 50, seed=seed) == found
    assert len({(one.token, one.output) for one in seen.values()}) > 1
    assert plan.replay(args, 10**9).compared == 2000


@pytest.mark.parametrize("kind", [list, np.asarray, tuple])
def test_samples_may_be_pairs(kind):
    plan, args, bits = ran("hopper_tc/slices=4", element="bf16")
    bits[3, 7] ^= 1
    assert plan.replay(args, kind([[0, 1], [4, 23], [3, 8]])).equal
    found = plan.replay(args, kind([[0, 1], [3, 7], [3, 7]]))
    assert (found.compared, found.differing) == (3, 2)
    assert plan.replay(args, np.empty((0, 2), np.int64)).compared == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (0, "samples: expected at least 1, got 0"),
        (-3, "samples: expected at least 1"),
        ("all", "samples: expected None, a number of results, or pairs"),
        (2.5, "samples: expected None"),
        ([1, 2], "samples: expected None"),
        ([[0.5, 1]], "samples: expected None"),
        ([[0, 1, 2]], "samples: expected None"),
        ([[5, 0]], "samples: expected tokens from 0 to below 5, got 5"),
        ([[0, -1]], "samples: expected outputs from 0 to below 24, got -1"),
    ],
)
def test_wrong_samples_are_refused(samples, message):
    plan, args, _ = ran("hopper_tc/slices=4", element="bf16")
    with pytest.raises(InvalidProblemError, match=message):
        plan.replay(args, samples)


def test_other_wrong_arguments_are_refused():
    plan, args, _ = ran("hopper_tc/slices=4", element="bf16")
    with pytest.raises(InvalidProblemError, match="seed: expected an integer from 0"):
        plan.replay(args, 3, seed=-1)
    with pytest.raises(InvalidProblemError, match="on_block: expected a function, got int"):
        plan.replay(args, on_block=3)
    with pytest.raises(InvalidProblemError, match=r"x: expected shape \[5, 520\]"):
        plan.replay(GemmSparse24Args(args.weight, args.x[:4], args.y))
    fast = GemmSparse24Plan.select(plan.descriptor, device="host")
    with pytest.raises(
        UnsupportedError, match="replay: expected a plan that names its arithmetic, got host_blas"
    ):
        fast.replay(args)


def test_progress_counts_every_result():
    plan, args, _ = ran("hopper_tc/slices=4", element="bf16", n=50, m=100)
    seen = []
    plan.replay(args, on_block=seen.append)
    assert sum(seen) == 5000
    assert len(seen) > 1


# The first difference -------------------------------------------------------------------------------


def diverged(monkeypatch, wrong_step, name: str = "hopper_tc/slices=2", **problem: object) -> str | None:
    """Return the explanation of a run in which one step of the tensor cores was changed."""
    right, calls = tensor_core.add_products, []

    def faulty(products, exponents, accumulator, step):
        calls.append(1)
        return wrong_step(len(calls) - 1, right(products, exponents, accumulator, step), accumulator)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_core, "add_products", faulty)
        plan, args, _ = ran(name, **{"element": "bf16", "out_element": "f32", **problem})
    found = plan.replay(args)
    assert not found.equal
    return found.first.divergence


def test_a_step_that_was_left_out_is_named(monkeypatch):
    said = diverged(monkeypatch, lambda number, new, old: old if number == 9 else new, n=1, m=3)
    assert said == "as if the step of columns 288 to 319 (slice 1) were left out"


@pytest.mark.parametrize(
    ("element", "name", "step", "place"),
    [
        ("f32", "hopper_tc_f32x6/slices=1", 12, "columns 64 to 95 for term 2 of X and term 0 of W (slice 0)"),
        (
            "f32",
            "hopper_tc_f32x6/slices=2",
            53,
            "columns 288 to 319 for term 1 of X and term 0 of W (slice 1)",
        ),
        (
            "f32",
            "hopper_tc_f32x3/slices=1",
            24,
            "columns 256 to 287 for term 1 of X and term 0 of W (slice 0)",
        ),
        ("f32", "hopper_tc_f32x3/slices=2", 5, "columns 32 to 63 for term 0 of X and term 0 of W (slice 0)"),
        ("fp8_e4m3", "hopper_tc_fp8/promoted=128", 4, "columns 256 to 319 (slice 2)"),
    ],
)
def test_a_missing_step_of_promoted_sums_is_named(monkeypatch, element, name, step, place):
    """A sum's first step starts from zero, whatever the sum before it came to."""
    said = diverged(
        monkeypatch, lambda number, new, old: old if number == step else new, name, element=element, n=1, m=3
    )
    assert said == f"as if the step of {place} were left out"


@pytest.mark.parametrize(
    ("name", "last"), [("hopper_tc_f32x6/slices=1", 11), ("hopper_tc_f32x3/slices=1", 5)]
)
def test_a_unit_of_a_split_float32s_accumulator_is_found(monkeypatch, name, last):
    """K is one sum, so that the result is its last accumulator."""
    said = diverged(
        monkeypatch,
        lambda number, new, old: new + np.spacing(new.astype(np.float32)) * (number == last),
        name,
        element="f32",
        n=1,
        m=1,
        k=64,
    )
    assert said.startswith("as if the accumulator came out a unit off after the step of columns ")


def test_a_unit_in_the_last_place_is_found(monkeypatch):
    up = np.float32(np.inf)
    said = diverged(
        monkeypatch,
        lambda number, new, old: (
            np.nextafter(new.astype(np.float32), up).astype(float) if number == 16 else new
        ),
        n=1,
        m=1,
    )
    assert said.startswith("as if the accumulator came out a unit off after the step of columns ")


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"alpha": 1.0}, "alpha"),
        ({"scale_w": "none"}, "scale_w"),
        ({"epilogue": "relu"}, "the bias"),
        ({"epilogue": "bias"}, "the activation"),
        ({"epilogue": "identity"}, "bias and activation"),
    ],
)
def test_a_step_after_the_sum_is_named(change, left_out):
    whole = {"element": "bf16", "alpha": 0.7, "scale_w": "row", "epilogue": "bias_relu", "out_element": "f32"}
    plan, args, _ = ran("hopper_tc/slices=2", **whole)
    fields = {**whole, **change}
    part = GemmSparse24Descriptor(n=5, m=24, k=520, **fields)
    other = GemmSparse24Plan.select(
        part, preference={"require": {"arithmetic": "hopper_tc/slices=2"}}, device="host"
    )
    bias = args.bias if part.epilogue.has_bias else None
    scale = args.scale_w if part.scale_w == "row" else None
    wrong = np.empty_like(args.y)
    other.run(GemmSparse24Args(args.weight, args.x, wrong, bias, None, scale))
    at = np.argwhere((wrong != args.y) & (wrong < 0 if "activation" in left_out else args.y > 0))[0]
    args.y[tuple(at)] = wrong[tuple(at)]
    assert plan.replay(args).first.divergence == f"after the sum, as if {left_out} were left out"


@pytest.mark.parametrize("epilogue", ["bias", "bias_silu", "bias_gelu_tanh", "bias_swiglu", "bias_geglu"])
def test_a_missing_bias_alone_is_named(epilogue):
    plan, args, _ = ran("fma32_in_order", m=32, element="f32", epilogue=epilogue)
    part = plan.descriptor.model_copy(update={"epilogue": plan.descriptor.epilogue.activation})
    wrong = np.empty_like(args.y)
    GemmSparse24Plan.select(part, preference={"prefer_kernel": "host_strict"}, device="host").run(
        GemmSparse24Args(args.weight, args.x, wrong)
    )
    at = tuple(np.argwhere(wrong != args.y)[0])
    args.y[at] = wrong[at]
    assert plan.replay(args).first.divergence == "after the sum, as if the bias were left out"


@pytest.mark.parametrize("epilogue", ["relu", "bias_relu"])
@pytest.mark.parametrize("bounds", [{"relu_upper_bound": 6.0}, {"relu_threshold": 0.25}])
def test_a_wrong_result_of_a_bounded_relu_is_reported(epilogue, bounds):
    plan, args, _ = ran("fma32_in_order", element="f32", epilogue=epilogue, **bounds)
    args.y[1, 2] += 1
    found = plan.replay(args)
    assert (found.differing, found.first.divergence) == (1, None)


def test_what_no_step_explains_is_said_to_be_so():
    plan, args, _ = ran("hopper_tc/slices=2", element="bf16")
    args.y[1, 1] = 1e30
    assert plan.replay(args).first.divergence is None


def test_places_of_steps_name_slices_from_zero():
    desc = GemmSparse24Descriptor(n=1, m=1, k=520, element="bf16")
    found = step_places(desc, Arithmetic.of("hopper_tc/slices=2"))
    assert (found[0].slice, found[0].columns, found[-1].columns) == (0, (0, 32), (512, 520))
