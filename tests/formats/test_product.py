"""``from_product``: a blob that only its own library can read, through its product with the identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse24_plans import ElementKind, FormatError, InvalidProblemError, Sparse24Weight
from sparse24_plans.formats.product import from_product

from ..support import same_bits
from .samples import f16_weight, random_bits, weight_of


def product_of(weight: Sparse24Weight, dtype: Any = np.float32) -> Any:
    """Stands for the library: reads the blob's values and knows the positions by itself."""

    def multiply(blob: np.ndarray) -> np.ndarray:
        values = blob.reshape(-1)[: weight.values.size].reshape(weight.values.shape)
        return Sparse24Weight(values, weight.metadata).decompress().astype(dtype)

    return multiply


@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "s8", "fp8_e4m3"])
def test_a_blob_is_read_through_a_product(element):
    kind = ElementKind(element)
    weight = weight_of(random_bits(np.random.default_rng(5), 16, 32, "tilelang", kind), kind)
    blob = np.concatenate([weight.values.reshape(-1), np.zeros(64, kind.dtype)])
    before = blob.tobytes()
    for dtype in (np.float32, kind.dtype):
        back = from_product(blob, (16, 32), product_of(weight, dtype))
        assert same_bits(back.values, weight.values)
        assert same_bits(back.metadata, weight.metadata)
    assert blob.tobytes() == before


@pytest.mark.parametrize("value", [0.0, 1.0, 4.0, -1.0, 0.5, np.nan, np.inf])
def test_a_product_that_isnt_one_of_markers(value):
    weight = f16_weight(8, 16)

    def multiply(blob: np.ndarray) -> np.ndarray:
        dense = product_of(weight)(blob)
        dense[3, 4:8] = value
        return dense

    with pytest.raises(FormatError, match="one 1 and one 2") as caught:
        from_product(weight.values.reshape(-1), (8, 16), multiply)
    assert (caught.value.row, caught.value.group) == (3, 1)


def test_blobs_and_products_that_dont_fit():
    weight = f16_weight(8, 16)
    blob = weight.values.reshape(-1)
    with pytest.raises(InvalidProblemError, match=r"product: expected shape \[8, 16\]"):
        from_product(blob, (8, 16), lambda blob: np.zeros((16, 8), np.float32))
    with pytest.raises(InvalidProblemError, match="product: expected"):
        from_product(blob, (8, 16), lambda blob: np.zeros((8, 16), np.uint16))
    with pytest.raises(InvalidProblemError, match="blob: expected 128 values or more"):
        from_product(blob, (16, 16), product_of(weight))
    with pytest.raises(InvalidProblemError, match="K a multiple of 8"):
        from_product(blob, (8, 12), product_of(weight))
