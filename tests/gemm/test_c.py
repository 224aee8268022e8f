"""Products add beta * C: in stated steps, inside the bound, with strides of its own, and upon Y itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
    explain,
)
from sparse24_plans.gemm.arithmetic.divergence import explain_difference
from sparse24_plans.gemm.arithmetic.results import Results
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules.mma_sp import split_k_of
from sparse24_plans.gemm.schedules.wgmma_sp import schedules_in
from sparse24_plans.plan.arithmetic import Arithmetic

from ..plan.cases import PlanCase, changed, random_inputs, rejected, select
from ..sample_devices import HOPPER
from ..support import Data, case_of, plan_of_row, random_data, same_bits
from .kernel_entries import OWN, marked, on_host, plan_of, row_of, tokens

rows = pytest.mark.parametrize("row", [marked(name) for name in OWN])
HOST_ROWS = ("host_strict", "host_blas")
RESULTS = {"s8": ("i32", "s8", "bf16"), "fp8_e4m3": ("bf16", "f32"), "f32": ("f32",)}
"""Results of an element; of the others they are the element and f32."""


def run_and_check(
    plan: GemmSparse24Plan, data: Data, *places: tuple[int, ...], in_place: bool = False
) -> np.ndarray:
    case = case_of(plan, data, *places, in_place=in_place)
    found = case.run()
    case.check(found)
    return found


# The definition -------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("row", HOST_ROWS)
def test_host_kernels_add_c_of_every_type_order_and_stride(row, data, seed):
    draw, rng = data.draw, np.random.default_rng(seed)
    element = draw(st.sampled_from(["f32", "f16", "bf16", "s8", "fp8_e4m3"]))
    out = draw(st.sampled_from(RESULTS.get(element, (element, "f32"))))
    fields = {
        "out_element": out,
        "c_element": draw(st.sampled_from([out, "f32"])),
        "beta": draw(st.sampled_from([1.0, -0.5, 1 / 3, 1e-30])),
        "alpha": draw(st.sampled_from([1.0, -0.37])),
        "epilogue": draw(st.sampled_from(["identity", "bias", "relu", "bias_silu"])),
        "y_order": draw(st.sampled_from(["row", "column"])),
        "scale_w": draw(st.sampled_from(["none", "row"])),
        "bias_element": "f32",
    }
    n, m = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    plan = plan_of(row, n=n, m=m, k=8 * draw(st.integers(0, 6)), element=element, **fields)
    operands = random_data(rng, plan.descriptor)
    pads = tuple(draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)))
    found = run_and_check(plan, operands, pads)
    if plan.descriptor.c_element is plan.descriptor.out_element:
        assert same_bits(found, run_and_check(plan, operands, pads, in_place=True))


@pytest.mark.parametrize("epilogue", ["identity", "bias_relu"])
@pytest.mark.parametrize("out", ["f32", "f16"])
def test_every_step_is_rounded_on_its_own(epilogue, out):
    """alpha * acc, beta * C, their sum, and the sum with the bias."""
    fields = {"n": 7, "m": 24, "k": 64, "element": "f16", "alpha": 0.7}
    wanted = {
        "epilogue": epilogue,
        "out_element": out,
        "bias_element": "f32",
        "c_element": "f32",
        "beta": -1 / 3,
    }
    plan = plan_of("host_strict", **fields, **wanted)
    data = random_data(np.random.default_rng(1), plan.descriptor)
    sums = case_of(
        plan_of("host_strict", **fields, out_element="f32"), replace(data, bias=None, c=None)
    ).run()
    v = sums + np.float32(-1 / 3) * data.c
    if epilogue == "bias_relu":
        v = np.maximum(v + data.bias, 0)
    assert same_bits(case_of(plan, data).run(), v.astype(plan.descriptor.out_element.dtype))


def test_integers_are_converted_to_float32_first():
    """2^24 + 1 is no float32, so the exact sum of integers is left."""
    plan = plan_of("host_strict", n=1, m=1, k=8, element="s8", beta=1.0)
    data = Data(np.zeros((1, 8), np.int8), np.zeros((1, 8), np.int8), c=np.array([[2**24 + 1]], np.int32))
    assert not plan.descriptor.is_plain
    assert case_of(plan, data).run()[0, 0] == 2**24


def test_without_beta_there_is_no_c():
    desc = GemmSparse24Descriptor(n=2, m=16, k=8, element="bf16", c_element="f32")
    assert not desc.has_c
    assert "c" not in {operand.name for operand in desc.operands()}
    assert desc.is_plain
    assert not desc.model_copy(update={"beta": 1.0}).is_plain
    case = PlanCase(select(desc, "host"), random_inputs(desc))
    rejected(case, replace(case.args, c=case.args.y), InvalidProblemError, "c: expected None")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epilogue": "bias_swiglu"}, "beta: expected 0 for epilogue bias_swiglu, got 1.0"),
        ({"op": "dgrad"}, "beta: expected 0 for op dgrad, got 1.0"),
        ({"c_element": "f16"}, "c_element: expected bf16 or f32, got f16"),
        ({"beta": float("nan")}, "beta"),
        ({"beta": 1e39}, "beta: expected a value finite in float32"),
    ],
)
def test_problems_without_a_meaning_are_refused(change, message):
    with pytest.raises(InvalidProblemError, match=message):
        GemmSparse24Descriptor(**{"n": 2, "m": 16, "k": 8, "element": "bf16", "beta": 1.0, **change})


# Operands -------------------------------------------------------------------------------------------


def test_c_may_be_y_and_nothing_else_that_overlaps_it():
    desc = GemmSparse24Descriptor(
        n=4, m=16, k=8, element="bf16", c_element="f32", out_element="f32", beta=1.0
    )
    case = PlanCase(select(desc, "host"), random_inputs(desc))
    assert case.plan.can_implement(replace(case.args, c=case.args.y))
    moved = changed(case.args.y, address=case.args.y.address + 16)
    rejected(case, replace(case.args, c=moved), InvalidProblemError, "y: expected memory apart from c")
    wider = changed(case.args.y, strides=(20, 1))
    rejected(case, replace(case.args, c=wider), InvalidProblemError, "y: expected memory apart from c")


def test_c_of_another_size_is_not_y():
    desc = GemmSparse24Descriptor(n=4, m=16, k=8, element="bf16", c_element="f32", beta=1.0)
    case = PlanCase(select(desc, "host"), random_inputs(desc))
    same_place = changed(case.args.y, element=ElementKind.F32)
    rejected(case, replace(case.args, c=same_place), InvalidProblemError, "y: expected memory apart from c")


def test_c_is_required_and_checked():
    desc = GemmSparse24Descriptor(n=4, m=16, k=8, element="bf16", beta=1.0)
    case = PlanCase(select(desc, "host"), random_inputs(desc))
    rejected(case, replace(case.args, c=None), InvalidProblemError, "c: expected a tensor bf16")
    wrong = changed(case.args.c, shape=(4, 8))
    rejected(case, replace(case.args, c=wrong), InvalidProblemError, "c: expected shape")


# Selection ------------------------------------------------------------------------------------------


def test_the_library_is_refused_by_name():
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", beta=0.5)
    reasons = {row: reason for row, _, reason in explain(desc, device=HOPPER).rows}
    assert reasons["cusparselt"] == "adds no C, got beta 0.5"
    assert reasons["wgmma_sp"] is None


def test_a_difference_is_traced_to_c():
    desc = GemmSparse24Descriptor(n=1, m=16, k=8, element="f32", beta=0.5, alpha=2.0)
    data = random_data(np.random.default_rng(0), desc)
    case = case_of(plan_of_row("host_strict").select(desc, device="host"), data)
    right = case.run().view(np.uint32)
    results = Results(desc, case.plan._check(case.args), Arithmetic.of("fma32_in_order"))
    for update, words in (({"beta": 0.0}, "C"), ({"beta": 1.0}, "beta")):
        other = results.of(desc.model_copy(update=update)).at(np.array([0]), np.array([3]))
        found = explain_difference(results, 0, 3, int(other[0]), int(right[0, 3]))
        assert found == f"after the sum, as if {words} were left out"


# Kernels --------------------------------------------------------------------------------------------

VARIANTS = [
    {},
    {"out_element": "f32", "epilogue": "bias_relu"},
    {"c_element": "f32", "epilogue": "bias_silu"},
    {"y_order": "column", "epilogue": "bias"},
]
SIZES = [(1, 200, 264), (37, 1088, 512), (300, 1104, 1040), (1500, 2064, 528)]
"""Sizes of schedules of every kind: split-K, few tokens, stream-K and several waves, with ragged ends."""


def problem_of(
    row: str, variant: dict[str, str], n: int, m: int, k: int, **more: object
) -> dict[str, object]:
    entry = row_of(row)
    element = entry.elements[-1]
    k -= k % 16 if element.itemsize == 1 else 0  # rows of 8-bit elements are multiples of 16 bytes
    fields = {"n": tokens(row, n), "m": m, "k": k, "element": element, "alpha": 0.75, "beta": -0.5}
    fields |= variant | more
    if element == "s8" and variant:
        fields |= {"out_element": variant.get("out_element", "s8"), "bias_element": "f32"}
    if "y_order" in variant and not entry.column_order:
        del fields["y_order"]
    if on_host(row):
        fields |= {"n": 5, "m": 40, "k": 64}
    return fields


@rows
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "f32", "mixed", "column"])
@pytest.mark.parametrize("n", [size[0] for size in SIZES])
def test_kernels_add_c(row, variant, n):
    """In guarded memory with gaps; C aligned for TMA and not; and in place, with the same bits."""
    (sizes,) = (one for one in SIZES if one[0] == n)
    plan = plan_of(row, **problem_of(row, variant, *sizes))
    data = random_data(np.random.default_rng(n), plan.descriptor)
    aligned = run_and_check(plan, data, (16, 16, 32))
    of_y = 0 if row == "inflate_cublas" else 1  # the library needs an aligned result
    any_stride = (
        plan.guarantee.deterministic and row != "inflate_cublas"
    )  # whose algorithms depend on strides
    for pads, offsets in (((0, 0, 3), (0, 0, 1)), ((16, 1, 16), (0, of_y, 0))):
        found = run_and_check(plan, data, pads, offsets)
        assert same_bits(aligned, found) or not any_stride
    if plan.descriptor.c_element is plan.descriptor.out_element:
        in_place = run_and_check(plan, data, (16, 16), in_place=True)
        assert same_bits(aligned, in_place) or not plan.guarantee.deterministic


@rows
def test_an_empty_sum_is_the_epilogue_of_c(row):
    fields = problem_of(row, {"epilogue": "relu"}, 20, 80, 0) | {"k": 0}
    if row_of(row).limits(GemmSparse24Descriptor(**fields)) is not None:
        pytest.skip("serves no empty sums")
    plan = plan_of(row, **fields)
    data = random_data(np.random.default_rng(0), plan.descriptor)
    run_and_check(plan, data)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [name for name in OWN if name.startswith("f32_split")])
@pytest.mark.parametrize("n", [5, 200])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_that_are_recomputed_add_c_once(row, n, in_place):
    """Values near 2^128 split into NaN. Their sums are recomputed after the store has replaced C."""
    plan = plan_of(row, n=n, m=336, k=512, element="f32", beta=0.5, epilogue="bias")
    data = random_data(np.random.default_rng(0), plan.descriptor)
    data.x[3], data.dense[:, 8:] = 3.39e38, 0
    data.dense[:, :8] = np.where(np.arange(8) % 4 == 0, 2.0**-126, 0)
    found = case_of(plan, data, (8, 8), in_place=in_place).run()
    strict = case_of(plan_of("host_strict", **plan.descriptor.model_dump()), data).run()
    assert np.isfinite(strict[3]).all()
    np.testing.assert_allclose(found[3], strict[3], rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "m", "k"), [(9, 4096, 1032), (64, 8448, 520), (200, 4096, 2048)])
def test_both_tensor_core_kernels_have_the_same_bits(monkeypatch, n, m, k):
    """The bits are the same where wgmma_sp cuts K into as many slices as mma_sp."""
    slices = split_k_of(m)
    schedule = next(one for one in schedules_in(slices, n) if one.split_k * one.k_chunks == slices)
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: schedule)
    fields = {
        "n": n,
        "m": m,
        "k": k,
        "element": "bf16",
        "epilogue": "bias_relu",
        "beta": 1 / 3,
        "alpha": 1.125,
    }
    plans = [plan_of(row, **fields) for row in ("mma_sp_many", "wgmma_sp")]
    assert plans[0].guarantee.arithmetic == plans[1].guarantee.arithmetic
    data = random_data(np.random.default_rng(n), plans[0].descriptor)
    assert same_bits(*(case_of(plan, data).run() for plan in plans))


@pytest.mark.gpu
@pytest.mark.parametrize("row", [name for name in OWN if not on_host(name)])
def test_a_replay_adds_c(row):
    plan = plan_of(row, **problem_of(row, {"epilogue": "bias_relu"}, 37, 208, 528))
    if plan.guarantee.arithmetic is None:
        pytest.skip("names no arithmetic")
    data = random_data(np.random.default_rng(1), plan.descriptor)
    result = np.ascontiguousarray(case_of(plan, data).run())
    args = GemmSparse24Args(Sparse24Weight.prune_compress(data.dense), data.x, result, data.bias, c=data.c)
    assert plan.replay(args, 200).equal
