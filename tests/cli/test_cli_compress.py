"""``sparse24 compress``: what it reports of files and folders, and as a table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans.checkpoints.weights_file import load_weight

from .commands import run, run_json


def test_compress_reports_every_tensor(checkpoint):
    out = checkpoint.with_name("out")
    report = run_json("compress", checkpoint, "-o", out)
    assert report["source_bytes"] == checkpoint.stat().st_size
    assert report["destination_bytes"] == out.stat().st_size
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert {name: tensor["action"] for name, tensor in tensors.items()} == {
        "layer.0.weight": "compressed",
        "layer.1.weight": "compressed",
        "embed.weight": "copied",
        "norm": "copied",
    }
    assert 0.5 < tensors["layer.0.weight"]["kept_energy"] < 1
    assert tensors["norm"]["reason"] == "1-d"
    assert tensors["layer.1.weight"]["bytes_before"] == 16 * 24 * 2
    assert tensors["layer.1.weight"]["bytes_after"] == 16 * 12 * 2 + 16 * 6
    assert load_weight(out, "layer.0.weight").m == 24


def test_compress_as_a_table(checkpoint):
    result = run("compress", checkpoint, "-o", checkpoint.with_name("out"))
    for text in (
        "layer.0.weight",
        "2 tensors compressed",
        "1-d: norm",
        "embedding table, excluded by default ('*embed*'): embed.weight",
        "2 compressed, 2 copied",
    ):
        assert text in result.stdout


def test_compress_reports_the_sparse_share_and_dense_families(checkpoint):
    done = np.zeros((8, 16), np.float32)
    arrays = {f"layers.{i}.proj.weight": done for i in range(12)}
    arrays |= {f"layers.{i}.gate.weight": np.ones((8, 16), np.float32) for i in range(12)}
    arrays["experts.w1"] = np.ones((2, 8, 16), np.float32)
    safetensors.numpy.save_file(arrays, checkpoint)
    out = checkpoint.with_name("out")
    result = run("compress", checkpoint, "-o", out)
    assert "router, excluded by default ('*.gate.weight'): layers.*.gate.weight (12)" in result.stdout
    assert "3-d (stacked matrices, such as experts, or a convolution): experts.w1" in result.stdout
    assert "12 compressed (12 of them 2:4 already), 13 copied" in result.stdout
    assert "46.2% of the model's bytes is 2:4" in result.stdout
    foreseen = run_json("compress", checkpoint, "-o", out, "--dry-run", "--force")
    assert foreseen["sparse_share"] == pytest.approx(12 / 26)


def test_compress_takes_patterns(checkpoint):
    out = checkpoint.with_name("out")
    options = ("--include", "embed*", "--include", "layer*", "--exclude", "layer.1*")
    report = run_json("compress", checkpoint, "-o", out, *options)
    done = {tensor["name"] for tensor in report["tensors"] if tensor["action"] == "compressed"}
    assert done == {"embed.weight", "layer.0.weight"}


def test_nan_becomes_null(checkpoint):
    safetensors.numpy.save_file({"w": np.full((8, 8), np.nan, np.float32)}, checkpoint)
    report = run_json("compress", checkpoint, "-o", checkpoint.with_name("out"))
    assert report["tensors"][0]["kept_energy"] is None


def test_names_cannot_drive_the_terminal(checkpoint):
    safetensors.numpy.save_file({"[red]\x1b[2Jw": np.ones((8, 8), np.float32)}, checkpoint)
    result = run("compress", checkpoint, "-o", checkpoint.with_name("out"))
    assert "\x1b" not in result.stdout
    assert r"[red]\x1b[2Jw" in result.stdout


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A dense model in two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(1)
    weight_map = {}
    for shard, name in enumerate(("a.weight", "b.weight")):
        file = f"model-{shard}.safetensors"
        safetensors.numpy.save_file({name: rng.standard_normal((16, 32), np.float32)}, folder / file)
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_compress_and_verify_folders_of_shards(sharded):
    out = sharded.with_name("out")
    report = run_json("compress", sharded, "-o", out)
    assert [tensor["action"] for tensor in report["tensors"]] == ["compressed"] * 2
    assert report["destination_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    found = run_json("verify", out, "--against", sharded, "--device", "host")
    assert found["passed"]
    assert [layer["name"] for layer in found["layers"]] == ["a.weight", "b.weight"]


def test_sizes_are_those_of_the_model_that_the_index_names(sharded):
    """Some repositories hold a second copy of their weights, which the index does not name."""
    size = sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
    safetensors.numpy.save_file({"a": np.ones((64, 64), np.float32)}, sharded / "consolidated.safetensors")
    out, dense = sharded.with_name("out"), sharded.with_name("dense")
    with pytest.warns(UserWarning, match=r"not copied: consolidated\.safetensors"):
        assert run_json("compress", sharded, "-o", out)["source_bytes"] == size
    index = sharded / "model.safetensors.index.json"
    assert run_json("compress", index, "-o", dense, "--dry-run")["source_bytes"] == size
    shutil.copy(sharded / "consolidated.safetensors", out)
    with pytest.warns(UserWarning, match="not copied"):
        written = run_json("convert", out, dense, "--from", "sparse24", "--to", "dense")
    assert written["destination_bytes"] == size
    assert written["source_bytes"] < size


def test_a_written_file_may_have_an_indexs_name(checkpoint):
    out = checkpoint.with_name("model.safetensors.index.json")
    assert run_json("compress", checkpoint, "-o", out)["destination_bytes"] == out.stat().st_size


def test_nothing_to_compress_is_sound(checkpoint):
    safetensors.numpy.save_file({"norm": np.ones(8, np.float32)}, checkpoint)
    out = checkpoint.with_name("out")
    assert "0 compressed, 1 copied" in run("compress", checkpoint, "-o", out).stdout
    assert "PASS: nothing could be compressed" in run("verify", out, "--against", checkpoint).stdout
