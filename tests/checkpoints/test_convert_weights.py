"""Weights from one format to another and back: the same matrix, what cannot be held copied or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    UnsupportedError,
    prune,
)
from sparse24_plans.checkpoints.checkpoint_format import CHECKPOINT_FORMATS
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight
from sparse24_plans.formats.convert import FORMATS, to_foreign

from ..support import same_bits
from .models import (
    BITMASK_MODEL,
    INTEROP,
    REAL,
    convert,
    dense_file,
    library_load,
    needs_real,
    random_array,
    rewrite,
    stored_in,
    tiled,
)


def plus_zeros(array: np.ndarray) -> np.ndarray:
    """Without the signs of zeros."""
    bits = array.view(f"u{array.dtype.itemsize}").copy()
    bits[np.asarray(array == 0)] = 0
    return bits.view(array.dtype)


def test_a_compressed_tensors_model_becomes_dense(tmp_path):
    reports = convert(BITMASK_MODEL, tmp_path / "out", "compressed_tensors", "dense")
    got, expected = stored_in(tmp_path / "out"), stored_in(INTEROP / "compressed_tensors_dense.safetensors")
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert same_bits(plus_zeros(got[name]), plus_zeros(array))
    with SafetensorsReader(tmp_path / "out") as reader:
        assert reader.metadata["format"] == "pt"
    done = {report.name: report for report in reports}
    assert done.keys() == expected.keys()
    for name, report in done.items():
        assert report.action == ("converted" if "_proj.weight" in name[-12:] else "copied")
        assert report.shape == expected[name].shape
        assert report.bytes_after == expected[name].nbytes


def test_a_compressed_tensors_model_becomes_ours_and_itself_again(tmp_path):
    ours, again = tmp_path / "ours", tmp_path / "again"
    convert(BITMASK_MODEL, ours, "compressed_tensors", "sparse24")
    expected = stored_in(INTEROP / "compressed_tensors_dense.safetensors")
    weights = dict(iter_weights(ours))
    assert set(weights) == {name for name in expected if "_proj.weight" in name[-12:]}
    for name, weight in weights.items():
        assert same_bits(plus_zeros(weight.decompress()), plus_zeros(expected[name]))
    convert(ours, again, "sparse24", "compressed_tensors")
    with SafetensorsReader(BITMASK_MODEL) as before, SafetensorsReader(again) as after:
        assert dict(after.tensors) == dict(before.tensors)
    convert(again, tmp_path / "dense", "compressed_tensors", "dense")
    dense = stored_in(tmp_path / "dense")
    assert all(same_bits(plus_zeros(dense[name]), plus_zeros(array)) for name, array in expected.items())


def test_compressed_tensors_reads_what_we_write(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors 0.10.2 is not installed")
    from ..formats.interop import writers

    arrays = {"a.weight": tiled((16, 32), "f32"), "b.weight": tiled((8, 16), "f16"), "norm": np.ones(4, "f4")}
    dense_file(tmp_path / "dense", arrays)
    convert(tmp_path / "dense", tmp_path / "out.safetensors", "dense", "compressed_tensors")
    read = writers.compressed_tensors_to_dense(tmp_path / "out.safetensors")
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same_bits(read[name].numpy(), array)


@pytest.mark.parametrize("name", [name for name in CHECKPOINT_FORMATS if name != "dense"])
def test_there_and_back_in_one_file(tmp_path, name):
    there, back = tmp_path / "there", tmp_path / "back"
    elements = ("f16",) if name == "baracuda" else ("f16", "bf16")
    arrays = {f"layer.{e}.weight": tiled((128, 128), e, seed) for seed, e in enumerate(elements)}
    arrays |= {"layer.bias": random_array((7,)), "embed.weight": tiled((32, 64), "f16")}
    dense_file(tmp_path / "dense", arrays, {"author": "someone"})
    options = {"tile_k": 64} if name == "cutlass_sm90" else {}
    reports = convert(tmp_path / "dense", there, "dense", name, **options)
    assert {report.name for report in reports if report.action == "converted"} == set(arrays) - {
        "layer.bias",
        "embed.weight",
    }
    stored, metadata = library_load(there)
    assert metadata["author"] == "someone"
    if name in FORMATS and name != "compressed_tensors":
        note = json.loads(metadata["sparse24.layer.f16.weight"])
        assert note == {"format": name, "shape": [128, 128], "element": "f16"} | options | (
            {"word_bytes": 2} if name == "tilelang" else {}
        )
        assert {f"layer.f16.weight.{part}" for part in FORMATS[name].parts} <= stored.keys()
    convert(there, back, name, "dense")
    assert library_load(back)[0].keys() == arrays.keys()
    for key, array in arrays.items():
        assert same_bits(library_load(back)[0][key], array)


def test_parts_that_somebody_saved_by_hand_need_no_note(tmp_path):
    """A user of PyTorch may save ``packed`` and ``meta`` under these names."""
    dense_file(tmp_path / "dense", {"w": tiled((32, 64), "f16")})
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours")
    parts = to_foreign("torch_cutlass", load_weight(tmp_path / "ours", "w"))
    dense_file(tmp_path / "theirs", {f"w.{name}": part for name, part in parts.items()})
    convert(tmp_path / "theirs", tmp_path / "back", "torch_cutlass", "dense")
    assert same_bits(library_load(tmp_path / "back")[0]["w"], tiled((32, 64), "f16"))


@needs_real
def test_a_real_model_there_and_back(tmp_path):
    assert REAL is not None
    ours, theirs, dense = (tmp_path / name for name in ("ours", "theirs", "dense"))
    compress_checkpoint(REAL, ours)
    convert(ours, theirs, "sparse24", "compressed_tensors")
    convert(theirs, dense, "compressed_tensors", "dense")
    weights = dict(iter_weights(ours))
    assert len(weights) == 37
    got, expected = library_load(dense)[0], library_load(REAL)[0]
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert same_bits(got[name], prune(array) if name in weights else array)


def test_ours_and_the_others_agree_on_a_pruned_model(files):
    source, ours = files
    arrays = dense_file(
        source, {"a.weight": random_array((64, 128)), "b.weight": random_array((32, 64), "bf16")}
    )
    compress_checkpoint(source, ours)
    for name in ("dense", "compressed_tensors"):
        out = ours.with_name(name)
        convert(ours, out, "sparse24", name)
    convert(ours.with_name("compressed_tensors"), ours.with_name("dense2"), "compressed_tensors", "dense")
    for name, array in arrays.items():
        for file in ("dense", "dense2"):
            assert same_bits(library_load(ours.with_name(file))[0][name], prune(array))


def test_nothing_is_pruned(files):
    source, out = files
    crowded = tiled((16, 32), "f32")
    crowded[5, 8:11] = 1
    dense_file(source, {"crowded": crowded, "sparse": tiled((16, 32), "f32"), "odd": np.ones((4, 12), "f4")})
    reports = {report.name: report for report in convert(source, out, "dense", "sparse24")}
    assert reports["crowded"].reason.endswith("got 3; prune first (row 5, group 2)")
    assert reports["odd"].reason == "K=12 is not a multiple of 8"
    assert reports["sparse"].reason is None
    assert [report.action for report in reports.values()].count("copied") == 2
    assert same_bits(library_load(out)[0]["crowded"], crowded)
    out.unlink()
    with pytest.raises(FormatError, match=r"row 5, group 2"):
        convert(source, out, "dense", "sparse24", include=["crowded"])
    assert not out.exists()


def test_a_tensor_that_the_format_cannot_hold(files):
    source, out = files
    dense_file(
        source, {"f32": tiled((32, 64), "f32"), "f16": tiled((32, 64), "f16"), "odd": tiled((8, 64), "f16")}
    )
    reports = {report.name: report.reason for report in convert(source, out, "dense", "torch_cutlass")}
    assert reports["f16"] is None
    assert reports["f32"] is None
    assert "M a multiple of 32" in reports["odd"]
    for name, kind in (("odd", InvalidProblemError), ("f32", UnsupportedError)):
        with pytest.raises(kind, match=name):
            convert(source, out, "dense", "torch_cutlass" if name == "odd" else "tilelang", include=[name])


def test_one_of_two_is_not_two_of_four(files):
    source, out = files
    dense_file(source, {"w": prune(random_array((32, 64))), "v": tiled((32, 64), "f32")})
    reports = {report.name: report.reason for report in convert(source, out, "dense", "torch_cutlass")}
    assert "expected one non-zero in each pair" in reports["w"]
    assert reports["v"] is None


def noted(path, **more) -> None:
    """Add entries to the notes of a file's weights."""

    def change(arrays, metadata):
        for key in [key for key in metadata if key.startswith("sparse24.")]:
            metadata[key] = json.dumps({**json.loads(metadata[key]), **more})

    rewrite(path, change)


@pytest.mark.parametrize("padding", [8, -1, "4", True, None, 1.0], ids=str)
def test_padding_that_no_weight_has_is_refused(files, padding):
    dense, out = files
    dense_file(dense, {"w": random_array((8, 16))})
    compress_checkpoint(dense, out)
    noted(out, padding=padding)
    with pytest.raises(FormatError, match=f"padding: expected 0 to 7 columns, got {padding!r}"):
        convert(out, out.parent / "back", "sparse24", "dense")


@pytest.mark.parametrize("name", ["baracuda", "tilelang"])
def test_a_calibrated_weight_is_known_as_one_after_another_format(files, name):
    dense, out = files
    dense_file(dense, {"w": random_array((32, 64), "bf16")})
    compress_checkpoint(dense, out)
    noted(out, calibrated="wanda")
    convert(out, out.parent / "other", "sparse24", name)
    convert(out.parent / "other", out.parent / "back", name, "sparse24")
    assert library_load(out.parent / "back")[1]["sparse24.w"] == library_load(out)[1]["sparse24.w"]
