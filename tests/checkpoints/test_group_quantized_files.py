"""Weights with scales of groups in files: what is written, read, converted, recorded, verified, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    compress_checkpoint,
    iter_weights,
    load_run,
    load_weight,
    prune,
    save_run,
    save_weights,
    verify_checkpoint,
)
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader, SafetensorsWriter
from sparse24_plans.cli.app import app

from ..gemm.test_replay import ran
from ..support import same_bits
from .models import convert, corrupt_group, dense_file, drop, random_array, rewrite, snapshot, stored_in, swap

STORED = {"s4": "U8", "s8": "I8", "fp8_e4m3": "F8_E4M3"}
each = pytest.mark.parametrize("stored", STORED)
NAME, M, K = "model.layers.0.up_proj.weight", 40, 192


def quantized(shape: tuple[int, int], element: str, seed: int = 0, **fields: Any) -> Sparse24QuantizedWeight:
    dense = Sparse24Weight.prune_compress(random_array(shape, element, seed))
    return Sparse24QuantizedWeight.quantize(dense, **fields)


def same_weight(one: Sparse24QuantizedWeight, other: Sparse24QuantizedWeight) -> bool:
    fields = (one.m, one.k, one.element, one.quantization) == (
        other.m,
        other.k,
        other.element,
        other.quantization,
    )
    return fields and all(same_bits(a.bits(), b.bits()) for a, b in zip(one.views, other.views, strict=True))


# The format -----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("element", "scales"), [("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("bf16", "f32")]
)
def test_saved_weights_load_as_they_were(tmp_path, stored, group, element, scales):
    by = {"stored": stored, "group": group, "scale_element": scales}
    weights = {f"layer.{i}": quantized((3 * i, 72 * i), element, i, **by) for i in range(3)}
    weights["plain"] = Sparse24Weight.prune_compress(random_array((4, 16), element))
    save_weights(tmp_path / "w", weights)
    loaded = dict(iter_weights(tmp_path / "w"))
    assert list(loaded) == list(weights)
    assert all(same_weight(loaded[name], weights[name]) for name in ("layer.0", "layer.1", "layer.2"))
    assert type(loaded["plain"]) is Sparse24Weight


@each
def test_a_file_has_the_documented_tensors_and_note(tmp_path, stored):
    weight = quantized((M, K), "bf16", stored=stored, group=128)
    save_weights(tmp_path / "w", {"w": weight})
    with SafetensorsReader(tmp_path / "w") as reader:
        found = {name: (info.dtype, info.shape) for name, info in reader.tensors.items()}
        note = json.loads(reader.metadata["sparse24.w"])
    width = K // 4 if stored == "s4" else K // 2
    assert found == {
        "w.values24": (STORED[stored], (M, width)),
        "w.meta24": ("U16", (M, K // 8)),
        "w.scales24": ("BF16", (M, 2)),
    }
    quantization = {"stored": stored, "group": 128, "scale_element": "bf16"}
    assert note == {"shape": [M, K], "element": "bf16", **quantization}


@each
@pytest.mark.parametrize(("k", "group"), [(192, 32), (192, 128), (32, 0), (64, 64)])
def test_a_state_dict_without_notes_tells_its_quantization(tmp_path, stored, k, group):
    weight = quantized((8, k), "f16", stored=stored, group=group)
    save_weights(tmp_path / "w", {"w": weight})
    with SafetensorsReader(tmp_path / "w") as reader:
        infos = list(reader.tensors.values())
        with SafetensorsWriter(tmp_path / "bare", infos, {}) as writer:
            for info in infos:
                writer.write(info.name, reader.read(info.name))
    found = load_weight(tmp_path / "bare", "w")
    assert found.quantization.element == stored
    assert same_bits(found.dequantize().decompress(), weight.dequantize().decompress())


def note(**fields: Any) -> Any:
    """Change fields of the note; None removes one."""

    def change(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        found = {**json.loads(metadata["sparse24.w"]), **fields}
        metadata["sparse24.w"] = json.dumps({key: value for key, value in found.items() if value is not None})

    return change


BROKEN = {
    "no scales": (drop("w.scales24"), "w.scales24 is missing"),
    "scales of another type": (
        swap("w.scales24", np.ones((4, 2), np.float32)),
        r"F16\[4, 2\], got F32\[4, 2\]",
    ),
    "too few scales": (swap("w.scales24", np.ones((4, 1), np.float16)), r"F16\[4, 2\], got F16\[4, 1\]"),
    "values of another type": (
        swap("w.values24", np.zeros((4, 16), np.int8)),
        r"U8\[4, 16\], got I8\[4, 16\]",
    ),
    "values of 8 bits": (swap("w.values24", np.zeros((4, 32), np.uint8)), r"U8\[4, 16\], got U8\[4, 32\]"),
    "metadata of another shape": (
        swap("w.meta24", np.zeros((4, 4), np.uint16)),
        r"U16\[4, 8\], got U16\[4, 4\]",
    ),
    "a bad group": (corrupt_group, r"expected bits 4-7 to be zero.*\(row 2, group 3\)"),
    "an unknown stored element": (note(stored="s5"), "stored: expected one of .*, got 's5'"),
    "a stored element of 16 bits": (note(stored="f16"), "stored: expected s4 or s8 or fp8_e4m3, got 'f16'"),
    "a stored element that is a list": (note(stored=["s4"]), "stored: expected"),
    "no group": (note(group=None), "group: expected 0 or 32 or 64 or 128, got None"),
    "an unknown group": (note(group=16), "group: expected 0 or 32 or 64 or 128, got 16"),
    "a group of text": (note(group="32"), "group: expected 0 or 32 or 64 or 128, got '32'"),
    "a group that is true": (note(group=True), "group: expected"),
    "another group": (note(group=0), r"w.scales24: expected F16\[4, 1\], got F16\[4, 2\]"),
    "scales of another element": (
        note(scale_element="bf16"),
        "scale_element: expected f16 or f32, got 'bf16'",
    ),
    "an element of 32 bits": (note(element="f32"), "element: expected f16 or bf16"),
    "another K": (note(shape=[4, 32]), "w.values24: expected"),
    "a giant shape": (note(shape=[2**62, 2**62]), "w.values24: expected"),
    "a forgotten quantization": (note(stored=None), r"w.values24: expected F16\[4, 32\], got U8\[4, 16\]"),
}


@pytest.mark.parametrize(("change", "complaint"), BROKEN.values(), ids=BROKEN)
def test_a_broken_weight_is_refused_by_file_and_name(tmp_path, change, complaint):
    path = tmp_path / "w"
    save_weights(path, {"w": quantized((4, 64), "f16", stored="s4", group=32)})
    rewrite(path, change)
    with pytest.raises(FormatError, match=complaint) as caught:
        load_weight(path, "w")
    assert f"{path}: 'w'" in str(caught.value)


# Conversion and records ---------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("target", ["dense", "compressed_tensors", "baracuda"])
def test_conversion_writes_the_dequantized_weight(tmp_path, stored, target):
    weight = quantized((M, K), "f16", stored=stored, group=64)
    save_weights(tmp_path / "ours", {"a.weight": weight})
    convert(tmp_path / "ours", tmp_path / "theirs", "sparse24", target)
    with SafetensorsReader(tmp_path / "theirs") as reader:
        assert not any(name.endswith("24") for name in reader.tensors)
    if target != "dense":
        convert(tmp_path / "theirs", tmp_path / "dense", target, "dense")
    found = stored_in(tmp_path / ("theirs" if target == "dense" else "dense"))["a.weight"]
    assert np.array_equal(found, weight.dequantize().decompress())


@each
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_a_recorded_run_replays_with_its_quantized_weight(tmp_path, stored, element):
    fields = {"element": element, "weight_element": stored, "weight_group": 64}
    plan, args, _ = ran("hopper_tc/slices=4", **fields)
    save_run(tmp_path / "run", plan, args)
    run = load_run(tmp_path / "run")
    assert run.descriptor == plan.descriptor
    assert same_weight(run.args.weight, args.weight)
    assert run.replay().equal


def test_a_packed_weight_is_recorded_in_canonical_form(tmp_path):
    plan, args, _ = ran("fma32_in_order", element="bf16", weight_element="s4")
    save_run(tmp_path / "run", plan, type(args)(plan.pack(args.weight), args.x, args.y))
    assert same_weight(load_run(tmp_path / "run").args.weight, args.weight)


def test_a_record_whose_weight_is_quantized_otherwise_is_refused(tmp_path):
    plan, args, _ = ran("fma32_in_order", element="bf16", weight_element="s8", weight_group=64)
    save_run(tmp_path / "run", plan, args)
    with SafetensorsReader(tmp_path / "run") as reader:
        metadata, infos = dict(reader.metadata), list(reader.tensors.values())
        metadata["descriptor"] = json.dumps({**json.loads(metadata["descriptor"]), "weight_group": 32})
        with SafetensorsWriter(tmp_path / "changed", infos, metadata) as writer:
            for info in infos:
                writer.write(info.name, reader.read(info.name))
    with pytest.raises(
        FormatError, match="expected s8 with bf16 scales of groups of 32, like the descriptor"
    ):
        load_run(tmp_path / "changed")


# Compression and verification ------------------------------------------------------------------------------


@pytest.fixture
def dense(tmp_path) -> Path:
    path = tmp_path / "dense.safetensors"
    dense_file(path, {NAME: random_array((M, K), "f32", 3), "bias": random_array((M,))})
    return path


def compress(dense: Path, **options: Any) -> tuple[Path, Any]:
    out = dense.with_name("out.safetensors")
    report = compress_checkpoint(dense, out, device="host", **options)
    return out, next(one for one in report if one.name == NAME)


@each
@pytest.mark.parametrize("rule", ["largest", "least_squares"])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_a_compressed_file_holds_the_pruned_weight_quantized(dense, stored, rule, group):
    out, report = compress(dense, weights=stored, group=group, scale_rule=rule)
    pruned = Sparse24Weight.prune_compress(stored_in(dense)[NAME])
    wanted = Sparse24QuantizedWeight.quantize(pruned, stored=stored, group=group, rule=rule, element="bf16")
    found = load_weight(out, NAME)
    assert same_weight(found, wanted)
    assert report.bytes_after == found.nbytes
    exact = prune(stored_in(dense)[NAME]).astype(np.float64)
    lost = np.linalg.norm(found.dequantize().decompress().astype(np.float64) - exact) / np.linalg.norm(exact)
    assert report.quantization_error == pytest.approx(lost, rel=1e-6)
    assert 0 < lost < {"s4": 0.15, "s8": 0.01, "fp8_e4m3": 0.04}[stored]
    assert verify_checkpoint(out, dense, device="host").passed


def test_defaults_are_groups_of_128_and_least_squares(dense):
    out, report = compress(dense, weights="s4")
    assert load_weight(out, NAME).quantization.group == 128
    _, chosen = compress(dense, weights="s4", group=128, scale_rule="least_squares")
    _, other = compress(dense, weights="s4", group=128, scale_rule="largest")
    assert report.quantization_error == chosen.quantization_error < other.quantization_error


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_weights_of_16_bits_keep_their_element(tmp_path, element):
    dense_file(tmp_path / "dense.safetensors", {NAME: random_array((8, 64), element)})
    out, _ = compress(tmp_path / "dense.safetensors", weights="s4", group=32)
    assert load_weight(out, NAME).element == element
    assert verify_checkpoint(out, tmp_path / "dense.safetensors", device="host").passed


@pytest.mark.parametrize("rule", ["largest", "least_squares"])
def test_a_note_without_a_rule_stands_for_any(dense, tmp_path, rule):
    """A saved model has such notes, because layers don't know how their scales were chosen."""
    out, _ = compress(dense, weights="s8", group=64, scale_rule=rule)
    save_weights(tmp_path / "again", dict(iter_weights(out)))
    (layer,) = verify_checkpoint(tmp_path / "again", dense, device="host").layers
    assert layer.passed, layer


def test_verification_sees_each_defect(dense, tmp_path):
    out, _ = compress(dense, weights="s8", group=64)
    with SafetensorsReader(out) as reader:
        infos, metadata = list(reader.tensors.values()), dict(reader.metadata)
        bits = {info.name: reader.read(info.name) for info in infos}
    key = f"sparse24.{NAME}"
    renamed = {key: json.dumps({**json.loads(metadata[key]), "scale_rule": "smallest"})}
    unnamed = {key: json.dumps({**json.loads(metadata[key]), "scale_rule": None})}
    note = {name: one for name, one in json.loads(metadata[key]).items() if name != "scale_rule"}
    for change, more, words in (
        (f"{NAME}.scales24", {key: json.dumps(note)}, "row 0, whichever rule gave the scales"),
        (None, unnamed, "scale_rule: expected largest or least_squares, got None"),
        (f"{NAME}.values24", {}, "a value differs from those of the pruned dense tensor in row 0"),
        (f"{NAME}.scales24", {}, "a scale differs"),
        (None, renamed, "scale_rule: expected largest or least_squares, got 'smallest'"),
    ):
        changed = {name: data.copy() for name, data in bits.items()}
        if change is not None:
            changed[change][0] ^= 1
        with SafetensorsWriter(tmp_path / "bad", infos, {**metadata, **more}) as writer:
            for name, data in changed.items():
                writer.write(name, data)
        found = verify_checkpoint(tmp_path / "bad", dense, device="host")
        assert words in found.layers[0].problem
        assert not found.passed


def test_a_kernel_outside_its_guarantee_is_found(dense, monkeypatch):
    from sparse24_plans.checkpoints import verify

    out, _ = compress(dense, weights="s4")
    honest = verify._run
    monkeypatch.setattr(verify, "_run", lambda *given: honest(*given) * 1.05)
    (layer,) = verify_checkpoint(out, dense, device="host").layers
    assert "times what the plan guarantees" in layer.problem
    assert layer.quantization == "s4 with bf16 scales of groups of 128"


# The command line -------------------------------------------------------------------------------------------


def run(*words: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_command_compresses_and_verifies(dense, tmp_path):
    out = tmp_path / "out.safetensors"
    words = ("compress", dense, "-o", out, "--weights", "s4", "--group", 32, "--scale-rule", "largest")
    document = json.loads(run(*words, "--json"))
    (row,) = (row for row in document["tensors"] if row["action"] == "compressed")
    assert 0 < row["quantization_error"] < 0.15
    assert load_weight(out, NAME).quantization == ("s4", 32, "bf16")
    assert "quantized" in run(*words, "--force")
    assert "PASS: 1 layer" in run("verify", out, "--against", dense, "--device", "host")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weights": "s4", "element": "s8"}, "weights: expected None with element"),
        ({"group": 32}, "group: expected None without weights, got 32"),
        ({"scale_rule": "largest"}, "scale_rule: expected None without weights, got 'largest'"),
        ({"weights": "f16"}, "weights: expected s4 or s8 or fp8_e4m3, got 'f16'"),
        ({"weights": "s4", "group": 48}, "group: expected 0 or 32 or 64 or 128, got 48"),
        (
            {"weights": "s4", "scale_rule": "best"},
            "scale_rule: expected largest or least_squares, got 'best'",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(dense, options, complaint):
    before = snapshot(dense.parent)
    with pytest.raises(InvalidProblemError, match=complaint):
        compress(dense, **options)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    output = run("compress", dense, "-o", dense.with_name("out"), *words, exit_code=2)
    assert complaint.partition(":")[0] in output.replace("--scale-rule", "scale_rule")
    assert snapshot(dense.parent) == before
