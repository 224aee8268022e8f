"""Weights that aren't: metadata, shapes and parts that don't fit are refused, by row and group or by name."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import ElementKind, FormatError, InvalidProblemError, PackedWeight, Sparse24Weight

from ..support import random_weight

M, K = 16, 32
F32 = ElementKind.F32


@pytest.mark.parametrize(
    ("byte", "complaint"),
    [
        (0x00, "increasing"),
        (0x05, "increasing"),
        (0x0A, "increasing"),
        (0x0F, "increasing"),
        (0x01, "increasing"),
        (0x06, "increasing"),
        (0x14, "bits 4-7"),
        (0x84, "bits 4-7"),
    ],
)
def test_bad_metadata_is_named_by_row_and_group(device, byte, complaint):
    weight = random_weight(np.random.default_rng(0), M, K, F32, "host")
    metadata = weight.metadata.copy()
    metadata.view(np.uint8)[11, 5] = byte
    metadata.view(np.uint8)[12, 0] = 0xFF
    broken = Sparse24Weight(weight.values, metadata, validate=False)
    moved = broken.to(device if device == "host" else 0)
    with pytest.raises(FormatError, match=complaint) as caught:
        moved.validate()
    assert (caught.value.row, caught.value.group) == (11, 5)
    with pytest.raises(FormatError):
        Sparse24Weight(moved.values_view, moved.metadata_view)


@pytest.mark.parametrize(
    ("values", "metadata", "word"),
    [
        ((4, 6), (4, 1), "values"),
        ((4,), (4, 1), "values"),
        ((4, 8), (4, 1), "metadata"),
        ((4, 8), (3, 2), "metadata"),
    ],
)
def test_weight_shapes(values, metadata, word):
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24Weight(np.zeros(values, np.float32), np.zeros(metadata, np.uint16))


def test_weight_parts_that_do_not_fit():
    good = np.full((4, 2), 0x4444, np.uint16)
    with pytest.raises(InvalidProblemError, match="metadata"):
        Sparse24Weight(np.zeros((4, 8), np.float32), good.astype(np.float64))
    with pytest.raises(InvalidProblemError, match="contiguous"):
        Sparse24Weight(np.zeros((4, 16), np.float32)[:, ::2], good)
    with pytest.raises(InvalidProblemError, match="values"):
        Sparse24Weight(np.zeros((4, 8), np.complex64), good)


def test_packed_weight_is_immutable():
    weight = PackedWeight.canonical(random_weight(np.random.default_rng(0), M, K, F32, "host"))
    with pytest.raises(AttributeError):
        weight.m = 3
