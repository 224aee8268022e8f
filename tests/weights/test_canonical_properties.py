"""The canonical 2:4 format against a slow model, for any bits; metadata that is valid, and that is not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse24_plans import (
    ElementKind,
    FormatError,
    Sparse24Weight,
    prune,
)
from sparse24_plans.vocab import IN_MEMORY

from ..support import same_bits
from .canonical_model import (
    FLOATS,
    assert_is,
    first_crowded,
    model_compress,
    model_prune,
)


def without_payloads(bits: np.ndarray, element: ElementKind) -> np.ndarray:
    """Any NaN becomes the one NaN, so that two NaNs are always a tie."""
    typed = bits.view(element.dtype)
    if element not in FLOATS:
        return typed
    return np.where(np.isnan(typed), np.array(np.nan, element.dtype), typed)


@st.composite
def matrices(draw: st.DrawFn, most_rows: int = 4, most_units: int = 3) -> tuple[np.ndarray, ElementKind]:
    """Any bits of any element, with zeros, ties and extremes more often than chance has them."""
    element = draw(st.sampled_from(IN_MEMORY))
    shape = (draw(st.integers(0, most_rows)), 8 * draw(st.integers(0, most_units)))
    top = 2 ** (8 * element.itemsize) - 1
    half = (top + 1) // 2
    common = st.sampled_from([0, half, 1, half + 1, top, half - 1])
    bits = draw(hnp.arrays(element.bits_dtype, shape, elements=common | st.integers(0, top)))
    return without_payloads(bits, element), element


@st.composite
def matrices_and_scores(draw: st.DrawFn) -> tuple[np.ndarray, ElementKind, np.ndarray]:
    dense, element = draw(matrices())
    kind = draw(st.sampled_from(IN_MEMORY))
    top = 2 ** (8 * kind.itemsize) - 1
    elements = st.sampled_from([0, (top + 1) // 2, 1, top]) | st.integers(0, top)
    scores = draw(hnp.arrays(kind.bits_dtype, dense.shape, elements=elements))
    return dense, element, scores.view(kind.dtype)


@given(case=matrices())
def test_prune_is_the_models(case):
    dense, element = case
    before = dense.tobytes()
    weight = Sparse24Weight.prune_compress(dense)
    assert_is(weight, model_prune(dense), element, dense.shape)
    assert same_bits(prune(dense), weight.decompress())
    assert dense.tobytes() == before
    weight.validate()


@given(case=matrices_and_scores())
def test_prune_by_scores_of_any_element_is_the_models(case):
    dense, element, scores = case
    weight = Sparse24Weight.prune_compress(dense, scores=scores)
    assert_is(weight, model_prune(dense, scores), element, dense.shape)
    weight.validate()


@given(case=matrices())
def test_compress_is_the_models_or_names_the_first_crowded_group(case):
    dense, element = case
    crowded = first_crowded(dense)
    if crowded is None:
        assert_is(Sparse24Weight.compress(dense), model_compress(dense), element, dense.shape)
    else:
        with pytest.raises(FormatError, match="prune first") as caught:
            Sparse24Weight.compress(dense)
        assert (caught.value.row, caught.value.group) == crowded


@given(case=matrices())
def test_a_pruned_matrix_survives_compression_bit_for_bit(case):
    pruned = prune(case[0])
    weight = Sparse24Weight.compress(pruned)
    assert same_bits(weight.decompress(), pruned)
    again = Sparse24Weight.prune_compress(case[0])
    assert same_bits(weight.values, again.values)
    assert same_bits(weight.metadata, again.metadata)


@given(case=matrices())
def test_pruning_twice_is_pruning_once(case):
    pruned = prune(case[0])
    assert same_bits(prune(pruned), pruned)


@given(data=st.data(), element=st.sampled_from(IN_MEMORY))
def test_decompress_takes_every_valid_metadata(data, element):
    """Some positions are not those that our own compression would choose."""
    m, units = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    pairs = st.sampled_from(list(itertools.combinations(range(4), 2)))
    kept = [[data.draw(pairs) for _ in range(2 * units)] for _ in range(m)]
    codes = np.array([[a + 4 * b for a, b in row] for row in kept], np.uint8).reshape(m, 2 * units)
    top = 2 ** (8 * element.itemsize) - 1
    bits = data.draw(hnp.arrays(element.bits_dtype, (m, 4 * units), elements=st.integers(0, top)))
    metadata = codes.view("<u2").reshape(m, units).copy()
    weight = Sparse24Weight(bits.view(element.dtype), metadata, element=element)
    want = np.zeros((m, 8 * units), element.bits_dtype)
    for row, group in itertools.product(range(m), range(2 * units)):
        for slot, position in enumerate(kept[row][group]):
            want[row, 4 * group + position] = bits[row, 2 * group + slot]
    assert same_bits(weight.decompress(), want.view(element.dtype))


@pytest.mark.parametrize("group", [0, 1, 2, 3])
def test_exactly_six_bytes_are_valid(group):
    valid = {first + 4 * second for first, second in itertools.combinations(range(4), 2)}
    for byte in range(256):
        codes = np.full((2, 4), 4, np.uint8)
        codes[1, group] = byte
        values = np.ones((2, 8), np.float32)
        if byte in valid:
            Sparse24Weight(values, codes.view("<u2"))
            continue
        with pytest.raises(FormatError) as caught:
            Sparse24Weight(values, codes.view("<u2"))
        assert (caught.value.row, caught.value.group) == (1, group)
