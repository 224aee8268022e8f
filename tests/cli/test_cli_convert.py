"""``sparse24 convert``: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans.checkpoints.checkpoint_format import CHECKPOINT_FORMATS

from ..checkpoints.models import BITMASK_MODEL, sharded_model
from .commands import run, run_json


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    path = tmp_path / "dense.safetensors"
    sparse = np.tile(np.array([0, 2, 0, 1], np.float16), (32, 16))
    safetensors.numpy.save_file({"a.weight": sparse, "b.weight": np.ones((8, 8), np.float16)}, path)
    return path


def test_convert_reports_every_tensor(dense):
    out = dense.with_name("out")
    report = run_json("convert", dense, out, "--from", "dense", "--to", "baracuda")
    assert (report["source"], report["destination"]) == (str(dense), str(out))
    assert report["source_bytes"] == dense.stat().st_size
    assert report["destination_bytes"] == out.stat().st_size
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert tensors["a.weight"] == {
        "name": "a.weight",
        "shape": [32, 64],
        "element": "f16",
        "action": "converted",
        "reason": None,
        "bytes_before": 4096,
        "bytes_after": 2048 + 512,
    }
    assert tensors["b.weight"]["action"] == "copied"
    assert "prune first (row 0, group 0)" in tensors["b.weight"]["reason"]


def test_convert_as_a_table(dense):
    result = run("convert", dense, dense.with_name("out"), "--from", "dense", "--to", "sparse24")
    for text in ("a.weight", "32 x 64", "prune first (row 0, group 0)", "1 converted, 1 copied"):
        assert text in result.stdout
    assert result.stderr == ""


def test_convert_a_folder(tmp_path):
    sharded_model(tmp_path / "model")
    options = ("--from", "compressed_tensors", "--to", "dense")
    report = run_json("convert", tmp_path / "model", tmp_path / "out", *options)
    for key, folder in (("source_bytes", "model"), ("destination_bytes", "out")):
        files = (tmp_path / folder).glob("*.safetensors")
        assert report[key] == sum(file.stat().st_size for file in files)
    assert [tensor["action"] for tensor in report["tensors"]].count("converted") == 3
    assert "no weight of the format" in run("convert", tmp_path / "model", tmp_path / "o2", *options).stdout


def test_convert_takes_patterns_and_a_tile(dense):
    options = ("--from", "dense", "--to", "cutlass_sm90", "--include", "a*", "--tile-k", 64)
    report = run_json("convert", dense, dense.with_name("out"), *options)
    assert [tensor["reason"] for tensor in report["tensors"]].count("not included") == 1


@pytest.mark.parametrize("name", CHECKPOINT_FORMATS)
def test_every_format_can_be_named(tmp_path, name):
    error = run_json(
        "convert", tmp_path / "missing", tmp_path / "out", "--from", name, "--to", "sparse24", exit_code=1
    )["error"]
    kind = "InvalidProblemError" if name == "sparse24" else "StorageError"
    assert error["type"] == kind


def test_an_error_is_one_line_and_nothing_is_written(dense):
    out = dense.with_name("out")
    result = run("convert", dense, out, "--from", "compressed_tensors", "--to", "dense", exit_code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("error: expected a weight in the format compressed_tensors in ")
    assert result.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [("--from", "dense"), ("--from", "dense", "--to", "marlin"), ("--to", "dense")]
)
def test_wrong_usage(arguments):
    assert run("convert", BITMASK_MODEL, "out", *arguments, exit_code=2).stdout == ""
