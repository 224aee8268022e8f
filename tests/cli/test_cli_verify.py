"""``sparse24 verify``: what passes and what fails, which kernel runs, and what is said of each layer."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans.checkpoints.weights_file import load_weight

from .commands import run, run_json


def test_verify_passes_a_sound_file(checkpoint, compressed):
    found = run_json("verify", compressed, "--against", checkpoint, "--tokens", 3)
    assert found["passed"]
    assert (found["tokens"], found["copied"], found["problems"]) == (3, 2, [])
    assert [layer["name"] for layer in found["layers"]] == ["layer.0.weight", "layer.1.weight"]
    for layer in found["layers"]:
        assert layer["passed"]
        assert layer["worst_ratio"] <= 1
        assert layer["error_bound"] > 0


def test_verify_as_a_table(checkpoint, compressed):
    result = run("verify", compressed, "--against", checkpoint, "--device", "host")
    assert "host_blas" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("PASS: 2 layers on host")


def test_verify_says_that_a_tensor_was_rounded(checkpoint, compressed):
    arrays = safetensors.numpy.load_file(compressed)
    with safetensors.safe_open(compressed, "numpy") as file:
        metadata = file.metadata()
    arrays["norm"] = arrays["norm"].astype(np.float16)
    safetensors.numpy.save_file(arrays, compressed, metadata)
    assert run_json("verify", compressed, "--against", checkpoint, "--device", "host")["rounded"] == 1
    said = run("verify", compressed, "--against", checkpoint, "--device", "host").stdout.split()
    assert "1 tensor copied unchanged, 1 rounded from float32 to 16 bits;" in " ".join(said)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        (["--require", "batch_invariant"], "host_strict"),
        (
            ["--require", "deterministic,subnormals=preserved", "--require", "max_error_bound=0.1"],
            "host_strict",
        ),
        (["--backend", "host"], "host_blas"),
    ],
)
def test_verify_runs_the_kernel_that_is_asked_for(checkpoint, compressed, options, kernel):
    found = run_json("verify", compressed, "--against", checkpoint, "--device", "host", *options)
    assert {layer["kernel"] for layer in found["layers"]} == {kernel}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["inflate_cublas", "inflate_strict"])
def test_verify_on_a_gpu(checkpoint, compressed, backend):
    found = run_json(
        "verify", compressed, "--against", checkpoint, "--device", "cuda:0", "--backend", backend
    )
    assert found["device"].startswith("cuda:0")
    assert {layer["kernel"] for layer in found["layers"]} == {backend}


def test_verify_fails_a_changed_layer(checkpoint, compressed):
    content = bytearray(compressed.read_bytes())
    values = load_weight(compressed, "layer.1.weight").values.tobytes()
    content[content.index(values) + 5] ^= 0x40
    compressed.write_bytes(bytes(content))
    found = run_json("verify", compressed, "--against", checkpoint, exit_code=1)
    assert not found["passed"]
    assert [layer["passed"] for layer in found["layers"]] == [True, False]
    assert found["layers"][1]["worst_ratio"] is None
    table = run("verify", compressed, "--against", checkpoint, exit_code=1).stdout
    assert "layer.1.weight: differs from the pruned dense tensor at row 0" in table
    assert table.splitlines()[-1].startswith("FAIL: 1 of 2 layers: layer.1.weight; on ")


def test_verify_fails_where_tensors_are_missing(checkpoint, compressed):
    arrays = safetensors.numpy.load_file(checkpoint)
    more, fewer = checkpoint.with_name("more"), checkpoint.with_name("fewer")
    safetensors.numpy.save_file({**arrays, "layer.2.weight": np.ones((8, 8), np.float32)}, more)
    assert "  layer.2.weight: missing\n" in run("verify", compressed, "--against", more, exit_code=1).stdout
    del arrays["layer.0.weight"]
    safetensors.numpy.save_file(arrays, fewer)
    result = run("verify", compressed, "--against", fewer, exit_code=1)
    assert "the dense checkpoint lacks it" in result.stdout
