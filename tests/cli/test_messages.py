"""Messages about mistyped commands name the option, its values and what was probably meant."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans.checkpoints.checkpoint_format import CHECKPOINT_FORMATS
from sparse24_plans.checkpoints.verify import MAX_TOKENS
from sparse24_plans.cli import app, compressing, verifying
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.plan.families import backends
from sparse24_plans.plan.guarantee import GuaranteeRequirement
from sparse24_plans.vocab import ElementKind

from .commands import run, run_json

PROBLEM = ("explain", "--n", 16, "--m", 512, "--k", 256)
COMMANDS = ("info", "compress", "convert", "verify", "explain", "replay", "demo", "bench", "tune", "warmup")


def said(text: str) -> str:
    return " ".join(text.split())


# Usage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--arch", "sm90"),
            "'--arch': expected one of sm80, sm86, sm89, sm90a, sm100, sm120, a100, a10, l40s, h100, b200, "
            "rtx5090, h200, got 'sm90'; ",
        ),
        (("--arch", "sm90"), "did you mean sm90a?"),
        (
            ("--element", "f64"),
            "'--element': expected one of f32, f16, bf16, s8, fp8_e4m3, fp8_e5m2, got 'f64'",
        ),
        (("--backend", "wgmma"), "did you mean wgmma_sp?"),
        (("--epilogue", "bias_sil"), "did you mean bias_silu?"),
        (("--device", "tpu"), "'--device': expected auto, host, cuda:N or N, got 'tpu'"),
        (("--arch", "sm80", "--device", "0"), "--arch and --device exclude each other"),
        (("--require", "batchinvariant"), "got 'batchinvariant'; did you mean batch_invariant?"),
        (("--require", "speed"), f"expected one of {', '.join(GuaranteeRequirement.model_fields)}, got"),
        (("--require", "max_error_bound"), "'--require': expected max_error_bound=VALUE, got no value"),
        (("--require", "max_error_bound="), "expected max_error_bound=VALUE, got no value"),
        (("--require", "max_error_bound=small"), "max_error_bound: expected a number, got 'small'"),
        (("--require", "subnormals"), "expected subnormals=VALUE, got no value"),
        (("--require", "subnormals=maybe"), "'preserved' or 'flushed'"),
        (("--require", "deterministic=no"), "expected deterministic without a value, got 'no'"),
        (
            ("--require", "max_error_bound=1e-3,max_error_bound=2e-3"),
            "'--require': expected one value of max_error_bound, got 0.001 and 0.002",
        ),
        (
            ("--field", "batches=2", "--field", "batches=3"),
            "'--field': expected one value of batches, got 2 and 3",
        ),
    ],
)
def test_wrong_words_of_explain(words, message):
    result = run(*PROBLEM, *words, exit_code=2)
    assert message in said(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("shape", ["4096", "x", "8x", "8x8x8", "8x-8", "8 8", "9" * 5000 + "x8"])
def test_a_shape_is_two_numbers(shape):
    result = run("tune", "-o", "t", "--n", 1, "--shape", shape, exit_code=2)
    assert "'--shape': expected MxK such as 4096x4096, got" in said(result.stderr)
    assert len(result.stderr) < 400


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--n", 1, "--m", 64, "--k", 63),
        ("explain", "--n", 1, "--m", 64, "--k", 64, "--field", "batches=x"),
        ("export", "-o", "plans", "--n", 1, "--shape", "64x63"),
        ("warmup", "--n", 1, "--shape", "64x63"),
        ("tune", "-o", "table", "--n", 1, "--shape", "64x63"),
    ],
    ids=str,
)
def test_values_of_options_that_no_problem_has_are_wrong_usage(words):
    result = run(*words, exit_code=2)
    assert "GemmSparse24Descriptor: " in said(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("command", [("compress", "missing"), ("export", "--n", 4, "--shape", "64x64")])
def test_a_group_is_one_that_kernels_know(command):
    result = run(*command, "-o", "out", "--weights", "s4", "--group", 48, exit_code=2)
    assert "expected one of 0, 32, 64, 128, got '48'" in said(result.stderr)


@pytest.mark.parametrize("n", [0, "1,2", ""])
def test_an_export_is_for_one_number_of_tokens(tmp_path, n):
    result = run("export", "-o", tmp_path / "plans", "--shape", "64x64", "--n", n, exit_code=2)
    assert "--n" in result.stderr
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize("tokens", [0, MAX_TOKENS + 1, 10**14, "9" * 5000, "eight"])
def test_tokens_of_no_use_are_refused_before_file_is_read(tokens):
    for command in (("verify", "missing", "--against", "missing"), ("demo",)):
        result = run(*command, "--tokens", tokens, exit_code=2)
        assert "--tokens" in result.stderr


@pytest.mark.parametrize("value", ["9" * 5000, "-1", "1.5", "0x10"])
@pytest.mark.parametrize("option", ["--n", "--m", "--k"])
def test_sizes_are_whole_numbers(option, value):
    words = [str(word) for word in PROBLEM]
    words[words.index(option) + 1] = value
    result = run(*words, exit_code=2)
    assert option in result.stderr


def test_a_flag_may_be_written_out():
    answer = run_json(*PROBLEM, "--device", "host", "--require", "batch_invariant=true")
    assert answer["chosen"] == "host_strict"


# Help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_offers_only_what_is_served(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[a-z0-9_]+", text))
    served = {element.value for row in ENTRIES for element in row.elements}
    # i32 is a type of results, s4 one of weights.
    unserved = {kind.value for kind in ElementKind} - served - {"i32", "s4"}
    unserved |= set(backends()) - {row.backend for row in ENTRIES}
    assert not words & (unserved - {"prune", "decompress", "pack", "quantize"})  # which are English, too
    for option in ("--backend NAME", "--element TYPE"):
        if option in text:
            offered = said(text.partition(option)[2]).partition("One of ")[2].partition(".")[0].split(", ")
            assert set(offered) <= served | {row.backend for row in ENTRIES}


def test_no_command_is_cut_short_in_the_list(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--help").stdout
    assert "..." not in text.partition("Commands:")[2]
    assert all(command in text for command in COMMANDS)


def test_brackets_in_help_are_no_markup():
    assert "the extra [demo]" in run("demo", "--help").stdout


@pytest.mark.parametrize("command", ["compress", "convert"])
def test_help_calls_patterns_shell_patterns(command):
    text = said(run(command, "--help").stdout)
    assert "--include GLOB Take only the tensors whose names match this shell pattern" in text
    assert "--exclude GLOB" in text


def test_explain_takes_every_field_of_a_problem():
    answer = run_json(
        *PROBLEM,
        *("--device", "host", "--element", "s8", "--out-element", "bf16", "--bias-element", "f32"),
        *("--epilogue", "bias", "--alpha", 0.5, "--scale-x", "tensor", "--scale-w", "row"),
        *("--x-order", "column", "--y-order", "column"),
    )
    asked = {
        "out_element": "bf16",
        "bias_element": "f32",
        "alpha": 0.5,
        "scale_x": "tensor",
        "scale_w": "row",
    }
    orders = {"x_order": "column", "y_order": "column"}
    assert {**answer["descriptor"], **asked, **orders} == answer["descriptor"]
    text = run(
        *PROBLEM, "--device", "host", "--scale-w", "row", "--alpha", 2, "--x-order", "column"
    ).stdout.splitlines()[0]
    assert text.endswith("epilogue identity, alpha 2.0, x_order column, scale_w row")


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (("--tier", "inflate"), "inflate_cublas"),
        (("--max-workspace", 0, "--tier", "inflate"), "inflate_strict"),
        (("--no-sm90a",), "mma_sp"),
    ],
)
def test_explain_takes_every_field_of_a_preference(words, chosen):
    assert run_json(*PROBLEM, "--arch", "sm90a", *words)["chosen"] == chosen


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90a", "sm120"])
@pytest.mark.parametrize("element", ["f32", "bf16", "s8", "fp8_e4m3"])
def test_figures_are_as_people_read_them(arch, element):
    """Powers of two as such, shares of a column, versions; no more than three digits after a point."""
    answer = run_json(*PROBLEM, "--arch", arch, "--element", element, exit_code=NONE.get((arch, element), 0))
    text = run(*PROBLEM, "--arch", arch, "--element", element, exit_code=0 if answer["chosen"] else 1).stdout
    assert not re.findall(r"\d\.\d{4,}|None|\(\d+, \d+\)", text)


NONE = {("sm80", "fp8_e4m3"): 1}


# Errors -------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "dense.safetensors"
    arrays = {f"layer.{i}.weight": np.ones((8, 16), np.float32) for i in range(8)}
    safetensors.numpy.save_file({**arrays, "norm": np.ones(8, np.float32)}, path)
    return path


COMPRESS = "compress", "--device", "host"


def test_a_missing_file_is_named_first(tmp_path):
    result = run("compress", tmp_path / "missing", "-o", tmp_path / "out", exit_code=1)
    assert result.stderr == f"error: {tmp_path / 'missing'}: No such file or directory\n"


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    result = run("compress", tmp_path / "model.bin", "-o", tmp_path / "out", exit_code=1)
    assert "expected a safetensors file, got a zip archive, as torch.save writes" in result.stderr


def test_a_dense_model_is_no_compressed_one(checkpoint):
    result = run("verify", checkpoint, "--against", checkpoint, exit_code=1)
    assert "expected a compressed model" in result.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_a_lack_of_memory_is_an_error_like_others(checkpoint, monkeypatch, as_json):
    def starve(*about: object, **more: object) -> None:
        raise MemoryError("4 GiB")

    monkeypatch.setattr(compressing, "compress_checkpoint", starve)
    words = (*COMPRESS, checkpoint, "-o", checkpoint.with_name("out"))
    if as_json:
        assert run_json(*words, exit_code=1)["error"]["message"] == "out of memory: 4 GiB"
    else:
        assert run(*words, exit_code=1).stderr == "error: out of memory: 4 GiB\n"


def test_a_warning_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", app._show_warning)
    warnings.warn("look\x1b[2J\nout", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: look\\x1b[2J\\nout\n"


# Files that are there -----------------------------------------------------------------------------


def commands(source: Path, out: Path) -> dict[str, tuple[object, ...]]:
    return {
        "compress": (*COMPRESS, source, "-o", out),
        "convert": ("convert", source, out, "--from", "dense", "--to", CHECKPOINT_FORMATS[1]),
        "demo": ("demo", "-o", out.parent, "--tokens", 1, "--device", "host"),
    }


@pytest.mark.parametrize("command", ["compress", "convert", "demo"])
def test_a_file_is_replaced_only_by_force(checkpoint, command, monkeypatch):
    monkeypatch.setattr(verifying, "packaged_checkpoint", lambda: None)
    safetensors.numpy.save_file({"w.weight": np.tile(np.float32([1, 0, 0, 1]), (8, 4))}, checkpoint)
    out = checkpoint.with_name("sparse24.safetensors")
    out.write_bytes(b"precious")
    words = commands(checkpoint, out)[command]
    result = run(*words, exit_code=1)
    assert (
        result.stderr == f"error: OUT: expected a new file, got {out}, which exists; replace it by --force\n"
    )
    assert out.read_bytes() == b"precious"
    run(*words, "--force")
    assert out.read_bytes() != b"precious"


def test_the_demo_replaces_no_model_of_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setattr(verifying, "packaged_checkpoint", lambda: None)
    (tmp_path / "random.safetensors").write_bytes(b"precious")
    run("demo", "-o", tmp_path, "--device", "host", exit_code=1)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]


def test_the_source_is_never_replaced(checkpoint):
    before = checkpoint.read_bytes()
    result = run(*COMPRESS, checkpoint, "-o", checkpoint, "--force", exit_code=1)
    assert "another path than the source" in result.stderr
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "zero"]
)
@pytest.mark.parametrize(
    "words",
    [("tune", "--n", 1, "--shape", "8x8", "-o"), ("bench", "-o"), (*PROBLEM, "--device", "host", "--tuning")],
    ids=["tune", "bench", "explain"],
)
def test_a_table_that_never_ends(tmp_path, words, make):
    make(tmp_path / "table.json")
    result = run(*words, tmp_path / "table.json", exit_code=1)
    assert result.stderr == f"error: {tmp_path / 'table.json'}: not a regular file\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scale-rule", "largest"), "--scale-rule: expected --weights with it, got largest alone"),
        (("--group", 64), "--group: expected --weights with it, got 64 alone"),
        (
            ("--weights", "s4", "--element", "s8"),
            "--weights: expected no --element with it, got s8",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named_as_typed(checkpoint, words, message):
    out = checkpoint.with_name("out")
    result = run(*COMPRESS, checkpoint, "-o", out, *words, exit_code=2)
    assert f"Invalid value: {message}" in said(result.stderr)
    assert not out.exists()


def test_a_group_is_exported_with_weights_alone(tmp_path):
    out = tmp_path / "plans"
    result = run("export", "-o", out, "--n", 4, "--shape", "64x64", "--group", 64, exit_code=2)
    assert "--group: expected --weights with it, got 64 alone" in said(result.stderr)
    assert not out.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("compress", "{}", "-o", "{}/out"),
        ("convert", "{}", "{}/out", "--from", "dense", "--to", "sparse24"),
        ("verify", "{}", "--against", "{}"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_without_a_model_is_named(tmp_path, words):
    result = run(*(word.format(tmp_path) for word in words), exit_code=1)
    wanted = f"expected one *.safetensors.index.json or one safetensors file in {tmp_path}, got 0 and 0"
    assert result.stderr == f"error: {wanted}\n"


# How much is shown --------------------------------------------------------------------------------


def test_a_few_layers_are_shown_and_all_on_request(checkpoint):
    out = checkpoint.with_name("out")
    for words, title in (
        ((*COMPRESS, checkpoint, "-o", out), "8 tensors compressed; the 5 that keep the least energy (--all"),
        (
            ("verify", out, "--against", checkpoint, "--device", "host"),
            "the worst 5 of 8 layers (--all shows",
        ),
    ):
        few = run(*words).stdout
        assert title in few
        assert few.count("layer.") == 5
        everything = run(*words, "--all", *(["--force"] if words[0] == "compress" else [])).stdout
        assert everything.count("layer.") == 8
        assert "--all" not in everything


def test_every_failure_is_shown_and_the_summary_names_one(checkpoint):
    out, other = checkpoint.with_name("out"), checkpoint.with_name("other.safetensors")
    run(*COMPRESS, checkpoint, "-o", out)
    arrays = safetensors.numpy.load_file(checkpoint)
    changed = {name: array * 2 if name < "layer.7" else array for name, array in arrays.items()}
    safetensors.numpy.save_file(changed, other)
    *_, verdict = lines = run(
        "verify", out, "--against", other, "--device", "host", exit_code=1
    ).stdout.splitlines()
    assert sum("differs from the pruned dense tensor" in line for line in lines) == 7
    assert verdict.startswith("FAIL: 7 of 8 layers: layer.0.weight and 6 more; ")


def test_one_reason_is_said_once():
    about = run_json("info")
    text = run("info").stdout
    for reason in {row["reason"] for row in about["kernels"]} - {None}:
        assert text.count(reason) == 1
    text = run(*PROBLEM, "--arch", "sm80").stdout
    assert text.count("needs compute capability 9.0, got 8.0") == 1
