"""Quantized weights cut, joined and reordered: as the matrices that they stand for, or refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    InvalidProblemError,
    PackedWeight,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    UnsupportedError,
    concat_weights,
    gated_rows,
    slice_weight,
    split_weight,
    take_rows,
)
from sparse24_plans.weights import dense as dense_layout
from sparse24_plans.weights.packing import pack

from ..support import same_bits

GROUPS = (0, 32, 64, 128)
STORED = ("s4", "s8", "fp8_e4m3")
kinds = st.tuples(st.sampled_from(STORED), st.sampled_from(GROUPS), st.sampled_from([None, "f32"]))


def weight_of(m: int, k: int, stored="s4", group=32, scale_element=None, seed=0) -> Sparse24QuantizedWeight:
    dense = np.random.default_rng(seed).standard_normal((m, k)).astype(np.float16)
    return Sparse24QuantizedWeight.quantize(
        Sparse24Weight.prune_compress(dense), stored=stored, group=group, scale_element=scale_element
    )


def dense_of(weight: Sparse24QuantizedWeight) -> np.ndarray:
    return weight.dequantize().decompress().view(np.uint16)


def assert_equal(one: Sparse24QuantizedWeight, other: Sparse24QuantizedWeight) -> None:
    assert type(one) is type(other) is Sparse24QuantizedWeight
    assert (one.m, one.k, one.element, one.quantization) == (
        other.m,
        other.k,
        other.element,
        other.quantization,
    )
    for mine, theirs in zip(one.views, other.views, strict=True):
        assert same_bits(mine.bits(), theirs.bits())


def widths(data: st.DataObject, axis: int, group: int) -> tuple[int, int, list[int]]:
    """M, K and the sizes of parts along the axis; the last part along K may end inside a group of scales."""
    unit = 1 if axis == 0 else group or 8
    sizes = [unit * size for size in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
    if axis == 1:
        sizes.append(8 * data.draw(st.integers(0, 9)))
        return 3, sum(sizes), sizes
    return sum(sizes), 8 * data.draw(st.integers(0, 40)), sizes


@given(data=st.data(), kind=kinds, axis=st.sampled_from((0, 1)), copy=st.sampled_from([None, True]))
def test_parts_are_those_of_the_matrix_and_joined_the_whole(data, kind, axis, copy):
    m, k, sizes = widths(data, axis, kind[1])
    weight = weight_of(m, k, *kind)
    parts = split_weight(weight, sizes, axis=axis, copy=copy)
    assert [(part.m, part.k)[axis] for part in parts] == sizes
    assert all(part.quantization == weight.quantization for part in parts)
    assert same_bits(np.concatenate([dense_of(part) for part in parts], axis=axis), dense_of(weight))
    assert_equal(concat_weights(parts, axis=axis), weight)
    start, stop = sum(sizes[:1]), sum(sizes)
    want = dense_of(weight)[start:] if axis == 0 else dense_of(weight)[:, start:]
    assert same_bits(dense_of(slice_weight(weight, start, stop, axis=axis)), want)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("group", GROUPS)
def test_the_packed_form_is_cut_like_the_weight(stored, group):
    weight = weight_of(6, 256, stored, group)
    packed = PackedWeight.canonical(weight)
    for axis, sizes in ((0, [2, 4]), (1, [128, 128])):
        parts = split_weight(packed, sizes, axis=axis)
        for part, want in zip(parts, split_weight(weight, sizes, axis=axis), strict=True):
            assert part.quantization == weight.quantization
            for one, other in zip(part.buffers, want.views, strict=True):
                assert same_bits(one.bits(), other.bits())
        assert concat_weights(parts, axis=axis).quantization == weight.quantization


def test_the_hosts_dense_layout_keeps_the_quantization():
    weight = weight_of(4, 64)
    packed = dense_layout.pack(weight.dequantize(), weight.quantization)
    (part, _) = split_weight(packed, [8, 56], axis=1)
    assert part.quantization == weight.quantization


@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_a_view(group):
    weight = weight_of(9, 256, "s4", group)
    part = slice_weight(weight, 3, 7, copy=False)
    for mine, whole in zip(part.views, weight.views, strict=True):
        assert mine.address == whole.address + 3 * whole.shape[1] * whole.element.itemsize


def test_columns_of_one_row_are_a_view():
    weight = weight_of(1, 256, "s4", 64)
    part = slice_weight(weight, 128, 256, axis=1, copy=False)
    offsets = [mine.address - whole.address for mine, whole in zip(part.views, weight.views, strict=True)]
    assert offsets == [32, 32, 4]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_cut_through_columns_of_one_scale_is_refused(group):
    weight = weight_of(2, 2 * group, "s8", group)
    words = (
        f"stop: expected cuts along K at multiples of {group}, the size of a group of columns "
        f"with one scale of layout 'canonical', or at the end {2 * group}, got {group + 8}"
    )
    with pytest.raises(InvalidProblemError, match=re.escape(words)):
        slice_weight(weight, 0, group + 8, axis=1)
    short = weight_of(2, group + 8, "s8", group)
    with pytest.raises(InvalidProblemError, match=rf"weights\[0\]: expected K a multiple of {group}"):
        concat_weights([short, weight], axis=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"stored": "s8"}, "quantization"), ({"group": 64}, "quantization"), ({"scale_element": "f32"}, "quan")],
)
def test_weights_of_another_quantization_are_not_joined(change, words):
    with pytest.raises(InvalidProblemError, match=rf"weights\[1\]: expected {words}"):
        concat_weights([weight_of(2, 64), weight_of(2, 64, **change)])
    with pytest.raises(InvalidProblemError, match=r"weights\[1\]: expected quantization .*, got None"):
        concat_weights([weight_of(2, 64), weight_of(2, 64).dequantize()])


def test_rows_of_other_scales_are_not_joined_along_k():
    one, other = (weight_of(2, 64, group=0, seed=seed) for seed in (0, 1))
    with pytest.raises(InvalidProblemError, match=r"weights\[1\]: expected the scales of weights\[0\]"):
        concat_weights([one, other], axis=1)
    assert concat_weights([one, other], axis=0).m == 4


# Rows in another order ----------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("stored", STORED)
def test_gate_and_up_are_merged_for_a_gated_epilogue(stored, group):
    gate, up = (weight_of(16, 128, stored, group, seed=seed) for seed in (0, 1))
    merged = take_rows(concat_weights([gate, up]), gated_rows(32))
    assert merged.quantization == gate.quantization
    assert same_bits(dense_of(merged), np.concatenate([dense_of(gate), dense_of(up)])[gated_rows(32)])


def test_rows_of_any_layout_with_rows_are_taken():
    weight = Sparse24Weight.prune_compress(np.random.default_rng(0).standard_normal((5, 16), np.float32))
    rows = np.array([4, 0, 0], np.uint8)
    taken = take_rows(weight, rows)
    assert type(taken) is Sparse24Weight
    assert same_bits(taken.decompress(), weight.decompress()[rows])
    packed = take_rows(dense_layout.pack(weight), rows)
    assert same_bits(packed.buffers[0].array(), weight.decompress()[rows])
    assert take_rows(weight, np.zeros(0, np.int64)).m == 0


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, 1], "rows: expected a one-dimensional NumPy array of integers"),
        (np.zeros((2, 2), np.int64), "rows: expected a one-dimensional"),
        (np.zeros(2), "rows: expected a one-dimensional"),
        (np.array([True, False]), "rows: expected a one-dimensional"),
        (np.ma.masked_array([0, 1]), "rows: expected a one-dimensional"),
        (np.array([0, 4]), "rows: expected indices from 0 to below M = 4, got 4"),
        (np.array([0, -1]), "rows: expected indices from 0 to below M = 4, got -1"),
    ],
)
def test_wrong_rows_are_named(rows, words):
    with pytest.raises(InvalidProblemError, match=words):
        take_rows(weight_of(4, 64), rows)


def test_rows_of_tiles_are_not_reordered():
    packed = pack(Sparse24Weight.compress(np.zeros((64, 128), np.float16)))
    with pytest.raises(UnsupportedError, match="rows of layout 'tile64x128_16bit_v1' can't be reordered"):
        take_rows(packed, gated_rows(64))
