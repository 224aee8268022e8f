"""Checkpoints from one format to another: files, folders of shards, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24Error,
    StorageError,
    UnsupportedError,
    prune,
)
from sparse24_plans.checkpoints.checkpoint_format import CHECKPOINT_FORMATS
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.convert import convert_checkpoint
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader
from sparse24_plans.checkpoints.streaming import DTYPES
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight
from sparse24_plans.formats.convert import FORMATS, to_foreign

from ..support import same_bits
from .checkpoints import REAL, dense_file, drop, library_load, needs_real, random_array, rewrite, swap

INTEROP = Path(__file__).parents[1] / "formats" / "interop"
BITMASK_MODEL = INTEROP / "compressed_tensors.safetensors"
INDEX = "model.safetensors.index.json"


def convert(source: Path, out: Path, from_format: str, to_format: str, **options: Any) -> Any:
    return convert_checkpoint(source, out, from_format=from_format, to_format=to_format, **options)


def stored_in(path: Path) -> dict[str, np.ndarray]:
    """As ``library_load``, whose library has no fp8 in NumPy."""
    types = {dtype: kind.dtype for kind, dtype in DTYPES.items()} | {
        "U8": np.dtype("u1"),
        "I64": np.dtype("i8"),
    }
    with SafetensorsReader(path) as reader:
        return {
            name: reader.read(name).view(types[info.dtype]).reshape(info.shape)
            for name, info in reader.tensors.items()
        }


def plus_zeros(array: np.ndarray) -> np.ndarray:
    """Without the signs of zeros."""
    bits = array.view(f"u{array.dtype.itemsize}").copy()
    bits[np.asarray(array == 0)] = 0
    return bits.view(array.dtype)


def tiled(shape: tuple[int, int], element: str, seed: int = 0) -> np.ndarray:
    """A dense matrix that every format holds: 2:4 with its transpose, and 1:2."""
    keep = np.tile(np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]], bool), (32, 32))
    dense = random_array(shape, element, seed)
    return np.where(keep[: shape[0], : shape[1]], dense, np.zeros((), dense.dtype))


# A model that compressed-tensors wrote ------------------------------------------------------------


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


def test_compressed_tensors_reads_a_folder_of_shards(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors 0.10.2 is not installed")
    from ..formats.interop import writers

    arrays = sharded_model(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "ours", "compressed_tensors", "sparse24")
    convert(tmp_path / "ours", tmp_path / "again", "sparse24", "compressed_tensors")
    for folder in ("model", "again"):
        read = writers.compressed_tensors_to_dense(tmp_path / folder)
        assert read.keys() == arrays.keys()
        for name, array in arrays.items():
            assert same_bits(read[name].float().numpy(), array.astype(np.float32))


# Every format -------------------------------------------------------------------------------------


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


# From dense ---------------------------------------------------------------------------------------


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


# Folders ------------------------------------------------------------------------------------------


def sharded_model(folder: Path) -> dict[str, np.ndarray]:
    """Two shards with a layer's parts on either side, index, configuration; returns the dense truth."""
    arrays = {f"model.{i}.proj.weight": tiled((16, 32), "bf16", i) for i in range(3)}
    others = {"model.norm.weight": random_array((8,)), "lm_head.weight": random_array((24, 8))}
    folder.mkdir()
    dense_file(folder / "all", {**arrays, **others}, {"format": "pt"})
    convert(folder / "all", folder / "all2", "dense", "compressed_tensors", include=["*.proj.*"])
    tensors, metadata = library_load(folder / "all2")
    (folder / "all").unlink()
    (folder / "all2").unlink()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[0::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / file, metadata)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}
    section = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparsity}
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "quantization_config": section}))
    (folder / "tokenizer.json").write_text("{}")
    return {**arrays, **others}


def contents(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: array for file in folder.glob("*.safetensors") for name, array in library_load(file)[0].items()
    }


@pytest.mark.parametrize("by_index", [False, True])
def test_a_sharded_model_whole(tmp_path, by_index):
    model, out, ours, again = (tmp_path / name for name in ("model", "dense", "ours", "again"))
    arrays = sharded_model(model)
    convert(model / INDEX if by_index else model, out, "compressed_tensors", "dense")
    convert(model, ours, "compressed_tensors", "sparse24")
    convert(ours, again, "sparse24", "compressed_tensors")
    names = {"config.json", "tokenizer.json", INDEX} | {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    for folder in (out, ours, again):
        assert {path.name for path in folder.iterdir()} == names
        index = json.loads((folder / INDEX).read_text())
        stored = contents(folder)
        assert index["weight_map"].keys() == stored.keys()
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
        for name, file in index["weight_map"].items():
            assert name in library_load(folder / file)[0]
    assert contents(out).keys() == arrays.keys()
    assert all(same_bits(contents(out)[name], array) for name, array in arrays.items())
    weights = {name: w for file in sorted(ours.glob("*.safetensors")) for name, w in iter_weights(file)}
    assert len(weights) == 3
    assert all(same_bits(weight.decompress(), arrays[name]) for name, weight in weights.items())
    assert contents(again).keys() == contents(model).keys()
    assert all(same_bits(part, contents(model)[name]) for name, part in contents(again).items())
    assert not list(tmp_path.glob(".*"))


def test_the_configuration_says_what_the_folder_holds(tmp_path):
    model, dense, again = (tmp_path / name for name in ("model", "dense", "again"))
    sharded_model(model)
    convert(model, dense, "compressed_tensors", "dense")
    assert json.loads((dense / "config.json").read_text()) == {"hidden_size": 8}
    convert(dense, again, "dense", "compressed_tensors")
    section = json.loads((again / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    sparsity = section["sparsity_config"]
    assert sparsity["format"] == "sparse-24-bitmask"
    assert sparsity["targets"] == [f"model.{i}.proj" for i in range(3)]
    assert 0.4 < sparsity["global_sparsity"] < 0.5


def test_quantisation_beside_the_sparsity_stays(tmp_path):
    model = tmp_path / "model"
    sharded_model(model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"group_0": {"targets": ["Linear"]}}
    (model / "config.json").write_text(json.dumps(config))
    convert(model, tmp_path / "out", "compressed_tensors", "dense")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["config_groups"] == {"group_0": {"targets": ["Linear"]}}
    assert "sparsity_config" not in section


def test_a_folder_with_one_file_needs_no_index(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    dense_file(folder / "model.safetensors", {"w.weight": tiled((16, 32), "f16")})
    convert(folder, tmp_path / "out", "dense", "sparse24")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert same_bits(
        load_weight(tmp_path / "out" / "model.safetensors", "w.weight").decompress(), tiled((16, 32), "f16")
    )


# Refusals: a typed error, and nothing written -----------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


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
    "another format": ('{"format": "tilelang", "shape": [32, 64]}', "the file says 'tilelang'"),
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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def set_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def point_all_at(file: Any) -> Callable[[Path], None]:
    return set_index(lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], file)))


def truncate(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])


BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "index of text": (lambda f: (f / INDEX).write_text("{"), FormatError, "expected JSON"),
    "deep index": (lambda f: (f / INDEX).write_text("[" * 100_000), FormatError, "expected JSON"),
    "index of a list": (lambda f: (f / INDEX).write_text("[]"), FormatError, "expected a JSON object"),
    "no map": (set_index(lambda index: index.pop("weight_map")), FormatError, "expected a weight_map"),
    "files elsewhere": (point_all_at("../model.safetensors"), FormatError, "files beside the index"),
    "absolute files": (point_all_at("/etc/x.safetensors"), FormatError, "files beside the index"),
    "files that are numbers": (point_all_at(7), FormatError, "files beside the index"),
    "a file that is missing": (point_all_at("no.safetensors"), StorageError, "no.safetensors"),
    "a tensor elsewhere": (
        set_index(lambda index: index["weight_map"].update({"x": "model-00001-of-00002.safetensors"})),
        FormatError,
        "the index looks for 'x'",
    ),
    "a truncated shard": (truncate, FormatError, "model-00002"),
    "two indexes": (
        lambda f: (f / "b.safetensors.index.json").write_text("{}"),
        InvalidProblemError,
        "expected one",
    ),
    "config of text": (lambda f: (f / "config.json").write_text("x"), FormatError, "config.json"),
    "no index": (lambda f: (f / INDEX).unlink(), InvalidProblemError, "got 0 and 2"),
}


@pytest.mark.parametrize(("change", "kind", "complaint"), BROKEN_FOLDERS.values(), ids=BROKEN_FOLDERS)
def test_broken_folders(tmp_path, change, kind, complaint):
    model = tmp_path / "model"
    sharded_model(model)
    change(model)
    before = snapshot(tmp_path)
    with pytest.raises(kind, match=complaint):
        convert(model, tmp_path / "out", "compressed_tensors", "dense")
    assert snapshot(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tensor_in_two_shards(tmp_path):
    model = tmp_path / "model"
    sharded_model(model)
    rewrite(model / "model-00001-of-00002.safetensors", swap("model.norm.weight", np.ones(3)))
    rewrite(model / "model-00002-of-00002.safetensors", swap("model.norm.weight", np.ones(3)))
    with pytest.raises(FormatError, match=r"is in model-00001-of-00002\.safetensors as well"):
        convert(model, tmp_path / "out", "compressed_tensors", "dense")


def test_another_quantisation_is_not_overwritten(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    dense_file(model / "model.safetensors", {"w.weight": tiled((16, 32), "f16")})
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(InvalidProblemError, match="got 'gptq'"):
        convert(model, tmp_path / "out", "dense", "compressed_tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("formats", "options", "complaint"),
    [
        (("dense", "nonsense"), {}, "to_format: expected one of dense, sparse24"),
        (("nonsense", "dense"), {}, "from_format: expected one of"),
        (("dense", "dense"), {}, "expected another format than dense"),
        (("sparse24", "dense"), {"include": ["w"]}, "apply to dense checkpoints"),
        (("dense", "sparse24"), {"include": ["typo"]}, "pattern 'typo' matches no tensor"),
        (("compressed_tensors", "dense"), {}, "holds no weight in the format compressed_tensors"),
        (("dense", "compressed_tensors"), {"include": ["v"]}, "v: .*a name that ends in .weight"),
        (("dense", "cutlass_sm90"), {"tile_k": 48, "include": ["v"]}, "v: .* tile_k = 48"),
    ],
)
def test_requests_that_cannot_be_meant(files, formats, options, complaint):
    source, out = files
    dense_file(source, {"w.weight": random_array((8, 8)), "v": tiled((8, 8), "f16")})
    with pytest.raises(InvalidProblemError, match=complaint):
        convert(source, out, *formats, **options)
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
