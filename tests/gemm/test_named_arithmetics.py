"""Which arithmetic each row names, where one is required, and that equal names mean equal bits."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PlanPreference,
    PrecisionGuarantee,
    Sparse24Weight,
    explain,
)
from sparse24_plans.gemm.arithmetic.results import Results, places
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.plan.arithmetic import Arithmetic
from sparse24_plans.plan.kernel import Choice

from ..sample_devices import AMPERE, HOPPER, HOST, gpu_of
from ..support import ELEMENTS, EPILOGUES, case_of, make_case, random_data, same_bits
from .kernel_entries import row_of
from .scalar_arithmetic import tensor_core_sum

SLICED = {"f16": "hopper_tc", "bf16": "hopper_tc", "fp8_e4m3": "hopper_tc_fp8"}


def named(row: str, device, **problem: object) -> str | None:
    desc = GemmSparse24Descriptor(**{"n": 16, "m": 4096, "k": 4096, **problem})
    return row_of(row).kernel.arithmetic(Choice(desc, device, row_of(row), PlanPreference(), {}))


def requiring(arithmetic: str, **more: object) -> PlanPreference:
    return PlanPreference(require={"arithmetic": arithmetic}, **more)


# Named arithmetics of kernels -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "element", "name"),
    [
        ("inflate_strict", "f32", "fma32_in_order"),
        ("inflate_strict", "bf16", "fma32_in_order"),
        ("mma_sp", "f16", "hopper_tc/slices=8"),
        ("mma_sp_many", "bf16", "hopper_tc/slices=8"),
        ("wgmma_sp_s8", "s8", "exact_sum"),
        ("wgmma_sp_fp8_promoted", "fp8_e4m3", "hopper_tc_fp8/promoted=128"),
        ("inflate_cublas", "bf16", None),
        ("cusparselt", "f16", None),
        ("cusparselt_fp8", "fp8_e4m3", None),
    ],
)
def test_on_hopper(row, element, name):
    assert named(row, HOPPER, element=element) == name


@pytest.mark.parametrize("row", ["wgmma_sp", "wgmma_sp_invariant", "wgmma_sp_fp8", "wgmma_sp_fp8_invariant"])
def test_rows_of_wgmma_name_their_slices(row):
    element = row_of(row).elements[0]
    name = named(row, HOPPER, element=element)
    assert Arithmetic.of(name) == Arithmetic.hopper(element, Arithmetic.of(name).slices)


@pytest.mark.parametrize("row", ["host_strict", "host_blas"])
@pytest.mark.parametrize("element", ["f32", "s8", "fp8_e4m3"])
def test_on_the_host(row, element):
    exact = "exact_sum" if element == "s8" else "fma32_in_order"
    assert named(row, HOST, element=element) == (exact if row == "host_strict" else None)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_other_tensor_cores_name_none(capability):
    """Tensor cores other than Hopper's add in other steps."""
    for row in ("mma_sp", "mma_sp_many"):
        assert named(row, gpu_of(*capability), element="bf16") is None
    assert named("mma_sp_fp8", gpu_of(*capability), element="fp8_e4m3") is None
    assert named("inflate_strict", gpu_of(*capability), element="bf16") == "fma32_in_order"


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    "row", [row.name for row in ENTRIES if row.backend in ("mma_sp", "wgmma_sp") and row.name != "mma_sp_fp8"]
)
def test_activations_of_cudas_library_have_no_name(row, epilogue):
    in_steps = epilogue in ("identity", "bias", "bias_relu")
    assert (named(row, HOPPER, element=row_of(row).elements[0], epilogue=epilogue) is not None) == in_steps


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_the_strict_rows_define_all_epilogues(epilogue):
    for row, device in (("inflate_strict", HOPPER), ("host_strict", HOST)):
        assert named(row, device, element="bf16", epilogue=epilogue) == "fma32_in_order"


# Requirements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", SLICED)
@pytest.mark.parametrize("n", [1, 16, 700])
def test_a_gpu_serves_exactly_the_arithmetics_its_kernels_name(element, n):
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element=element)
    by_name = {}
    for slices in range(1, 9):
        name = str(Arithmetic.hopper(desc.element, slices))
        answer = explain(desc, preference=requiring(name), device=HOPPER)
        by_name[name] = {row for row, _, reason in answer.rows if reason is None}
        assert answer.chosen is None or answer.chosen in by_name[name]
    for row in ENTRIES:
        others = row.promoted or row.only_groups or row.name == "mma_sp_fp8"
        if row.backend in ("mma_sp", "wgmma_sp") and desc.element in row.elements and not others:
            own = named(row.name, HOPPER, n=n, element=element)
            for name, rows in by_name.items():
                assert row.name not in rows or name == own
            assert row.name in by_name[own] or row.limits(desc) is not None


@pytest.mark.parametrize(
    ("element", "name", "row"),
    [
        ("f32", "fma32_in_order", "host_strict"),
        ("fp8_e4m3", "fma32_in_order", "host_strict"),
        ("s8", "exact_sum", "host_strict"),
        *((element, f"{kind}/slices=5", "host_tensor_core") for element, kind in SLICED.items()),
        ("fp8_e4m3", "hopper_tc_fp8/promoted=128", "host_tensor_core"),
        ("s8", "fma32_in_order", None),
        ("f32", "hopper_tc/slices=1", None),
        ("bf16", "hopper_tc_fp8/slices=1", None),
        ("bf16", "exact_sum", None),
    ],
)
def test_the_host_runs_each(element, name, row):
    desc = GemmSparse24Descriptor(n=2, m=8, k=16, element=element)
    assert explain(desc, preference=requiring(name), device=HOST).chosen == row
    if row is not None:
        plan = GemmSparse24Plan.select(desc, preference=requiring(name), device="host")
        assert plan.guarantee.arithmetic == plan.sku.precision_guarantee.arithmetic == name


def test_kernels_on_request_are_never_chosen_unless_required():
    desc = GemmSparse24Descriptor(n=2, m=8, k=16, element="bf16")
    for preference in ({}, {"require": {"batch_invariant": True}}, {"require": {"math_precision": "bf16"}}):
        answer = explain(desc, preference=preference, device=HOST)
        assert answer.chosen != "host_tensor_core"
        reasons = {name: reason for name, _, reason in answer.rows}
        assert reasons["host_tensor_core"] == "used only when `require=arithmetic=...` asks for it"


def test_a_refusal_says_what_the_kernel_entry_names():
    desc = GemmSparse24Descriptor(n=2, m=8, k=16, element="bf16")
    reasons = {
        name: reason
        for name, _, reason in explain(desc, preference=requiring("hopper_tc/slices=7"), device=AMPERE).rows
    }
    assert reasons["inflate_strict"] == "arithmetic is fma32_in_order, required hopper_tc/slices=7"
    assert reasons["mma_sp"] == "arithmetic is None, required hopper_tc/slices=7"


@pytest.mark.parametrize("name", ["hopper_tc", "hopper_tc/slices=9", 3, True])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(InvalidProblemError, match=r"PlanPreference: require\.arithmetic: .*, got"):
        PlanPreference(require={"arithmetic": name})
    given = row_of("host_strict").guarantee(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")).model_dump()
    with pytest.raises(InvalidProblemError, match="PrecisionGuarantee: arithmetic: "):
        PrecisionGuarantee(**{**given, "arithmetic": name})


# The same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "epilogue"), [("dgrad", "identity"), *(("forward", epilogue) for epilogue in EPILOGUES)]
)
@pytest.mark.parametrize("element", [*ELEMENTS, "s8", "fp8_e4m3"])
def test_results_one_by_one_are_those_of_the_strict_row(op, element, epilogue):
    scales = {"scale_x": "row", "scale_w": "tensor"} if op == "forward" else {}
    problem = {"n": 5, "m": 40, "k": 24, "element": element, "op": op, "epilogue": epilogue}
    case = make_case(GemmSparse24Descriptor(**problem, alpha=1.3, **scales), row="host_strict")
    want = case.run()
    arithmetic = Arithmetic.of(case.plan.guarantee.arithmetic)
    tokens, outputs = places(np.arange(want.size), case.plan.descriptor)
    got = Results(case.plan.descriptor, case.plan._check(case.args), arithmetic).at(tokens, outputs)
    assert got.tobytes() == want[tokens, outputs].tobytes()


@pytest.mark.parametrize(("element", "name"), [(e, f"{kind}/slices=2") for e, kind in SLICED.items()])
@pytest.mark.parametrize("epilogue", ["identity", "bias", "bias_relu"])
@pytest.mark.parametrize("out", ["f32", "own"])
def test_the_row_on_request_rounds_step_by_step(element, name, epilogue, out):
    """The whole definition: the sums in exact numbers, then one float32 rounding a step."""
    out = {"f16": "f16"}.get(element, "bf16") if out == "own" else "f32"
    scales = {"scale_x": "row", "scale_w": "row"} if element == "fp8_e4m3" else {}
    desc = GemmSparse24Descriptor(
        n=3, m=9, k=520, element=element, epilogue=epilogue, out_element=out, alpha=0.3, **scales
    )
    data = random_data(np.random.default_rng(4), desc)
    case = case_of(GemmSparse24Plan.select(desc, preference=requiring(name), device="host"), data)
    assert case.plan.explain().chosen == "host_tensor_core"
    got = case.run()
    case.check(got)
    weight = Sparse24Weight.prune_compress(data.dense)
    v = np.array([[tensor_core_sum(data.x, weight, n, m, name) for m in range(9)] for n in range(3)])
    if scales:
        v = (v * data.scale_x[:, None]) * data.scale_w
    v = np.float32(0.3) * v
    if data.bias is not None:
        v = v + data.bias.astype(np.float32)
    v = np.maximum(v, 0) if epilogue == "bias_relu" else v
    assert same_bits(got, v.astype(desc.out_element.dtype))


@pytest.mark.parametrize(("element", "name"), [(e, f"{kind}/slices=3") for e, kind in SLICED.items()])
def test_the_row_on_request_keeps_its_promises(element, name):
    """Run to run, in any batch, with Inf and NaN at pruned positions, rows apart or in columns."""
    rng, desc = np.random.default_rng(1), GemmSparse24Descriptor(n=9, m=70, k=264, element=element)
    data = random_data(rng, desc)
    data.dense[:, 2::4] = 0  # pruned in every row
    plan = GemmSparse24Plan.select(desc, preference=requiring(name), device="host")
    whole = case_of(plan, data)
    first = whole.run()
    assert same_bits(whole.run(), first)
    assert same_bits(case_of(plan, data, pads=(8, 3)).run(), first)
    for n in (1, 4):
        part = GemmSparse24Descriptor(n=n, m=70, k=264, element=element, x_order="column", y_order="column")
        at = rng.permutation(9)[:n]
        small = GemmSparse24Plan.select(part, preference=requiring(name), device="host")
        few = case_of(small, type(data)(data.dense, data.x[at]))
        assert same_bits(np.ascontiguousarray(few.run()), first[at])
    x, y = data.x.copy(), np.empty_like(first)
    x[:, 2::4] = np.nan
    plan.run(GemmSparse24Args(whole.args.weight, x, y))
    assert same_bits(y, first)


@pytest.mark.parametrize(
    ("name", "exponent", "want"), [("f32x6", -149, np.inf), ("f32x3", -133, np.inf), ("f32x3", -135, np.nan)]
)
def test_two_terms_hold_no_weight_below_the_least_bf16(name, exponent, want):
    """An Inf in X is multiplied by the two terms of W, not by W itself."""
    desc = GemmSparse24Descriptor(n=1, m=1, k=8, element="f32")
    plan = GemmSparse24Plan.select(desc, preference=requiring(f"hopper_tc_{name}/slices=1"), device="host")
    dense = np.array([[2.0**exponent, *[0] * 7]], np.float32)
    x, y = np.array([[np.inf, *[0] * 7]], np.float32), np.empty((1, 1), np.float32)
    plan.run(GemmSparse24Args(plan.pack(Sparse24Weight.compress(dense)), x, y))
    assert np.array_equal(y, [[want]], equal_nan=True)
