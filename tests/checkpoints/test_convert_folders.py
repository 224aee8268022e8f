"""Folders of shards from one format to another: shards, index, configuration and the other files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    StorageError,
    compress_checkpoint,
)
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight

from ..support import same_bits
from .models import (
    INDEX,
    contents,
    convert,
    dense_file,
    library_load,
    rewrite,
    sharded_model,
    snapshot,
    swap,
    tiled,
)


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


def test_quantization_beside_the_sparsity_stays(tmp_path):
    model = tmp_path / "model"
    sharded_model(model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"group_0": {"targets": ["Linear"]}}
    (model / "config.json").write_text(json.dumps(config))
    convert(model, tmp_path / "out", "compressed_tensors", "dense")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["config_groups"] == {"group_0": {"targets": ["Linear"]}}
    assert "sparsity_config" not in section


KV_CACHE = {"kv_cache_scheme": {"num_bits": 8}}
UNQUANTIZED_INPUTS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}


@pytest.mark.parametrize(("element", "kind"), [("fp8_e4m3", "float"), ("s8", "int")])
@pytest.mark.parametrize("change", [{}, KV_CACHE, UNQUANTIZED_INPUTS])
def test_quantization_of_8_bits_is_described_to_each_reader(tmp_path, element, kind, change):
    """Without config_groups, compressed-tensors' readers would take the values without their scales."""
    model, ours, theirs, again = (tmp_path / name for name in ("model", "ours", "theirs", "again"))
    model.mkdir()
    dense_file(model / "model.safetensors", {"up.weight": tiled((16, 32), "bf16")})
    (model / "config.json").write_text('{"hidden_size": 8}')
    compress_checkpoint(model, ours, element=element)
    convert(ours, theirs, "sparse24", "compressed_tensors")
    config = json.loads((theirs / "config.json").read_text())
    section = config["quantization_config"]
    assert section["sparsity_config"]["format"] == "sparse-24-bitmask"
    assert section["format"] == f"{kind}-quantized"
    [group] = section["config_groups"].values()
    assert (group["targets"], group["weights"]["type"]) == (["up"], kind)
    section |= change
    (theirs / "config.json").write_text(json.dumps(config))
    convert(theirs, again, "compressed_tensors", "sparse24")
    found = json.loads((again / "config.json").read_text())["quantization_config"]
    wanted = {key: value for key, value in section.items() if key != "sparsity_config"}
    assert found == (wanted if change else {"quant_method": "sparse24"})


def test_a_folder_with_one_file_needs_no_index(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    dense_file(folder / "model.safetensors", {"w.weight": tiled((16, 32), "f16")})
    convert(folder, tmp_path / "out", "dense", "sparse24")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert same_bits(
        load_weight(tmp_path / "out" / "model.safetensors", "w.weight").decompress(), tiled((16, 32), "f16")
    )


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
        "expected 'x' in .*, where the index says it is, got none",
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


def test_another_quantization_is_not_overwritten(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    dense_file(model / "model.safetensors", {"w.weight": tiled((16, 32), "f16")})
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(InvalidProblemError, match="got 'gptq'"):
        convert(model, tmp_path / "out", "dense", "compressed_tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
