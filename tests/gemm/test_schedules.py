"""How problems are cut into slices of K, which fix the bits: by the shape, never by the device at hand."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    DeviceProperties,
    ElementKind,
    GemmSparse24Descriptor,
    PlanPreference,
    UnsupportedError,
)
from sparse24_plans.device.tensors import TensorView
from sparse24_plans.gemm import wgmma
from sparse24_plans.gemm.backends import mma_sp, wgmma_sp
from sparse24_plans.gemm.schedules import mma_sp as mma_schedules
from sparse24_plans.gemm.schedules import wgmma_sp as wgmma_schedules
from sparse24_plans.gemm.schedules.mma_sp import MmaSpSchedule
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.schedules.wgmma_sp import WgmmaSpSchedule
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.weights.packed_layouts import TILES_16BIT

from ..sample_devices import ADA, H200, gpu_of
from .kernel_entries import OWN, row_of

MULTIPROCESSORS = (66, 78, 114, 132, 144)
"""SMs of half an H100, an H20, an H100 PCIe, an H200 and a complete chip."""
WGMMA_ENTRIES = [name for name in OWN if row_of(name).backend == "wgmma_sp"]
MMA_ENTRIES = [name for name in OWN if row_of(name).backend == "mma_sp"]
shapes = st.builds(
    GemmSparse24Descriptor,
    n=st.integers(1, 4096) | st.sampled_from([1, 8, 16, 17, 64, 65, 128, 1024]),
    m=st.integers(1, 60000) | st.sampled_from([4096, 4224, 4225, 6144, 28672, 57344]),
    k=st.integers(1, 4096).map(lambda units: 16 * units),
    element=st.sampled_from(["f16", "bf16"]),
)


def hopper(multiprocessors: int) -> DeviceProperties:
    return gpu_of(9, 0, multiprocessors=multiprocessors)


class Recorder:
    """Stands for the compiler: keeps the macros that a kernel would be compiled with."""

    def __init__(self, monkeypatch, module) -> None:
        self.defines: list[dict[str, int]] = []
        monkeypatch.setattr(wgmma if module is wgmma_sp else module, "load", self)
        self._module = module

    def __call__(self, source, name, threads, device, defines, **more):
        self.defines.append(defines)
        return SimpleNamespace()

    def of(
        self, desc: GemmSparse24Descriptor, row: str, device: DeviceProperties, **wishes: int
    ) -> dict[str, int]:
        self._module.Kernel(Choice(desc, device, row_of(row), PlanPreference(**wishes), {}))
        return self.defines[-1]


@settings(max_examples=60)
@given(desc=shapes)
def test_the_slices_of_mma_sp_are_those_of_the_shape(desc):
    cuts = [MmaSpSchedule.in_clusters(desc.n, desc.m, count) for count in MULTIPROCESSORS]
    assert {cut.split_k for cut in cuts} == {mma_schedules.split_k_of(desc.m)}
    for device in map(hopper, MULTIPROCESSORS):
        for configuration in mma_schedules.candidates(desc, device):
            cut = MmaSpSchedule.of(desc, device, configuration)
            assert cut.split_k == mma_schedules.split_k_of(desc.m)


@pytest.mark.parametrize("row", MMA_ENTRIES)
@settings(max_examples=20)
@given(desc=shapes)
def test_kernel_of_mma_sp_is_compiled_for_same_slices_everywhere(row, desc):
    with pytest.MonkeyPatch.context() as patch:
        compiled = Recorder(patch, mma_sp)
        slices = {compiled.of(desc, row, hopper(count))["SPLIT_K"] for count in MULTIPROCESSORS}
        for capability in ((8, 0), (8, 6), (8, 9), (12, 0)):  # where one block holds them all
            other = gpu_of(*capability)
            assert compiled.of(desc, row, other)["SPLIT_K"] == mma_schedules.WARP_PAIRS
    assert len(slices) == 1


@pytest.mark.parametrize("row", WGMMA_ENTRIES)
@settings(max_examples=8)
@given(desc=shapes)
def test_kernel_of_wgmma_sp_is_compiled_for_same_slices_everywhere(row, desc):
    """Nothing that is compiled depends on the device; only the number of CTAs does."""
    desc = GemmSparse24Descriptor(n=desc.n, m=desc.m, k=desc.k, element=row_of(row).elements[0])
    with pytest.MonkeyPatch.context() as patch:
        compiled = Recorder(patch, wgmma_sp)
        found = [compiled.of(desc, row, hopper(count)) for count in MULTIPROCESSORS]
    assert len({(one["SPLIT_K"] * one["K_CHUNKS"], one["STREAM_K"]) for one in found}) == 1
    assert all(one == found[0] for one in found)


def test_slices_that_are_faster_than_free_schedules_lose_nothing():
    """Few outputs of a deep K: eight slices are the fastest, also beyond the n that others have them for."""
    m, k = 48, 21456
    slices = WGMMA_SP.split_k(m, k, ElementKind.BF16)
    for n in (1, 33, 100, 640, 2600):
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16")
        sliced = WGMMA_SP.predicted(wgmma_schedules.schedules_in(slices, n, m), desc)
        assert sliced.min() <= WGMMA_SP.predicted(wgmma_schedules.schedules_for(n, m), desc).min()


@settings(max_examples=15)
@given(desc=shapes, tokens=st.lists(st.integers(1, 5000), min_size=2, max_size=5))
def test_invariant_rows_cut_k_alike_for_every_n(desc, tokens):
    for name in ("wgmma_sp_invariant", "wgmma_sp_fp8_invariant", "wgmma_sp_fp8_promoted"):
        row = row_of(name)
        parts = set()
        for n in tokens:
            one = GemmSparse24Descriptor(n=n, m=desc.m, k=desc.k, element=row.elements[0])
            for cut in WGMMA_SP.allowed(one, row):
                parts.add(cut.split_k * cut.k_chunks)
            assert WGMMA_SP.best(one, row) in WGMMA_SP.allowed(one, row)
        assert parts == {1 if row.promoted else WGMMA_SP.split_k(desc.m, desc.k, row.elements[0])}
    assert len({MmaSpSchedule.in_clusters(n, desc.m, 132).split_k for n in tokens}) == 1


@pytest.mark.parametrize("row", ["wgmma_sp_invariant", "wgmma_sp_fp8_invariant", "wgmma_sp_fp8_promoted"])
@settings(max_examples=12)
@given(desc=shapes, shards=st.integers(1, 16))
def test_wgmma_sp_splits_k_alike_for_parts_and_wholes(row, desc, shards):
    """Whatever number of tokens comes to either."""
    fields = {"m": desc.m, "k": desc.k, "element": row_of(row).elements[0]}
    part = {**fields, "m": -(-desc.m // shards)}
    with pytest.MonkeyPatch.context() as patch:
        compiled = Recorder(patch, wgmma_sp)
        whole = compiled.of(GemmSparse24Descriptor(n=16, **fields), row, H200)
        for n in (1, desc.n):
            found = compiled.of(GemmSparse24Descriptor(n=n, **part), row, H200, whole_m=desc.m)
            assert found["SPLIT_K"] * found["K_CHUNKS"] == whole["SPLIT_K"] * whole["K_CHUNKS"]


@pytest.mark.parametrize("row", MMA_ENTRIES)
@settings(max_examples=25)
@given(desc=shapes, shards=st.integers(1, 16))
def test_mma_sp_splits_k_alike_for_parts_and_wholes(row, desc, shards):
    part = desc.model_copy(update={"m": -(-desc.m // shards)})
    with pytest.MonkeyPatch.context() as patch:
        compiled = Recorder(patch, mma_sp)
        for device in (
            H200,
            ADA,
        ):
            whole, found = compiled.of(desc, row, device), compiled.of(part, row, device, whole_m=desc.m)
            assert found["SPLIT_K"] == whole["SPLIT_K"]


def test_without_whole_m_part_of_weight_may_be_cut_otherwise():
    """``whole_m`` exists because the split-K of a part of the rows may differ."""
    row = row_of("wgmma_sp_invariant")
    slices = [WGMMA_SP.split_k(m, 4096, row.elements[0]) for m in (28672, 28672 // 8)]
    assert slices[0] != slices[1]
    assert mma_schedules.split_k_of(28672) != mma_schedules.split_k_of(28672 // 8)


def test_configuration_is_not_applied_to_part_of_weight():
    desc = GemmSparse24Descriptor(n=16, m=3584, k=4096, element="bf16")
    other = mma_schedules.candidates(desc, H200)[0]
    free = MmaSpSchedule.of(desc, H200, {}, 28672)
    assert MmaSpSchedule.of(desc, H200, other, 28672) == free
    assert free.split_k == mma_schedules.split_k_of(28672)


# Valid schedules ------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(desc=shapes, multiprocessors=st.sampled_from(MULTIPROCESSORS))
def test_schedules_of_mma_sp_cover_the_problem_and_fit(desc, multiprocessors):
    cut = MmaSpSchedule.in_clusters(desc.n, desc.m, multiprocessors)
    assert cut.token_blocks * 8 * cut.n8_tiles >= desc.n
    row_blocks = -(-desc.m // (64 * cut.warp_pairs_m))
    assert (
        cut.blocks
        == row_blocks * cut.token_blocks * cut.split_k * cut.warp_pairs_m // mma_schedules.WARP_PAIRS
    )
    assert 2 <= cut.stages <= 8
    assert cut.stages * cut.stage_bytes * cut.ctas_per_sm <= 227 << 10
    assert cut.stage_bytes >= mma_schedules.WARP_PAIRS * TILES_16BIT.tile_bytes


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (12, 0)])
@settings(max_examples=40)
@given(desc=shapes)
def test_schedules_in_a_block_cover_the_problem_and_fit(capability, desc):
    cut = MmaSpSchedule.in_cta(desc.n, desc.m, capability)
    assert cut.token_blocks * 8 * cut.n8_tiles >= desc.n
    assert cut.blocks == -(-desc.m // 64) * cut.token_blocks
    assert cut.stages >= 2
    room = (163 if capability in ((8, 0), (8, 7)) else 99) << 10
    assert cut.stages * cut.stage_bytes <= room


@pytest.mark.parametrize("row", WGMMA_ENTRIES)
@settings(max_examples=12)
@given(
    desc=shapes, columns=st.tuples(st.booleans(), st.booleans()), out_f32=st.booleans(), beta=st.booleans()
)
def test_schedules_of_wgmma_sp_cover_the_problem_and_fit(row, desc, columns, out_f32, beta):
    element = row_of(row).elements[0]
    out = {"out_element": "f32"} if out_f32 else {}
    out |= {"beta": float(beta)}
    desc = GemmSparse24Descriptor(n=desc.n, m=desc.m, k=desc.k, element=element, **out)
    lines = wgmma_schedules.OperandLayouts.of(desc)
    if row_of(row).column_order:
        lines = lines._replace(x_columns=columns[0], y_columns=columns[1])
    for cut in WGMMA_SP.allowed(desc, row_of(row)):
        token_blocks = -(-desc.n // cut.tokens)
        assert cut.work_tiles(desc.n, desc.m) * cut.rows * cut.cluster_m >= desc.m * token_blocks
        assert cut.shared_bytes(lines) * cut.ctas_per_sm <= 227 << 10
        weights, sources = cut.stages(lines)
        assert (weights >= 2, sources >= 2) == (True, True)
        assert cut.cluster <= 8
        buffers = cut.warpgroups * lines.buffers if lines.stages_c and cut.split_k == 1 else 0
        barriers = 2 * weights + 2 * sources + 2 * buffers
        used, bytes_of_both = cut._staging_bytes(lines), cut._stage_bytes(lines)
        stages = weights * bytes_of_both[0] + sources * bytes_of_both[1]
        assert stages + used - 16 * buffers + 8 * barriers <= cut.shared_bytes(lines)


@pytest.mark.parametrize("groups", [1, 8, 1024])
def test_shared_memory_has_room_for_the_table_of_groups(groups):
    """It holds three numbers of each group and one more, with a total of each warp."""
    one = GemmSparse24Descriptor(n=8 * groups, m=256, k=256, element="bf16")
    grouped = one.model_copy(update={"groups": groups})
    lines, without = map(wgmma_schedules.OperandLayouts.of, (grouped, one))
    for cut in WGMMA_SP.allowed(one, row_of("wgmma_sp")):
        (weights, sources), (weight, source) = cut.stages(lines), cut._stage_bytes(lines)
        used = weights * weight + sources * source + cut._fixed_bytes(without)
        warps = 4 * (cut.warpgroups + 1)
        assert used + 4 * (3 * groups + 1 + warps) <= cut.shared_bytes(lines) <= 227 << 10


def every_width(n: int, widest: int, m: int) -> tuple[int, ...]:
    """Return the tile widths of more than 64 tokens, from every number of token tiles."""
    fewest, most = -(-n // widest), -(-n // 64)
    most = most if 0 < m < 2048 else min(most, fewest + 5)
    tokens = (-(-n // blocks) for blocks in range(fewest, most + 1))
    return tuple(dict.fromkeys(-(-one // 16) * 16 for one in tokens))


@pytest.mark.parametrize("widest", [256, 192, 128, 112])
@pytest.mark.parametrize("m", [0, 1000, 5000])
def test_the_widths_of_blocks_of_tokens(m, widest):
    for n in (65, 100, 129, 256, 257, 1000, 2049, 4096, 5999, 100_003):
        assert wgmma_schedules.widths(n, widest, m) == every_width(n, widest, m)


def test_the_widths_of_many_tokens_are_found_at_once():
    start = perf_counter()
    assert wgmma_schedules.widths(10**8, m=1000) == tuple(range(256, 63, -16))
    assert perf_counter() - start < 0.05


# Ranges ---------------------------------------------------------------------------------------------


def pieces(cut: WgmmaSpSchedule, items: int, tiles: int) -> list[list[tuple[int, int, int]]]:
    """Return (work tile, first K tile, end) for every cluster, in the order of the kernel."""
    whole = items - items % cut.stream_k - cut.stream_k
    size, longer = divmod((items - whole) * tiles, cut.stream_k)
    begins = [size * one + min(one, longer) for one in range(cut.stream_k + 1)]
    found = []
    for one, (begin, end) in enumerate(pairwise(begins)):
        its = [(item, 0, tiles) for item in range(one, whole, cut.stream_k)]
        its += [(whole + end // tiles, 0, end % tiles)] if end % tiles else []
        its += [(whole + item, 0, tiles) for item in range(-(-begin // tiles), end // tiles)]
        its += [(whole + begin // tiles, begin % tiles, tiles)] if begin % tiles else []
        found.append(its)
    return found


@settings(max_examples=30)
@given(desc=shapes)
def test_stream_k_ranges_are_even_and_share_tiles_once(desc):
    """The next cluster needs the partial sums last, and storing them comes first, so no cluster waits."""
    tiles = -(-desc.k // 128)
    for cut in wgmma_schedules.schedules_for(desc.n, desc.m):
        if not cut.stream_k:
            continue
        items = cut.work_tiles(desc.n, desc.m)
        found = pieces(cut, items, tiles)
        whole = cut.stream_k_split(desc.n, desc.m, tiles)[0]
        assert whole == items - items % cut.stream_k - cut.stream_k
        work = [sum(last - first for _, first, last in its) for its in found]
        assert (sum(work), max(work) - min(work) <= 1) == (items * tiles, True)
        assert len({(item, first) for its in found for item, first, _ in its}) == sum(map(len, found))
        for one, its in enumerate(found):
            for at, (item, first, last) in enumerate(its):
                if last < tiles:
                    assert all(other < whole for other, _, _ in its[:at])
                    assert found[one + 1][-1] == (item, last, tiles)
                if first > 0:
                    assert at == len(its) - 1
                    assert (item, 0, first) in found[one - 1]
                    before = sum(b - a for other, a, b in its[:-1] if other >= whole)
                    assert before >= first, "the giver isn't done by then"


def test_no_stream_k_for_full_waves_or_few_work_tiles():
    for m in (64 * 132, 64 * 131, 64):
        assert not any(
            cut.stream_k
            for cut in wgmma_schedules.schedules_for(16, m)
            if (cut.warpgroups, cut.m_tiles) == (1, 1)
        )
    assert any(cut.stream_k for cut in wgmma_schedules.schedules_for(16, 64 * 133))
    assert not any(cut.stream_k for cut in wgmma_schedules.schedules_for(16))


def resident(cut: WgmmaSpSchedule) -> int:
    """Clusters of an H200 that run at once."""
    return cut.resident_clusters(132)


CROWDED_SIZES = [
    (n, m) for n in (1, 8, 24, 64, 65, 300) for m in (64, 1024, 2560, 4096, 6144, 9000, 14336, 28672)
]


@pytest.mark.parametrize(("n", "m"), CROWDED_SIZES)
def test_several_ctas_per_sm_only_beyond_one_wave(n, m):
    """A CTA with an SM of its own is never slower: CTAs that share an SM share its path to memory."""
    shared = [cut for cut in wgmma_schedules.schedules_for(n, m) if cut.ctas_per_sm > 1]
    assert all(cut.work_tiles(n, m) > resident(cut._replace(ctas_per_sm=1)) for cut in shared)


@pytest.mark.parametrize("n", [1, 8, 24, 64])
def test_some_ctas_share_sms_for_many_outputs(n):
    assert any(cut.ctas_per_sm > 1 for cut in wgmma_schedules.schedules_for(n, 28672))


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("slices", "blocks", "most"), [(2, 2, 66), (3, 2, 39), (3, 4, 39), (4, 2, 30), (6, 2, 19)]
)
def test_ctas_share_sms_from_the_first_cluster_that_would_wait(slices, blocks, most, more):
    """Clusters of three and more CTAs leave some SMs idle: fewer run at once than 132 SMs have room for."""
    cut = WgmmaSpSchedule(1, 1, 8, split_k=slices, ctas_per_sm=blocks)
    assert (cut in wgmma_schedules.schedules_for(8, 64 * (most + more))) == bool(more)


def test_ranges_leave_the_bits_as_they_are():
    """Batch-invariant kernels may therefore use stream-K if K isn't split."""
    taken = set()
    for name in ("wgmma_sp_invariant", "wgmma_sp_fp8_invariant"):
        for m in (4096, 10240, 28672, 57344):
            desc = GemmSparse24Descriptor(n=300, m=m, k=8192, element=row_of(name).elements[0])
            slices = WGMMA_SP.split_k(m, desc.k, desc.element)
            cuts = [cut for cut in WGMMA_SP.allowed(desc, row_of(name)) if cut.stream_k]
            assert {cut.split_k * cut.k_chunks for cut in cuts} <= {slices}
            taken.add((slices, bool(cuts)))
    assert (1, True) in taken


def test_a_bound_on_the_workspace_is_kept():
    row = row_of("wgmma_sp")
    desc = GemmSparse24Descriptor(n=1024, m=10240, k=8192, element="bf16")
    free = WGMMA_SP.best(desc, row)
    assert free.stream_k, "the problem has too few blocks for whole ones to be even"
    for most in (0, 1 << 20, free.workspace_bytes() - 1, free.workspace_bytes()):
        assert WGMMA_SP.best(desc, row, None, most).workspace_bytes() <= most
        with pytest.MonkeyPatch.context() as patch:
            Recorder(patch, wgmma_sp)
            for configuration in ({}, free._asdict()):
                choice = Choice(desc, H200, row, PlanPreference(max_workspace_bytes=most), configuration)
                assert wgmma_sp.Kernel(choice).workspace_size <= most
    assert WGMMA_SP.best(desc, row, None, most) == free


# Configurations -------------------------------------------------------------------------------------


def test_a_configuration_that_would_change_the_bits_is_refused():
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element="bf16")
    with pytest.raises(UnsupportedError, match="mma_sp has no schedule"):
        MmaSpSchedule.of(desc, H200, {"n8_tiles": 16, "warp_pairs_m": 1, "ctas_per_sm": 1})
    row = row_of("wgmma_sp_invariant")
    slices = WGMMA_SP.split_k(desc.m, desc.k, row.elements[0])
    cuts = [cut for cut in wgmma_schedules.schedules_for(16) if cut.split_k != slices]
    assert cuts
    for cut in cuts:
        with pytest.raises(UnsupportedError, match="can't keep its promises"):
            wgmma_sp._schedule_of(Choice(desc, H200, row, PlanPreference(), cut._asdict()))


@pytest.mark.parametrize("row", [*WGMMA_ENTRIES, *MMA_ENTRIES])
@settings(max_examples=12)
@given(desc=shapes, whole=st.booleans())
def test_named_slices_are_the_compiled_slices(row, desc, whole):
    element = desc.element if desc.element in row_of(row).elements else row_of(row).elements[0]
    desc = GemmSparse24Descriptor(n=desc.n, m=desc.m, k=desc.k, element=element)
    invariant = row_of(row).guarantee(desc).batch_invariant
    preference = PlanPreference(whole_m=4 * desc.m if whole and invariant else None)
    module = wgmma_sp if row in WGMMA_ENTRIES else mma_sp
    choice = Choice(desc, H200, row_of(row), preference, {})
    with pytest.MonkeyPatch.context() as patch:
        compiled = Recorder(patch, module)
        module.Kernel(choice)
    made = compiled.defines[-1]
    slices = made["SPLIT_K"] * made.get("K_CHUNKS", 1)
    if row == "mma_sp_fp8":
        assert module.Kernel.arithmetic(choice) is None
        return
    want = {"wgmma_sp_s8": "exact_sum", "wgmma_sp_fp8_promoted": "hopper_tc_fp8/promoted=128"}.get(row)
    sliced = "hopper_tc_fp8" if element in ("fp8_e4m3", "fp8_e5m2") else "hopper_tc"
    assert module.Kernel.arithmetic(choice) == (want or f"{sliced}/slices={slices}")


def test_where_blocks_dont_fold_there_is_nothing_to_tune():
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element="bf16")
    assert mma_schedules.candidates(desc, ADA) == []
    assert len(mma_schedules.candidates(desc, H200)) > 1


SPACES = [
    one
    for n in (8, 60, 200, 1030)
    for one in (*wgmma_schedules.schedules_for(n, 9000), *wgmma_schedules.schedules_in(8, n, 9000))
    if one.workspace_bytes()
]


@pytest.mark.parametrize("at", [0, 1 << 20])
def test_what_lies_where_in_the_workspace_is_known_without_one(at, monkeypatch):
    """``can_implement`` needs the places of the flags, of stream-K's partial sums and of blocked sums."""
    monkeypatch.setattr(wgmma, "view_map", lambda *_: b"")  # the driver makes tensor maps
    assert any(one.saved_accumulators for one in SPACES)
    assert any(one.stream_k for one in SPACES)
    desc = GemmSparse24Descriptor(n=1030, m=9000, k=1024, element="bf16")
    x, y = np.zeros((desc.n, desc.k), np.uint16), np.zeros((desc.n, desc.m + 1), np.uint16)[:, 1:]
    views = {"source": TensorView.of(x), "packed": TensorView.of(x), "result": TensorView.of(y)}
    for one in SPACES:
        lines = wgmma_schedules.OperandLayouts.of(desc)
        found = wgmma.WgmmaParameters(desc, one, lines, 2).of(views, views["source"], at)
        sums = at + one.flags_bytes()
        places = found.flags or 0, found.partials or 0, found.blocked_sums
        assert places == (at, sums, sums + one.sums_bytes())
