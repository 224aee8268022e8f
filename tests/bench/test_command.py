"""``sparse24 bench``: options are checked before a GPU is asked for, and records grow. Nothing is timed."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from sparse24_plans import BackendUnavailableError, InvalidProblemError, bench
from sparse24_plans.bench import gemm, host, prepare, record, run
from sparse24_plans.bench.scope import PREPARE_SHAPES, SHAPES, TOKENS, Scope
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
        ("--gpus", "2"),
        ("--torch", "--gpus", "3"),
        ("--torch", "--gpus", "0"),
        ("--torch", "--n", "1"),
        ("--torch", "--element", "f16"),
        ("--torch", "--random", "1"),
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
def test_what_it_cannot_add_to_is_refused_before_anything_is_measured(no_gpu, tmp_path, text):
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
        if (matrix[:2], n) == (SHAPES[1], 4096):
            raise KeyboardInterrupt
        sources.add("gemm/mma_sp.cu")
        about = {"m": matrix[0], "k": matrix[1], "n": n, "element": str(matrix[2])}
        return [row(**about, dense_us=4.0, cusparselt_us=None)]

    def op(shape, element, on_row, sources):
        sources.add("prepare/pack.cu")
        return [{"op": "pack", "m": shape[0], "k": shape[1], "element": element, "us": 1.0, "copy_us": 0.9}]

    monkeypatch.setattr(record, "machine", lambda: ABOUT)
    monkeypatch.setattr(run, "Matrix", lambda *about: about)
    monkeypatch.setattr(run, "free_memory", lambda: None)
    monkeypatch.setattr(gemm, "measured", product)
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
    ):
        result = invoke("-o", str(out), "--shapes", "3", *words)
        assert result.exit_code == 0, result.output
    assert played == [("s8", *shape, n) for shape in SHAPES[:3] for n in (1, 16)]
    found = record.load(out)
    assert len(found["gemm"]) == 6
    assert found["host"] == {"run_us": 7.0}
    assert [(one["m"], one["k"]) for one in found["prepare"]] == [PREPARE_SHAPES[1]]
    assert found["kernel_files"] == record.files_of(["gemm/mma_sp.cu", "prepare/pack.cu"])
    assert record.is_current(found)
    assert found["schema"] == 1
    assert {name: found[name] for name in ABOUT} == ABOUT


def test_an_interrupted_run_leaves_the_matrices_that_are_done(played, tmp_path):
    out = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run.measure(
            Scope(tokens=(8, 4096), shapes=SHAPES[:2], parts=("gemm",)),
            keep=lambda found: record.save(found, out),
        )
    found = record.load(out)
    assert [(one["m"], one["k"], one["n"]) for one in found["gemm"]] == [(*SHAPES[0], 8), (*SHAPES[0], 4096)]
    assert record.is_current(found)


def test_every_step_is_reported(played):
    steps: list = []
    scope = Scope(tokens=TOKENS[:3], shapes=SHAPES[:2], parts=("gemm",))
    run.measure(scope, lambda: steps.append(1))
    assert len(steps) == scope.steps == 6


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


# PyTorch's door ------------------------------------------------------------------------------------


def decoder_row(n: int, gpus: int) -> dict:
    ms = {"graph_dense_ms": 2.0, "graph_sparse_ms": 1.0, "graph_invariant_ms": 1.25}
    about = {"kind": "decode", "n": n, "tokens": 1, "weights": "bf16", "gpus": gpus}
    return {**about, **ms, "eager_dense_ms": 4.0, "eager_sparse_ms": 5.0}


@pytest.fixture
def torch_played(monkeypatch):
    """Stands for what needs PyTorch: a module of that name, which measures nothing."""
    played = ModuleType("sparse24_plans.bench.torch_run")

    def check_gpus(gpus: int) -> None:
        if gpus > 2:
            raise BackendUnavailableError(f"PyTorch sees 2 CUDA devices, {gpus} are needed")

    def measure(gpus, on_step, keep):
        found = record.empty(ABOUT, record.TORCH_KEYS)
        for n in (1, 8):
            found["decoder"].append(decoder_row(n, gpus))
            found |= {"host": {"f_linear_us": 15.0} if gpus == 1 else {}}
            found |= record.stamp(record.files_of(["gemm/wgmma_sp.cu" if gpus == 1 else "gemm/mma_sp.cu"]))
            keep(found)
            on_step()
        return found

    played.STEPS, played.check_gpus, played.measure = 2, check_gpus, measure
    monkeypatch.setitem(sys.modules, "sparse24_plans.bench.torch_run", played)
    monkeypatch.setattr(bench, "torch_run", played, raising=False)
    monkeypatch.setattr(record, "machine", lambda: ABOUT)


def test_the_record_of_pytorchs_door_grows_by_numbers_of_gpus(torch_played, tmp_path):
    out = tmp_path / "h200-torch.json"
    for words in ((), ("--gpus", "2")):
        result = invoke("--torch", "-o", str(out), *words)
        assert result.exit_code == 0, result.output
        assert "2.00x" in result.stdout
        assert "0.80x" in result.stdout
    found = json.loads(out.read_text())
    assert found["decoder"] == [decoder_row(n, gpus) for gpus in (1, 2) for n in (1, 8)]
    assert found["host"] == {"f_linear_us": 15.0}
    assert found["kernel_files"] == record.files_of(["gemm/wgmma_sp.cu", "gemm/mma_sp.cu"])
    assert record.is_current(found)
    assert found["schema"] == 1
    assert {name: found[name] for name in ABOUT} == ABOUT
    assert "gemm" not in found


def test_too_few_gpus_are_an_error(torch_played, tmp_path):
    result = invoke("--torch", "--gpus", "4", "-o", str(tmp_path / "r.json"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "BackendUnavailableError"
    assert not list(tmp_path.iterdir())


def test_a_record_of_another_kind_is_not_added_to(torch_played, tmp_path):
    out = tmp_path / "r.json"
    record.save(record.empty(ABOUT), out)
    result = invoke("--torch", "-o", str(out), "--json")
    assert json.loads(result.stdout)["error"]["type"] == "FormatError"


def test_without_pytorch_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "machine", lambda: ABOUT)
    monkeypatch.delattr(bench, "torch_run", raising=False)
    monkeypatch.setitem(sys.modules, "sparse24_plans.bench.torch_run", None)
    result = invoke("--torch", "-o", str(tmp_path / "r.json"), "--json")
    assert json.loads(result.stdout)["error"]["type"] == "BackendUnavailableError"
    assert not list(tmp_path.iterdir())
