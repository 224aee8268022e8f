"""Gated epilogues: Y[n, 8 j + i] = act(v[n, 16 j + i]) * v[n, 16 j + 8 + i].

Every cut of the kernels: test_gated_on_gpu.py; results on their way out: test_gated_staging.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseConv2dDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    EpilogueKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PlanPreference,
    Sparse24Weight,
    UnsupportedError,
    explain,
    gated_rows,
    load_run,
    save_run,
    slice_weight,
)
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.gemm.schedules.inflate_strict import TILES, InflateStrictSchedule
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.vocab import ElementKind

from ..float64 import activate, rows_of_gates
from ..sample_devices import gpu_of
from ..support import Case, case_of, device_of_row, make_case, plan_of_row, random_data, same_bits
from .kernel_entries import marked, row_of

GATED = ("bias_swiglu", "bias_geglu", "bias_geglu_tanh")
gated = pytest.mark.parametrize("epilogue", GATED)
HOPPER = gpu_of(9, 0).model_copy(update={"cusparselt": "0.8.0"})
PLAIN = {"bias_swiglu": "bias_silu", "bias_geglu": "bias_gelu", "bias_geglu_tanh": "bias_gelu_tanh"}
"""The epilogue with the same activation."""
RESULTS = {
    "f32": ("f32",),
    "f16": ("f16", "f32"),
    "bf16": ("bf16", "f32"),
    "s8": ("s8", "f16", "bf16", "f32"),
    "fp8_e4m3": ("bf16", "f16", "f32"),
    "fp8_e5m2": ("bf16", "f16", "f32"),
}
TYPES = [(element, out) for element, results in RESULTS.items() for out in results]
ORDERS = [{"x_order": x, "y_order": y} for x, y in itertools.product(("row", "column"), repeat=2)]
SERVING = [row for row in ENTRIES if EpilogueKind.BIAS_SWIGLU in row.epilogues and not row.only_groups]
IN_COLUMNS = [row.name for row in SERVING if row.column_order]


def check(row: str, *, pads: tuple[int, int] = (0, 0), offsets: tuple[int, int] = (0, 0), **problem) -> Case:
    """The row's result, inside its bound, with guards round every operand. The case, which has run."""
    desc = GemmSparse24Descriptor(**problem)
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    case = case_of(plan, random_data(np.random.default_rng(desc.n + desc.m), desc), pads, offsets)
    case.check(case.run())
    return case


def rounded(values: np.ndarray, element: ElementKind) -> np.ndarray:
    """float32 to the element, by its definition."""
    if element.is_integer:
        return np.clip(np.rint(values), -128, 127).astype(np.int8)
    return values.astype(element.dtype)


# The order of W's rows ----------------------------------------------------------------------------


def test_the_order_of_rows_written_out():
    gate, up = list(range(16)), list(range(16, 32))
    assert gated_rows(32).tolist() == [*gate[:8], *up[:8], *gate[8:], *up[8:]]
    assert gated_rows(32).dtype == np.int64
    assert gated_rows(0).tolist() == []


@given(st.integers(1, 50))
def test_each_row_once_with_gates_before_their_up_rows(units):
    rows = gated_rows(16 * units)
    assert sorted(rows.tolist()) == list(range(16 * units))
    gates, ups = rows_of_gates(rows[None])
    assert gates[0].tolist() == list(range(8 * units))
    assert (ups - gates == 8 * units).all()


@pytest.mark.parametrize("m", [8, 17, -16, 2**31, 2**62, 2**63, 16.0, "16", None, True])
def test_a_size_that_has_no_such_order(m):
    with pytest.raises(InvalidProblemError, match=r"m: expected a multiple of 16 below 2\^31, got "):
        gated_rows(m)


# Descriptors --------------------------------------------------------------------------------------


@gated
def test_a_descriptor_of_half_as_many_results(epilogue):
    desc = GemmSparse24Descriptor(n=3, m=48, k=64, element="bf16", epilogue=epilogue, scale_w="row")
    shapes = {one.argument: one.shape for one in desc.operands()}
    assert shapes == {"weight": (48, 64), "x": (3, 64), "y": (3, 24), "bias": (48,), "scale_w": (48,)}
    assert (desc.sums, desc.outputs, desc.is_plain) == (48, 24, False)
    assert GemmSparse24Descriptor.model_validate_json(desc.model_dump_json()) == desc


@gated
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": 24}, "m: expected a multiple of 16 for epilogue bias_.*, got 24"),
        ({"m": 1}, "m: expected a multiple of 16 for epilogue bias_.*, got 1"),
        ({"element": "s8"}, "out_element: expected s8 or a float for epilogue bias_.*, got i32"),
        ({"element": "s8", "out_element": "i32"}, "out_element: expected s8 or a float"),
        ({"op": "dgrad"}, "epilogue: expected identity for op dgrad, got bias_"),
    ],
)
def test_what_has_no_gates(epilogue, change, words):
    fields = {"n": 1, "m": 16, "k": 16, "element": "bf16", "epilogue": epilogue}
    with pytest.raises(InvalidProblemError, match=words):
        GemmSparse24Descriptor(**{**fields, **change})


@gated
def test_block_sparse_families_have_no_gates(epilogue):
    words = f"epilogue: expected one that isn't gated, got {epilogue}"
    shape = BlockSparseShape(heads=1, rows=64, cols=64, block=16, blocks=3)
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseMatmulDescriptor(op="dsd", layout=shape, n=16, element="bf16", epilogue=epilogue)
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseConv2dDescriptor(
            layout=shape, batch=1, height=8, width=8, kernel=1, element="bf16", epilogue=epilogue
        )


# Who serves them ----------------------------------------------------------------------------------


@gated
@pytest.mark.parametrize("element", RESULTS)
def test_rows_that_do_not_serve_them_say_so(epilogue, element):
    out = "bf16" if element == "s8" else RESULTS[element][0]
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element=element, out_element=out, epilogue=epilogue)
    reasons = {name: reason for name, _, reason in explain(desc, device=HOPPER).rows}
    others = [
        row
        for row in ENTRIES
        if row not in SERVING and element in row.elements and not row.on_host and not row.only_groups
    ]
    assert {reasons[row.name] for row in others} <= {f"does not serve epilogue {epilogue}"}
    assert {"f32": 1, "s8": 1, "fp8_e4m3": 1, "fp8_e5m2": 0}.get(element, 2) == len(others)


@gated
@pytest.mark.parametrize(
    ("element", "chosen", "invariant"),
    [
        ("f32", "f32_split6", "f32_split6_invariant"),
        ("f16", "wgmma_sp", "wgmma_sp_invariant"),
        ("bf16", "wgmma_sp", "wgmma_sp_invariant"),
        ("s8", "wgmma_sp_s8", "wgmma_sp_s8"),
        ("fp8_e4m3", "wgmma_sp_fp8", "wgmma_sp_fp8_invariant"),
    ],
)
@pytest.mark.parametrize("n", [1, 64, 5000])
def test_what_is_chosen_on_hopper(epilogue, element, chosen, invariant, n):
    fields = {"out_element": "bf16"} if element == "s8" else {}
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element=element, epilogue=epilogue, **fields)
    assert explain(desc, device=HOPPER).chosen == chosen
    assert explain(desc, preference={"require": {"batch_invariant": True}}, device=HOPPER).chosen == invariant


@gated
@pytest.mark.parametrize("element", ["f16", "f32"])
def test_what_is_chosen_where_there_is_no_wgmma(epilogue, element):
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element=element, epilogue=epilogue)
    assert explain(desc, device=gpu_of(8, 0)).chosen == ("mma_sp" if element == "f16" else "inflate_strict")


@pytest.mark.parametrize("backend", ["inflate_cublas", "cusparselt"])
def test_a_backend_that_does_not_serve_them_is_refused(backend):
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", epilogue="bias_swiglu")
    with pytest.raises(UnsupportedError, match="does not serve epilogue bias_swiglu"):
        GemmSparse24Plan.compile(desc, preference=PlanPreference(prefer_backend=backend), device=HOPPER)


def test_arithmetic_is_named_where_a_plain_activation_has_a_name():
    for row in SERVING:
        for element, kind in itertools.product(row.elements, GATED):
            fields = {"n": 4, "m": 64, "k": 64, "element": element, "out_element": "f32"}
            one, other = (
                row.guarantee(GemmSparse24Descriptor(**fields, epilogue=epilogue))
                for epilogue in (kind, PLAIN[kind])
            )
            assert one == other


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["host_blas", "host_strict"])
@gated
@pytest.mark.parametrize(("element", "out"), TYPES)
def test_two_layers_and_their_product(row, epilogue, element, out):
    """The definition: gate and up are layers of their own, put together by ``gated_rows``.

    Each problem has X in one order with Y in the same or in the other, and both the other way round.
    """
    of_same = (GATED.index(epilogue) + TYPES.index((element, out))) % 2
    for order in ORDERS[::3] if of_same else ORDERS[1:3]:
        check_two_layers(row, element=element, out=out, epilogue=epilogue, **order)


def check_two_layers(row: str, element: str, out: str, epilogue: str, **order: str) -> None:
    rng = np.random.default_rng(len(out) + len(element))
    n, features, k = 7, 40, 32
    scale = {"scale_x": "row", "scale_w": "row"} if element in ("s8", "fp8_e4m3") else {}
    alpha = 2.0**-12 if element == "s8" else 0.03125
    fields = {"element": element, "out_element": out, "epilogue": epilogue, "alpha": alpha, **order, **scale}
    desc = GemmSparse24Descriptor(n=n, m=2 * features, k=k, **fields)
    data = random_data(rng, desc)
    rows = gated_rows(2 * features)
    case = case_of(plan_of_row(row).select(desc, device="host"), data, (3, 5), (1, 2))
    got = case.run().astype(np.float64)
    natural = np.argsort(rows)  # of gate, then up
    gate, up = (
        (data.x.astype(np.float64) @ case.dense[part].T * alpha * _scale(data, part))
        + data.bias[part].astype(np.float64)
        for part in (natural[:features], natural[features:])
    )
    want = activate(gate, epilogue) * up
    if out == "s8":
        want = np.clip(want, -128, 127)
    unit = ElementKind(out).unit_roundoff or 2.0**-8
    error = np.abs(got - want)
    assert (error <= 2 * unit * np.abs(want) + 1e-4 * (1 + np.abs(up)) + (0.51 if out == "s8" else 0)).all()
    assert case.check(case.fetch()) <= 1


def _scale(data, part):
    if data.scale_x is None:
        return 1.0
    return data.scale_x.astype(np.float64)[:, None] * data.scale_w.astype(np.float64)[part]


def composed(row: str, epilogue: str, case: Case, data, **fields) -> np.ndarray:
    """Return the gated result from ungated plans of the kernel: act(gate) times up in float32, rounded."""
    found = {}
    for kind in (PLAIN[epilogue], "bias"):
        desc = GemmSparse24Descriptor(**{**fields, "out_element": "f32", "epilogue": kind})
        found[kind] = case_of(plan_of_row(row).select(desc, device=device_of_row(row)), data).run()
    gate, up = rows_of_gates(found[PLAIN[epilogue]])[0], rows_of_gates(found["bias"])[1]
    assert gate.dtype == up.dtype == np.float32
    return rounded(gate * up, case.plan.descriptor.out_element)


def _is_invariant(name: str) -> bool:
    fields = {"element": row_of(name).elements[0], "out_element": "f32", "epilogue": "bias_swiglu"}
    return row_of(name).guarantee(GemmSparse24Descriptor(n=1, m=16, k=16, **fields)).batch_invariant


INVARIANT = [row.name for row in SERVING if _is_invariant(row.name)]


def _tokens_of(row: str) -> tuple[int, ...]:
    return (1, 5) if device_of_row(row) == "host" else (1, 5, 77, 128 if row == "mma_sp" else 300)


@pytest.mark.parametrize(("row", "n"), [marked(name, n) for name in INVARIANT for n in _tokens_of(name)])
@gated
@pytest.mark.parametrize("m", [16, 1040])
def test_steps_are_those_of_ungated_plans_and_one_product(row, epilogue, n, m):
    """To the bit: the activation and the other row's value as they are elsewhere, then two roundings."""
    m, k = (min(m, 208), 72) if device_of_row(row) == "host" else (m, 1040)
    for element in row_of(row).elements:
        for out in RESULTS[element]:
            fields = {"n": n, "m": m, "k": k, "element": element, "out_element": out, "bias_element": "f32"}
            alpha = 2.0**-13 if element == "s8" else 0.125
            desc = GemmSparse24Descriptor(**fields, epilogue=epilogue, alpha=alpha)
            data = random_data(np.random.default_rng(n), desc)
            case = case_of(plan_of_row(row).select(desc, device=device_of_row(row)), data)
            got = case.run()
            assert same_bits(got, composed(row, epilogue, case, data, **fields, alpha=alpha))


NUMBERS = [0.0, -0.0, 1.5, -2.5, 40.0, -40.0, 1e30, -1e30, np.inf, -np.inf, np.nan, 1e-40, 3.0e38, -130.0]


@pytest.mark.parametrize("row", [marked(row.name) for row in SERVING])
@gated
@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_special_values(row, epilogue, out):
    """Sums are zeros, so that the bias is what is gated: NaN is the one NaN, and signs are a product's."""
    for element in (one for one in row_of(row).elements if out in RESULTS[one]):
        pairs = np.array(list(itertools.product(NUMBERS, repeat=2)) + [(0.0, 0.0)] * 4, np.float32)
        gate, up = pairs.T + np.float32(0)  # as the sum and a bias of -0 are
        m, k = 2 * len(pairs), 128
        fields = {"element": element, "out_element": out, "bias_element": "f32", "epilogue": epilogue}
        desc = GemmSparse24Descriptor(n=3, m=m, k=k, **fields)
        data = random_data(np.random.default_rng(0), desc)
        data = type(data)(data.dense, np.zeros_like(data.x), np.concatenate([gate, up])[gated_rows(m)])
        with np.errstate(all="ignore"):
            case = case_of(plan_of_row(row).select(desc, device=device_of_row(row)), data)
            got = case.run()
            wide = gate.astype(np.float64)
            with np.errstate(all="ignore"):
                acted = activate(np.where(np.isinf(wide), 0, wide), epilogue)
            acted = np.where(wide == np.inf, np.inf, np.where(wide == -np.inf, -0.0, acted))
            want = (acted.astype(np.float32) * up).astype(np.float64)
        assert all(same_bits(one, got[0]) for one in got)
        nan, found = np.isnan(want), got[0].astype(np.float64)
        bits = got[0].view(case.plan.descriptor.out_element.bits_dtype)
        assert (np.isnan(found) == nan).all()
        assert set(bits[nan].tolist()) == {0x7FFFFFFF if out == "f32" else 0x7FFF}
        inf = np.isinf(want) | np.isinf(found)
        near = inf & (np.abs(found) > 1e38) & (np.abs(want) > 1e38)  # rounded up to Inf, or not
        assert (np.sign(found[inf & ~nan]) == np.sign(want[inf & ~nan])).all()
        assert (near | ~inf | nan).all()
        finite = ~nan & ~inf
        scale = np.abs(want[finite]) * (2.0**-7 if out == "bf16" else 2.0**-19)
        tiny = 2.0**-126 * np.maximum(np.abs(up[finite].astype(np.float64)), 1)
        assert (np.abs(found[finite] - want[finite]) <= scale + tiny).all()
        zero = finite & (want == 0) & (found == 0) & (np.abs(up) < 1e30)
        assert (np.signbit(found[zero]) == np.signbit(want[zero])).all()


@gated
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_integers_saturate_and_nan_becomes_0(epilogue, alpha):
    gate = np.array([300.0, -3.0, np.nan, 1.0, 50.0, 2.0, 0.0, 130.0], np.float32)
    up = np.array([2.0, 1e6, 1.0, np.nan, -50.0, 1.25, np.inf, 1.0], np.float32)
    desc = GemmSparse24Descriptor(
        n=1, m=16, k=0, element="s8", out_element="s8", epilogue=epilogue, alpha=alpha
    )
    case = make_case(desc)
    case.inputs[1].fill(np.concatenate([gate, up]))
    with np.errstate(all="ignore"):
        exact = activate(gate.astype(np.float64), epilogue) * up
        want = np.clip(np.rint(np.nan_to_num(exact, posinf=1e9, neginf=-1e9)), -128, 127)
    assert case.run()[0].astype(float).tolist() == want.tolist()


@pytest.mark.parametrize(("n", "m", "k"), [(0, 32, 16), (3, 0, 16), (3, 48, 0)])
@pytest.mark.parametrize("row", ["host_blas", "host_strict", marked("inflate_strict"), marked("mma_sp")])
def test_empty_problems(row, n, m, k):
    case = check(row, n=n, m=m, k=k, element="bf16", epilogue="bias_swiglu")
    assert case.fetch().shape == (n, m // 2)


# Replays, records, parts --------------------------------------------------------------------------


@gated
@pytest.mark.parametrize("element", ["f32", "f16", "s8"])
def test_a_replay_finds_what_was_changed(epilogue, element, tmp_path):
    out = {"s8": "bf16"}.get(element, "f32")
    desc = GemmSparse24Descriptor(
        n=5, m=48, k=64, element=element, out_element=out, epilogue=epilogue, scale_w="row", scale_x="row"
    )
    data = random_data(np.random.default_rng(4), desc)
    weight = Sparse24Weight.prune_compress(data.dense)
    plan = plan_of_row("host_strict").select(desc, device="host")
    y = np.empty((5, 24), desc.out_element.dtype)
    args = GemmSparse24Args(weight, data.x, y, data.bias, data.scale_x, data.scale_w)
    plan.run(args)
    for samples in (None, 7, [(4, 23), (0, 0), (2, 9)]):
        found = plan.replay(args, samples)
        assert found.equal
        assert found.results == 120
    save_run(tmp_path / "run.safetensors", plan, args)
    assert load_run(tmp_path / "run.safetensors").replay().equal
    y.view(desc.out_element.bits_dtype)[3, 17] ^= 1
    changed = plan.replay(args)
    assert (changed.differing, changed.first.token, changed.first.output) == (1, 3, 17)
    with pytest.raises(InvalidProblemError, match="expected outputs from 0 to below 24"):
        plan.replay(args, [(0, 24)])


def test_replay_says_which_step_after_sum_was_left_out():
    desc = GemmSparse24Descriptor(
        n=2, m=16, k=64, element="f32", epilogue="bias_swiglu", scale_w="row", alpha=0.5
    )
    data = random_data(np.random.default_rng(4), desc)
    weight = Sparse24Weight.prune_compress(data.dense)
    y, other = np.empty((2, 2, 8), np.float32)
    plan, without = (
        plan_of_row("host_strict").select(desc.model_copy(update={"alpha": alpha}), device="host")
        for alpha in (0.5, 1.0)
    )
    for one, result in ((plan, y), (without, other)):
        one.run(GemmSparse24Args(weight, data.x, result, data.bias, None, data.scale_w))
    y[1, 3] = other[1, 3]
    found = plan.replay(GemmSparse24Args(weight, data.x, y, data.bias, None, data.scale_w))
    assert found.first.divergence == "after the sum, as if alpha were left out"


@pytest.mark.parametrize("row", [marked(name) for name in INVARIANT if name != "mma_sp"])
@gated
def test_part_of_weight_has_bits_of_whole(row, epilogue):
    """Cut along M at a multiple of 16; and a row of Y has the same bits alone."""
    device = device_of_row(row)
    m, k, first, last, n = (96, 64, 16, 80, 5) if device == "host" else (4096, 2048, 528, 3104, 130)
    for element in row_of(row).elements:
        fields = {"k": k, "element": element, "out_element": "f32", "bias_element": "f32"}
        desc = GemmSparse24Descriptor(n=n, m=m, epilogue=epilogue, **fields)
        data = random_data(np.random.default_rng(1), desc)
        kind = plan_of_row(row)
        whole = case_of(kind.select(desc, device=device), data).run().copy()
        part = desc.model_copy(update={"m": last - first})
        plan = kind.select(part, device=device, preference=PlanPreference(whole_m=m))
        cut = type(data)(data.dense[first:last], data.x, data.bias[first:last])
        assert same_bits(case_of(plan, cut).run(), np.ascontiguousarray(whole[:, first // 2 : last // 2]))
        alone = case_of(
            kind.select(desc.model_copy(update={"n": 1}), device=device),
            type(data)(data.dense, data.x[3:4], data.bias),
        )
        assert same_bits(alone.run(), whole[3:4])
    weight = Sparse24Weight.prune_compress(data.dense)
    assert slice_weight(weight, first, last).m == last - first


# How they are cut ---------------------------------------------------------------------------------


def test_the_strict_grid_counts_rows_of_w():
    desc = GemmSparse24Descriptor(n=100, m=4096, k=64, element="bf16", epilogue="bias_swiglu")
    plain = desc.model_copy(update={"epilogue": "bias_silu"})
    smallest, of = TILES[-1], InflateStrictSchedule.of
    assert smallest.work_tiles(desc) == smallest.work_tiles(plain)
    assert of(desc, HOPPER.multiprocessors) == of(plain, HOPPER.multiprocessors)


@gated
@pytest.mark.parametrize("n", [1, 16, 64, 300, 1024, 4096])
@pytest.mark.parametrize(("m", "k"), [(28672, 4096), (1008, 2048)])
def test_schedules_are_allowed_and_sum_as_without_gates(epilogue, n, m, k):
    row = row_of("wgmma_sp_invariant")
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", epilogue=epilogue)
    slices = WGMMA_SP.split_k(m, k, desc.element)
    allowed = WGMMA_SP.allowed(desc, row)
    assert allowed
    assert {one.split_k * one.k_chunks for one in allowed} == {slices}
    assert min(one.workspace_bytes() for one in allowed) == 0
    most = max((o.tokens for o in allowed if o.warpgroups == 3 and o.stream_k and o.k_chunks > 1), default=0)
    assert most <= 96
