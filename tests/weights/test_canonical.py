"""The canonical 2:4 format against a slow model: every small group, each rule by itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    prune,
)

from ..support import same_bits
from .canonical_model import (
    F32,
    FLOATS,
    assert_is,
    every_element,
    every_group,
    float_elements,
    model_compress,
    model_prune,
)


@every_element
def test_prune_every_small_group(element):
    dense = every_group(element)
    weight = Sparse24Weight.prune_compress(dense)
    assert_is(weight, model_prune(dense), element, dense.shape)
    weight.validate()
    assert same_bits(prune(dense), weight.decompress())


@every_element
def test_compress_every_small_group_that_is_sparse(element):
    groups = every_group(element).reshape(-1, 4)
    sparse = groups[[sum(float(v) != 0 for v in group) <= 2 for group in groups]]
    dense = np.concatenate([sparse, sparse]).reshape(-1, 8)
    weight = Sparse24Weight.compress(dense)
    assert_is(weight, model_compress(dense), element, dense.shape)
    weight.validate()


@every_element
def test_compress_refuses_every_small_group_that_is_not(element):
    groups = every_group(element).reshape(-1, 4)
    for group in groups[[sum(float(v) != 0 for v in group) > 2 for group in groups]][::7]:
        dense = np.zeros((3, 16), element.dtype)
        dense[1, 8:12] = group
        count = sum(float(v) != 0 for v in group)
        with pytest.raises(
            FormatError, match=f"at most 2 non-zeros in every group of 4, got {count}"
        ) as caught:
            Sparse24Weight.compress(dense)
        assert (caught.value.row, caught.value.group) == (1, 2)


@pytest.mark.parametrize("signed", [True, False])
def test_prune_by_every_small_score(signed):
    """Scores rank as they are, signed; NaN first; -0.0 ties with +0.0; ties keep the lower index."""
    values = (-2.0, -1.0, -0.0, 0.0, 1.0, np.inf, -np.inf, np.nan) if signed else (0.0, 1.0, 2.0, 3.0)
    scores = np.array(list(itertools.product(values, repeat=4)), np.float32).reshape(-1, 8)
    dense = np.random.default_rng(0).standard_normal(scores.shape).astype(np.float32)
    weight = Sparse24Weight.prune_compress(dense, scores=scores)
    assert_is(weight, model_prune(dense, scores), F32, dense.shape)
    assert same_bits(prune(dense, scores=scores), weight.decompress())


# The rules, one by one ----------------------------------------------------------------------------

A, B = 5.0, 3.0
DEGENERATE = [
    ((0, 0, 0, 0), (0, 1)),
    ((A, 0, 0, 0), (0, 1)),
    ((0, A, 0, 0), (0, 1)),
    ((0, 0, A, 0), (0, 2)),
    ((0, 0, 0, A), (0, 3)),
]
FULL = [
    ((A, B, 0, 0), (0, 1)),
    ((A, 0, B, 0), (0, 2)),
    ((A, 0, 0, B), (0, 3)),
    ((0, A, B, 0), (1, 2)),
    ((0, A, 0, B), (1, 3)),
    ((0, 0, A, B), (2, 3)),
]


@pytest.mark.parametrize(
    "make", [Sparse24Weight.compress, Sparse24Weight.prune_compress], ids=["compress", "prune"]
)
@every_element
def test_positions_of_a_group(element, make):
    """The row "ours" of the table of degenerate groups, and the six full ones."""
    for group, positions in DEGENERATE + FULL:
        dense = np.array([group * 2], element.dtype)
        byte = positions[0] + 4 * positions[1]
        assert make(dense).metadata.tolist() == [[byte * 0x0101]], group
        assert make(dense).values.tolist() == [[group[i] for i in positions] * 2], group


def test_metadata_holds_the_low_byte_first():
    dense = np.array([[A, B, 0, 0, 0, 0, A, B]], np.float32)
    assert Sparse24Weight.compress(dense).metadata.tolist() == [[0x0E04]]


@float_elements
def test_only_stored_zeros_keep_their_sign(element):
    dense = np.array([[-0.0, 1, -0.0, 0, -0.0, 1, 1, -0.0]], element.dtype)
    weight = Sparse24Weight.compress(dense)
    assert np.signbit(weight.values.astype(float)).tolist() == [[True, False, False, False]]
    back = weight.decompress().astype(float)
    assert (back == dense.astype(float)).all()
    assert np.signbit(back).tolist() == [[True] + [False] * 7]


@every_element
def test_every_bit_pattern_is_stored_as_it_is(element):
    """NaN payloads, signalling NaNs and subnormals included."""
    if element.itemsize == 1:
        patterns = np.arange(256)
    else:
        patterns = np.random.default_rng(0).integers(0, 2 ** (8 * element.itemsize), 4096)
    bits = np.zeros((patterns.size // 4, 8), element.bits_dtype)
    bits[:, 0::4] = patterns.reshape(-1, 4)[:, :2]
    bits[:, 3::4] = patterns.reshape(-1, 4)[:, 2:]
    dense = bits.view(element.dtype)
    for make in (Sparse24Weight.compress, Sparse24Weight.prune_compress):
        back = make(dense).decompress().view(element.bits_dtype)
        zero = bits == (0 if element not in FLOATS else 1 << (8 * element.itemsize - 1))
        np.testing.assert_array_equal(back[~zero], bits[~zero])


@float_elements
def test_of_more_than_two_nans_two_are_kept(element):
    """Whatever their payloads; which two is said for equal ones only: the first."""
    bits = element.bits_dtype.type
    quiet = np.array([np.nan], element.dtype).view(element.bits_dtype)[0]
    sign = bits(1 << (8 * element.itemsize - 1))
    dense = np.array([[1, quiet, quiet ^ sign, quiet, quiet, quiet, quiet, quiet]], element.bits_dtype)
    weight = Sparse24Weight.prune_compress(dense.view(element.dtype))
    assert weight.metadata.tolist() == [[(1 + 4 * 2) + 256 * (0 + 4 * 1)]]
    assert np.isnan(weight.values.astype(float)).all()


def test_the_smallest_s8_is_the_largest_magnitude():
    dense = np.array([[127, -128, 127, 126, -128, -127, 127, -128]], np.int8)
    assert prune(dense).tolist() == [[127, -128, 0, 0, -128, 0, 0, -128]]


@pytest.mark.parametrize(
    ("element", "nans"),
    [("f16", [0x7E01, 0x7E03, 0x7E02, 0xFE02]), ("f32", [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7F800002])],
)
def test_nans_tie_whatever_their_payload(element, nans):
    kind = ElementKind(element)
    bits = np.array([nans + [0] * 4], kind.bits_dtype)
    weight = Sparse24Weight.prune_compress(bits, element=kind)
    assert weight.values.view(kind.bits_dtype)[0, :2].tolist() == nans[:2]


def test_scores_may_be_numpys_float64():
    dense = np.arange(1, 9, dtype=np.float32)[None]
    scores = np.array([[4, 3, 2, 1, 1, 2, 3, 4]], np.float64)
    assert Sparse24Weight.prune_compress(dense, scores=scores).values.tolist() == [[1, 2, 7, 8]]
    with pytest.raises(InvalidProblemError, match="scores"):
        Sparse24Weight.prune_compress(dense, scores=scores[:, :4])
