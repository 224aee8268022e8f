"""Conversions that are refused raise a typed error and write nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24Error,
    StorageError,
)
from sparse24_plans.checkpoints.weights_file import iter_weights

from .models import (
    BITMASK_MODEL,
    INDEX,
    convert,
    dense_file,
    drop,
    random_array,
    rewrite,
    sharded_model,
    snapshot,
    swap,
    tiled,
)


def note(text: str) -> Any:
    return lambda arrays, metadata: metadata.update({"sparse24.w": text})


def bits_of(name: str, value: int) -> Any:
    def change(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        arrays[name] = np.full_like(arrays[name], value)

    return change


BROKEN_BITMASK = {
    "no bitmask": (drop("w.bitmask"), "w.bitmask is missing"),
    "bitmask of another size": (swap("w.bitmask", np.zeros((16, 3), np.uint8)), "expected 64 words"),
    "bitmask of another type": (swap("w.bitmask", np.zeros((16, 4), np.float32)), "bitmask: expected u8"),
    "three bits": (bits_of("w.bitmask", 0x73), r"got 3 \(row 0, group 1\)"),
    "another shape": (swap("w.shape", np.array([[32], [16]])), "shape: expected .16, 32."),
    "a shape that overflows": (swap("w.shape", np.array([[2**62], [2**62]])), "shape: expected"),
    "values of one axis": (swap("w.compressed", np.zeros(256, np.float16)), r"expected \[M, K/2\]"),
    "values of doubles": (swap("w.compressed", np.zeros((16, 16))), "w.compressed: expected a type of"),
    "K not a multiple of 8": (swap("w.compressed", np.zeros((16, 6), np.float16)), "K a multiple of 8"),
}


@pytest.mark.parametrize(("change", "complaint"), BROKEN_BITMASK.values(), ids=BROKEN_BITMASK)
def test_broken_compressed_tensors_files(tmp_path, change, complaint):
    dense_file(tmp_path / "dense", {"w.weight": tiled((16, 32), "f16")})
    convert(tmp_path / "dense", tmp_path / "in", "dense", "compressed_tensors")
    rewrite(tmp_path / "in", change)
    before = snapshot(tmp_path)
    with pytest.raises(FormatError, match=complaint) as caught:
        convert(tmp_path / "in", tmp_path / "out", "compressed_tensors", "sparse24")
    assert str(tmp_path / "in") in str(caught.value)
    assert snapshot(tmp_path) == before


BROKEN_NOTES = {
    "not JSON": ("shape", "expected a JSON shape"),
    "no shape": ('{"format": "cusparselt_sm90"}', "expected a JSON shape"),
    "a list": ("[1, 2]", "expected a JSON shape"),
    "another format": ('{"format": "tilelang", "shape": [32, 64]}', "expected the format .*, got 'tilelang'"),
    "larger than the file": ('{"format": "cusparselt_sm90", "shape": [64, 64]}', "expected the values of"),
    "giant": (f'{{"format": "cusparselt_sm90", "shape": [{2**40}, {2**40}]}}', "expected the values of"),
    "negative": ('{"format": "cusparselt_sm90", "shape": [-32, -64]}', "K a multiple of 8"),
    "smaller": ('{"format": "cusparselt_sm90", "shape": [32, 32]}', "expected the values of"),
}


@pytest.mark.parametrize(("text", "complaint"), BROKEN_NOTES.values(), ids=BROKEN_NOTES)
def test_hostile_notes(tmp_path, text, complaint):
    dense_file(tmp_path / "dense", {"w": tiled((32, 64), "f16")})
    convert(tmp_path / "dense", tmp_path / "in", "dense", "cusparselt_sm90")
    rewrite(tmp_path / "in", note(text))
    before = snapshot(tmp_path)
    with pytest.raises(FormatError, match=complaint):
        convert(tmp_path / "in", tmp_path / "out", "cusparselt_sm90", "dense")
    assert snapshot(tmp_path) == before


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_typed_errors_and_no_file(tmp_path, data):
    """A few bytes changed anywhere: a Sparse24Error and nothing written, or a file that is sound."""
    name = data.draw(st.sampled_from(["compressed_tensors", "cusparselt_sm90", "cutlass_sm90", "torch_tile"]))
    source, damaged, out = tmp_path / name, tmp_path / "damaged", tmp_path / "out"
    if not source.exists():
        dense_file(tmp_path / "dense", {"w.weight": tiled((32, 64), "f16")})
        convert(tmp_path / "dense", source, "dense", name)
    content = bytearray(source.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([header_end, len(content)]))
        at = data.draw(st.integers(0, end - 1))
        content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:')))
    damaged.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 7]))]))
    out.unlink(missing_ok=True)
    try:
        convert(damaged, out, name, "sparse24")
    except Sparse24Error:
        assert not out.exists()
        return
    for _, weight in iter_weights(out):
        weight.validate()


@pytest.mark.parametrize(
    ("formats", "options", "complaint"),
    [
        (("dense", "nonsense"), {}, "to_format: expected one of dense, sparse24"),
        (("nonsense", "dense"), {}, "from_format: expected one of"),
        (("dense", "dense"), {}, "expected another format than dense"),
        (("sparse24", "dense"), {"include": ["w"]}, "only dense checkpoints take them"),
        (("dense", "sparse24"), {"include": ["typo"]}, "pattern 'typo' matches no tensor"),
        (
            ("compressed_tensors", "dense"),
            {},
            "a weight in the format compressed_tensors in .*, got none",
        ),
        (("dense", "compressed_tensors"), {"include": ["v"]}, "v: .*a name that ends in .weight"),
        (("dense", "cutlass_sm90"), {"tile_k": 48, "include": ["v"]}, "v: .* tile_k = 48"),
        (("dense", "tilelang"), {"tile_k": 64}, "tile_k: expected None unless a format is cutlass_sm90"),
    ],
)
def test_requests_that_cannot_be_meant(files, formats, options, complaint):
    source, out = files
    dense_file(source, {"w.weight": random_array((8, 8)), "v": tiled((8, 8), "f16")})
    with pytest.raises(InvalidProblemError, match=complaint):
        convert(source, out, *formats, **options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("to_format", "element", "why"),
    [
        ("torch_tile", "f32", r"w\.\* \(2\): torch_tile holds f16, bf16, got f32"),
        ("sparse24", "f64", r"embed, w\.\* \(2\): element f64"),
    ],
)
def test_the_reason_why_no_matrix_is_converted_is_given(files, to_format, element, why):
    source, out = files
    matrix = tiled((16, 64), "f32").astype({"f32": np.float32, "f64": np.float64}[element])
    dense_file(source, {"embed": matrix, "w.0": matrix, "w.1": matrix})
    with pytest.raises(InvalidProblemError, match=f"expected a 2:4 matrix in .*, got none; .*{why}$"):
        convert(source, out, "dense", to_format)
    assert not out.exists()


def test_destinations_that_cannot_be_meant(tmp_path):
    model = tmp_path / "model"
    sharded_model(model)
    for out in (model, tmp_path):
        with pytest.raises(InvalidProblemError, match="destination: expected"):
            convert(model, out, "compressed_tensors", "dense")
    file = next(model.glob("*.safetensors"))
    with pytest.raises(InvalidProblemError, match="another path than the source"):
        convert(file, file, "compressed_tensors", "dense")
    with pytest.raises(StorageError):
        convert(model, tmp_path / "no" / "folder", "compressed_tensors", "dense")
    empty = tmp_path / "empty"
    empty.mkdir()
    convert(model, empty, "compressed_tensors", "dense")
    assert (empty / INDEX).exists()


@pytest.mark.parametrize("whole", [False, True])
def test_an_interrupted_run_leaves_nothing(tmp_path, whole):
    sharded_model(tmp_path / "model")

    def interrupt(report: object) -> None:
        raise KeyboardInterrupt

    before = snapshot(tmp_path)
    source = tmp_path / "model" if whole else BITMASK_MODEL
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "compressed_tensors", "dense", on_tensor=interrupt)
    assert snapshot(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_name_that_is_taken(files):
    source, out = files
    dense_file(source, {"w": tiled((8, 8), "f16"), "w.values24": random_array((3,))})
    with pytest.raises(InvalidProblemError, match="expected names that occur once"):
        convert(source, out, "dense", "sparse24")
