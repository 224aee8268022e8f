"""Results in fp8: their rounding, their scale, and the largest magnitude before it, of every kernel."""

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
    UnsupportedError,
    explain,
)
from sparse24_plans.arithmetic.epilogue import encoded
from sparse24_plans.gemm.backends import wgmma_sp, wgmma_sp_grouped
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.gemm.schedules import grouped
from sparse24_plans.gemm.schedules import wgmma_sp as schedules

from ..sample_devices import HOPPER, gpu_of
from ..support import (
    Case,
    Data,
    case_of,
    device_of_row,
    plan_of_row,
    random_data,
    same_bits,
)
from .batched_cases import batched_case
from .grouped_cases import grouped_case
from .kernel_entries import OWN, gpu, marked, on_host, row_of, tokens

FP8 = ("fp8_e4m3", "fp8_e5m2")
ROUNDING = [
    name for name in OWN if row_of(name).fp8_results and row_of(name).elements not in (("f32",), ("s8",))
]
"""Kernels with fp8 results."""
GROUPED = [
    row.name
    for row in ENTRIES
    if row.groups and not row.on_request and row.elements not in (("f32",), ("s8",))
]
rows = pytest.mark.parametrize("row", [marked(name) for name in ROUNDING])
SCALED = {"scale_y": "tensor", "amax": True}
SIZES = [(1, 203, 272), (37, 1090, 512), (300, 1104, 1040), (1500, 2064, 528)]
"""Sizes of schedules of every kind: split-K, few tokens, stream-K and several waves, with ragged ends."""


def plan_of(row: str, **problem: object) -> GemmSparse24Plan:
    entry = row_of(row)
    fields = {"element": entry.elements[-1], "out_element": "fp8_e4m3", **problem}
    if entry.scales:
        fields = {"scale_x": "row", "scale_w": "row", **fields}
    plan = plan_of_row(row).select(GemmSparse24Descriptor(**fields), device=device_of_row(row))
    assert plan.explain().chosen == row
    return plan


def wide_results(plan: GemmSparse24Plan, data: Data, row: str) -> np.ndarray:
    """The results of the same kernel in float32, before scale and rounding."""
    change = {
        "scale_y": "none",
        "amax": False,
        **dict.fromkeys(("out_element", "bias_element", "c_element"), "f32"),
    }
    desc = GemmSparse24Descriptor(**{**plan.descriptor.model_dump(), **change})
    wide = plan_of_row(row).select(desc, device=device_of_row(row))
    bias, c = (None if one is None else one.astype(np.float32) for one in (data.bias, data.c))
    return case_of(wide, replace(data, bias=bias, c=c, scale_y=None, amax=None)).run()


def check_against(case: Case, wide: np.ndarray, found: np.ndarray) -> None:
    """The bits of the results, and amax, from results in float32."""
    scale = np.float32(1) if case.scale_y is None else case.scale_y
    out = case.plan.descriptor.out_element
    with np.errstate(all="ignore"):
        want = encoded(wide.astype(np.float32) * scale, out)
    assert same_bits(np.ascontiguousarray(found).view(np.uint8), want)
    if case.amax is not None:
        assert same_bits(np.array(case.largest()), np.max(np.abs(wide), initial=0))


# The definition -------------------------------------------------------------------------------------


def nearest(values: np.ndarray, element: ElementKind) -> np.ndarray:
    """The nearest finite value of the element, of two as near ones the even one, by comparing all of them."""
    bits = np.arange(256, dtype=np.uint8)
    every = bits.view(element.dtype).astype(np.float64)
    bits, every = (one[np.isfinite(every) & (bits < 0x80)] for one in (bits, every))
    size = np.minimum(np.abs(values.astype(np.float64)), every[-1])
    distance = np.abs(size[:, None] - every)
    distance[:, bits % 2 == 1] *= 1 + 1e-12  # an odd one is chosen only if it is nearer
    return bits[distance.argmin(axis=1)] | (np.signbit(values).astype(np.uint8) << 7)


@pytest.mark.parametrize("element", [ElementKind(name) for name in FP8])
def test_values_are_rounded_to_nearest_even_and_saturate(element):
    exact = np.arange(128, dtype=np.uint8).view(element.dtype).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    middles = (exact[1:] + exact[:-1]) / 2
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(5000) * 10.0 ** rng.uniform(-9, 9, 5000)
    values = np.concatenate(
        [exact, middles, np.nextafter(middles, np.inf), np.nextafter(middles, 0), spread, [np.inf]]
    ).astype(np.float32)
    values = np.concatenate([values, -values])
    assert same_bits(encoded(values.copy(), element), nearest(values, element))
    assert encoded(np.array([np.nan, -np.nan], np.float32), element).tolist() == [0x7F, 0x7F]


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("row", [name for name in ROUNDING if on_host(name)])
def test_host_kernels_scale_and_round_every_kind_of_problem(row, data, seed):
    draw = data.draw
    element = draw(st.sampled_from(["f16", "bf16", *FP8]))
    fields = {
        "element": element,
        "x_element": draw(st.sampled_from(FP8 if element in FP8 else (element,))),
        "out_element": draw(st.sampled_from(FP8)),
        "scale_y": draw(st.sampled_from(["none", "tensor"])),
        "amax": draw(st.booleans()),
        "epilogue": draw(st.sampled_from(["identity", "bias", "relu", "bias_silu", "swiglu"])),
        "y_order": draw(st.sampled_from(["row", "column"])),
        "alpha": draw(st.sampled_from([1.0, 40.0])),
        "bias_element": draw(st.sampled_from(["bf16", "f16", "f32"])),
    }
    if fields["epilogue"] != "swiglu" and draw(st.booleans()):
        fields |= {"beta": -0.5, "c_element": draw(st.sampled_from(["bf16", "f16", "f32"]))}
    n, m = draw(st.integers(0, 9)), 16 * draw(st.integers(0, 4))
    plan = plan_of(row, n=n, m=m, k=8 * draw(st.integers(0, 6)), **fields)
    operands = random_data(np.random.default_rng(seed), plan.descriptor)
    case = case_of(plan, operands, tuple(draw(st.lists(st.integers(0, 5), min_size=3, max_size=3))))
    found = case.run()
    case.check(found)
    check_against(case, wide_results(plan, operands, row), found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_element": "bf16"}, "scale_y: expected none for out_element bf16, got tensor"),
        ({"out_element": "bf16", "scale_y": "none"}, "amax: expected none for out_element bf16, got True"),
        ({"scale_y": "row"}, "scale_y: expected none or tensor, got row"),
        ({"op": "dgrad"}, "out_element: expected bf16 or f32, got fp8_e4m3"),
        ({"element": "s8"}, "out_element: expected i32 or s8 or f16 or bf16 or f32, got fp8_e4m3"),
        ({"element": "f32"}, "out_element: expected f32, got fp8_e4m3"),
        (
            {"element": "fp8_e5m2", "out_element": "s8"},
            "out_element: expected bf16 or f16 or f32 or fp8_e4m3",
        ),
        ({"bias_element": "fp8_e4m3"}, "bias_element: expected bf16 or f16 or f32, got fp8_e4m3"),
        ({"c_element": "fp8_e4m3"}, "c_element: expected bf16 or f16 or f32, got fp8_e4m3"),
        ({"x_element": "fp8_e4m3"}, "x_element: expected bf16, got fp8_e4m3"),
        ({"element": "fp8_e4m3", "x_element": "s8"}, "x_element: expected fp8_e4m3 or fp8_e5m2, got s8"),
    ],
)
def test_problems_without_a_meaning_are_refused(change, message):
    problem = {"n": 2, "m": 16, "k": 16, "element": "bf16", "out_element": "fp8_e4m3", **SCALED}
    with pytest.raises(InvalidProblemError, match=message):
        GemmSparse24Descriptor(**problem | change)


def test_libraries_and_older_devices_are_refused_by_name():
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", out_element="fp8_e5m2", **SCALED)
    reasons = {row: reason for row, _, reason in explain(desc, device=HOPPER).rows}
    assert reasons["cusparselt"] == reasons["inflate_cublas"] == "serves no out_element fp8_e5m2"
    assert reasons["wgmma_sp"] is None
    reasons = {row: reason for row, _, reason in explain(desc, device=gpu_of(8, 6)).rows}
    assert reasons["mma_sp"] == reasons["inflate_strict"] == "needs compute capability 8.9, got 8.6"
    mixed = GemmSparse24Descriptor(n=16, m=64, k=64, element="fp8_e4m3", x_element="fp8_e5m2")
    reasons = {row: reason for row, _, reason in explain(mixed, device=gpu_of(8, 9)).rows}
    assert reasons["cusparselt_fp8"] == "serves x_element fp8_e4m3 for fp8_e4m3, not fp8_e5m2"
    assert reasons["mma_sp_fp8"] is None


@pytest.mark.parametrize("n", [1, 2, 300])
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_misaligned_rows_are_served_at_every_n_or_at_none(n, capability):
    fields = {"n": n, "m": 64, "k": 24}
    device = gpu_of(*capability)
    assert explain(GemmSparse24Descriptor(element="fp8_e4m3", **fields), device=device).chosen == (
        "inflate_strict_fp8"
    )
    with pytest.raises(UnsupportedError, match="no kernel"):
        GemmSparse24Plan.select(GemmSparse24Descriptor(element="s8", **fields), device=device)


# Every kernel ---------------------------------------------------------------------------------------


def sized(row: str, n: int, m: int, k: int) -> dict[str, int]:
    return (
        {"n": 5, "m": m // 16 % 7 * 16 + m % 16, "k": 64}
        if on_host(row)
        else {"n": tokens(row, n), "m": m, "k": k}
    )


EPILOGUES = ["identity", "bias_relu", "gelu", "bias_silu", "swiglu", "bias_geglu"]


@rows
@pytest.mark.parametrize(("out", "epilogue"), [(FP8[i % 2], one) for i, one in enumerate(EPILOGUES)])
@pytest.mark.parametrize("n", [size[0] for size in SIZES])
def test_results_are_those_of_float32_scaled_and_rounded(row, out, epilogue, n):
    """Operands lie in guarded memory; TMA stores some rows of Y, threads store others."""
    (sizes,) = (one for one in SIZES if one[0] == n)
    fields = {**sized(row, *sizes), "out_element": out, "epilogue": epilogue, "alpha": 1.5, **SCALED}
    if epilogue.endswith("glu"):
        fields["m"] -= fields["m"] % 16
    plan = plan_of(row, **fields)
    data = random_data(np.random.default_rng(n), plan.descriptor)
    first = None
    for pads, offsets in (((16, 16), (0, 0)), ((0, 1), (0, 3))):
        case = case_of(plan, data, pads, offsets)
        found = case.run()
        case.check(found)
        first = found if first is None else first
        assert same_bits(np.ascontiguousarray(found), np.ascontiguousarray(first))
        if plan.guarantee.batch_invariant:  # a schedule may depend on the result's size, and bits on it
            check_against(case, wide_results(plan, data, row), found)
    if plan.guarantee.arithmetic is not None:
        args = GemmSparse24Args(
            Sparse24Weight.prune_compress(data.dense),
            data.x,
            np.ascontiguousarray(first),
            data.bias,
            data.scale_x,
            data.scale_w,
            scale_y=data.scale_y,
            amax=np.zeros(1, np.float32),
        )
        assert plan.replay(args, 300).equal
        assert args.amax[0] == 0  # a replay changes nothing


@rows
def test_a_column_major_result(row):
    fields = {"element": row_of(row).elements[-1], "out_element": FP8[0], "y_order": "column"}
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, **fields)
    if row_of(row).backend == "wgmma_sp" and row_of(row).column_order:
        assert row_of(row).limits(desc) == "serves y_order row for out_element fp8_e4m3"
        return
    if not row_of(row).column_order:
        assert row_of(row).refusal(desc) == "serves x_order and y_order row"
        return
    plan = plan_of(row, **sized(row, 37, 1088, 512), y_order="column", epilogue="bias", **SCALED)
    data = random_data(np.random.default_rng(0), plan.descriptor)
    for pads, offsets in (((16, 16), (0, 0)), ((0, 0), (0, 0)), ((0, 1), (0, 5))):
        case = case_of(plan, data, pads, offsets)
        found = case.run()
        case.check(found)
        if plan.guarantee.batch_invariant:
            check_against(case, wide_results(plan, data, row), found)


@rows
@pytest.mark.parametrize("c_element", ["bf16", "f32"])
def test_c_is_added_before_the_scale(row, c_element):
    fields = {"beta": -0.5, "c_element": c_element, "epilogue": "bias_relu", **SCALED}
    plan = plan_of(row, **sized(row, 37, 1088, 512), **fields)
    data = random_data(np.random.default_rng(0), plan.descriptor)
    case = case_of(plan, data, (0, 16, 3))
    found = case.run()
    case.check(found)
    if plan.guarantee.batch_invariant:
        check_against(case, wide_results(plan, data, row), found)


@rows
@pytest.mark.parametrize("out", FP8)
def test_inf_saturates_and_nan_is_one_pattern(row, out):
    plan = plan_of(row, **sized(row, 12, 80, 64), out_element=out, epilogue="bias", alpha=-1.0, **SCALED)
    data = random_data(np.random.default_rng(0), plan.descriptor)
    data.bias[:3] = [np.inf, -np.inf, 1e30]
    case = case_of(plan, data)
    found = case.run().view(np.uint8)
    most = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}[out]
    assert (found[:, :3] == [most, most | 0x80, most]).all()
    assert case.largest() == np.inf
    data.bias[1] = -np.nan
    again = case_of(plan, data)
    assert (again.run().view(np.uint8)[:, 1] == 0x7F).all()
    assert np.isnan(again.largest())
    assert same_bits(found[:, 3:], again.run().view(np.uint8)[:, 3:])


@rows
def test_amax_is_raised_and_never_lowered(row):
    plan = plan_of(row, **sized(row, 37, 208, 512), **SCALED)
    data = random_data(np.random.default_rng(0), plan.descriptor)
    case = case_of(plan, data)
    case.run()
    own = case.largest()
    assert own > 0
    for before, after in ((own / 2, own), (own * 2, own * 2), (np.float32(np.nan), np.nan)):
        again = case_of(plan, replace(data, amax=np.array([before], np.float32)))
        again.run()
        again.run()
        np.testing.assert_equal(again.largest(), np.float32(after))


@rows
def test_an_empty_result_leaves_amax(row):
    desc = GemmSparse24Descriptor(
        n=0, m=16, k=64, element=row_of(row).elements[-1], out_element=FP8[0], **SCALED
    )
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    data = replace(random_data(np.random.default_rng(0), desc), amax=np.array([3.0], np.float32))
    case = case_of(plan, data)
    case.run()
    assert case.largest() == 3


# Schedules ------------------------------------------------------------------------------------------

CUTS = [(n, cut) for n in (1, 13, 60, 200, 700) for cut in schedules.schedules_for(n)]
CUTS += [(n, cut) for n in (13, 300) for cut in schedules.schedules_for(n, 8900) if cut.stream_k]


@gpu
@pytest.mark.parametrize(("n", "cut"), CUTS, ids=str)
def test_every_cut_scales_and_finds_the_largest(monkeypatch, n, cut):
    """Split-K, K chunks and stream-K: a partial sum is no result."""
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    row, number = "wgmma_sp_fp8", CUTS.index((n, cut))
    out, m = FP8[number % 2], (8900 if cut.stream_k else 1000) + 4 * number + number % 3  # of its own
    plan = plan_of(row, n=n, m=m, k=1552, element="fp8_e4m3", out_element=out, epilogue="bias", **SCALED)
    data = random_data(np.random.default_rng(n), plan.descriptor)
    case = case_of(plan, data)
    found = case.run().copy()
    check_against(case, wide_results(plan, data, row), found)
    assert all(same_bits(case.run(), found) for _ in range(3))


@pytest.mark.parametrize("row", [marked(name) for name in GROUPED])
@pytest.mark.parametrize("epilogue", ["identity", "bias_swiglu"])
def test_groups_share_a_scale_and_a_largest(monkeypatch, row, epilogue):
    """Rows in no group, NaN here, count nowhere, though tiles multiply them."""
    ends = [3, 9, 17, 90, 131]
    schedules = list(grouped.schedules_for(300))
    for schedule in schedules if row_of(row).backend == "wgmma_sp_grouped" else schedules[:1]:
        monkeypatch.setattr(wgmma_sp_grouped.GROUPED, "best", lambda *_, one=schedule: one)
        plan = plan_of(
            row, n=140, groups=4, m=64 * (3 + schedule.warpgroups), k=256, epilogue=epilogue, **SCALED
        )
        case = grouped_case(plan, ends, 1)
        x = case.inputs[0]
        nan = np.full(x.view.shape, np.nan, np.float32).astype(x.view.element.dtype)
        nan[3:131] = x.numpy()[3:131]
        x.fill(nan)
        got = case.run().copy()
        case.check(got)
        name = plan.guarantee.arithmetic
        require = {} if name is None else {"require": {"arithmetic": name}}
        host = GemmSparse24Plan.select(plan.descriptor, preference=require, device="host")
        own = grouped_case(host, ends, 1)
        own.inputs[0].fill(nan)
        want = own.run()
        if name is None:
            np.testing.assert_allclose(case.largest(), own.largest(), rtol=2.0**-7)
        else:
            assert same_bits(got, want)
            assert case.largest() == own.largest()


@pytest.mark.parametrize("row", [marked(name) for name in ROUNDING if row_of(name).batches])
def test_batches_share_a_scale_and_a_largest(row):
    """Each batch has the bits of its product alone, and amax is the largest of theirs."""
    plan = plan_of(row, **sized(row, 37, 1088, 512), epilogue="bias_relu", batches=2, **SCALED)
    case = batched_case(plan, 0)
    found = case.run().copy()
    singles = [case.single(batch) for batch in (0, 1)]
    assert all(same_bits(one.run(), part) for one, part in zip(singles, found, strict=True))
    assert case.amax.numpy()[0] == max(one.largest() for one in singles)


@gpu
@pytest.mark.parametrize("row", [name for name in ROUNDING if not on_host(name)])
def test_a_graph_raises_amax_at_each_replay(row):
    import cupy

    plan = plan_of(row, **sized(row, 37, 1088, 512), epilogue="bias_silu", **SCALED)
    data = random_data(np.random.default_rng(0), plan.descriptor)
    case = case_of(plan, data)
    case.run()
    want = case.largest()
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = plan.bind(case.args, workspace=case.workspace and case.workspace.view)
    with stream:
        stream.begin_capture()
        bound.launch(stream=stream)
        graph = stream.end_capture()
    for _ in range(3):
        case.amax.fill(np.zeros(1, np.float32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(np.array(case.largest()), np.array(want))


# Operands of both fp8 types -------------------------------------------------------------------------

MIXED = [(w, x) for w in FP8 for x in FP8 if (w, x) != ("fp8_e4m3", "fp8_e4m3")]


@pytest.mark.parametrize("row", [marked(name) for name in OWN if "fp8_e5m2" in row_of(name).elements])
@pytest.mark.parametrize(("w", "x"), MIXED)
@pytest.mark.parametrize("n", [size[0] for size in SIZES])
def test_operands_of_both_types(row, w, x, n):
    (sizes,) = (one for one in SIZES if one[0] == n)
    fields = {"element": w, "x_element": x, "out_element": "f32", "epilogue": "bias_relu"}
    plan = plan_of(row, **sized(row, *sizes), **fields)
    data = random_data(np.random.default_rng(n), plan.descriptor)
    case = case_of(plan, data, (16, 16))
    found = case.run()
    case.check(found)
    if plan.guarantee.arithmetic is not None:
        args = GemmSparse24Args(
            Sparse24Weight.prune_compress(data.dense),
            data.x,
            np.ascontiguousarray(found),
            data.bias,
            data.scale_x,
            data.scale_w,
        )
        assert plan.replay(args, 2000).equal
