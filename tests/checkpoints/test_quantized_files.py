"""Compressed checkpoints of 8 bits: what is written, and that verification sees what is wrong with it."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from sparse24_plans import (
    InvalidProblemError,
    compress_checkpoint,
    convert_checkpoint,
    load_weight,
    prune,
    verify_checkpoint,
)
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader, SafetensorsWriter, TensorInfo
from sparse24_plans.cli.app import app
from sparse24_plans.vocab import ElementKind

from .models import dense_file, random_array, rewrite, swap

M, K = 40, 64
NAME = "model.layers.0.up_proj.weight"
LARGEST = {"fp8_e4m3": 448, "s8": 127}
each = pytest.mark.parametrize("element", LARGEST)


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    infos = [TensorInfo(name, "F32", one.shape, one.nbytes) for name, one in tensors.items()]
    with SafetensorsWriter(path, infos, {}) as writer:
        for name, one in tensors.items():
            writer.write(name, one)
    return path


@pytest.fixture
def dense(tmp_path):
    rng = np.random.default_rng(5)
    weight = (rng.standard_normal((M, K)) * 10.0 ** rng.uniform(-6, 6, (M, 1))).astype(np.float32)
    weight[3] = 0
    return write(tmp_path / "dense.safetensors", {NAME: weight, "bias": weight[0, :8].copy()})


def tensor(path: Path, name: str) -> np.ndarray:
    with SafetensorsReader(path) as reader:
        info = reader.tensors[name]
        types = {"F32": np.float32, "I8": np.int8, "U16": np.uint16, "F8_E4M3": ElementKind.FP8_E4M3.dtype}
        return np.array(reader.read(name)).view(types[info.dtype]).reshape(info.shape)


@each
def test_values_times_scales_are_the_pruned_weight(dense, tmp_path, element):
    out = tmp_path / "out.safetensors"
    report = compress_checkpoint(dense, out, element=element)
    assert [one.action for one in report if one.name == NAME] == ["compressed"]
    scale, weight = tensor(out, NAME + "_scale"), load_weight(out, NAME)
    assert (weight.element, scale.shape, scale.dtype) == (element, (M, 1), np.float32)
    wanted = prune(tensor(dense, NAME)).astype(np.float64)
    found = weight.decompress().astype(np.float64) * scale
    step = np.abs(wanted) * 2.0**-4 + scale * 2.0**-10 if element == "fp8_e4m3" else scale / 2
    assert (np.abs(found - wanted) <= step * 1.0001).all()
    assert not found[wanted == 0].any()
    most = np.abs(weight.values.astype(np.float64)).max(axis=1)
    assert (most[np.arange(M) != 3] == LARGEST[element]).all(), "a row doesn't use the whole range"
    saved = next(one for one in report if one.name == NAME)
    assert saved.bytes_after == M * K // 2 + M * K // 4 + 4 * M


@each
def test_verification_passes_and_sees_each_defect(dense, tmp_path, element):
    out = tmp_path / "out.safetensors"
    compress_checkpoint(dense, out, element=element)
    assert verify_checkpoint(out, dense).passed
    with SafetensorsReader(out) as reader:
        tensors = {name: np.array(reader.read(name)).reshape(-1) for name in reader.tensors}
        shapes, metadata = {name: one.shape for name, one in reader.tensors.items()}, dict(reader.metadata)
        names = {name: one.dtype for name, one in reader.tensors.items()}
    for name, words in (
        (NAME + "_scale", "a scale differs"),
        (NAME + ".values24", "differs from the pruned"),
    ):
        changed = {**tensors, name: tensors[name].copy()}
        changed[name][0] ^= 1
        infos = [TensorInfo(one, names[one], shapes[one], changed[one].nbytes) for one in changed]
        with SafetensorsWriter(tmp_path / "bad.safetensors", infos, metadata) as writer:
            for one, values in changed.items():
                writer.write(one, values)
        found = verify_checkpoint(tmp_path / "bad.safetensors", dense)
        assert words in next(layer.problem for layer in found.layers)


@pytest.mark.parametrize(("change", "passes"), [(0, True), (1, False)])
def test_a_bias_may_be_the_dense_one_in_float32(tmp_path, change, passes):
    """Layers that quantize their input hold their bias in float32, and so does a saved model."""
    weight = random_array((M, K), "bf16")
    dense = {"up.weight": weight, "up.bias": weight[:, 0].copy(), "norm.bias": weight[0].copy()}
    dense_file(tmp_path / "dense.safetensors", dense)
    out = tmp_path / "out.safetensors"
    compress_checkpoint(tmp_path / "dense.safetensors", out, element="s8")
    rewrite(out, swap("up.bias", dense["up.bias"].astype(np.float32) + change))
    found = verify_checkpoint(out, tmp_path / "dense.safetensors", device="host")
    assert found.problems == (() if passes else ("up.bias: differs from the dense checkpoint",))
    rewrite(out, swap("norm.bias", dense["norm.bias"].astype(np.float32)))
    found = verify_checkpoint(out, tmp_path / "dense.safetensors", device="host")
    assert "norm.bias: differs from the dense checkpoint" in found.problems


@each
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_row_without_a_finite_scale_verifies(tmp_path, element, special):
    weight = np.random.default_rng(6).standard_normal((M, K)).astype(np.float32)
    weight[7, 5] = special
    dense, out = write(tmp_path / "dense.safetensors", {NAME: weight}), tmp_path / "out.safetensors"
    compress_checkpoint(dense, out, element=element)
    found = verify_checkpoint(out, dense)
    assert found.passed, found


def test_compressed_tensors_and_back_keeps_the_bits(dense, tmp_path):
    ours, theirs, again = (tmp_path / f"{name}.safetensors" for name in ("ours", "theirs", "again"))
    compress_checkpoint(dense, ours, element="fp8_e4m3")
    convert_checkpoint(ours, theirs, from_format="sparse24", to_format="compressed_tensors")
    with SafetensorsReader(theirs) as reader:
        assert NAME + "_scale" in reader.tensors
    convert_checkpoint(theirs, again, from_format="compressed_tensors", to_format="sparse24")
    for name in (NAME + ".values24", NAME + ".meta24", NAME + "_scale"):
        assert (tensor(again, name).view(np.uint8) == tensor(ours, name).view(np.uint8)).all()


def test_the_command_line(dense, tmp_path):
    out = tmp_path / "out.safetensors"
    words = ["compress", str(dense), "-o", str(out), "--element", "fp8_e4m3", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sparse_share"] > 0.9
    assert load_weight(out, NAME).element == "fp8_e4m3"


@pytest.mark.parametrize(
    ("element", "name"),
    [(ml_dtypes.float8_e4m3fn, "fp8_e4m3"), ("float8_e4m3fn", "fp8_e4m3"), (np.int8, "s8"), ("int8", "s8")],
)
def test_an_element_may_be_a_dtype(dense, tmp_path, element, name):
    compress_checkpoint(dense, tmp_path / "out.safetensors", element=element)
    assert load_weight(tmp_path / "out.safetensors", NAME).element == name


def test_an_element_of_16_bits_is_refused(dense, tmp_path):
    with pytest.raises(InvalidProblemError, match="element: expected one of fp8_e4m3, s8 or None, got 'f16'"):
        compress_checkpoint(dense, tmp_path / "out.safetensors", element="f16")
    assert not (tmp_path / "out.safetensors").exists()
