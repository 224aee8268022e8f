"""Commands that fail: one line on stderr or one document, and exit codes of 1, or of 2 for wrong usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ..support import HAS_GPU
from .commands import PROBLEM, run, run_json


def failing(tmp_path: Path) -> dict[str, tuple[tuple[object, ...], str, str]]:
    """Command lines with the error that each gives."""
    broken, missing = tmp_path / "broken", tmp_path / "missing"
    broken.write_bytes(b"\x05")
    return {
        "broken file": (("compress", broken, "-o", tmp_path / "o"), "FormatError", "at least 8 bytes"),
        "missing file": (("compress", missing, "-o", tmp_path / "o"), "StorageError", str(missing)),
        "not compressed": (("verify", broken, "--against", broken), "FormatError", str(broken)),
    }


@pytest.mark.parametrize("case", ["broken file", "missing file", "not compressed"])
def test_an_error_is_one_line_on_stderr_or_one_document(tmp_path, case):
    arguments, kind, message = failing(tmp_path)[case]
    result = run(*arguments, exit_code=1)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    document = run_json(*arguments, exit_code=1)
    assert document["error"]["type"] == kind
    assert message in document["error"]["message"]


def test_errors_cannot_drive_the_terminal(tmp_path):
    result = run("compress", tmp_path / "a\x1b[2J\nb", "-o", tmp_path / "o", exit_code=1)
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert r"a\x1b[2J\nb" in line


@pytest.mark.skipif(HAS_GPU, reason="a CUDA device is here")
def test_a_device_that_is_not_here(checkpoint, compressed):
    document = run_json("verify", compressed, "--against", checkpoint, "--device", "0", exit_code=1)
    assert document["error"]["type"] == "BackendUnavailableError"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--n", 1, "--m", 8),
        ("explain", *PROBLEM, "--element", "f8"),
        ("explain", *PROBLEM, "--arch", "sm90a", "--device", "0"),
        ("explain", *PROBLEM, "--device", "tpu"),
        ("explain", *PROBLEM, "--require", "speed"),
        ("explain", *PROBLEM, "--field", "n=3"),
        ("explain", *PROBLEM, "--field", "amax"),
        ("explain", *PROBLEM, "--require", "subnormals=maybe"),
        ("compress", "x"),
        ("verify", "x", "--against", "y", "--tokens", 0),
        ("explain", *PROBLEM, "--device", "9" * 5000),
        ("tune", "-o", "x", "--n", "1,", "--shape", "8x8"),
        ("bench", "--n", "all"),
        ("nonsense",),
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    result = run(*arguments, exit_code=2)
    assert result.stdout == ""
    assert result.stderr


def test_wrong_usage_with_json_is_a_document():
    result = run("explain", "--bogus", "--json", exit_code=2)
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "UsageError"
    assert "--bogus" in error["message"]
    assert result.stderr == ""


def test_a_wrong_preference_with_json_is_a_document():
    result = run("explain", *PROBLEM, "--max-workspace", 10**20, "--json", exit_code=2)
    assert "max_workspace_bytes" in json.loads(result.stdout)["error"]["message"]


def test_a_method_needs_samples_to_calibrate_with(tmp_path):
    source, out = tmp_path / "dense.safetensors", tmp_path / "out.safetensors"
    safetensors.numpy.save_file({"w.weight": np.ones((8, 16), np.float32)}, source)
    result = run("compress", source, "-o", out, "--method", "wanda", exit_code=2)
    assert "--method: expected --calibrate with it, got wanda alone" in " ".join(result.stderr.split())
    assert not out.exists()


def test_converting_a_dense_file_says_to_compress_first(tmp_path):
    source = tmp_path / "dense.safetensors"
    safetensors.numpy.save_file({"w.weight": np.ones((8, 16), np.float32)}, source)
    words = ("convert", source, tmp_path / "out", "--from", "dense", "--to", "sparse24")
    result = run(*words, exit_code=1)
    assert "expected a 2:4 matrix in" in result.stderr
    assert "run `sparse24 compress` first" in result.stderr


@pytest.mark.parametrize("command", [("tune", "-o", "table.json"), ("warmup",)])
def test_commands_say_what_the_gpu_lacks(monkeypatch, tmp_path, command):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.chdir(tmp_path)
    error = run_json(*command, "--n", 1, "--shape", "64x64", exit_code=1)["error"]
    assert error["type"] == "BackendUnavailableError"
    assert error["message"].startswith("CuPy is not installed; ")
