"""Plans of float32 in bf16 terms: schedules, slices of K, chunks and workspaces, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    UnsupportedError,
    explain,
)
from sparse24_plans.device.jit.launcher import recording
from sparse24_plans.device.tensors import Device, TensorView
from sparse24_plans.gemm import limits, wgmma
from sparse24_plans.gemm.arithmetic.bf16_terms import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE
from sparse24_plans.gemm.schedules.f32_split_heuristics import RANGE_TILES, Chunking, F32Split
from sparse24_plans.gemm.schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.weights.packed_layouts import TILE_M, layout_called

from ..kernels.index_functions import Table, check_tables
from ..sample_devices import HOPPER
from .f32_split_cases import NAMES, ROWS, every_row, least_workspace
from .kernel_entries import row_of
from .test_schedules import pieces


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
        split = F32Split(row.split_terms).split_k(m, k, ElementKind.F32)
        assert named == {f"{NAMES[row.split_terms]}/slices={split}"}


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


# Batches --------------------------------------------------------------------------------------------


def launches_of(desc, row, most, views):
    """The launches of a kernel with ``most`` bytes of workspace: code, CTAs and bytes of the parameters."""
    wish, found = PlanPreference(max_workspace_bytes=most), []
    with recording():
        row.kernel(Choice(desc, HOPPER, row, wish, {})).launcher(views, 1 << 52)(found)
    for one in found:
        if isinstance(one.parameters, wgmma.WgmmaSpParams):
            one.parameters.launch_id = 0  # every launch has its own
    return [(one.code, one.blocks, one.overlapping, bytes(one.parameters)) for one in found]


def f32_view(address, shape, strides):
    return TensorView(address, shape, ElementKind.F32, Device("cuda", 0), strides=strides)


SIZES_OF_BATCHES = [(1000, 320, 4616, True), (40, 320, 4616, False), (7, 320, 512, False)]
"""n, m, k and whether the workspace is the least: in chunks, with a pre-pass kernel, with none."""


@every_row
@pytest.mark.parametrize("shared", [(), ("weight",), ("x", "bias"), ("c", "weight", "x")], ids=str)
@pytest.mark.parametrize(("n", "m", "k", "least"), SIZES_OF_BATCHES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_batch_is_launched_as_its_own_product(row, n, m, k, least, shared, interleaved):
    """With the operands that lie at the batch's strides, or are shared, and in the same workspace."""
    row, batches = row_of(row), 3
    fields = {"n": n, "m": m, "k": k, "element": "f32", "epilogue": "bias_silu", "beta": 0.5, "alpha": 0.75}
    desc = GemmSparse24Descriptor(**fields, batches=batches, shared_weight="weight" in shared)
    most = least_workspace(row, desc) if least else None
    apart = {"x": k, "y": m, "c": m} if interleaved else {"x": n * k + 64, "y": n * m, "c": n * m + 5}
    apart |= {"bias": m + 3, **{name: 0 for name in shared if name != "weight"}}
    line = (batches if interleaved else 1) * k, (batches if interleaved else 1) * m
    names = {"source": ("x", (n, k), (line[0], 1)), "bias": ("bias", (m,), (1,))}
    names |= {name: (key, (n, m), (line[1], 1)) for name, key in (("result", "y"), ("c", "c"))}
    addresses = {name: (at + 1) << 40 for at, name in enumerate(names)}
    tile_rows, tile_columns, nbytes = layout_called(row.layout).packed_shape(m, k)
    weight = tile_rows * tile_columns * nbytes

    def packed(at):
        return {"packed": TensorView(at, (weight,), ElementKind.U8, Device("cuda", 0))}

    whole = {
        name: f32_view(addresses[name], (batches, *shape), (apart[key], *strides))
        for name, (key, shape, strides) in names.items()
    }
    found = launches_of(desc, row, most, whole | packed(1 << 50))
    expected = []
    for batch in range(batches):
        own = {
            name: f32_view(addresses[name] + 4 * batch * apart[key], shape, strides)
            for name, (key, shape, strides) in names.items()
        }
        own |= packed((1 << 50) + (0 if "weight" in shared else batch * weight))
        expected += launches_of(desc.one_batch, row, most, own)
    assert found == expected
    assert (
        len(found)
        == row.kernel.sized(Choice(desc, HOPPER, row, PlanPreference(max_workspace_bytes=most), {})).launches
    )


@every_row
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("n", "m", "k"), [(7, 64, 512), (200, 320, 4616), (3000, 9024, 8192), (0, 64, 64)])
def test_batches_have_the_plan_and_the_workspace_of_one(row, n, m, k, shared):
    one = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
    many = one.model_copy(update={"batches": 5, "shared_weight": shared})

    def selected(desc, most):
        wanted = {"prefer_kernel": row, "max_workspace_bytes": most}
        return GemmSparse24Plan.select(desc, preference=wanted, device=HOPPER)

    least = least_workspace(row_of(row), many)
    assert least == least_workspace(row_of(row), one)
    sizes = [plan.workspace_size() for plan in (selected(one, None), selected(many, None))]
    for most in (None, least, sizes[0], 2 * least + 10**6):
        single, plan = selected(one, most), selected(many, most)
        assert (plan.workspace_size(), plan.guarantee) == (single.workspace_size(), single.guarantee)
        kernel, alone = (row_of(row).kernel.sized(made.parts.choice) for made in (plan, single))
        if n:
            assert kernel.launches == 5 * alone.launches
            start = f"5 batches one after the other in {kernel.launches} launches: "
            assert plan.explain().details == start + single.explain().details
    assert sizes[0] == sizes[1]
    assert selected(many, sizes[1]).explain().details == selected(many, None).explain().details
    plans = [
        GemmSparse24Plan.for_tokens(desc, max(n, 1), preference={"prefer_kernel": row}, device=HOPPER)
        for desc in (one, many)
    ]
    assert plans[0].workspace_size() == plans[1].workspace_size()


@pytest.mark.parametrize("n", [0, 1, 64, 2000])
@pytest.mark.parametrize("batches", [0, 2, 1024])
def test_batches_of_large_weights_have_their_products_kernel(n, batches):
    """Batches of small ones are faster in one launch of the strict kernel. A named backend serves all."""
    for wish, chosen in (
        ({}, "f32_split6"),
        ({"require": {"batch_invariant": True}}, "f32_split6_invariant"),
        ({"require": {"max_error_bound": 2.0**-10}}, "f32_split3"),
    ):
        for m in (1024, 960):
            one = GemmSparse24Descriptor(n=n, m=m, k=1024, element="f32")
            many = one.model_copy(update={"batches": batches, "shared_weight": n == 64})
            assert explain(one, preference=wish, device=HOPPER).chosen == chosen
            found = explain(many, preference=wish, device=HOPPER)
            assert found.chosen == (chosen if m == 1024 else "inflate_strict")
            assert (chosen, None) in [(name, reason) for name, _, reason in found.rows]
            forced = {**wish, "prefer_backend": chosen.removesuffix("_invariant")}
            assert explain(many, preference=forced, device=HOPPER).chosen == chosen
            of_tier = {**wish, "tier": "sparse_tensor_core"}
            assert explain(many, preference=of_tier, device=HOPPER).chosen == chosen


def test_batches_beyond_the_strict_kernels_grid_are_launched_one_by_one():
    desc = GemmSparse24Descriptor(n=2**22, m=960, k=1024, element="f32", batches=1024, shared_weight=True)
    assert explain(desc, device=HOPPER).chosen == "f32_split6"


@every_row
def test_batches_that_are_too_many_or_share_tiles_are_refused(row):
    desc = GemmSparse24Descriptor(n=16, m=72, k=64, element="f32", batches=3)
    refused = row_of(row).limits
    assert refused(desc) == "needs m a multiple of 64 with a weight for each batch, got 72"
    assert refused(desc.model_copy(update={"shared_weight": True})) is None
    many = desc.model_copy(update={"batches": 1025, "m": 64})
    assert refused(many) == "launches at most 1024 batches one after the other, got 1025"
    assert refused(many.model_copy(update={"batches": 1024})) is None
    large = GemmSparse24Descriptor(n=2**22, m=2**13, k=8, element="f32", batches=4)
    assert refused(large) is None  # the grid is that of one batch


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
    unit, tiles = RANGE_TILES[row.split_terms], -(-k // SPLIT_TILE)
    assert unit * SPLIT_TILE % SPLIT_SUM[row.split_terms] == 0
    assert SPLIT_GROUP[row.split_terms] % (unit * SPLIT_TILE) == 0
    for one in F32Split(row.split_terms).allowed(desc, row):
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
    cut, _ = Chunking.of(desc, row_of(row), HOPPER)
    assert (cut.split_k, cut.stream_k) == (1, 132)
    assert cut.work_tiles(n, desc.m) > 132
    assert cut.work_tiles(n, desc.m) % 132


@pytest.mark.parametrize(("k", "split"), [(896, True), (1024, False)])
def test_no_stream_k_where_producers_split_x(k, split):
    """The warp that would exchange the flags of stream-K splits X."""
    m = 9000
    tried = F32Split(2).candidates(GemmSparse24Descriptor(n=17, m=m, k=k, element="f32"))
    assert limits.producers_split(m, k, 24) == split
    assert any(one.stream_k for one in tried) != split


@pytest.mark.parametrize(
    ("m", "k", "terms", "split"),
    [(24576, 4096, 2, 1), (8576, 7680, 2, 3), (37696, 12608, 2, 2), (8704, 2752, 3, 3), (17088, 11840, 3, 4)],
)
def test_stream_k_for_few_tokens_moves_no_invariant_split(m, k, terms, split):
    """The split fixes bits, so it still depends on the schedules of the first fit alone."""
    assert F32Split(terms).split_k(m, k, ElementKind.F32) == split


@settings(max_examples=60)
@given(name=st.sampled_from(ROWS), n=st.integers(1, 3000), m=st.integers(1, 60000))
def test_tiles_of_x_begin_where_a_swizzles_pattern_does(name, n, m):
    """With every schedule, tiles of X lie behind those of W in shared memory."""
    row, desc = row_of(name), GemmSparse24Descriptor(n=n, m=m, k=1040, element="f32")
    layout = layout_called(row.layout)
    for one in F32Split(row.split_terms).allowed(desc, row):
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
