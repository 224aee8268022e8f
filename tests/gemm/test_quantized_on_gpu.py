"""On a GPU a product of a quantized weight has the bits of the product of the elements that it stands for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    Sparse24QuantizedWeight,
    Sparse24Weight,
)
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.weights.packed_layouts import Quantization, memory_element, stored_width
from sparse24_plans.weights.packing_quantized import pack_quantized

from ..support import (
    case_of,
    make_case,
    random_data,
    same_bits,
    weight_of,
)
from .grouped_cases import grouped_case
from .kernel_entries import plan_of

pytestmark = pytest.mark.gpu
STORED = ("s4", "s8", "fp8_e4m3")
KINDS = tuple(
    {"element": element, "weight_element": stored, "weight_group": group, "weight_scale_element": scale}
    for element, stored, group in product(("bf16", "f16"), STORED, (0, 32, 64, 128))
    for scale in (element, "f32")
)
EPILOGUES = ("identity", "bias_gelu", "bias_swiglu", "relu2")
CUTS = [
    (n, cut)
    for n in (1, 13, 40, 60, 200, 1030)
    for cut in dict.fromkeys(
        (*schedules.schedules_for(n, quantized=True), *schedules.schedules_in(4, n, quantized=True))
    )
]


def elements_only(problem: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in problem.items() if not name.startswith("weight_")}


@pytest.mark.parametrize("n", [1, 24, 130, 700])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_product_has_bits_of_product_of_its_elements(kind, n):
    """The invariant kernel sums K in as many slices for both. Sizes are ragged, Y has gaps."""
    at = KINDS.index(kind)
    orders = {"x_order": "column", "y_order": "column"} if at % 3 == 2 and n % 8 == 0 else {}
    problem = {"n": n, "m": 208 + 16 * (at % 5), "k": 16 * (20 + at), **kind, **orders}
    problem["epilogue"] = EPILOGUES[at % len(EPILOGUES)]
    if problem["epilogue"] in ("identity", "bias_gelu"):
        problem["beta"] = 0.5
    plan = plan_of("wgmma_sp_invariant", **problem)
    data = random_data(np.random.default_rng(), plan.descriptor)
    case = case_of(plan, data, (8, 8, 8))
    found = case.run().copy()
    case.check(found)
    plain = plan_of("wgmma_sp_invariant", **elements_only(problem))
    elements = case.dense.astype(plan.descriptor.element.dtype)
    assert plan.guarantee.arithmetic == plain.guarantee.arithmetic
    assert same_bits(found, case_of(plain, replace(data, dense=elements), (8, 8, 8)).run())


@pytest.mark.parametrize(("n", "cut"), CUTS, ids=str)
def test_every_cut(monkeypatch, n, cut):
    """Forced on a problem that is ragged in n, m and k, and has uneven slices."""
    at = CUTS.index((n, cut))
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    fields = {"m": (2000, 2001)[at % 2], "k": 1072, "epilogue": "bias_silu", **KINDS[at % len(KINDS)]}
    desc = GemmSparse24Descriptor(n=n, alpha=1 + at / 64, **fields)  # alpha of its own: plans are cached
    case = make_case(desc, row="wgmma_sp", pad=8)
    found = case.run()
    case.check(found)
    assert same_bits(found, case.run())


@pytest.mark.parametrize("kind", KINDS[::5], ids=lambda kind: "-".join(map(str, kind.values())))
def test_groups_have_the_bits_of_single_products(kind):
    fields = {"m": 128, "k": 272, "epilogue": "bias", **kind}
    case = grouped_case(
        plan_of("wgmma_sp_grouped", n=300, groups=4, **fields), [0, 1, 1, 150, 290], np.random.SeedSequence()
    )
    found = case.run()
    case.check(found)
    for own, (begin, end) in case.of_groups():
        single = plan_of("wgmma_sp_grouped", n=end - begin, groups=1, **elements_only(fields))
        alone = grouped_case(single, [0, end - begin])
        alone.inputs[0].fill(own.x)
        alone.inputs[1].fill(own.bias)
        weight = Sparse24Weight.prune_compress(own.dense.astype(single.descriptor.element.dtype)).to(0)
        alone.args = replace(alone.args, weight=single.pack(weight))
        assert same_bits(found[begin:end], alone.run())


def hostile_weight(rng: np.random.Generator, desc: GemmSparse24Descriptor) -> Sparse24QuantizedWeight:
    """Stored values and scales of any bits. Scales of even rows give finite elements, also subnormal ones."""
    by, (m, k) = desc.quantization, (desc.m, desc.k)
    whole = weight_of(random_data(rng, desc).dense, desc)
    cells = rng.integers(0, 256, (m, stored_width(k, by)), np.uint8)
    if by.element is ElementKind.FP8_E4M3:
        cells[::2][cells[::2] & 0x7F == 0x7F] = 0  # NaN
    bits, kind = by.scale_element.bits_dtype, by.scale_element.dtype
    shape = m, by.scales_of_a_row(k)
    scales = rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(kind)
    scales[::2] = (rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-24, 2, shape))[::2].astype(kind)
    scales[[1, 3, 5], 0] = np.inf, np.nan, 0
    return Sparse24QuantizedWeight(
        cells.view(memory_element(by.element).dtype),
        whole.views[1],
        scales,
        element=desc.element,
        **by.arguments,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_hostile_values_and_scales_become_the_elements_of_the_definition(kind):
    problem = {"n": 96, "m": 192, "k": 384, "out_element": "f32", **kind}
    plan = plan_of("wgmma_sp_invariant", **problem)
    plain = plan_of("wgmma_sp_invariant", **elements_only(problem))
    rng = np.random.default_rng()
    weight = hostile_weight(rng, plan.descriptor)
    data = random_data(rng, plan.descriptor)
    results = []
    for one, own in ((plan, weight), (plain, weight.dequantize())):
        case = case_of(one, data)
        case.args = replace(case.args, weight=one.pack(own.to(0)))
        results.append(case.run().copy())
    finite = np.isfinite(results[1])
    assert finite[:, ::2].all()
    assert not finite.all()
    assert same_bits(results[0][finite], results[1][finite])
    assert np.array_equal(results[0], results[1], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS[::4], ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_gpu_packs_what_the_host_packs(kind):
    desc = GemmSparse24Descriptor(n=1, m=200, k=328, **kind)
    weight = weight_of(random_data(np.random.default_rng(), desc).dense, desc)
    (there,), (here,) = pack_quantized(weight.to(0)).buffers, pack_quantized(weight).buffers
    assert np.array_equal(there.array().get(), here.array())


@pytest.mark.parametrize("stored", STORED)
def test_results_can_be_replayed_on_the_host(stored):
    fields = {"element": "bf16", "weight_element": stored, "weight_group": 128}
    plan = plan_of("wgmma_sp", n=9, m=192, k=1040, epilogue="bias", **fields)
    data = random_data(np.random.default_rng(), plan.descriptor)
    result = np.ascontiguousarray(case_of(plan, data).run())
    weight = weight_of(data.dense, plan.descriptor)
    found = plan.replay(GemmSparse24Args(weight, data.x, result, data.bias))
    assert (found.compared, found.differing) == (9 * 192, 0)
    assert plan.descriptor.quantization == Quantization(ElementKind(stored), 128, ElementKind.BF16)
