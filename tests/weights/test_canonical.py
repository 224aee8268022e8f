"""The canonical 2:4 format against a slow model written from docs/formats.md, one group after the other."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    ElementKind,
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    TensorView,
    prune,
)

from ..support import same_bits

F32, F16, BF16, S8, U8 = (ElementKind(name) for name in ("f32", "f16", "bf16", "s8", "u8"))
every_element = pytest.mark.parametrize("element", ElementKind)
FLOATS = [element for element in ElementKind if element.unit_roundoff]
float_elements = pytest.mark.parametrize("element", FLOATS)

# The model ----------------------------------------------------------------------------------------


def two_largest(keys: list[float]) -> tuple[int, int]:
    """Positions of the two largest of four: NaN before everything, then by value, then by position."""
    order = sorted(range(4), key=lambda i: (not math.isnan(keys[i]), -keys[i], i))
    return tuple(sorted(order[:2]))


def nonzero_cover(values: list[float]) -> tuple[int, int]:
    """Positions of the non-zeros of a group, spare slots at the lowest free ones."""
    used = [i for i in range(4) if values[i] != 0]
    spare = [i for i in range(4) if values[i] == 0]
    assert len(used) <= 2
    return tuple(sorted((used + spare)[:2]))


class Model:
    """``values`` [M, K/2] as bits and one metadata byte a group, lists of lists."""

    def __init__(self, dense: np.ndarray, choose) -> None:
        """``choose(row, group, values)`` names the two positions to keep."""
        bits = dense.view(f"u{dense.dtype.itemsize}")
        self.values: list[list[int]] = []
        self.metadata: list[list[int]] = []
        self.dense = np.zeros_like(bits)
        for row in range(dense.shape[0]):
            kept, codes = [], []
            for group in range(dense.shape[1] // 4):
                start = 4 * group
                first, second = choose(row, group, [float(v) for v in dense[row, start : start + 4]])
                kept += [int(bits[row, start + first]), int(bits[row, start + second])]
                codes.append(first + 4 * second)
                for position in (first, second):
                    self.dense[row, start + position] = bits[row, start + position]
            self.values.append(kept)
            self.metadata.append(codes)


def model_prune(dense: np.ndarray, scores: np.ndarray | None = None) -> Model:
    def choose(row: int, group: int, values: list[float]) -> tuple[int, int]:
        if scores is None:
            return two_largest([abs(v) for v in values])
        return two_largest([float(s) for s in scores[row, 4 * group : 4 * group + 4]])

    return Model(dense, choose)


def model_compress(dense: np.ndarray) -> Model:
    return Model(dense, lambda row, group, values: nonzero_cover(values))


def first_crowded(dense: np.ndarray) -> tuple[int, int] | None:
    """Row and group of the first group with more than two non-zeros."""
    for row in range(dense.shape[0]):
        for group in range(dense.shape[1] // 4):
            if sum(float(v) != 0 for v in dense[row, 4 * group : 4 * group + 4]) > 2:
                return row, group
    return None


def metadata_bytes(weight: Sparse24Weight) -> list[list[int]]:
    """The metadata as bytes, the low one of each uint16 first, by arithmetic."""
    return [[byte for word in row for byte in (int(word) % 256, int(word) // 256)] for row in weight.metadata]


def assert_is(weight: Sparse24Weight, model: Model, element: ElementKind, shape: tuple[int, int]) -> None:
    m, k = shape
    assert (weight.m, weight.k, weight.element, str(weight.device)) == (m, k, element, "host")
    assert weight.values.shape == (m, k // 2)
    assert weight.values.dtype == element.dtype
    assert weight.metadata.shape == (m, k // 8)
    assert weight.metadata.dtype == np.uint16
    assert weight.values.view(element.bits_dtype).tolist() == model.values
    assert metadata_bytes(weight) == model.metadata
    assert weight.nbytes == weight.values.nbytes + weight.metadata.nbytes
    assert same_bits(weight.decompress(), model.dense.view(element.dtype))


# Every small group --------------------------------------------------------------------------------

SMALL = {
    **dict.fromkeys(FLOATS, (-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, np.nan, np.inf)),
    S8: (-128, -127, -1, 0, 1, 127),
    ElementKind.I32: (-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 1),
    ElementKind.U16: (0, 1, 2, 32768, 65535),
    U8: (0, 1, 2, 128, 255),
}


def every_group(element: ElementKind) -> np.ndarray:
    """Every group of four of the element's small set, eight columns a row."""
    groups = np.array(list(itertools.product(SMALL[element], repeat=4)))
    if len(groups) % 2:
        groups = np.concatenate([groups, groups[:1]])
    with np.errstate(invalid="ignore"):  # fp8_e4m3 has no infinity: NaN
        return groups.astype(element.dtype).reshape(-1, 8)


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
@pytest.mark.parametrize(("group", "positions"), DEGENERATE + FULL, ids=str)
@every_element
def test_positions_of_a_group(element, group, positions, make):
    """The row "ours" of the table of degenerate groups, and the six full ones."""
    dense = np.array([group * 2], element.dtype)
    byte = positions[0] + 4 * positions[1]
    assert make(dense).metadata.tolist() == [[byte * 0x0101]]
    assert make(dense).values.tolist() == [[group[i] for i in positions] * 2]


def test_metadata_holds_the_low_byte_first():
    dense = np.array([[A, B, 0, 0, 0, 0, A, B]], np.float32)
    assert Sparse24Weight.compress(dense).metadata.tolist() == [[0x0E04]]


@float_elements
def test_the_sign_of_a_stored_zero_is_kept_and_of_another_is_not(element):
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


# Properties ---------------------------------------------------------------------------------------


def without_payloads(bits: np.ndarray, element: ElementKind) -> np.ndarray:
    """Any NaN becomes the one NaN, so that two NaNs are always a tie."""
    typed = bits.view(element.dtype)
    if element not in FLOATS:
        return typed
    return np.where(np.isnan(typed), np.array(np.nan, element.dtype), typed)


@st.composite
def matrices(draw: st.DrawFn, most_rows: int = 4, most_units: int = 3) -> tuple[np.ndarray, ElementKind]:
    """Any bits of any element, with zeros, ties and extremes more often than chance has them."""
    element = draw(st.sampled_from(ElementKind))
    shape = (draw(st.integers(0, most_rows)), 8 * draw(st.integers(0, most_units)))
    top = 2 ** (8 * element.itemsize) - 1
    half = (top + 1) // 2
    common = st.sampled_from([0, half, 1, half + 1, top, half - 1])
    bits = draw(hnp.arrays(element.bits_dtype, shape, elements=common | st.integers(0, top)))
    return without_payloads(bits, element), element


@st.composite
def matrices_and_scores(draw: st.DrawFn) -> tuple[np.ndarray, ElementKind, np.ndarray]:
    dense, element = draw(matrices())
    kind = draw(st.sampled_from(ElementKind))
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


@settings(max_examples=50)
@given(data=st.data(), element=st.sampled_from(ElementKind))
def test_decompress_takes_every_valid_metadata(data, element):
    """Also positions that our own compression wouldn't choose."""
    m, units = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    pairs = st.sampled_from(list(itertools.combinations(range(4), 2)))
    kept = [[data.draw(pairs) for _ in range(2 * units)] for _ in range(m)]
    codes = np.array([[a + 4 * b for a, b in row] for row in kept], np.uint8).reshape(m, 2 * units)
    top = 2 ** (8 * element.itemsize) - 1
    bits = data.draw(hnp.arrays(element.bits_dtype, (m, 4 * units), elements=st.integers(0, top)))
    weight = Sparse24Weight(bits.view(element.dtype), codes.view("<u2").reshape(m, units).copy())
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


# Sizes and layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (0, 24), (1, 0), (5, 0)])
@every_element
def test_empty_matrices(element, shape):
    dense = np.zeros(shape, element.dtype)
    for make in (Sparse24Weight.compress, Sparse24Weight.prune_compress):
        weight = make(dense)
        assert_is(weight, model_compress(dense), element, shape)
        weight.validate()
    assert same_bits(prune(dense), dense)
    assert same_bits(prune(dense, scores=np.zeros(shape, np.float32)), dense)


LARGE = [(33, 1 << 15), (2, (1 << 20) + 8)]  # both larger than one internal step; one has a row that is
large = pytest.mark.parametrize("shape", LARGE, ids=str)


@large
@pytest.mark.parametrize("by_scores", [False, True])
def test_large_matrices_are_done_in_steps_that_do_not_show(shape, by_scores):
    rng = np.random.default_rng(0)
    dense = rng.integers(-128, 128, shape, dtype=np.int8)
    scores = rng.integers(-128, 128, shape, dtype=np.int8) if by_scores else None
    weight = Sparse24Weight.prune_compress(dense, scores=scores)
    weight.validate()
    for row in (0, shape[0] - 1):
        columns = slice(shape[1] - 256, None)
        part = np.ascontiguousarray(dense[row : row + 1, columns])
        model = model_prune(part, None if scores is None else scores[row : row + 1, columns])
        assert weight.values.view(np.uint8)[row : row + 1, -128:].tolist() == model.values
        assert metadata_bytes(weight)[row][-64:] == model.metadata[0]
    pruned = weight.decompress()
    assert ((pruned == dense) | (pruned == 0)).all()
    assert same_bits(Sparse24Weight.compress(pruned).decompress(), pruned)


@large
@pytest.mark.parametrize("row", [0, -1])
def test_a_crowded_group_of_a_large_matrix_is_named(shape, row):
    row %= shape[0]
    group = shape[1] // 4 - 3
    dense = np.zeros(shape, np.int8)
    dense[row, 4 * group : 4 * group + 3] = 1
    dense[-1, -4:] = 1
    with pytest.raises(FormatError, match="got 3") as caught:
        Sparse24Weight.compress(dense)
    assert (caught.value.row, caught.value.group) == (row, group)


@large
def test_bad_metadata_of_a_large_matrix_is_named(shape):
    m, k = shape
    codes = np.full((m, k // 4), 0x4, np.uint8)
    codes[m - 1, k // 4 - 2] = 0x5
    with pytest.raises(FormatError, match="increasing") as caught:
        Sparse24Weight(np.zeros((m, k // 2), np.int8), codes.view("<u2"))
    assert (caught.value.row, caught.value.group) == (m - 1, k // 4 - 2)


@pytest.mark.parametrize(
    "index",
    [np.s_[:, 8:40], np.s_[::2, :32], np.s_[::-1, :32], np.s_[:, ::2], np.s_[:, ::-1], np.s_[3:4, 16:24]],
    ids=str,
)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("element", [F32, BF16, S8])
def test_any_strides(element, order, index):
    rng = np.random.default_rng(0)
    whole = np.asarray(rng.integers(-99, 99, (12, 64)).astype(element.dtype), order=order)
    scores = np.asarray(rng.standard_normal((12, 64)).astype(np.float32), order=order)
    dense, by = whole[index], scores[index]
    plain, plain_by = np.ascontiguousarray(dense), np.ascontiguousarray(by)
    for got, want in (
        (Sparse24Weight.prune_compress(dense), Sparse24Weight.prune_compress(plain)),
        (
            Sparse24Weight.prune_compress(dense, scores=by),
            Sparse24Weight.prune_compress(plain, scores=plain_by),
        ),
    ):
        assert same_bits(got.values, want.values)
        assert same_bits(got.metadata, want.metadata)
    assert same_bits(prune(dense), prune(plain))


def test_the_result_shares_no_memory_with_the_input():
    dense = np.ones((4, 8), np.float32)
    weight = Sparse24Weight.prune_compress(dense)
    pruned = prune(dense)
    dense[:] = 7
    assert weight.values.max() == pruned.max() == 1


def test_values_and_metadata_are_the_callers_own_memory():
    values, metadata = np.ones((4, 8), np.float32), np.full((4, 2), 0x4444 & 0x0F0F, np.uint16)
    weight = Sparse24Weight(values, metadata)
    assert np.shares_memory(weight.values, values)
    assert np.shares_memory(weight.metadata, metadata)


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Sparse24Weight.compress, Sparse24Weight.prune_compress, prune])
class TestArguments:
    @pytest.mark.parametrize("shape", [(4, 12), (4, 4), (8,), (), (2, 4, 8)])
    def test_shape(self, make, shape):
        with pytest.raises(InvalidProblemError, match=r"dense: expected shape .*multiple of 8") as caught:
            make(np.zeros(shape, np.float32))
        assert str(list(shape)) in str(caught.value)

    @pytest.mark.parametrize("dtype", ["f8", "i8", "c8", "?", ">f4"])
    def test_type(self, make, dtype):
        with pytest.raises(InvalidProblemError, match="dense"):
            make(np.zeros((4, 8), dtype))

    @pytest.mark.parametrize("element", ["f64", "", "F32", 3])
    def test_element_that_is_none(self, make, element):
        with pytest.raises(InvalidProblemError, match="element"):
            make(np.zeros((4, 8), np.float32), element=element)

    def test_bits_with_an_element(self, make):
        dense = np.array([[1, 0, 0, -2, 0, 3, 0, 0]], ml_dtypes.bfloat16)
        typed, raw = make(dense), make(dense.view(np.uint16), element="bf16")
        if isinstance(typed, Sparse24Weight):
            assert raw.element is BF16
            typed, raw = typed.values, raw.values
        assert same_bits(typed, raw)


@pytest.mark.parametrize(
    "scores",
    [
        np.zeros((4, 8), np.float32),
        np.zeros((8, 4), np.float32),
        np.zeros(64, np.float32),
        np.zeros((4, 16), np.complex64),
        TensorView(4096, (4, 16), F32, Device("cuda", 0)),
        "magnitude",
    ],
)
def test_scores_that_do_not_fit(scores):
    for function in (Sparse24Weight.prune_compress, prune):
        with pytest.raises(InvalidProblemError, match="scores"):
            function(np.zeros((4, 16), np.float32), scores=scores)


@pytest.mark.parametrize("element", ["f64", "", 3])
def test_a_weights_element_that_is_none(element):
    with pytest.raises(InvalidProblemError, match="element"):
        Sparse24Weight(np.zeros((1, 4), np.uint16), np.full((1, 1), 0x0404, np.uint16), element=element)


def test_a_weight_moves_only_where_it_is_not():
    weight = Sparse24Weight.prune_compress(np.ones((4, 8), np.float32))
    assert weight.to("host") is weight
    assert weight.to("cpu") is weight
    for device in ("gpu", -1, 1.5, True, None):
        with pytest.raises(InvalidProblemError, match="device"):
            weight.to(device)


def test_a_weight_cannot_move_to_a_device_that_is_not_there():
    weight = Sparse24Weight.prune_compress(np.ones((4, 8), np.float32))
    with pytest.raises(BackendUnavailableError):
        weight.to(63)


@pytest.mark.gpu
@every_element
def test_a_weight_survives_the_way_to_a_gpu_and_back(element):
    dense = every_group(element)
    weight = Sparse24Weight.prune_compress(dense)
    moved = weight.to(0)
    assert str(moved.device) == "cuda:0"
    moved.validate()
    back = moved.to("host")
    assert same_bits(back.values, weight.values)
    assert same_bits(back.metadata, weight.metadata)


def test_repr_says_what_it_is():
    weight = Sparse24Weight.prune_compress(np.ones((4, 8), ml_dtypes.bfloat16))
    assert repr(weight) == "Sparse24Weight(bf16[4, 8], host)"


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
