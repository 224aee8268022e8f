"""Column-major X and Y of 16-bit elements. Their results have the bits of row-major ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    MisalignedOperandError,
    PlanPreference,
    explain,
)
from sparse24_plans.gemm.backends import mma_sp, wgmma_sp
from sparse24_plans.gemm.schedules import mma_sp as mma_schedules
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.gemm.schedules.mma_sp import MmaSpSchedule
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.wgmma import defines, result_box
from sparse24_plans.plan.kernel import Choice

from ..kernels.index_functions import Table, check_tables
from ..kernels.requests import recorded_loads
from ..sample_devices import gpu_of
from ..support import EPILOGUES, Case, case_of, make_case, plan_of_row, random_data, same_bits
from . import column_major_model as model
from .kernel_entries import gpu, row_of

HOPPER, AMPERE = (
    gpu_of(*capability).model_copy(update={"cusparselt": None}) for capability in ((9, 0), (8, 0))
)
ORDERS = [{"x_order": x, "y_order": y} for x, y in itertools.product(("row", "column"), repeat=2)][1:]
orders = pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order.values()))
BOTH = ORDERS[-1]


# Who serves them ----------------------------------------------------------------------------------


@orders
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("n", [8, 64, 4096])
def test_sparse_tensor_cores_serve_both_orders(order, element, n):
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element=element, **order)
    assert explain(desc, device=HOPPER).chosen == "wgmma_sp"
    assert explain(desc, device=AMPERE).chosen == ("mma_sp" if n <= 128 else "inflate_cublas")
    invariant = PlanPreference(require=GuaranteeRequirement(batch_invariant=True))
    assert explain(desc, preference=invariant, device=HOPPER).chosen == "wgmma_sp_invariant"


@pytest.mark.parametrize("n", [1, 17, 4095])
def test_misaligned_column_major_x_is_transposed_or_inflated(n):
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element="bf16", **BOTH)
    assert explain(desc, device=HOPPER).chosen == "wgmma_sp"
    for device in (HOPPER, AMPERE):
        reasons = {name: reason for name, _, reason in explain(desc, device=device).rows}
        assert reasons["mma_sp_many"] == f"needs columns of X in multiples of 16 bytes, got n = {n}"
    assert explain(desc, device=AMPERE).chosen == "inflate_cublas"
    little = PlanPreference(max_workspace_bytes=2 * n * 4096 - 1)
    reasons = {name: reason for name, _, reason in explain(desc, preference=little, device=HOPPER).rows}
    assert f"{2 * n * 4096} bytes" in reasons["wgmma_sp"]


@pytest.mark.parametrize(
    ("n", "transposed"),
    [(8, False), (17, True), (56, False), (72, True), (80, False), (1032, True), (4096, False)],
)
def test_x_is_transposed_where_loads_would_be_slow(n, transposed):
    """X is read as it lies if the workspace has no room for a transpose, also for many tokens."""
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element="bf16", **BOTH)
    kernel = built(desc, PlanPreference())
    assert (kernel.launches, "transposed" in kernel.details) == (1 + transposed, transposed)
    needed = 2 * n * 4096 if transposed else 0
    assert kernel.workspace_size == kernel._schedule.workspace_bytes() + needed
    if transposed and n % 8 == 0:
        most = kernel.workspace_size - 1
        kernel = built(desc, PlanPreference(max_workspace_bytes=most))
        assert kernel.launches == 1
        assert kernel.workspace_size == kernel._schedule.workspace_bytes() <= most


def built(desc: GemmSparse24Descriptor, preference: PlanPreference) -> wgmma_sp.Kernel:
    """The kernel as selection builds it, not loaded."""
    with recorded_loads(wgmma_sp.Kernel):
        return wgmma_sp.Kernel(Choice(desc, HOPPER, row_of("wgmma_sp"), preference, {}))


@pytest.mark.parametrize("n", [1, 17, 4095])
def test_column_major_results_for_any_number_of_tokens(n):
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element="bf16", y_order="column")
    assert explain(desc, device=HOPPER).chosen == "wgmma_sp"


@orders
@pytest.mark.parametrize("element", ["s8", "fp8_e4m3"])
def test_8_bit_elements_lie_in_rows(order, element):
    """wgmma reads them K-major alone."""
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element=element, **order)
    reasons = {name: reason for name, _, reason in explain(desc, device=HOPPER).rows}
    single = [name for name in reasons if name.startswith("wgmma") and "grouped" not in name]
    words = {reasons[name] for name in single if element[:2] in name}
    assert words == {"serves x_order and y_order row"}


@orders
@pytest.mark.parametrize("n", [5, 64])
def test_column_major_float32_goes_to_the_library(order, n):
    """Kernels that split float32 read rows alone."""
    desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element="f32", **order)
    answer = explain(desc, device=HOPPER)
    assert answer.chosen == "inflate_cublas"
    reasons = {name: reason for name, _, reason in answer.rows if name.startswith("f32_split")}
    assert len(reasons) == 4
    assert set(reasons.values()) == {"serves x_order and y_order row"}


@settings(max_examples=20)
@given(
    n=st.integers(1, 600).map(lambda units: 8 * units),
    m=st.integers(1, 30000),
    k=st.integers(1, 1000).map(lambda units: 16 * units),
    row=st.sampled_from(["wgmma_sp", "wgmma_sp_invariant"]),
)
def test_a_problem_is_summed_alike_in_every_order(n, m, k, row):
    fields = {"n": n, "m": m, "k": k, "element": "bf16"}
    rows = WGMMA_SP.best(GemmSparse24Descriptor(**fields), row_of(row))
    for order in ORDERS:
        found = WGMMA_SP.best(GemmSparse24Descriptor(**fields, **order), row_of(row))
        assert found == rows


# Shared memory, as TMA fills it and the tensor cores read it -----------------------------------------

CUTS = sorted(
    {(one.tokens, one.cluster_m) for n in (8, 300, 600, 8192) for one in schedules.schedules_for(n)}
)
CUTS += [(tokens, 1) for tokens in (16, 24, 32, 40, 48, 56, 64)]


@pytest.mark.parametrize("ranges", [0, 132])
@pytest.mark.parametrize(("tokens", "share"), CUTS)
def test_column_major_x_reaches_wgmma(tokens, share, ranges):
    """A stage of whole blocks and of ragged ones, in the middle of K and at its end."""
    schedule = schedules.WgmmaSpSchedule(2, 1, tokens, share, stream_k=ranges)
    rng = np.random.default_rng(tokens)
    k = 2 * model.BOX_COLUMNS + 24
    for tail in {8, tokens // 16 * 8 or 8, tokens // 16 * 8 + 8, tokens}:
        desc = GemmSparse24Descriptor(n=tokens + tail, m=64, k=k, element="bf16", x_order="column")
        x = rng.integers(1, 1 << 16, (desc.n, k), dtype=np.uint16)
        padded = np.zeros((desc.n, 3 * model.BOX_COLUMNS), np.uint16)
        padded[:, :k] = x
        for token0, box in itertools.product((0, tokens), (1, 2)):
            shared, came, announced = model.stage(desc, schedule, x, token0, box)
            assert came == announced
            group, count = schedule.group(2), min(tokens, desc.n - token0)
            for step in range(2):
                start = model.descriptor(0, 2 * group, 128 * group) + step * 4 * group
                column = box * model.BOX_COLUMNS + step * model.STEP_COLUMNS
                want = padded[token0 : token0 + count, column : column + model.STEP_COLUMNS].T
                assert np.array_equal(model.read_b(shared, start, tokens)[:, :count], want)


@pytest.mark.parametrize(
    ("tokens", "stream_k"),
    [*zip(sorted({tokens for tokens, _ in CUTS if tokens <= 64}), itertools.cycle([0, 132]))],
)
def test_producer_threads_copy_x_where_the_model_does(tokens, stream_k):
    desc = GemmSparse24Descriptor(n=tokens, m=64, k=64, element="bf16", x_order="column")
    schedule = schedules.WgmmaSpSchedule(2, 1, tokens, stream_k=stream_k)
    copy, pitch, threads = model.XCopy.of(schedule), 2 * schedule.group(2), np.arange(128)
    assert schedule.copied_by_threads(desc.n)
    check_tables(
        "gemm/wgmma_sp/producer.cuh",
        model.defines(desc, schedule),
        Table("i0 == 0 ? XCopy::kStep : XCopy::kChunks", [copy.step, copy.chunks]),
        Table("XCopy::line(i0)", threads % copy.threads // copy.lanes),
        Table("XCopy::chunk(i0)", threads % copy.lanes),
        Table("XCopy::address_of_pass(XCopy::offset(i0), i1)", copy.places(pitch)),
    )


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 256])
def test_wgmma_finds_a_column_major_x_where_the_model_does(tokens):
    group = schedules.WgmmaSpSchedule(2, 1, tokens).group(2)
    want = [model.descriptor(1024 * i, 2 * group, 128 * group) for i in range(300)]
    function = f"matrix_descriptor_n_major<{2 * group}, {128 * group}>(1024 * i0)"
    check_tables("ptx/wgmma.cuh", {}, Table(function, want))


STAGED = [(0.0, "bf16"), (1.0, "f32"), (0.0, "f32"), (1.0, "bf16")]


@pytest.mark.parametrize(
    ("tokens", "beta", "out"),
    [(tokens, *STAGED[i % 4]) for i, tokens in enumerate(sorted({tokens for tokens, _ in CUTS}))],
)
def test_column_major_y_is_staged_where_tma_reads_it(tokens, beta, out):
    """With C in smaller steps: it comes through the same places."""
    fields = {"element": "bf16", "out_element": out, "y_order": "column", "beta": beta}
    desc = GemmSparse24Descriptor(n=tokens, m=64, k=64, **fields)
    schedule = schedules.WgmmaSpSchedule(1, 1, tokens)
    layouts = schedules.OperandLayouts.of(desc)
    box = result_box(desc, schedule, layouts)
    assert box.lines * box.pitch <= schedules._STAGED_BYTES // layouts.buffers
    assert tokens % box.elements == 0
    want = model.addresses(box, desc.out_element.itemsize).T
    check_tables(
        "gemm/wgmma_sp/epilogue_store.cuh",
        model.defines(desc, schedule),
        Table("EpilogueStore<Config::Out>::staged_at(i0, i1)", want),
    )


@pytest.mark.parametrize(
    ("chunks", "shape"), [(chunks, shape) for chunks, (shape, *_) in mma_schedules._shapes_of(4).items()]
)
def test_mma_sp_reads_column_major_x_without_bank_conflicts(chunks, shape):
    """Each chunk has a place of its own, and those of eight neighbouring columns lie in different banks."""
    swapped = min(chunks, 8)
    columns, into = np.indices((128, chunks))
    places = columns * chunks + (into ^ columns // (8 // swapped) % swapped)
    assert sorted(places.ravel().tolist()) == list(range(128 * chunks))
    banks = np.sort(places.reshape(16, 8, chunks) % 8, axis=1)
    assert (banks == np.arange(8)[:, None]).all()
    desc = GemmSparse24Descriptor(n=8 * chunks, m=4096, k=4096, element="bf16", **BOTH)
    schedule = MmaSpSchedule.shaped(desc.n, 4096, 4, chunks, *shape)
    check_tables("gemm/mma_sp.cu", mma_sp.defines(desc, schedule), Table("line_offset(i0, i1)", 16 * places))


@pytest.mark.parametrize("order", ["true", "false"])
@pytest.mark.parametrize("slices", [4, 8])
def test_the_sums_of_mma_sp_fit_where_the_stages_were(slices, order):
    """A warp pair of a CTA has a buffer of its own."""
    tables = []
    for tokens, shapes in mma_schedules._shapes_of(slices).items():
        for block_tiles, per_sm in shapes:
            schedule = MmaSpSchedule.shaped(8 * tokens, 4096, slices, tokens, block_tiles, per_sm)
            buffer = f"ReduceBuffer<{64 * block_tiles}, {8 * tokens}, {order}>"
            stages = schedule.stages * schedule.stage_bytes
            tables.append(Table(f"{4 // block_tiles} * {buffer}::kBytes <= {stages}", [True]))
    check_tables("gemm/split_k.cuh", {}, *tables)


# On the GPU -----------------------------------------------------------------------------------------


def cases_of(
    row: str, pads: tuple[int, int] = (0, 0), offsets: tuple[int, int] = (0, 0), **problem: object
) -> tuple[Case, Case]:
    """Return the problem as it is, and the same numbers with all operands in rows."""
    desc = GemmSparse24Descriptor(**problem)
    rows = GemmSparse24Descriptor(**{**problem, "x_order": "row", "y_order": "row"})
    data = random_data(np.random.default_rng(desc.n + desc.m), desc)
    kind = plan_of_row(row)
    return (
        case_of(kind.select(desc, device=0), data, pads, offsets),
        case_of(kind.select(rows, device=0), data),
    )


def check(
    row: str, pads: tuple[int, int] = (0, 0), offsets: tuple[int, int] = (0, 0), **problem: object
) -> None:
    case, rows = cases_of(row, pads, offsets, **problem)
    got = case.run()
    case.check(got)
    assert same_bits(np.ascontiguousarray(got), rows.run())


WGMMA_CUTS = [
    *((n, cut) for n in (8, 24, 64, 136, 1032) for cut in schedules.schedules_for(n)),
    *((n, cut) for n in (40, 200) for cut in schedules.schedules_in(3, n)),
][::2]
"""Every other schedule; test_tilings.py runs all of them."""
WGMMA_CUTS += [
    (n, schedules.WgmmaSpSchedule(*shape[:2], tokens, shape[2], stream_k=7))
    for n, tokens in ((8, 8), (24, 24), (40, 48), (72, 80), (112, 112), (136, 144), (200, 208))
    for shape in schedules._STREAM_K_SHAPES
    if schedules.WgmmaSpSchedule(*shape[:2], tokens, shape[2], stream_k=7).fits()
]


@gpu
@pytest.mark.parametrize(("n", "cut"), WGMMA_CUTS, ids=str)
def test_cuts_of_wgmma_sp(monkeypatch, n, cut):
    """Forced on a problem that is ragged in m and k, has several row blocks, and uneven slices."""
    index = WGMMA_CUTS.index((n, cut))
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    if index % 4 < 3:  # X as it lies
        monkeypatch.setattr(wgmma_sp, "should_transpose_x", lambda _: False)
    element, alpha = ("f16", "bf16")[index % 2], 1 + index / 64  # of its own: plans are cached
    fields = {"k": 1048, "element": element, "alpha": alpha, "epilogue": EPILOGUES[index % 5]}
    out = "f32" if index % 3 == 0 else element
    check("wgmma_sp", (8, 8), n=n, m=2001, out_element=out, **(ORDERS[0], BOTH)[index // 3 % 2], **fields)


@gpu
@pytest.mark.parametrize("row", ["wgmma_sp", "wgmma_sp_invariant", "mma_sp_many"])
@pytest.mark.parametrize("n", [1, 5, 13, 61, 77, 203, 1030])
@pytest.mark.parametrize("out_f32", [False, True])
def test_a_ragged_result_in_columns(row, n, out_f32):
    """Columns of Y end within 16 bytes, begin anywhere, and have others' memory between them."""
    fields = {"m": 1337, "k": 264, "element": "bf16", "y_order": "column", "epilogue": "bias_silu"}
    for pads, offsets in (((0, 0), (0, 0)), ((8, 3), (8, 1)), ((0, 8 - n % 8), (0, 0))):
        check(row, pads, offsets, n=n, out_element="f32" if out_f32 else "bf16", **fields)


@gpu
@orders
@pytest.mark.parametrize("n", [8, 16, 24, 32, 40, 64, 72, 128, 200])
@pytest.mark.parametrize(("m", "k"), [(4096, 1024), (8448, 640), (20000, 136), (200, 16)])
def test_every_cut_of_mma_sp(order, n, m, k):
    fields = {"element": "f16", "epilogue": "bias_gelu", "out_element": "f32"}
    check("mma_sp_many", (8, 5), n=n, m=m, k=k, **order, **fields)


@gpu
@orders
@pytest.mark.parametrize("row", ["wgmma_sp", "wgmma_sp_invariant", "mma_sp_many"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_epilogue(order, row, epilogue, element):
    check(row, (16, 8), n=72, m=1000, k=520, element=element, epilogue=epilogue, alpha=-0.75, **order)


@gpu
@orders
@pytest.mark.parametrize("n", [1, 7, 17, 64, 1001])
@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("epilogue", ["identity", "bias_silu"])
def test_the_library_serves_every_order(order, n, element, epilogue):
    desc = GemmSparse24Descriptor(n=n, m=333, k=136, element=element, epilogue=epilogue, alpha=0.5, **order)
    for pads in ((0, 0), (8, 3)):
        data = random_data(np.random.default_rng(n), desc)
        case = case_of(plan_of_row("inflate_cublas").select(desc, device=0), data, pads)
        case.check(case.run())


@gpu
@pytest.mark.parametrize("row", ["wgmma_sp", "wgmma_sp_invariant"])
@pytest.mark.parametrize("n", [1, 5, 63, 65, 72, 129, 1001])
@pytest.mark.parametrize("k", [16, 136, 1048])
def test_transposed_x_may_lie_anywhere(row, n, k):
    """Columns begin at any element, or at a multiple of 16 bytes, with other memory between them."""
    fields = {"m": 1000, "k": k, "element": ("f16", "bf16")[n // 8 % 2], "epilogue": "bias"}
    for pads, offsets in (((0, 0), (0, 0)), ((3, 0), (1, 0)), ((-n % 8, 0), (8, 0)), ((8, 5), (4, 3))):
        check(row, pads, offsets, n=n, **fields, **(ORDERS[1], BOTH)[n % 2])


@gpu
def test_rows_of_y_keep_their_bits_in_every_batch():
    fields = {"m": 4096, "k": 4096, "element": "bf16", **BOTH}
    preference = PlanPreference(require=GuaranteeRequirement(batch_invariant=True))
    rng = np.random.default_rng(3)
    whole = GemmSparse24Descriptor(n=1032, **fields)
    data = random_data(rng, whole)
    want = make_case(whole, 0, preference, dense=data.dense, x=data.x).run()
    for n in (8, 16, 72, 264):
        part = make_case(GemmSparse24Descriptor(n=n, **fields), 0, preference, dense=data.dense, x=data.x[:n])
        assert same_bits(np.ascontiguousarray(part.run()), np.ascontiguousarray(want[:n]))


@gpu
@pytest.mark.parametrize("row", ["wgmma_sp", "mma_sp_many"])
def test_columns_that_do_not_begin_at_16_bytes_are_refused(row):
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16", **BOTH)
    data = random_data(np.random.default_rng(0), desc)
    for pads, offsets, words in (((4, 0), (0, 0), "x column stride"), ((0, 0), (4, 0), "x: ")):
        case = case_of(plan_of_row(row).select(desc, device=0), data, pads, offsets)
        with pytest.raises(MisalignedOperandError, match=words):
            case.run()
        assert case.result.untouched()


@gpu
def test_one_plan_serves_what_lies_elsewhere_with_other_strides():
    desc = GemmSparse24Descriptor(n=264, m=1000, k=520, element="f16", **BOTH)
    plan = GemmSparse24Plan.select(desc, device=0)
    data = random_data(np.random.default_rng(0), desc)
    results = [case_of(plan, data, pads).run().copy() for pads in ((0, 0), (8, 16), (64, 3))]
    assert all(same_bits(np.ascontiguousarray(one), np.ascontiguousarray(results[0])) for one in results)


def test_macros_of_both_kernels_say_how_x_and_y_lie():
    for order in ORDERS:
        desc = GemmSparse24Descriptor(n=64, m=4096, k=4096, element="bf16", **order)
        made = [
            defines(desc, schedules.schedules_for(64)[0], schedules.OperandLayouts.of(desc), False),
            mma_sp.defines(desc, MmaSpSchedule.in_clusters(64, 4096, 132)),
        ]
        want = tuple(int(order[name] == "column") for name in ("x_order", "y_order"))
        assert [(one["X_COLUMN_MAJOR"], one["Y_COLUMN_MAJOR"]) for one in made] == [want, want]
