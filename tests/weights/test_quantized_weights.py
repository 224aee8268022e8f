"""Quantized 2:4 weights: what stored values and scales mean, how scales are chosen, and what is refused."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    FormatError,
    InvalidProblemError,
    PackedWeight,
    Sparse24QuantizedWeight,
    Sparse24Weight,
)
from sparse24_plans.weights.quantized_weight import nibbles_of

from ..support import random_values

STORED = ("s4", "s8", "fp8_e4m3")
LARGEST = {"s4": 7.0, "s8": 127.0, "fp8_e4m3": 448.0}
GROUPS = (0, 32, 64, 128)
ELEMENTS = ("f16", "bf16")


def a_weight(rng: np.random.Generator, m: int, k: int, element: str) -> Sparse24Weight:
    return Sparse24Weight.prune_compress(random_values(rng, (m, k), ElementKind(element)))


def stored_values(rng: np.random.Generator, m: int, k: int, stored: str) -> tuple[np.ndarray, np.ndarray]:
    """Any stored values [m, k/2] as numbers, and the array that the constructor takes."""
    if stored == "s4":
        numbers = rng.integers(-8, 8, (m, k // 2))
        held = np.zeros((m, k // 4), np.uint8)
        for row in range(m):
            for at in range(0, k // 2, 2):
                low, high = (int(number) % 16 for number in numbers[row, at : at + 2])
                held[row, at // 2] = low + 16 * high
        return numbers.astype(np.float64), held
    if stored == "s8":
        numbers = rng.integers(-128, 128, (m, k // 2)).astype(np.int8)
        return numbers.astype(np.float64), numbers
    bits = rng.integers(0, 256, (m, k // 2)).astype(np.uint8)
    bits[bits & 0x7F == 0x7F] = 0x40  # no NaN
    numbers = bits.view(ml_dtypes.float8_e4m3fn)
    return numbers.astype(np.float64), numbers


def numbers_of(weight: Sparse24QuantizedWeight) -> np.ndarray:
    """The stored values [m, k/2] as float64."""
    if weight.quantization.element != "s4":
        return weight.values.astype(np.float64)
    halves = np.stack([weight.values % 16, weight.values // 16], axis=-1).reshape(weight.m, -1).astype(float)
    return halves - 16 * (halves > 7)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_element_is_the_value_times_its_groups_scale(data, seed):
    rng = np.random.default_rng(seed)
    element, stored = data.draw(st.sampled_from(ELEMENTS)), data.draw(st.sampled_from(STORED))
    group = data.draw(st.sampled_from(GROUPS))
    scale_element = ElementKind(data.draw(st.sampled_from([element, "f32"])))
    m, k = data.draw(st.integers(0, 5)), 8 * data.draw(st.integers(0, 40))
    metadata = a_weight(rng, m, k, element).metadata
    numbers, held = stored_values(rng, m, k, stored)
    groups = -(-k // group) if group else 1
    scales = (rng.standard_normal((m, groups)) * 10.0 ** rng.integers(-3, 2)).astype(scale_element.dtype)
    weight = Sparse24QuantizedWeight(
        held, metadata, scales, element=element, stored=stored, group=group, scale_element=scale_element
    )
    found = weight.dequantize()
    assert (found.element, found.m, found.k) == (element, m, k)
    assert np.array_equal(found.metadata, metadata)
    kind = ElementKind(element).dtype.type
    for row in range(m):
        for at in range(k // 2):
            scale = float(scales[row, 4 * (at // 2) // group if group else 0])
            product = np.float32(numbers[row, at] * scale)  # exact in float64, then rounded to float32
            assert found.values[row, at] == kind(product)


@pytest.mark.parametrize("rule", ["largest", "least_squares"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("group", GROUPS)
def test_a_groups_largest_value_keeps_its_size(rule, stored, group):
    """Integers are off by at most half a step of the scale, fp8 by its rounding; positions stay."""
    rng = np.random.default_rng(group)
    weight = a_weight(rng, 24, 200, "bf16")
    found = Sparse24QuantizedWeight.quantize(weight, stored=stored, group=group, rule=rule)
    assert np.array_equal(found.metadata, weight.metadata)
    assert found.scales.shape == (24, -(-200 // group) if group else 1)
    wide, back = (one.values.astype(np.float64) for one in (weight, found.dequantize()))
    scales = found.scales.astype(np.float64)
    each = np.repeat(scales, (group or 200) // 2, axis=1)[:, :100]
    most = np.abs(wide) / LARGEST[stored]
    if rule == "largest":  # the scale is the nearest bf16 to the largest |value| over the largest stored one
        for at in range(scales.shape[1]):
            part = most[:, at * group // 2 : (at + 1) * group // 2] if group else most
            assert np.array_equal(scales[:, at], part.max(axis=1).astype(ml_dtypes.bfloat16).astype(float))
    step = 0.5 * each if stored != "fp8_e4m3" else np.maximum(np.abs(wide) * 2.0**-4, each * 2.0**-10)
    rounding = np.abs(wide) * 2.0**-8
    clipped = np.maximum(np.abs(wide) - LARGEST[stored] * each, 0)
    assert (np.abs(back - wide) <= step + rounding + clipped).all()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("group", GROUPS)
def test_least_squares_loses_no_more_in_any_group(stored, group):
    weight = a_weight(np.random.default_rng(3), 32, 256, "f16")
    wide = weight.values.astype(np.float32)

    def lost(rule: str) -> np.ndarray:
        found = Sparse24QuantizedWeight.quantize(weight, stored=stored, group=group, rule=rule)
        scales = np.repeat(found.scales.astype(np.float64), (group or 256) // 2, axis=1)
        error = np.square(numbers_of(found) * scales - wide)
        return error.reshape(-1, (group or 256) // 2).sum(axis=1)

    plain, fitted = lost("largest"), lost("least_squares")
    assert (fitted <= plain * (1 + 1e-4)).all()  # errors are compared in float32
    if stored == "s4":
        assert fitted.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("rule", ["largest", "least_squares"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("element", ELEMENTS)
def test_finite_weights_stay_finite_and_zeros_zero(element, stored, rule):
    kind = ElementKind(element).dtype
    most = ml_dtypes.finfo(kind).max
    dense = np.zeros((4, 64), kind)
    dense[0, ::4], dense[1, ::2], dense[2, 0] = most, -most, ml_dtypes.finfo(kind).smallest_subnormal
    for scale_element in (element, "f32"):
        found = Sparse24QuantizedWeight.quantize(
            Sparse24Weight.compress(dense), stored=stored, group=32, scale_element=scale_element, rule=rule
        )
        back = found.dequantize().decompress().astype(np.float64)
        assert np.isfinite(back).all()
        assert (back[dense == 0] == 0).all()
        assert np.abs(back[:2] - dense[:2].astype(float)).max() <= float(most) * 2.0**-6


@pytest.mark.parametrize("stored", STORED)
def test_nan_and_inf_stay_in_their_group(stored):
    dense = np.ones((1, 128), np.float16)
    dense[0, ::2] = 0
    dense[0, 1], dense[0, 65] = np.nan, np.inf
    found = Sparse24QuantizedWeight.quantize(Sparse24Weight.compress(dense), stored=stored, group=32)
    scales = found.scales[0].astype(np.float32)
    assert np.isnan(scales[0])
    assert np.isinf(scales[2])
    back = found.dequantize().decompress().astype(np.float32)
    assert np.array_equal(back[0, 32:64], dense[0, 32:64])
    assert np.array_equal(back[0, 96:], dense[0, 96:])


def test_four_bits_take_the_bytes_that_they_say():
    weight = a_weight(np.random.default_rng(0), 256, 1024, "bf16")
    found = Sparse24QuantizedWeight.quantize(weight, stored="s4", group=128)
    assert found.values.nbytes == 256 * 1024 // 4
    assert found.nbytes == found.values.nbytes + found.metadata.nbytes + found.scales.nbytes
    assert PackedWeight.canonical(found).nbytes == found.nbytes


@pytest.mark.parametrize("stored", STORED)
def test_copies_and_pickles_are_equal(stored):
    weight = Sparse24QuantizedWeight.quantize(
        a_weight(np.random.default_rng(1), 8, 64, "f16"), stored=stored, group=32, scale_element="f32"
    )
    packed = PackedWeight.canonical(weight)
    for again in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.to("host")):
        assert again.quantization == weight.quantization
        assert again.element == weight.element
        for one, other in zip(again.views, weight.views, strict=True):
            assert np.array_equal(one.bits(), other.bits())
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert again.quantization == weight.quantization
        assert all(
            np.array_equal(a.bits(), b.bits()) for a, b in zip(again.buffers, packed.buffers, strict=True)
        )


GOOD = {"element": "bf16", "stored": "s4", "group": 32}


def parts(m: int = 4, k: int = 64) -> list[np.ndarray]:
    metadata = np.full((m, k // 8), 0x0404, np.uint16)
    return [np.zeros((m, k // 4), np.uint8), metadata, np.ones((m, k // 32), ml_dtypes.bfloat16)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"element": "f32"}, "element: expected f16 or bf16"),
        ({"stored": "bf16"}, "stored: expected s4 or s8 or fp8_e4m3"),
        ({"stored": "fp8_e5m2"}, "stored"),
        ({"group": 16}, "group: expected 0 or 32 or 64 or 128, got 16"),
        ({"group": "32"}, "group"),
        ({"group": None}, "group"),
        ({"scale_element": "f16"}, "scale_element: expected bf16 or f32"),
        ({"stored": "s8"}, "metadata: expected shape"),
        ({"group": 64}, "scales: expected shape"),
        ({"validate": 1}, "validate"),
    ],
)
def test_wrong_fields_are_named(change, word):
    assert Sparse24QuantizedWeight(*parts(), **GOOD).k == 64
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24QuantizedWeight(*parts(), **{**GOOD, **change})


@pytest.mark.parametrize(
    ("at", "wrong", "word"),
    [
        (0, np.zeros((4, 15), np.uint8), "values: expected shape"),
        (0, np.zeros(4, np.uint8), "values: expected shape"),
        (0, np.zeros((4, 16), np.int32), "values"),
        (0, np.zeros((8, 16), np.uint8)[::2], "values: expected contiguous"),
        (1, np.zeros((4, 4), np.uint16), "metadata: expected shape"),
        (1, np.full((4, 8), 4, np.uint8), "metadata"),
        (2, np.ones((4, 2), np.float32), "scales"),
        (2, np.ones((4, 3), ml_dtypes.bfloat16), "scales: expected shape"),
        (2, None, "scales"),
    ],
)
def test_wrong_parts_are_named(at, wrong, word):
    given = parts()
    given[at] = wrong
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24QuantizedWeight(*given, **GOOD)


def test_bad_metadata_is_named_by_row_and_group():
    given = parts()
    given[1].view(np.uint8)[2, 3] = 0x05
    with pytest.raises(FormatError) as caught:
        Sparse24QuantizedWeight(*given, **GOOD)
    assert (caught.value.row, caught.value.group) == (2, 3)
    assert Sparse24QuantizedWeight(*given, **GOOD, validate=False).m == 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stored": "f16"}, "stored"),
        ({"group": 31}, "group"),
        ({"rule": "smallest"}, "rule: expected largest or least_squares"),
        ({"rule": None}, "rule"),
        ({"scale_element": "s8"}, "scale_element"),
    ],
)
def test_wrong_ways_to_quantize_are_named(change, word):
    weight = a_weight(np.random.default_rng(0), 4, 64, "bf16")
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24QuantizedWeight.quantize(weight, **{"stored": "s4", "group": 32, **change})


@pytest.mark.parametrize("element", ["f32", "s8"])
def test_a_quantized_weight_has_16_bits_when_it_is_multiplied(element):
    weight = a_weight(np.random.default_rng(0), 4, 64, element)
    with pytest.raises(InvalidProblemError, match="element: expected f16 or bf16"):
        Sparse24QuantizedWeight.quantize(weight, stored="s4", group=32)


@pytest.mark.parametrize("element", ELEMENTS)
def test_float32_is_not_rounded_before_it_is_quantized(element):
    dense = np.zeros((1, 32), np.float32)
    dense[0, ::2] = 7.0
    dense[0, 1::4] = 0
    dense[0, 2] = np.float32(2.5) + np.float32(2.0**-20)  # rounded to 16 bits it would be a tie: 2
    weight = Sparse24Weight.compress(dense)
    found = Sparse24QuantizedWeight.quantize(weight, stored="s4", group=32, element=element)
    assert (found.element, found.quantization.scale_element) == (element, element)
    assert numbers_of(found)[0, :2].tolist() == [7, 3]
    with pytest.raises(InvalidProblemError, match="weight: expected elements f32 or f16 or bf16, got"):
        Sparse24QuantizedWeight.quantize(
            a_weight(np.random.default_rng(0), 1, 32, "s8"), stored="s4", group=32, element=element
        )


def test_nibbles_hold_every_pair():
    pairs = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)), axis=-1).reshape(-1, 2).astype(np.int8)
    assert len(set(nibbles_of(pairs).ravel().tolist())) == 256
