"""Products of quantized weights have the bits of products of the weights that they stand for."""

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
    Sparse24QuantizedWeight,
    Sparse24Weight,
    UnsupportedError,
)
from sparse24_plans.weights.packed_layouts import QUANTIZED_LAYOUTS

from ..plan.cases import PlanCase, rejected
from ..sample_devices import HOPPER, gpu_of
from ..support import case_of, plan_of_row, random_data, same_bits, weight_of
from .grouped_cases import grouped_case

ROWS = ("host_blas", "host_strict", "host_tensor_core")
EPILOGUES = {
    "host_blas": ("identity", "bias", "silu", "swiglu"),
    "host_strict": ("identity", "bias_relu", "gelu", "geglu"),
    "host_tensor_core": ("identity", "bias", "bias_relu", "relu2"),
}
PLAIN = ("weight_element", "weight_group", "weight_scale_element")


def select(row: str, desc: GemmSparse24Descriptor) -> GemmSparse24Plan:
    wanted = {"require": {"arithmetic": "hopper_tc/slices=1"}} if row == "host_tensor_core" else None
    plan = plan_of_row(row).select(desc, device="host", preference=wanted)
    assert plan.kernel == row
    return plan


def without(desc: GemmSparse24Descriptor, *fields: str) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(**{n: v for n, v in desc.model_dump().items() if n not in fields})


@st.composite
def quantizations(draw: st.DrawFn) -> dict[str, object]:
    element = draw(st.sampled_from(["f16", "bf16"]))
    return {
        "element": element,
        "weight_element": draw(st.sampled_from(["s4", "s8", "fp8_e4m3"])),
        "weight_group": draw(st.sampled_from([0, 32, 64, 128])),
        "weight_scale_element": draw(st.sampled_from([element, "f32"])),
    }


@settings(max_examples=15)
@given(data=st.data(), fields=quantizations(), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("row", ROWS)
def test_same_bits_as_the_weight_that_it_stands_for(row, data, fields, seed):
    draw = data.draw
    more = {
        "out_element": draw(st.sampled_from([fields["element"], "f32"])),
        "alpha": draw(st.sampled_from([1.0, -0.7])),
    }
    if row != "host_tensor_core" and draw(st.integers(0, 3)) == 0:
        more["op"] = "dgrad"
    else:
        more["epilogue"] = draw(st.sampled_from(EPILOGUES[row]))
        more["x_order"] = draw(st.sampled_from(["row", "column"]))
        more["scale_w"] = draw(st.sampled_from(["none", "row"]))
        if not more["epilogue"].endswith("glu"):
            more["beta"] = draw(st.sampled_from([0.0, 0.5]))
    n, m, k = draw(st.integers(0, 9)), 16 * draw(st.integers(0, 3)), 8 * draw(st.integers(0, 40))
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, **fields, **more)
    operands = random_data(np.random.default_rng(seed), desc)
    case = case_of(select(row, desc), operands)
    found = case.run().copy()
    case.check(found)
    plain = case_of(
        select(row, without(desc, *PLAIN)), replace(operands, dense=case.dense.astype(desc.element.dtype))
    )
    if row == "host_blas":  # BLAS may sum in another order from one call to the next
        plain.check(found)
    else:
        assert same_bits(np.ascontiguousarray(found), np.ascontiguousarray(plain.run()))


@pytest.mark.parametrize("row", ROWS)
def test_groups_of_tokens_have_scales_of_their_own(row):
    desc = GemmSparse24Descriptor(
        n=24,
        m=32,
        k=96,
        element="bf16",
        weight_element="s4",
        weight_group=64,
        groups=3,
        epilogue="bias_relu",
    )
    case = grouped_case(select(row, desc), [0, 5, 5, 20], seed=7)
    case.check(case.run())


@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_canonical_and_packed_weights_give_the_same(op):
    desc = GemmSparse24Descriptor(
        n=3,
        m=8,
        k=136,
        element="f16",
        op=op,
        weight_element="s8",
        weight_group=128,
        weight_scale_element="f32",
    )
    plan = GemmSparse24Plan.select(desc, device="host")
    assert plan.kernel == "host_blas"
    weight = weight_of(random_data(np.random.default_rng(0), desc).dense, desc)
    x = np.ones((3, desc.reduction), np.float16)
    results = []
    for one in (weight, plan.pack(weight)):
        y = np.zeros((3, desc.outputs), np.float16)
        plan.run(plan.args_type(desc)(one, x, y))
        results.append(y.astype(np.float64))
    assert np.allclose(*results, rtol=2e-3)


def test_results_replay():
    desc = GemmSparse24Descriptor(n=4, m=16, k=264, element="bf16", weight_element="s4", weight_group=128)
    data = random_data(np.random.default_rng(1), desc)
    weight, y = weight_of(data.dense, desc), np.zeros((4, 16), desc.element.dtype)
    args = GemmSparse24Args(weight, data.x, y)
    plan = select("host_tensor_core", desc)
    plan.run(args)
    found = plan.replay(args)
    assert (found.compared, found.differing) == (64, 0)
    other = weight.scales.copy()
    other[3, 1] *= 2
    changed = Sparse24QuantizedWeight(
        weight.values, weight.metadata, other, element="bf16", stored="s4", group=128
    )
    found = plan.replay(replace(args, weight=changed))
    assert found.differing
    assert {one.output for one in [found.first]} == {3}


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"element": "f32", "weight_element": "s4"}, "weight_element: expected f32, got s4"),
        ({"element": "s8", "weight_element": "s4"}, "weight_element: expected s8, got s4"),
        ({"weight_element": "fp8_e5m2"}, "weight_element: expected bf16 or s4 or s8 or fp8_e4m3"),
        ({"weight_element": "s4", "weight_group": 48}, "weight_group: expected 0 or 32 or 64 or 128, got 48"),
        ({"weight_group": 32}, "weight_group: expected 0 for weight_element bf16, got 32"),
        ({"weight_scale_element": "f32"}, "weight_scale_element: expected bf16 for weight_element bf16"),
        (
            {"weight_element": "s4", "weight_scale_element": "f16"},
            "weight_scale_element: expected bf16 or f32",
        ),
    ],
)
def test_fields_that_do_not_fit_are_named(fields, word):
    with pytest.raises(InvalidProblemError, match=word):
        GemmSparse24Descriptor(**{"n": 1, "m": 8, "k": 8, "element": "bf16", **fields})


DESC = GemmSparse24Descriptor(n=2, m=8, k=64, element="bf16", weight_element="s4", weight_group=32)


@pytest.mark.parametrize(
    "change",
    [{"stored": "s8"}, {"group": 64}, {"group": 0}, {"scale_element": "f32"}, None],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_weights_of_another_quantization_are_refused(change, packed):
    whole = Sparse24Weight.prune_compress(random_data(np.random.default_rng(0), DESC).dense)
    other, fields = whole, {"n": 2, "m": 8, "k": 64, "element": "bf16"}
    if change is not None:
        given = {"stored": "s4", "group": 32, **change}
        other = Sparse24QuantizedWeight.quantize(whole, **given)
        by = other.quantization
        fields |= {
            "weight_element": by.element,
            "weight_group": by.group,
            "weight_scale_element": by.scale_element,
        }
    case = PlanCase(
        GemmSparse24Plan.select(DESC, device="host"),
        {"weight": weight_of(whole.decompress(), DESC), "source": np.zeros((2, 64), np.uint16)},
    )
    weight = (
        GemmSparse24Plan.select(GemmSparse24Descriptor(**fields), device="host").pack(other)
        if packed
        else other
    )
    rejected(
        case,
        replace(case.args, weight=weight),
        InvalidProblemError,
        "weight: expected s4 with bf16 scales of groups of 32, got",
    )
    with pytest.raises(InvalidProblemError, match="weight: expected"):
        case.plan.pack(other)


def test_quantized_weights_are_refused_where_none_is_expected():
    quantized = weight_of(random_data(np.random.default_rng(0), DESC).dense, DESC)
    plan = GemmSparse24Plan.select(without(DESC, *PLAIN), device="host")
    with pytest.raises(InvalidProblemError, match="expected values that are not quantized, got s4"):
        plan.pack(quantized)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_gpus_without_a_kernel_refuse_quantized_weights_by_name(capability):
    with pytest.raises(
        UnsupportedError, match="multiplies no weight of s4 with bf16 scales of groups of 32"
    ) as caught:
        GemmSparse24Plan.select(DESC, device=gpu_of(*capability))
    assert "mma_sp" in str(caught.value)


@pytest.mark.parametrize("stored", ["s4", "s8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("more", "kernel"),
    [({}, "wgmma_sp"), ({"groups": 2, "m": 64, "n": 4}, "wgmma_sp_grouped")],
    ids=["single", "groups"],
)
def test_hopper_serves_each_kind_of_stored_values(stored, more, kernel):
    desc = DESC.model_copy(update={"weight_element": ElementKind(stored), **more})
    plan = GemmSparse24Plan.select(desc, device=HOPPER)
    assert (plan.kernel, plan.sku.layout) == (kernel, QUANTIZED_LAYOUTS[ElementKind(stored)])
    assert plan.guarantee.arithmetic.startswith("hopper_tc/slices=")


@pytest.mark.parametrize("empty", ["n", "m"])
@pytest.mark.parametrize(
    ("more", "kernel"),
    [
        ({}, "wgmma_sp"),
        ({"groups": 8, "m": 64, "n": 200}, "wgmma_sp_grouped"),
        ({"groups": 128, "m": 64, "n": 128, "group_tokens": "counts"}, "wgmma_sp_grouped"),
    ],
    ids=["single", "offsets", "counts"],
)
def test_an_empty_result_of_a_quantized_weight_launches_nothing(more, kernel, empty):
    desc = DESC.model_copy(update={"weight_element": ElementKind.S4, **more, empty: 0})
    plan = GemmSparse24Plan.select(desc, device=HOPPER)
    assert (plan.kernel, plan.workspace_size()) == (kernel, 0)
    assert plan.guarantee.arithmetic is None
    assert GemmSparse24Plan.compile(desc, device=HOPPER) == ()
