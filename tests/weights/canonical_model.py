"""A slow model of the canonical 2:4 format, written from docs/formats.md, one group after the other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sparse24_plans import ElementKind, Sparse24Weight
from sparse24_plans.vocab import IN_MEMORY

from ..support import same_bits

F32, F16, BF16, S8, U8 = (ElementKind(name) for name in ("f32", "f16", "bf16", "s8", "u8"))
every_element = pytest.mark.parametrize("element", IN_MEMORY)
FLOATS = [element for element in ElementKind if element.unit_roundoff]
float_elements = pytest.mark.parametrize("element", FLOATS)


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
