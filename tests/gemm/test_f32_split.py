"""float32 in bf16 terms: what the terms are, what their products lose, and what becomes of Inf and NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Weight,
    UnsupportedError,
)
from sparse24_plans.device.jit.launcher import recording
from sparse24_plans.device.tensors import Device, TensorView
from sparse24_plans.gemm import limits, wgmma
from sparse24_plans.gemm.arithmetic.bf16_terms import (
    MAX_TERMS,
    SPLIT_GROUP,
    SPLIT_SUM,
    SPLIT_TILE,
    term_pairs,
    terms_of,
)
from sparse24_plans.gemm.backends import f32_split
from sparse24_plans.gemm.schedules import f32_split_heuristics
from sparse24_plans.gemm.schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from sparse24_plans.plan import plan as plans
from sparse24_plans.plan.arithmetic import Arithmetic
from sparse24_plans.plan.guarantee import LEAST_IN_PARTS
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.schedule_choice import constants
from sparse24_plans.weights.packed_layouts import TILE_M, layout_called

from ..kernels.index_functions import Table, check_tables
from ..sample_devices import HOPPER
from ..support import Data, case_of, device_of_row, make_case, plan_of_row, random_data
from .kernel_entries import gpu, row_of
from .test_schedules import pieces

ROWS = ("f32_split3", "f32_split3_invariant", "f32_split6", "f32_split6_invariant")
every_row = pytest.mark.parametrize("row", ROWS)
NAMES = {2: "hopper_tc_f32x3", 3: "hopper_tc_f32x6"}
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def least_workspace(row, desc, device=HOPPER):
    return row.needed_workspace(Choice(desc, device, row, PlanPreference(), {}))


# Parts ----------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(floats)
def test_the_parts_of_a_number(x):
    if abs(x) > float(ml_dtypes.finfo(ml_dtypes.bfloat16).max):
        return  # it rounds to an infinity: below
    high, middle, low = (part.astype(np.float64) for part in terms_of(np.array([x], np.float32)))
    for part in (high, middle, low):
        assert float(part[0].astype(ml_dtypes.bfloat16)) == part[0]
    whole = high + middle + low
    assert whole == x if abs(x) >= 2.0**-110 or x == 0 else abs(whole - x) <= 2.0**-134
    least = max(abs(x), LEAST_IN_PARTS)
    assert abs(middle) <= 2.0**-8 * least
    assert abs(low) <= 2.0**-17 * least


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan, 3.4e38, -3.4028235e38])
def test_what_has_no_finite_parts_shows_in_every_product(x):
    """A product of such terms is NaN, whatever the other factor is."""
    with np.errstate(all="ignore"):
        for count in (2, 3):
            mine = terms_of(np.array([x], np.float32))[:count]
            for other in (0.0, 1.0, -2.5, 1e-45, np.inf, 3.4e38):
                theirs = terms_of(np.array([other], np.float32))[:count]
                total = sum(mine[i].astype(np.float64) * theirs[j] for i, j in term_pairs(count))
                assert np.isnan(total).all()


@pytest.mark.parametrize(("parts", "products"), [(2, 3), (3, 6)])
def test_small_products_are_added_first(parts, products):
    order = term_pairs(parts)
    assert len(set(order)) == products
    assert all(i + j < parts for i, j in order)
    assert order[-1] == (0, 0)
    assert [i for i, _ in order] == sorted((i for i, _ in order), reverse=True)


# Errors ---------------------------------------------------------------------------------------------


def sums_of(parts: int, slices: int, x: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """Return the sums that the arithmetic gives on the host."""
    desc = GemmSparse24Descriptor(n=x.shape[0], m=dense.shape[0], k=x.shape[1], element="f32")
    require = {"arithmetic": str(Arithmetic.split(parts, slices))}
    plan = GemmSparse24Plan.select(desc, preference={"require": require}, device="host")
    assert plan.guarantee.arithmetic == f"{NAMES[parts]}/slices={slices}"
    return case_of(plan, Data(dense, x)).run()


def largest_error(got: np.ndarray, x: np.ndarray, dense: np.ndarray) -> float:
    exact = x.astype(np.float64) @ dense.astype(np.float64).T
    return float(np.abs(got - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("kind", ["normal", "positive", "mixed magnitudes"])
@pytest.mark.parametrize("k", [512, 4096])
def test_six_products_err_less_than_float32_in_order(kind, k):
    rng = np.random.default_rng(k)
    x, dense = rng.standard_normal((4, k)), rng.standard_normal((12, k))
    if kind == "positive":
        x, dense = np.abs(x), np.abs(dense)
    if kind == "mixed magnitudes":
        x, dense = (values * 2.0 ** rng.integers(-20, 20, values.shape) for values in (x, dense))
    desc = GemmSparse24Descriptor(n=4, m=12, k=k, element="f32")
    strict = make_case(
        desc, preference={"require": {"arithmetic": "fma32_in_order"}},
        dense=dense.astype(np.float32), x=x.astype(np.float32),
    )  # fmt: skip
    kept = strict.dense.astype(np.float32)
    in_order = largest_error(strict.run(), strict.x, kept)
    assert largest_error(sums_of(3, 1, strict.x, kept), strict.x, kept) <= max(in_order, 2.0**-23)
    assert largest_error(sums_of(2, 1, strict.x, kept), strict.x, kept) <= 2.0**-15


def test_inf_and_nan_are_where_float32_has_them():
    """Not where parts of them meet zeros, or others of another sign."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((6, 72)).astype(np.float32)
    dense = Sparse24Weight.prune_compress(rng.standard_normal((9, 72)).astype(np.float32)).decompress()
    x[1, 3], x[2, 40], x[3, 7], x[4, 8], x[4, 9] = np.inf, np.nan, 3.4e38, -np.inf, np.inf
    for row, value in ((2, np.inf), (4, -np.inf), (5, np.nan), (6, -3.4e38)):
        dense[row, np.flatnonzero(dense[row])[row]] = value
    dense[7, np.flatnonzero(dense[7])[:3]] = 1e-40, -1e-45, 2.0**-130
    kept = dense != 0
    with np.errstate(all="ignore"):
        products = x[:, None, :].astype(np.float64) * dense[None].astype(np.float64)
        exact = np.where(kept[None], products, 0).sum(axis=2).astype(np.float32)
        for parts in (2, 3):
            for slices in (1, 3):
                got = sums_of(parts, slices, x, dense)
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(exact))
                special = ~np.isfinite(exact)
                np.testing.assert_array_equal(got[special], exact[special])
                np.testing.assert_allclose(got[~special], exact[~special], rtol=0.02, atol=1e-4)


# Plans ----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    m=st.integers(1, 60000) | st.sampled_from([4096, 28672, 57344]),
    k=st.integers(1, 4096).map(lambda units: 8 * units),
    tokens=st.lists(st.integers(1, 9000) | st.sampled_from([64, 128, 8192]), min_size=2, max_size=4),
    shards=st.integers(1, 8),
)
def test_split_k_of_invariant_kernels_ignores_n_and_slices(m, k, tokens, shards):
    for name in ("f32_split3_invariant", "f32_split6_invariant"):
        row, part = row_of(name), -(-m // shards)
        named = set()
        for n in tokens:
            for rows, wish in ((m, {}), (part, {"whole_m": m})):
                desc = GemmSparse24Descriptor(n=n, m=rows, k=k, element="f32")
                for device in (HOPPER, HOPPER.model_copy(update={"multiprocessors": 66})):
                    choice = Choice(desc, device, row, PlanPreference(**wish), {})
                    named.add(row.kernel.arithmetic(choice))
        assert named == {
            f"{NAMES[row.split_terms]}/slices={f32_split_heuristics.invariant_split_k(m, k, row.split_terms)}"
        }


@settings(max_examples=30)
@given(
    name=st.sampled_from(ROWS),
    n=st.integers(1, 3000) | st.sampled_from([1, 64, 65, 1000]),
    m=st.integers(1, 9000),
    k=st.integers(1, 2000).map(lambda units: 8 * units),
)
def test_the_least_workspace_is_enough(name, n, m, k):
    """The workspace that a kernel asks for suffices for some schedule, and no limit changes the bits."""
    row, desc = row_of(name), GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
    least, named = least_workspace(row, desc), set()
    for most in (least, least + 10**7, None):
        choice = Choice(desc, HOPPER, row, PlanPreference(max_workspace_bytes=most), {})
        kernel = row.kernel.sized(choice)
        assert most is None or kernel.workspace_size <= most
        assert most != least or kernel.workspace_size == least
        assert (kernel.launches == 1) == limits.producers_split(m, k, n)
        named.add(row.kernel.arithmetic(choice))
    assert len(named) == 1
    assert row.limits(desc) is None


@pytest.mark.parametrize(
    ("n", "m", "k"),
    [(128, 7, 8192), (16, 905, 4104), (65, 24, 4104), (129, 16, 8192), (2973, 1, 8192), (7, 0, 8192)],
    ids=str,
)
@pytest.mark.parametrize("multiprocessors", [114, 132])
@every_row
def test_a_plan_is_selected_again_with_its_own_workspace(row, n, m, k, multiprocessors):
    """Schedules with slices of K keep no blocked sums, and the least workspace counts none for them."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
    device = HOPPER.model_copy(update={"multiprocessors": multiprocessors})

    def selected(most):
        wanted = {"prefer_kernel": row, "max_workspace_bytes": most}
        return GemmSparse24Plan.select(desc, preference=wanted, device=device)

    free = selected(None)
    again = selected(free.workspace_size())
    assert again.explain().details == free.explain().details
    least = least_workspace(row_of(row), desc, device)
    assert selected(least).workspace_size() == least
    if least:
        with pytest.raises(UnsupportedError, match=f"needs a workspace of {least} bytes"):
            selected(least - 1)


@settings(max_examples=25)
@given(
    name=st.sampled_from(ROWS),
    n=st.integers(129, 60000),
    m=st.integers(1, 40000),
    k=st.integers(500, 8000).map(lambda units: 8 * units),
)
def test_terms_of_x_are_split_in_chunks_of_bounded_memory(name, n, m, k):
    """The issue's 16384 tokens of 36864 columns would take 3.4 GiB of terms."""
    row, desc = row_of(name), GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
    choice = Choice(desc, HOPPER, row, PlanPreference(), {})
    kernel = row.kernel.sized(choice)
    sums = 5 * 132 * 128 * 128 * 4  # of stream-K and of groups of sums
    assert kernel.workspace_size <= limits.SPLIT_CHUNK_BYTES + sums
    assert kernel.workspace_size <= row.kernel.most_workspace(choice)
    tokens = [chunk.descriptor.n for chunk in kernel._chunks]
    assert sum(tokens) == n
    assert len(set(tokens[:-1])) <= 1
    assert tokens[-1] <= tokens[0]
    if 2 * row.split_terms * n * k <= limits.SPLIT_CHUNK_BYTES:
        assert len(tokens) == 1


@pytest.mark.parametrize("beta", [0, 1])
def test_chunks_read_and_write_each_row_once(beta):
    """Whatever the strides, and in the order of the rows: the launches say so."""
    desc = GemmSparse24Descriptor(n=1000, m=320, k=4616, element="f32", beta=beta)
    row = row_of("f32_split6")
    wish = PlanPreference(max_workspace_bytes=least_workspace(row, desc))
    with recording():
        kernel = row.kernel(Choice(desc, HOPPER, row, wish, {}))
        shapes = {"source": (1000, 4624), "result": (1000, 324), "c": (1000, 332)}
        views = {
            name: TensorView(
                (number + 1) << 40, (1000, columns), ElementKind.F32, Device("cuda", 0), strides=(columns, 1)
            )
            for number, (name, (_, columns)) in enumerate(shapes.items())
            if name != "c" or beta
        }
        views["packed"] = TensorView(1 << 50, (8,), ElementKind.U8, Device("cuda", 0))
        launches: list = []
        kernel.launcher(views, 1 << 52)(launches)
    assert len(launches) == kernel.launches == 2 * len(kernel._chunks) > 4
    begin = 0
    for split, product in zip(launches[::2], launches[1::2], strict=True):
        first, then = split.parameters, product.parameters
        assert (first.terms, first.n) == (1 << 52, then.n)
        assert first.x == then.x == views["source"].address + 4 * 4624 * begin
        assert then.y == views["result"].address + 4 * 324 * begin
        assert then.c == (views["c"].address + 4 * 332 * begin if beta else None)
        begin += then.n
    assert begin == 1000


@settings(max_examples=30)
@given(
    name=st.sampled_from(ROWS),
    n=st.integers(1, 6000) | st.integers(1, 64),
    m=st.integers(1000, 60000),
    k=st.integers(1, 1200).map(lambda units: 8 * units),
)
def test_ranges_cut_no_sum_of_the_tensor_cores(name, n, m, k):
    """Ranges are even and at least one work tile long, so at most two clusters share a work tile."""
    row, desc = row_of(name), GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
    unit, tiles = f32_split_heuristics.RANGE_TILES[row.split_terms], -(-k // SPLIT_TILE)
    assert unit * SPLIT_TILE % SPLIT_SUM[row.split_terms] == 0
    assert SPLIT_GROUP[row.split_terms] % (unit * SPLIT_TILE) == 0
    for one in f32_split_heuristics.allowed_schedules(desc, row):
        if not one.stream_k:
            continue
        units = -(-tiles // unit)
        found = pieces(one, one.work_tiles(n, m), units)
        work = [sum(last - first for _, first, last in its) for its in found]
        assert (sum(work), max(work) - min(work) <= 1) == (one.work_tiles(n, m) * units, True)
        assert min(work) >= units


@pytest.mark.parametrize("row", ["f32_split3_invariant", "f32_split6_invariant"])
@pytest.mark.parametrize("n", [17, 64])
def test_invariant_kernels_take_stream_k_for_a_partial_wave(row, n):
    """Split-K is 1 for every n, and whole work tiles would leave 72 of 132 SMs idle in the last wave."""
    desc = GemmSparse24Descriptor(n=n, m=24576, k=4096, element="f32")
    cut, _ = f32_split_heuristics.best_chunking(desc, row_of(row), HOPPER)
    assert (cut.split_k, cut.stream_k) == (1, 132)
    assert cut.work_tiles(n, desc.m) > 132
    assert cut.work_tiles(n, desc.m) % 132


@pytest.mark.parametrize(("k", "split"), [(896, True), (1024, False)])
def test_no_stream_k_where_producers_split_x(k, split):
    """The warp that would exchange the flags of stream-K splits X."""
    m = 9000
    tried = f32_split_heuristics.tried_schedules(17, m, k, 2)
    assert limits.producers_split(m, k, 24) == split
    assert any(one.stream_k for one in tried) != split


@pytest.mark.parametrize(
    ("m", "k", "terms", "split"),
    [(24576, 4096, 2, 1), (8576, 7680, 2, 3), (37696, 12608, 2, 2), (8704, 2752, 3, 3), (17088, 11840, 3, 4)],
)
def test_stream_k_for_few_tokens_moves_no_invariant_split(m, k, terms, split):
    """The split fixes bits, so it still depends on the schedules of the first fit alone."""
    assert f32_split_heuristics.invariant_split_k(m, k, terms) == split


@settings(max_examples=60)
@given(name=st.sampled_from(ROWS), n=st.integers(1, 3000), m=st.integers(1, 60000))
def test_tiles_of_x_begin_where_a_swizzles_pattern_does(name, n, m):
    """With every schedule, tiles of X lie behind those of W in shared memory."""
    row, desc = row_of(name), GemmSparse24Descriptor(n=n, m=m, k=1040, element="f32")
    layout = layout_called(row.layout)
    for one in f32_split_heuristics.allowed_schedules(desc, row):
        weights, _ = one.stages(OperandLayouts.of(desc, layout), row.split_terms)
        assert weights * one.rows // TILE_M * layout.shared_bytes % 1024 == 0


@pytest.mark.parametrize("row", ["f32_split3", "f32_split6"])
@pytest.mark.parametrize("tokens", [8, 16])
def test_producers_store_terms_where_wgmma_reads_them(row, tokens):
    """A warp fills a stage: a line of 128 swizzled bytes for each token, 16 bytes of 8 columns at a time."""
    desc, layout = (
        GemmSparse24Descriptor(n=tokens, m=64, k=64, element="f32"),
        layout_called(row_of(row).layout),
    )
    layouts, schedule = OperandLayouts.of(desc, layout), WgmmaSpSchedule(2, 1, tokens)
    defined = wgmma.defines(desc, schedule, layouts, False, row_of(row).split_terms)
    assert defined["X_SPLIT"] == 1
    lane, step = np.arange(32)[:, None], np.arange(tokens // 4)
    token, chunk = lane // 8 + 4 * step, lane % 8
    at = token * 128 + (chunk ^ token % 8) * 16
    np.testing.assert_array_equal(np.sort(at, axis=None), 16 * np.arange(8 * tokens))
    check_tables(
        "gemm/wgmma_sp/producer_split.cuh",
        defined,
        Table("SplitPiece::token(i0, i1)", token),
        Table("SplitPiece::chunk(i0)", chunk[:, 0]),
        Table("SplitPiece::offset(i0, i1)", at),
        Table("SplitPiece::kPasses + 0 * i0", [tokens // 4]),
    )


@every_row
def test_what_is_too_large_is_refused_by_what_it_exceeds(row):
    terms = row_of(row).split_terms
    many = GemmSparse24Descriptor(n=2**31, m=64, k=8, element="f32")
    assert "tensor map" in row_of(row).limits(many)
    assert row_of(row).limits(many.model_copy(update={"n": 2**31 // terms})) is None
    assert "grid limit" in row_of(row).limits(many.model_copy(update={"n": 2**27, "m": 2**15}))
    assert limits.f32_split(terms, many.model_copy(update={"n": 1, "k": 0})) == "serves no empty sums"


def test_the_bounds_are_below_those_of_float32_in_order():
    desc = GemmSparse24Descriptor(n=1, m=64, k=8192, element="f32")
    six, three, strict, cublas = (
        row_of(name).guarantee(desc)
        for name in ("f32_split6", "f32_split3", "inflate_strict", "inflate_cublas")
    )
    for k in (2048, 4096, 28672):
        assert six.error_bound(k) < three.error_bound(k) < strict.error_bound(k) < cublas.error_bound(k)
    assert three.error_bound(8) > 2.0**-15  # products of low parts are missing, however few are added
    assert MAX_TERMS == 3


# On a GPU -------------------------------------------------------------------------------------------


CUTS = [
    (row, n, m, cut)
    for row in ("f32_split3", "f32_split6")
    for n, m in ((1, 1800), (13, 9000), (20, 1800), (60, 9000), (200, 9000))
    for cut in f32_split_heuristics.tried_schedules(n, m, 4616, row_of(row).split_terms)
]


@gpu
@pytest.mark.parametrize(("row", "n", "m", "cut"), CUTS, ids=str)
def test_every_cut(monkeypatch, row, n, m, cut):
    """Forced on a problem that is ragged in n, m and k, and long enough for groups of sums."""
    chunking = f32_split_heuristics.Chunking
    monkeypatch.setattr(
        f32_split, "best_chunking", lambda desc, entry, *_: chunking.of(cut, desc, entry.split_terms)
    )
    alpha = 1 + CUTS.index((row, n, m, cut)) / 64  # of its own: plans are cached
    desc = GemmSparse24Descriptor(n=n, m=m, k=4616, element="f32", epilogue="bias_silu", alpha=alpha)
    case = make_case(desc, row=row, pad=8)
    case.check(case.run())


RANGED = [
    (row, n, cut._replace(stream_k=7))
    for row in ("f32_split3", "f32_split6")
    for n in (1, 13, 20, 60)
    for cut in f32_split_heuristics.tried_schedules(n, 36000, 4616, row_of(row).split_terms)
    if cut.stream_k
]
"""Every shape that is tried with stream-K for few tokens, in so few clusters that a small matrix has work for
all of them."""


@gpu
@pytest.mark.parametrize(("row", "n", "cut"), RANGED, ids=str)
def test_stream_k_for_few_tokens_changes_no_bit(monkeypatch, row, n, cut):
    """A range begins within a group of sums, and another cluster summed the groups before it."""
    desc = GemmSparse24Descriptor(n=n, m=1900, k=6024, element="f32", epilogue="bias_silu")
    assert cut.work_tiles(n, desc.m) > cut.stream_k
    assert cut.work_tiles(n, desc.m) % cut.stream_k
    found = set()
    for one in (cut, cut._replace(stream_k=0)):
        plans._select.cache_clear()  # plans of the other schedule
        chunking = f32_split_heuristics.Chunking(one, n)
        monkeypatch.setattr(f32_split, "best_chunking", lambda *_, chunking=chunking: chunking)
        case = make_case(desc, row=row, pad=8)
        assert (" by stream-K" in case.plan.explain().details) == (one == cut)
        found |= {case.run().tobytes() for _ in range(3)}
        case.check(case.run())
    plans._select.cache_clear()
    assert len(found) == 1


@gpu
@every_row
@pytest.mark.parametrize(("n", "m", "k"), [(1000, 300, 4616), (1300, 9000, 1032), (257, 4096, 8192)])
def test_bits_do_not_depend_on_chunks(row, n, m, k):
    """The workspace bounds the tokens of a chunk. C is Y: no chunk may add another's results."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32", epilogue="bias_silu", beta=0.5)
    data = random_data(np.random.default_rng(), desc)
    data.x[n // 2, 7], data.x[n - 1, 9] = np.inf, 3.4e38
    found, chunks = set(), set()
    least = least_workspace(row_of(row), desc)
    for most in (None, least, 2 * least + 2**25):
        wish = PlanPreference(max_workspace_bytes=most)
        plan = plan_of_row(row).select(desc, device=device_of_row(row), preference=wish)
        case = case_of(plan, data, (8, 12), in_place=True)
        found.add(case.run().tobytes())
        chunks.add(plan.parts.choice.entry.kernel.sized(plan.parts.choice).launches // 2)
        bound = plan.bind(case.args, workspace=case.workspace and case.workspace.view)
        case.result.fill(data.c)
        bound.launch()  # one CUDA graph
        found.add(case.fetch().tobytes())
    assert len(chunks) > 1
    assert len(found) == 1


@gpu
@every_row
@pytest.mark.parametrize(("m", "k"), [(1280, 1280), (130, 200), (520, 8232)])
def test_bits_do_not_depend_on_which_kernel_splits_x(row, m, k):
    """Producers split X of few tokens, and a pre-pass kernel X of more."""
    most, found = 24, set()
    rng = np.random.default_rng()
    x = (rng.standard_normal((most, k)) * 2.0 ** rng.integers(-120, 60, (most, k))).astype(np.float32)
    for few in (most, 0):
        for n in (1, 2, 7, 8, 9, 16, most):
            desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(constants("f32_producer_split"), "max_tokens", few)
                plans._select.cache_clear()  # plans of the other kernel
                case = make_case(desc, row=row, x=x[:n], pad=4)
                assert (" bf16 terms, " in case.plan.explain().details) == (few < n)
            found.add((n, case.run().tobytes()))
    plans._select.cache_clear()
    assert len(found) == 7


@gpu
@every_row
@pytest.mark.parametrize("epilogue", ["identity", "bias_relu"])
@pytest.mark.parametrize(("n", "m", "k"), [(1, 130, 200), (40, 136, 1032), (300, 200, 520)])
def test_inf_and_nan_on_a_gpu(row, epilogue, n, m, k):
    """Whatever the cut: where NaN comes from the parts of an operand, the sum is made again."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32", epilogue=epilogue)
    rng = np.random.default_rng(n)
    data = random_data(rng, desc)
    x, dense = data.x.copy(), data.dense.copy()
    x[0, 3] = np.inf
    if n > 4:
        x[1, 40], x[2, 7], x[3, 8], x[3, 9] = np.nan, 3.4e38, -np.inf, np.inf
    dense[5, 12], dense[m - 1, 33], dense[70, 50] = -np.inf, np.nan, -3.4e38
    case = make_case(desc, row=row, seed=n, dense=dense, x=x)
    got, kept = case.run(), case.dense != 0
    with np.errstate(all="ignore"):
        exact = np.empty((n, m), np.float32)
        for i in range(m):
            at = np.flatnonzero(kept[i])
            exact[:, i] = (x[:, at].astype(np.float64) * case.dense[i, at]).sum(axis=1)
        size = np.abs(x).astype(np.float64) @ np.abs(case.dense).T
        if case.bias is not None:
            exact = exact + case.bias.astype(np.float32)
            exact = np.where(exact < 0, np.float32(0), exact)
    special = ~np.isfinite(exact)
    assert np.isnan(exact).any()
    assert np.isinf(exact).any()
    np.testing.assert_array_equal(got[special], exact[special])
    tame = ~special & np.isfinite(size)
    assert (np.abs(got - exact)[tame] <= 1e-4 * (size[tame] + 1)).all()
    assert np.isfinite(got[~special]).all()


@gpu
@every_row
@pytest.mark.parametrize("epilogue", ["swiglu", "bias_geglu_tanh"])
@pytest.mark.parametrize("n", [5, 200])
def test_gated_pairs_of_which_a_sum_is_nan_are_recomputed(row, epilogue, n):
    """Values near 2^128 have no finite terms: gates, what they multiply, or both, are summed again."""
    desc = GemmSparse24Descriptor(n=n, m=352, k=512, element="f32", epilogue=epilogue)
    data = random_data(np.random.default_rng(0), desc)
    data.x[3], data.dense[:, 8:], data.dense[:, :8] = 3.39e38, 0, 0
    data.dense[:, :8:4] = 2.0**-126 * np.arange(1, 353)[:, None]
    data.dense[::5, :8] = 0
    plans = (plan_of_row(one).select(desc, device=device_of_row(one)) for one in (row, "host_strict"))
    found, want = (case_of(plan, data).run() for plan in plans)
    assert np.isfinite(want[3]).all()
    np.testing.assert_allclose(found[3], want[3], rtol=1e-5)
