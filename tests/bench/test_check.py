"""Messages of ``python -m benchmarks.check`` about invented records."""

from __future__ import annotations

import functools
import json

import pytest

from benchmarks import check
from benchmarks.bounds import BOUNDS
from benchmarks.judging import Bound, judged, ratios
from sparse24_plans.bench import record

from .records import RESULTS
from .records import record as committed


def product(n: int, us: float, backend: str = "auto", m: int = 4096, **more: object) -> dict:
    about = {"m": m, "k": 4096, "n": n, "element": "bf16", "backend": backend, "rel_error": 0.001}
    return {**about, "us": us, "dense_us": 12.0, "cusparselt_us": None, **more}


REPORT = functools.cache(check.report)
OVER_DENSE = ratios("gemm", "dense_us", element="bf16", backend="auto")
ROWS = {"gemm": [product(1, 6.0), product(64, 8.0), product(8, 24.0, "mma_sp")]}


def test_a_mean_stands_beside_its_worst_cell():
    found = judged(Bound("over dense", OVER_DENSE, 1.8, on_the_mean=True), ROWS)
    assert found.mean == pytest.approx(3.0**0.5)
    assert (found.worst, found.at) == (1.5, "4096x4096 N 64")
    assert found.is_missed


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ({"least": 1.5}, False),
        ({"least": 1.51}, True),
        ({"most": 2.0}, False),
        ({"most": 1.99}, True),
        ({}, False),
        ({"least": 1.7, "on_the_mean": True}, False),
    ],
    ids=str,
)
def test_each_cell_or_mean_is_bounded_from_below_or_above(limits, missed):
    assert judged(Bound("over dense", OVER_DENSE, **limits), ROWS).is_missed is missed


def test_a_bound_without_cells_is_neither_kept_nor_missed():
    found = judged(Bound("over dense", OVER_DENSE, 9.0), {"gemm": []})
    assert (found.worst, found.is_missed) == (None, False)
    assert check.verdicts("grid", {**record.empty({})}) == []


def test_spans_of_tokens_leave_out_other_rows():
    values = ratios("gemm", "dense_us", span=(1, 63), backend=("auto", "mma_sp"))(ROWS)
    assert values == [("4096x4096 N 1", 2.0), ("4096x4096 N 8", 0.5)]


@pytest.mark.parametrize("kind", BOUNDS)
def test_every_bound_finds_its_cells_in_the_committed_record(kind):
    """A bound whose fields are misspelt would never be missed."""
    gpu = "h100" if kind == "quantized" else "h200"
    name = f"{gpu}.json" if kind == "grid" else f"{gpu}-{kind}.json"
    if kind in ("blocksparse-random", "calibration", "layers") and not (RESULTS / name).exists():
        pytest.skip("the record has not been taken; tests of the kind's benchmark make one")
    unmeasured = {"two GPUs in a graph", "attention forward over FlashInfer, each"}  # it may be absent
    found = {one.bound.about for one in check.verdicts(kind, committed(name))}
    assert {bound.about for bound in BOUNDS[kind]} - found <= unmeasured


@pytest.fixture
def read_once(monkeypatch):
    """Reports on committed records, of which each is judged once."""
    monkeypatch.setattr(check, "report", REPORT)


def test_stale_and_missed_are_printed_and_change_no_exit_status(capsys, read_once):
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(path.name) for line in lines) for path in RESULTS.glob("*.json"))


def test_all_bounds_fit_80_columns_and_json_says_the_same(capsys, read_once):
    check.main(["--all"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert check.main(["--json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    missed = sum(one["missed"] for document in documents for one in document["verdicts"])
    assert sum(line.startswith("!") for line in lines) == missed


def test_a_malformed_record_is_an_error(tmp_path, capsys):
    for text in ("", "[]", "{}"):
        (tmp_path / "h100.json").write_text(text)
        assert check.main([str(tmp_path / "h100.json")]) == 1
        assert "MALFORMED" in capsys.readouterr().out


def test_a_record_of_other_kernels_is_stale(tmp_path, capsys):
    one = {**committed("h200-compile.json"), **record.stamp(record.files_of(["gemm/mma_sp.cu"]))}
    for text, state in ((one, "current"), ({**one, "kernels_sha256": "0" * 64}, "STALE")):
        (tmp_path / "h100-compile.json").write_text(json.dumps(text))
        assert check.main([str(tmp_path / "h100-compile.json")]) == 0
        assert state in capsys.readouterr().out.splitlines()[0]
