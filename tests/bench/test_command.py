"""``sparse24 bench``: options are checked before a GPU is asked for, and records grow. Nothing is timed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from benchmarks import check, gpus, measure
from sparse24_plans import BackendUnavailableError, InvalidProblemError, UnsupportedError
from sparse24_plans.bench import additions, gemm, host, prepare, record, run
from sparse24_plans.bench.scope import PREPARE_SHAPES, SHAPES, Scope
from sparse24_plans.cli.app import app

from .test_record_files import ABOUT, row


def invoke(*words: str):
    return CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)


@pytest.fixture
def no_gpu(monkeypatch):
    def machine() -> dict:
        raise BackendUnavailableError("no usable CUDA device")

    monkeypatch.setattr(record, "machine", machine)


@pytest.mark.parametrize(
    "words",
    [
        ("--n", "0"),
        ("--n", "8193"),
        ("--n", "x"),
        ("--element", "i32"),
        ("--element", "u8"),
        ("--backend", "host"),
        ("--backend", "prune"),
        ("--shapes", "0"),
        ("--shapes", "9"),
        ("--only", "typo"),
        ("--seconds", "-1"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_usage_errors_without_a_gpu(no_gpu, words):
    assert invoke(*words).exit_code == 2


def test_without_a_gpu_it_says_so(no_gpu, tmp_path):
    result = invoke("-o", str(tmp_path / "r.json"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "BackendUnavailableError"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[]", json.dumps({**record.empty(ABOUT), "kernels_sha256": "0" * 64})])
def test_unusable_records_are_refused_before_measuring(no_gpu, tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    result = invoke("-o", str(tmp_path / "r.json"), "--json")
    assert json.loads(result.stdout)["error"]["type"] in ("FormatError", "InvalidProblemError")
    assert (tmp_path / "r.json").read_text() == text


@pytest.fixture
def played(monkeypatch):
    """Measurements that give figures of their own; the scope's cells that were asked for."""
    asked: list = []

    def product(matrix, n, backends, sources):
        asked.append((str(matrix[2]), *matrix[:2], n))
        sources.add("gemm/mma_sp.cu")
        about = {"m": matrix[0], "k": matrix[1], "n": n, "element": str(matrix[2])}
        return [row(**about, dense_us=4.0, cusparselt_us=None, rel_error=0.001)]

    def op(shape, element, sources):
        sources.add("prepare/pack.cu")
        return [{"op": "pack", "m": shape[0], "k": shape[1], "element": element, "us": 1.0, "copy_us": 0.9}]

    def added(part, matrix, n, sources):
        field, plain_us, names = additions.ADDITIONS[part]
        about = {"m": matrix[0], "k": matrix[1], "n": n, "element": str(matrix[2])}
        return [{**about, field: name, "us": 3.0, plain_us: 2.0} for name in names]

    def matrix(*about):
        return about

    matrix.cache_clear = lambda: None
    monkeypatch.setattr(record, "machine", lambda: ABOUT)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(run, "matrix_of", matrix)
    monkeypatch.setattr(gemm, "measured", product)
    monkeypatch.setattr(additions, "measured", added)
    monkeypatch.setattr(prepare, "measured", op)
    monkeypatch.setattr(prepare, "peer_rows", lambda shape, element: [])
    monkeypatch.setattr(host, "measured", lambda sources: {"run_us": 7.0})
    return asked


def test_parts_of_a_record_add_up_in_its_file(played, tmp_path):
    out = tmp_path / "r.json"
    for words in (
        ("--only", "gemm", "--n", "1,16", "--element", "s8"),
        ("--only", "host"),
        ("--only", "prepare"),
        ("--only", "epilogues", "--n", "16,17,2048"),
        ("--only", "variants", "--n", "16,256"),
    ):
        result = invoke("-o", str(out), "--shapes", "3", *words)
        assert result.exit_code == 0, result.output
    assert played == [("s8", *shape, n) for shape in SHAPES[:3] for n in (1, 16)]
    found = record.load(out)
    assert len(found["gemm"]) == 6
    assert found["host"] == {"run_us": 7.0}
    assert [(one["m"], one["k"]) for one in found["prepare"]] == [PREPARE_SHAPES[1]]
    gates, activations = {"swiglu", "geglu", "geglu_tanh"}, {"relu", "relu2", "gelu", "gelu_tanh", "silu"}
    for part, name, added, n in (
        ("epilogues", "epilogue", {"bias", *activations, *gates}, 2048),
        ("variants", "variant", {"beta", "batch"}, 256),
    ):
        rows = found[part]
        assert [(one["m"], one["k"], one["n"]) for one in rows[:: len(added)]] == [
            (*shape, n) for shape in SHAPES[:3]
        ]
        assert Counter(one[name] for one in rows) == dict.fromkeys(added, 3)
    assert "1.5" in result.stdout
    assert found["kernel_files"] == record.files_of(["gemm/mma_sp.cu", "prepare/pack.cu"])
    assert record.is_current(found)
    assert found["schema"] == 1
    assert {name: found[name] for name in ABOUT} == ABOUT


def test_what_the_file_has_is_not_measured_again(played, tmp_path):
    out = tmp_path / "r.json"
    for tokens in ("16", "8,16"):
        assert invoke("-o", str(out), "--shapes", "1", "--only", "gemm", "--n", tokens).exit_code == 0
    assert [n for *_, n in played] == [16, 8]
    assert [one["n"] for one in record.load(out)["gemm"]] == [16, 8]


def test_run_without_time_measures_nothing_and_says_what_there_is(played, tmp_path):
    out = tmp_path / "r.json"
    result = invoke("-o", str(out), "--shapes", "1", "--only", "gemm", "--n", "16", "--seconds", "0")
    assert result.exit_code == 0, result.output
    assert played == []


# benchmarks.measure -------------------------------------------------------------------------------


def test_maintainers_take_the_grid_in_parts(played, tmp_path, capsys):
    out = tmp_path / "h100.json"
    words = ["grid", str(out), "--element", "bf16", "--n", "16"]
    assert measure.main([*words, "--part", "gemm"]) == 0
    assert played == [("bf16", *shape, 16) for shape in SHAPES]
    assert "8 of 8 steps are there" in capsys.readouterr().out
    assert measure.main(words) == 0
    assert len(played) == len(SHAPES)
    said = capsys.readouterr().out
    assert "bf16 over dense, N 1-64" in said
    found = record.load(out)
    assert found["host"] == {"run_us": 7.0}
    assert check.faults("grid", found) == []


def test_several_gpus_share_run_and_their_rows_are_one_record(played, tmp_path, monkeypatch):
    """Each GPU's process is this one here, one after the other. A share that was interrupted counts."""
    out = tmp_path / "r.json"
    words = ["grid", str(out), "--element", "bf16", "--part", "gemm"]
    seen: list[str] = []

    class Process:
        def __init__(self, command, env):
            monkeypatch.setattr(gpus, "visible_gpus", lambda: [env["CUDA_VISIBLE_DEVICES"]])
            seen.append(env["CUDA_VISIBLE_DEVICES"])
            self.status = measure.main(command[3:])

        def wait(self):
            return self.status

    assert measure.main([*words, "--n", "16", "--share", "1/2"]) == 0
    (tmp_path / "r.json").rename(tmp_path / "r.share3.json")
    assert len(played) == len(SHAPES) // 2
    monkeypatch.setattr(gpus.subprocess, "Popen", Process)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["4", "7"])
    assert measure.main([*words, "--n", "16", "--n", "8"]) == 0
    assert seen == ["4", "7"]
    assert sorted(played) == sorted(("bf16", *shape, n) for shape in SHAPES for n in (16, 8))
    assert len(record.load(out)["gemm"]) == 2 * len(SHAPES)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_wrong_result_is_reported_and_the_run_goes_on(played, tmp_path, monkeypatch, capsys):
    right = gemm.measured

    def wrong(matrix, n, backends, sources):
        if matrix[:2] == SHAPES[2]:
            raise UnsupportedError("relative error 1, not recorded")
        return right(matrix, n, backends, sources)

    monkeypatch.setattr(gemm, "measured", wrong)
    words = ["grid", str(tmp_path / "r.json"), "--element", "bf16", "--n", "16", "--part", "gemm"]
    assert measure.main(words) == 1
    said = capsys.readouterr()
    assert "7 of 8 steps are there" in said.out
    assert "relative error 1" in said.err


def test_a_device_that_has_gone_ends_the_run(played, tmp_path, monkeypatch):
    def gone(*about):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gemm, "measured", gone)
    with pytest.raises(RuntimeError, match="illegal memory"):
        measure.main(["grid", str(tmp_path / "r.json"), "--element", "bf16"])


def test_a_part_that_there_is_not(played, tmp_path, capsys):
    with pytest.raises(SystemExit):
        measure.main(["grid", str(tmp_path / "r.json"), "--part", "typo"])
    assert "expected one of epilogues, gemm, host, prepare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": (0,)}, "n: expected from 1 to 8192, got 0"),
        ({"elements": ("u8",)}, "element: expected one of f32"),
        ({"parts": ("all",)}, "part: expected one of gemm"),
        ({"backends": ("host",)}, "backend: expected one of wgmma_sp"),
    ],
)
def test_a_scope_refuses_what_no_record_has(change, words):
    with pytest.raises(InvalidProblemError, match=words):
        Scope(**change)
