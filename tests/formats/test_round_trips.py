"""``to_foreign`` and back: no bit is lost, whatever the format, element, shape and option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import ElementKind, from_foreign, to_foreign
from sparse24_plans.formats.table import FORMATS

from ..support import same_bits
from .samples import STEPS, every_case, quick, random_bits, weight_of


@every_case
@quick
@given(data=st.data())
def test_round_trips_lose_no_bit(name, element, data):
    rows, columns = STEPS.get(name, (1, 8))
    m = rows * data.draw(st.integers(1, 3 if rows < 128 else 1))
    k = columns * data.draw(st.integers(1, 6 if columns < 128 else 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight = weight_of(random_bits(rng, m, k, name, element), element)
    options: dict[str, Any] = {}
    if name == "cutlass_sm90":
        options["tile_k"] = 32 * data.draw(st.integers(1, 5))
    parts = to_foreign(name, weight, **options)
    assert tuple(parts) == FORMATS[name].parts
    if "shape" in FORMATS[name].options:
        options["shape"] = (m, k)
    back = from_foreign(name, parts, **options)
    assert (back.element, back.m, back.k) == (element, m, k)
    assert same_bits(back.values, weight.values)
    assert same_bits(back.metadata, weight.metadata)


@every_case
def test_empty_weights(name, element):
    _, columns = STEPS.get(name, (1, 8))
    for m, k in ((0, columns), (0, 0)):
        weight = weight_of(np.zeros((m, k), element.bits_dtype), element)
        shape = {"shape": (m, k)} if "shape" in FORMATS[name].options else {}
        back = from_foreign(name, to_foreign(name, weight), **shape)
        assert (back.m, back.k) == (m, k)


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_tilelang_words_are_the_same_bytes(word_bytes):
    weight = weight_of(
        random_bits(np.random.default_rng(0), 6, 96, "tilelang", ElementKind.F16), ElementKind.F16
    )
    parts = to_foreign("tilelang", weight, word_bytes=word_bytes)
    assert parts["meta"].dtype.itemsize == word_bytes
    assert parts["meta"].tobytes() == to_foreign("tilelang", weight)["meta"].tobytes()
    back = from_foreign("tilelang", parts, word_bytes=word_bytes)
    assert same_bits(back.values, weight.values)


def test_rows_of_tilelang_can_be_concatenated():
    rng = np.random.default_rng(1)
    weights = [
        weight_of(random_bits(rng, 3, 64, "tilelang", ElementKind.BF16), ElementKind.BF16) for _ in "ab"
    ]
    parts = [to_foreign("tilelang", weight) for weight in weights]
    both = {part: np.concatenate([one[part] for one in parts]) for part in parts[0]}
    joined = from_foreign("tilelang", both).decompress()
    assert same_bits(joined, np.concatenate([weight.decompress() for weight in weights]))
