"""Weights that a format can't hold, and parts that don't fit together: typed errors that say where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    UnsupportedError,
    from_foreign,
    to_foreign,
)
from sparse24_plans.formats.table import FORMATS

from ..support import same_bits
from .samples import ONE_OF_TWO, f16_weight, random_bits, weight_of

REFUSED_EXPORTS = [
    ("torch_cutlass", (16, 64), {}, InvalidProblemError, "M a multiple of 32"),
    ("torch_cutlass", (32, 16), {}, InvalidProblemError, "M = 32, K = 16"),
    ("cutlass_sm90", (32, 64), {"tile_k": 48}, InvalidProblemError, "tile_k = 48"),
    ("cutlass_sm90", (32, 64), {"tile_k": 0}, InvalidProblemError, "expected a positive number"),
    ("cutlass_sm90", (32, 64), {"tile_k": "128"}, InvalidProblemError, "got '128'"),
    ("cutlass_sm90", (32, 8), {}, InvalidProblemError, "K a multiple of 16"),
    ("tilelang", (32, 8), {}, InvalidProblemError, "K a multiple of 8 times"),
    ("tilelang", (32, 64), {"word_bytes": 8}, InvalidProblemError, "expected 1, 2 or 4, got 8"),
    ("torch_tile", (4, 64), {}, InvalidProblemError, "multiples of 8"),
    ("cusparselt_sm80", (128, 64), {}, InvalidProblemError, "multiples of 128"),
    ("cusparselt_sm90", (48, 64), {}, InvalidProblemError, "multiples of 32"),
    ("torch_cutlass", (32, 64), {"tile_k": 64}, InvalidProblemError, "takes no such option"),
    ("nonsense", (32, 64), {}, InvalidProblemError, "expected one of baracuda"),
]


@pytest.mark.parametrize(("name", "shape", "options", "kind", "complaint"), REFUSED_EXPORTS)
def test_exports_that_are_refused(name, shape, options, kind, complaint):
    with pytest.raises(kind, match=complaint):
        to_foreign(name, f16_weight(*shape), **options)


def test_an_element_that_the_format_lacks():
    s8 = weight_of(np.zeros((128, 128), np.uint8), ElementKind.S8)
    for name, known in FORMATS.items():
        if ElementKind.S8 not in known.elements:
            with pytest.raises(UnsupportedError, match=f"{name} holds .*, got s8"):
                to_foreign(name, s8)
    with pytest.raises(UnsupportedError, match="torch_tile holds f16, bf16, got f32"):
        from_foreign(
            "torch_tile", {"packed": np.zeros((32, 32), np.float32), "meta": np.zeros(128, np.int16)}
        )


def test_what_isnt_a_weight():
    with pytest.raises(InvalidProblemError, match="expected Sparse24Weight, got ndarray"):
        to_foreign("baracuda", np.zeros((8, 8)))  # type: ignore[arg-type]


def test_one_of_two_formats_refuse_two_values_in_a_pair():
    dense = np.zeros((32, 32), np.float32)
    dense[5, 14:16] = 1, 2
    weight = Sparse24Weight.compress(dense)
    for name in ONE_OF_TWO:
        with pytest.raises(FormatError, match="one non-zero in each pair") as caught:
            to_foreign(name, weight)
        assert (caught.value.row, caught.value.group) == (5, 3)


@pytest.mark.parametrize("name", ONE_OF_TWO)
def test_a_negative_zero_beside_a_value_is_no_second_one(name):
    # w * mask leaves such zeros, and a lone value's spare slot holds the one beside it.
    groups = [(3, -0.0, 0, 0), (0, 0, -0.0, 5), (-0.0, 7, 0, 0), (-0.0, -0.0, 0, 0), (-0.0, 0, 0, 2)]
    dense = np.zeros((32, 32), np.float32)
    dense[1, :20] = np.concatenate(groups)
    back = from_foreign(name, to_foreign(name, Sparse24Weight.compress(dense)))
    assert np.array_equal(back.decompress(), dense)
    assert np.signbit(back.decompress()[1, 16])  # its pair holds nothing else


def test_a_matrix_whose_transpose_isnt_sparse():
    dense = np.zeros((32, 64), np.float16)
    dense[8:11, 20] = 1
    with pytest.raises(FormatError, match="transpose") as caught:
        to_foreign("torch_tile", Sparse24Weight.compress(dense))
    assert (caught.value.row, caught.value.group) == (20, 2)


def test_halves_of_a_tile_pack_that_contradict_each_other():
    weight = weight_of(
        random_bits(np.random.default_rng(3), 32, 64, "torch_tile", ElementKind.F16), ElementKind.F16
    )
    parts = to_foreign("torch_tile", weight)
    other = parts["packed_t"].copy()
    at = np.argwhere(other.view(np.uint16) & 0x7FFF)[0]
    other[tuple(at)] = 7
    with pytest.raises(FormatError, match="expected the transpose of packed"):
        from_foreign("torch_tile", {**parts, "packed_t": other})
    with pytest.raises(FormatError, match="every non-zero to be marked"):
        from_foreign("torch_tile", {**parts, "bitmask": np.zeros_like(parts["bitmask"])})
    with pytest.raises(InvalidProblemError, match="meta_t is missing"):
        from_foreign("torch_tile", {name: parts[name] for name in ("packed", "meta", "packed_t")})
    alone = from_foreign("torch_tile", {name: parts[name] for name in ("packed", "meta")})
    assert same_bits(alone.values, weight.values)


def broken_imports() -> list[Any]:
    cutlass = to_foreign("torch_cutlass", f16_weight())
    sm90 = to_foreign("cutlass_sm90", f16_weight())
    blob = to_foreign("cusparselt_sm90", f16_weight())
    bits = to_foreign("compressed_tensors", f16_weight())
    crowded = bits["bitmask"].copy()
    crowded[7, 3] = 0x3F
    sized = {"shape": (32, 64)}
    return [
        ("torch_cutlass", {"packed": cutlass["packed"]}, {}, "torch_cutlass needs 'meta'"),
        ("torch_cutlass", {**cutlass, "extra": cutlass["meta"]}, {}, "got 'extra'"),
        ("torch_cutlass", [cutlass], {}, "expected a mapping"),
        ("torch_cutlass", {**cutlass, "meta": cutlass["meta"][:-1]}, {}, "meta: expected 128 words int16"),
        (
            "torch_cutlass",
            {**cutlass, "meta": cutlass["meta"].view(np.int32)},
            {},
            "meta: expected u16, got int32",
        ),
        (
            "torch_cutlass",
            {**cutlass, "packed": cutlass["packed"][:, :-2]},
            {},
            "K a multiple of 8, got a tensor",
        ),
        ("torch_cutlass", {**cutlass, "packed": cutlass["packed"][:-1]}, {}, "M a multiple of 32"),
        ("torch_cutlass", {**cutlass, "packed": "text"}, {}, "packed: expected a tensor"),
        ("torch_cutlass", cutlass, {"shape": (32, 64)}, "shape: torch_cutlass takes no such option"),
        ("cutlass_sm90", sm90, {"tile_k": 2048}, "meta: expected 16384 words uint8"),
        ("cusparselt_sm90", blob, {}, r"expected shape=\(M, K\)"),
        ("cusparselt_sm90", {"packed": blob["packed"][:-1]}, sized, "packed: expected .* words or more"),
        ("cusparselt_sm90", {"packed": blob["packed"][::2]}, sized, "packed: expected .* words or more"),
        ("cusparselt_sm90", blob, {"shape": (2**40, 2**40)}, "M \\* K from 0 to below"),
        ("cusparselt_sm90", blob, {"shape": (-32, 64)}, "M \\* K from 0 to below"),
        ("cusparselt_sm90", blob, {"shape": (32,)}, "expected two sizes"),
        ("cusparselt_sm90", blob, {"shape": "ab"}, "expected two sizes"),
        ("compressed_tensors", {**bits, "bitmask": crowded}, {}, r"got 4 \(row 7, group 6\)"),
        ("compressed_tensors", {**bits, "shape": np.array([64, 32])}, {}, "shape: expected .32, 64."),
        ("compressed_tensors", {**bits, "bitmask": bits["bitmask"][:16]}, {}, "expected 256 words uint8"),
    ]


@pytest.mark.parametrize(("name", "parts", "options", "complaint"), broken_imports())
def test_imports_that_are_refused(name, parts, options, complaint):
    with pytest.raises((InvalidProblemError, FormatError), match=complaint):
        from_foreign(name, parts, **options)


def test_a_nibble_that_no_pair_of_float32_has():
    weight = Sparse24Weight.compress(np.tile(np.array([1, 0, 0, 2], np.float32), (32, 8)))
    parts = to_foreign("torch_cutlass", weight)
    assert set(np.unique(parts["meta"].view(np.uint8))) == {0xE4}
    parts["meta"].reshape(-1)[0] = 0x1234
    with pytest.raises(FormatError, match="expected 0x4 or 0xe for a pair") as caught:
        from_foreign("torch_cutlass", parts)
    assert (caught.value.row, caught.value.group) == (0, 0)
