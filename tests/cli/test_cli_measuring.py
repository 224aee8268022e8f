"""``sparse24 bench`` and ``tune`` check words and files before they ask for a GPU. Nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse24_plans import BackendUnavailableError
from sparse24_plans.bench import record
from sparse24_plans.cli import measuring

from .commands import run, run_json

COMMANDS = {"bench": (), "tune": ("--n", 1, "--shape", "64x64")}


@pytest.fixture(autouse=True)
def asked(monkeypatch) -> list[str]:
    """Whether a GPU was asked for, of which there is none."""
    calls: list[str] = []

    def absent(*about: object) -> None:
        calls.append("a GPU")
        raise BackendUnavailableError("no GPU")

    monkeypatch.setattr(record, "machine", absent)
    monkeypatch.setattr(measuring, "resolve", absent)
    return calls


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["missing/out.json", ".", "x" * 300], ids=["no folder", "a folder", "long"])
def test_what_cannot_be_written_is_refused_first(tmp_path, asked, command, place):
    error = run_json(command, *COMMANDS[command], "-o", tmp_path / place, exit_code=1)["error"]
    assert error["type"] == "StorageError"
    assert str(tmp_path) in error["message"]
    assert asked == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_something_else_is_refused_first(tmp_path, asked, command):
    out = tmp_path / "out.json"
    out.write_bytes(b"precious")
    assert run_json(command, *COMMANDS[command], "-o", out, exit_code=1)["error"]["type"] == "FormatError"
    assert asked == []
    assert out.read_bytes() == b"precious"


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_gpu_nothing_is_written_or_shown(tmp_path: Path, asked, command):
    result = run(command, *COMMANDS[command], "-o", tmp_path / "out.json", exit_code=1)
    assert (result.stdout, result.stderr) == ("", "error: no GPU\n")
    assert asked == ["a GPU"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("bench", "--element", "i32"), "expected one of f32, f16, bf16, s8, fp8_e4m3, fp8_e5m2, got 'i32'"),
        (("bench", "--backend", "prune"), "expected one of wgmma_sp, f32_split3, f32_split6, mma_sp"),
        (("bench", "--backend", "wgmma"), "did you mean wgmma_sp?"),
        (("tune", "-o", "x", *COMMANDS["tune"], "--element", "fp8"), "did you mean fp8_e4m3?"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(asked, words, advice):
    result = run(*words, exit_code=2)
    assert advice in " ".join(result.stderr.replace("│", " ").split())
    assert asked == []
