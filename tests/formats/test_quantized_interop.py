"""marlin-24 and pack-quantized against compressed-tensors 0.10.2, which wrote the fixture, and live."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse24_plans import Sparse24QuantizedWeight, from_foreign, to_foreign
from sparse24_plans.weights.quantized_weight import signed_nibbles

from ..support import same_bits
from .test_interop import fixture

CASES = fixture("compressed_tensors_quantized")
STORED = {"marlin_24_4": "s4", "marlin_24_8": "s8", "pack_quantized_4": "s4", "pack_quantized_8": "s8"}
STORED["shifted_4"] = "s8"


def integers_of(weight: Sparse24QuantizedWeight) -> np.ndarray:
    """The stored integers [M, K] with their zeros."""
    values = weight.values if weight.quantization.element == "s8" else signed_nibbles(weight.values)
    dense = np.zeros((weight.m, weight.k), np.int8)
    codes = weight.metadata.view(np.uint8)
    for row, group in np.ndindex(codes.shape):
        for slot in range(2):
            column = 4 * group + (int(codes[row, group]) >> 2 * slot & 3)
            dense[row, column] = values[row, 2 * group + slot]
    return dense


def read(case: str, parts: dict[str, Any]) -> Sparse24QuantizedWeight:
    name, bits, _ = case.rsplit("_", 2)
    return from_foreign("marlin_24" if name == "marlin_24" else "pack_quantized", parts, bits=int(bits))


@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_wrote_what_we_read(case):
    parts = dict(CASES[case])
    integers = parts.pop("integers")
    weight = read(case, parts)
    assert weight.quantization.element == STORED[case.rpartition("_")[0]]
    assert weight.quantization.group == int(case.rpartition("_")[2])
    assert weight.element == weight.quantization.scale_element == "f16"
    assert np.array_equal(integers_of(weight), integers)
    if "weight_scale" in parts:
        assert same_bits(weight.scales, parts["weight_scale"])


@pytest.mark.parametrize("case", ["marlin_24_4_128", "marlin_24_8_0"])
def test_we_write_what_compressed_tensors_wrote(case):
    """Byte for byte: positions stay, those of groups with fewer than two values among them."""
    parts = dict(CASES[case])
    parts.pop("integers")
    written = to_foreign("marlin_24", read(case, parts))
    assert written.keys() == parts.keys()
    for name, part in parts.items():
        assert same_bits(written[name], part)


@pytest.fixture
def writers() -> Any:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors 0.10.2 is not installed")
    from .interop import writers

    return writers


@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 128), (8, 0), (8, 128)])
@pytest.mark.parametrize(("m", "k"), [(64, 128), (192, 384), (128, 640)])
def test_marlin_24_both_ways(writers, m, k, bits, group):
    for full in (False, True):
        given = writers.quantized(m, k, bits, group, full=full, seed=m + k)
        parts = {name: part.numpy() for name, part in writers.marlin_24(given, bits, group).items()}
        weight = from_foreign("marlin_24", parts, bits=bits, group=group)
        assert np.array_equal(integers_of(weight), given["integers"].numpy())
        assert same_bits(weight.scales, given["scales"].numpy())
        ours = to_foreign("marlin_24", weight)
        for name, part in parts.items():
            assert ours[name].dtype == part.dtype
            assert ours[name].shape == part.shape
            assert same_bits(ours[name], part)
        again = from_foreign("marlin_24", ours, bits=bits, group=group)
        for one, other in zip(again.views, weight.views, strict=True):
            assert same_bits(one.bits(), other.bits())


@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 64), (8, 0), (8, 32)])
@pytest.mark.parametrize("shift", [0, 4])
def test_pack_quantized(writers, bits, group, shift):
    given = writers.quantized(24, 192, bits, group, shift=shift, seed=shift)
    parts = writers.pack_quantized(given, bits, group, symmetric=not shift)
    weight = from_foreign("pack_quantized", parts, bits=bits, element="bf16")
    assert weight.quantization == ("s8" if shift or bits == 8 else "s4", group, "f32")
    assert np.array_equal(integers_of(weight), given["integers"].numpy())
    assert np.array_equal(weight.scales, given["scales"].float().numpy())
