"""The table of formats: what the guide says of it, and what a new format costs."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sparse24_plans import ElementKind, InvalidProblemError, UnsupportedError, from_foreign, to_foreign
from sparse24_plans.formats.base import (
    ForeignFormat,
    Incoming,
    Layout,
    Outgoing,
    Parts,
    WeightShape,
    integer_option,
    row_major,
)
from sparse24_plans.formats.table import FORMATS, QUANTIZED_FORMATS

from ..support import same_bits
from .samples import ONE_OF_TWO, f16_weight


def test_the_guide_says_what_the_table_says():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    table = text.partition("## Other libraries' formats")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|`")]
    assert [row[0].strip("`") for row in rows] == list(FORMATS)
    for name, (_, _, elements, parts, shapes) in zip(FORMATS, rows, strict=True):
        known = FORMATS[name]
        assert tuple(element.removesuffix(" (1:2)") for element in elements.split(", ")) == known.elements
        assert ("f32 (1:2)" in elements) == (name in ONE_OF_TWO)
        assert set(re.findall(r"`(\w+)`", parts)) == set(known.parts)
        needed, _, optional = parts.partition("optional")
        assert set(re.findall(r"`(\w+)`", optional)) == set(known.optional)
        assert ("`shape=(M, K)`" in needed) == name.startswith("cusparselt")
        assert shapes == known.constraint


def test_the_guide_says_what_the_table_of_quantized_formats_says():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    table = text.partition("## Quantized weights of other libraries")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|`")]
    assert [row[0].strip("`") for row in rows] == list(QUANTIZED_FORMATS)
    for known, (_, _, parts, shapes) in zip(QUANTIZED_FORMATS.values(), rows, strict=True):
        assert set(re.findall(r"`(\w+)`", parts)) == set(known.parts)
        assert set(re.findall(r"`(\w+)`", parts.partition("optional")[2])) == set(known.optional)
        assert shapes == known.constraint
    for option in {name for known in QUANTIZED_FORMATS.values() for name in known.options}:
        assert f"`{option}" in table


class Plain(ForeignFormat):
    """A byte of metadata for a group, plus ``step``."""

    name = "plain"
    origin = "this test"
    elements = (ElementKind.F16, ElementKind.BF16)
    parts = ("values", "codes")
    constraint = "M even"
    options = MappingProxyType({"step": integer_option(3, "a step from 0 to 9", lambda step: 0 <= step < 10)})

    def fits(self, shape: WeightShape) -> bool:
        return shape.m % 2 == 0

    def layout(self, shape: WeightShape) -> Layout:
        return {"values": row_major(shape), "codes": ("uint8", (shape.m, shape.k // 4))}

    def decode(self, found: Incoming) -> tuple[Any, Any]:
        codes = found.words("codes") - np.uint8(found.shape.options["step"])
        return found.values(), codes.reshape(found.shape.m, -1)

    def encode(self, out: Outgoing) -> Parts:
        return {"values": out.typed(out.values), "codes": out.codes + np.uint8(out.shape.options["step"])}


def test_new_format_is_class_and_line_of_table(monkeypatch):
    """Checks, options, messages and normalising come with the base class."""
    weight = f16_weight()
    monkeypatch.setitem(FORMATS, "plain", Plain())
    for options, step in (({}, 3), ({"step": 0}, 0), ({"step": np.int64(9)}, 9)):
        parts = to_foreign("plain", weight, **options)
        assert same_bits(
            parts["codes"].reshape(-1), weight.metadata.reshape(-1).view(np.uint8) + np.uint8(step)
        )
        back = from_foreign("plain", parts, **options)
        assert same_bits(back.values, weight.values)
        assert same_bits(back.metadata, weight.metadata)
    with pytest.raises(InvalidProblemError, match="step: expected a step from 0 to 9, got 10"):
        to_foreign("plain", weight, step=10)
    with pytest.raises(InvalidProblemError, match="shape: plain takes no such option"):
        from_foreign("plain", parts, shape=(32, 64))
    with pytest.raises(
        InvalidProblemError, match="plain: expected M even; got M = 31, K = 64, f16, step = 3"
    ):
        to_foreign("plain", f16_weight(31))
    with pytest.raises(UnsupportedError, match="plain holds f16, bf16, got u8"):
        from_foreign("plain", {"values": np.zeros((2, 4), np.uint8), "codes": np.zeros((2, 2), np.uint8)})


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_says_what_it_is(name):
    known = FORMATS[name]
    assert known.name == name
    assert set(known.optional) < set(known.parts)
    sizes = {"M": 128, "K": 256}
    for element in known.elements:
        shape = known.shape_of(sizes["M"], sizes["K"], element)
        known.check(shape)
        assert tuple(known.layout(shape)) == known.parts
    with pytest.raises(
        InvalidProblemError, match=re.escape(f"{name}: expected {known.constraint}; got M = 1")
    ):
        known.check(known.shape_of(1, 4, known.elements[0]))
