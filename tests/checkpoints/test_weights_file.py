"""Weights saved and loaded by name: what was saved comes back; what is broken is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
)
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight, save_weights

from ..support import same_bits
from .models import (
    ELEMENTS,
    corrupt_group,
    dense_file,
    drop,
    random_array,
    rewrite,
    swap,
)

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("element", [*ELEMENTS, "s8", "fp8_e4m3"])
def test_saved_weights_load_as_they_were(tmp_path, element):
    path = tmp_path / "w"
    weights = {
        f"layer.{i}": Sparse24Weight.prune_compress(random_array((8 * i, 24), element, i)) for i in range(3)
    }
    save_weights(path, weights)
    loaded = dict(iter_weights(path))
    assert list(loaded) == list(weights)
    for name, weight in weights.items():
        assert (loaded[name].m, loaded[name].k) == (weight.m, weight.k)
        assert loaded[name].element is weight.element
        assert same_bits(loaded[name].values, weight.values)
        assert same_bits(loaded[name].metadata, weight.metadata)


@pytest.mark.gpu
def test_a_device_weight_is_saved_from_the_device(tmp_path):
    weight = Sparse24Weight.prune_compress(random_array((8, 16), "bf16"))
    save_weights(tmp_path / "w", {"w": weight.to(0)})
    assert same_bits(load_weight(tmp_path / "w", "w").decompress(), weight.decompress())


def test_save_takes_weights_only(tmp_path):
    with pytest.raises(InvalidProblemError, match=r"w: expected Sparse24Weight or .*, got ndarray"):
        save_weights(tmp_path / "w", {"w": random_array((8, 8))})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def compressed(files) -> Path:
    source, out = files
    dense_file(source, {"w": random_array((4, 16)), "norm": random_array((4,))})
    compress_checkpoint(source, out)
    return out


@pytest.mark.parametrize("name", ["norm", "nothing", "w.values24"])
def test_only_compressed_tensors_load(compressed, name):
    with pytest.raises(InvalidProblemError, match=f"one of the 1 compressed tensors.*got '{name}'"):
        load_weight(compressed, name)


def describe(text: str, key: str = "sparse24.w") -> Any:
    return lambda arrays, metadata: metadata.update({key: text})


BROKEN = {
    "no values": (drop("w.values24"), "w.values24 is missing"),
    "no metadata": (drop("w.meta24"), "w.meta24 is missing"),
    "values of another shape": (swap("w.values24", random_array((4, 4))), r"F32\[4, 8\], got F32\[4, 4\]"),
    "values of another type": (swap("w.values24", random_array((4, 8), "f16")), "F32.*got F16"),
    "metadata of another type": (swap("w.meta24", np.zeros((4, 2), np.int16)), "U16.*got I16"),
    "a bad group": (corrupt_group, r"expected bits 4-7 to be zero.*\(row 2, group 3\)"),
    "description isn't JSON": (describe("shape"), "expected a JSON shape and element, got 'shape'"),
    "description is a list": (describe("[1]"), "expected a JSON shape and element"),
    "one dimension": (describe('{"shape": [4], "element": "f32"}'), "expected a JSON shape and element"),
    "unknown element": (describe('{"shape": [4, 16], "element": "f33"}'), "expected a JSON shape"),
    "element that isn't stored": (describe('{"shape": [4, 16], "element": "u8"}'), "expected .M, K."),
    "K isn't a multiple of 8": (describe('{"shape": [4, 12], "element": "f32"}'), "a multiple of 8"),
    "negative shape": (describe('{"shape": [-4, 16], "element": "f32"}'), "expected .M, K."),
    "shape of text": (describe('{"shape": "ab", "element": "f32"}'), "expected .M, K."),
    "giant shape": (describe(f'{{"shape": [{2**62}, {2**62}], "element": "f32"}}'), "w.values24: expected"),
    "another version": (describe("2", "sparse24_format"), "sparse24_format = '1', got '2'"),
}


@pytest.mark.parametrize(("change", "complaint"), BROKEN.values(), ids=BROKEN)
def test_a_broken_layer_is_refused_by_name(compressed, change, complaint):
    rewrite(compressed, change)
    for attempt in (lambda: load_weight(compressed, "w"), lambda: dict(iter_weights(compressed))):
        with pytest.raises(FormatError, match=complaint) as caught:
            attempt()
        assert str(compressed) in str(caught.value)
    if change is corrupt_group:
        assert (caught.value.row, caught.value.group) == (2, 3)


@settings(quick, max_examples=100)
@given(data=st.data())
def test_damaged_header_gives_format_error_or_sound_weight(tmp_path, data):
    path = tmp_path / "w"
    if not path.exists():
        save_weights(path, {"w": Sparse24Weight.prune_compress(random_array((4, 16)))})
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, header_end - 1))
        content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:')))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(content))
    try:
        for _, weight in iter_weights(damaged):
            weight.validate()
    except FormatError:
        pass


def test_a_dense_file_holds_no_layers(files):
    source, _ = files
    dense_file(source, {"w": random_array((4, 16))})
    with pytest.raises(
        FormatError, match=r"expected a compressed model, with .* sparse24_format = '1', got None"
    ):
        load_weight(source, "w")
