"""Results of the plans, against slow models written from docs/formats.md, and errors about bad weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    ElementKind,
    FormatError,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    Sparse24Weight,
)
from sparse24_plans.weights.packed_layouts import TILES_16BIT
from sparse24_plans.weights.packing import pack

from .models import cover, largest, model, numbers
from .prepare_cases import ELEMENTS, MOODS, PrepareCase, matrix, run

every_element = pytest.mark.parametrize("element", ELEMENTS)
every_mood = pytest.mark.parametrize("mood", MOODS)
SCORES = tuple(ElementKind(name) for name in ("f32", "f16", "bf16"))
M, K = 5, 24


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, bits in got.items():
        assert np.array_equal(bits, want[name]), name


# Pruning ------------------------------------------------------------------------------------------


@every_mood
@every_element
def test_prune_and_prune_compress_keep_the_two_largest_magnitudes(element, mood, device):
    dense = matrix(np.random.default_rng(0), (M, K), element, mood)
    sizes = np.abs(numbers(dense, element))
    want = model(dense, lambda row, group: largest(list(sizes[row, 4 * group : 4 * group + 4])))
    fields = {"m": M, "k": K, "element": element}
    both = run(PruneSparse24Descriptor(**fields), device, dense=dense)
    assert set(both) == {"pruned", "mask"}
    assert_same(both, want)
    for alone, left_out in (("pruned", "mask"), ("mask", "pruned")):
        only = run(PruneSparse24Descriptor(**fields), device, without=(left_out,), dense=dense)
        assert set(only) == {alone}
        assert_same(only, want)
    assert_same(run(PruneCompressSparse24Descriptor(**fields), device, dense=dense), want)


@every_mood
@pytest.mark.parametrize("scores", SCORES)
@every_element
def test_scores_are_compared_as_they_are(element, scores, mood, device):
    rng = np.random.default_rng(1)
    dense, ranks = matrix(rng, (M, K), element, "any_bits"), matrix(rng, (M, K), scores, mood)
    keys = numbers(ranks, scores)
    want = model(dense, lambda row, group: largest(list(keys[row, 4 * group : 4 * group + 4])))
    fields = {"m": M, "k": K, "element": element, "scores": scores}
    assert_same(run(PruneSparse24Descriptor(**fields), device, dense=dense, scores=ranks), want)
    assert_same(run(PruneCompressSparse24Descriptor(**fields), device, dense=dense, scores=ranks), want)


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ([1, -2, 3, -4], [2, 3]),
        ([1, 1, 1, 1], [0, 1]),
        ([0, -0.0, 0, -0.0], [0, 1]),
        ([-0.0, 0, 0, 5], [0, 3]),
        ([5, 0, -0.0, 0], [0, 1]),
        ([math.inf, math.nan, 1, -math.inf], [0, 1]),
        ([math.inf, 1, -math.inf, math.nan], [0, 3]),
        ([math.nan, 9, -math.nan, math.nan], [0, 2]),
        ([1e-45, 0, 1e-45, -1e-45], [0, 2]),
    ],
)
def test_special_values(cells, kept, device):
    """Ties: the lower position. -0.0 is a zero, and keeps its sign where it is kept. NaN ranks above Inf."""
    dense = np.array([cells + [0.0] * 4], np.float32).view(np.uint32)
    found = run(PruneSparse24Descriptor(m=1, k=8, element="f32"), device, dense=dense)
    assert found["mask"].tolist() == [[sum(1 << i for i in kept) | 0x30]]
    assert found["pruned"][0, kept].tolist() == dense[0, kept].tolist()
    assert not found["pruned"][0, [i for i in range(4) if i not in kept]].any()


# Compression --------------------------------------------------------------------------------------


@every_mood
@every_element
def test_compress_covers_nonzeros_and_reports_first_group_of_too_many(element, mood, device):
    dense = matrix(np.random.default_rng(2), (M, K), element, mood)
    cells = numbers(dense, element)
    want = model(dense, lambda row, group: cover(cells[row, 4 * group : 4 * group + 4]))
    case = PrepareCase(CompressSparse24Descriptor(m=M, k=K, element=element), device, {"dense": dense})
    found = case.run()
    counts = (cells != 0).reshape(M, K // 4, 4).sum(axis=2)
    crowded = np.argwhere(counts > 2)
    status = int(found.pop("status").view(np.uint64)[0])
    assert_same(found, want)
    if not len(crowded):
        assert status == 2**64 - 1
        case.plan.check(case.args)
        return
    with pytest.raises(FormatError) as caught:
        case.plan.check(case.args)
    assert (caught.value.row, caught.value.group) == tuple(crowded[0])
    assert f"got {counts[tuple(crowded[0])]}" in str(caught.value)
    assert "prune first" in str(caught.value)


@every_element
def test_pruned_matrices_survive_compression(element, device):
    rng = np.random.default_rng(3)
    dense = matrix(rng, (M, K), element, "any_bits")
    fields = {"m": M, "k": K, "element": element}
    pruned = run(PruneSparse24Descriptor(**fields), device, dense=dense)["pruned"]
    case = PrepareCase(CompressSparse24Descriptor(**fields), device, {"dense": pruned})
    kept = case.run()
    case.plan.check(case.args)
    back = run(DecompressSparse24Descriptor(**fields), device, **kept)
    assert np.array_equal(back["dense"], pruned)
    weight = case.plan.weight(case.args)
    weight.validate()
    assert (weight.m, weight.k, weight.element) == (M, K, element)


def test_decompress_puts_zero_where_nothing_is_kept(device):
    values = np.full((1, 4), 0x8000, np.uint16)  # -0.0
    metadata = np.array([[0x0C09]], np.uint16)  # positions 1, 2; 0, 3
    found = run(
        DecompressSparse24Descriptor(m=1, k=8, element="f16"), device, values=values, metadata=metadata
    )
    assert found["dense"].tolist() == [[0, 0x8000, 0x8000, 0, 0x8000, 0, 0, 0x8000]]


# Packing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["f16", "bf16", "s8", "fp8_e4m3"])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (64, 128), (65, 136), (130, 264)])
def test_pack_and_unpack_are_packings_inverse_pair(element, m, k, device):
    kind = ElementKind(element)
    dense = matrix(np.random.default_rng(4), (m, k), kind, "any_bits")
    weight = Sparse24Weight.prune_compress(dense, element=kind)
    parts = {"values": weight.values.view(kind.bits_dtype), "metadata": weight.metadata}
    case = PrepareCase(PackSparse24Descriptor(m=m, k=k, element=kind), device, parts)
    packed = case.run()["packed"]
    case.plan.check(case.args)  # nothing to find
    assert np.array_equal(packed, pack(weight).buffers[0].bits())
    assert case.plan.weight(case.args).layout_id == pack(weight).layout_id
    back = PrepareCase(
        PackSparse24Descriptor(m=m, k=k, element=kind, direction="unpack"), device, {"packed": packed}
    )
    found = back.run()
    back.plan.check(back.args)
    assert np.array_equal(found["values"], parts["values"])
    assert np.array_equal(found["metadata"], parts["metadata"])


@given(st.integers(0, 63), st.integers(0, 31), st.sampled_from([0, 1, 5, 15, 10, 2]))
@settings(max_examples=30)
def test_unpack_reports_a_bad_nibble(row, group, nibble):
    check_bad_nibble("host", row, group, nibble)


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "group", "nibble"), [(0, 0, 5), (63, 31, 0), (17, 9, 15)])
def test_unpack_reports_a_bad_nibble_on_a_gpu(row, group, nibble):
    check_bad_nibble(0, row, group, nibble)


def check_bad_nibble(device, row: int, group: int, nibble: int) -> None:
    m, k = 64, 128
    good = run(
        PackSparse24Descriptor(m=m, k=k, element="f16"),
        "host",
        values=np.zeros((m, k // 2), np.uint16),
        metadata=np.full((m, k // 8), 0x0404, np.uint16),
    )["packed"]
    # docs of packing.py: word j of a lane covers 64 columns; a half is 16 of them, four nibbles.
    w, g, high = row // 16, row % 8, row % 16 // 8
    j, quad = group // 16, group % 16 // 4
    word = 8192 + ((w * 32 + g * 4 + quad) * 2 + j) * 4 + 2 * high + group % 4 // 2
    shift = 4 * (group % 2)
    good[0, 0, word] = good[0, 0, word] & ~np.uint8(15 << shift) | np.uint8(nibble << shift)
    desc = PackSparse24Descriptor(m=m, k=k, element="f16", direction="unpack")
    case = PrepareCase(desc, device, {"packed": good})
    case.run()
    with pytest.raises(FormatError, match="strictly increasing positions") as caught:
        case.plan.check(case.args)
    assert (caught.value.row, caught.value.group) == (row, group)
    assert f"got {nibble & 3} then {nibble >> 2}" in str(caught.value)


# Masks --------------------------------------------------------------------------------------------


@every_element
def test_a_mask_of_rows_clears_the_rest(element, device):
    rng = np.random.default_rng(5)
    dense = matrix(rng, (M, K), element, "any_bits")
    keep = rng.random((M, K)) < 0.5
    mask = np.packbits(keep, axis=1, bitorder="little")
    found = run(MaskSparse24Descriptor(m=M, k=K, element=element), device, dense=dense, mask=mask)
    assert np.array_equal(found["masked"], np.where(keep, dense, 0))


@every_element
def test_a_mask_of_tiles_clears_the_rest(element, device):
    rng = np.random.default_rng(6)
    m = 16
    dense = matrix(rng, (m, K), element, "any_bits")
    keep = rng.random((m, K)) < 0.5
    mask = np.zeros((m // 8, K // 8, 8), np.uint8)
    for row, column in np.argwhere(keep):
        bit = 16 * (2 * (row % 8 // 4) + column % 8 // 4) + column % 4 + 4 * (row % 4)
        mask[row // 8, column // 8, bit // 8] |= 1 << bit % 8
    desc = MaskSparse24Descriptor(m=m, k=K, element=element, layout="tiles")
    found = run(desc, device, dense=dense, mask=mask)
    assert np.array_equal(found["masked"], np.where(keep, dense, 0))


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k"), [(0, 8), (8, 0), (0, 0)])
def test_empty_matrices(m, k, device):
    fields = {"m": m, "k": k, "element": "bf16"}
    empty = np.zeros((m, k), np.uint16)
    case = PrepareCase(CompressSparse24Descriptor(**fields), device, {"dense": empty})
    case.run()
    case.plan.check(case.args)
    kept = run(PruneCompressSparse24Descriptor(**fields), device, dense=empty)
    assert kept["values"].size == kept["metadata"].size == 0
    run(DecompressSparse24Descriptor(**fields), device, **kept)
    packed = run(PackSparse24Descriptor(**fields), device, **kept)["packed"]
    assert packed.shape == TILES_16BIT.packed_shape(m, k)
    back = PrepareCase(PackSparse24Descriptor(**fields, direction="unpack"), device, {"packed": packed})
    back.run()
    back.plan.check(back.args)
