"""The benchmark of ``calibrate``, on a decoder small enough for a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import calibration, check
from benchmarks.bounds import BOUNDS
from benchmarks.torch_end_to_end import DecoderShape
from sparse24_plans.bench import record

SMALL = DecoderShape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=96)
ABOUT = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "versions": {}}


@pytest.fixture
def found(capsys) -> tuple[dict, list[str]]:
    """The record of a small decoder, and the lines that the run printed."""
    steps = calibration.steps(SMALL, "cpu", sequences=8, length=16)
    return record.take(steps, ABOUT, calibration.LISTS), capsys.readouterr().err.splitlines()


def test_record_has_row_of_each_method_and_keeps_its_bound(found):
    rows = found[0]["calibration"]
    sizes = {"layers": 3, "hidden": 64, "ffn": 96, "tokens": 128, "peak_gb": None}
    assert [row["method"] for row in rows] == ["sparsegpt", "wanda"]
    assert all(sizes.items() <= row.items() and row["seconds"] > 0 for row in rows)
    assert check.faults("calibration", found[0]) == []
    assert BOUNDS["calibration"][0].most == 900
    (verdict,) = check.verdicts("calibration", found[0])
    assert not verdict.is_missed
    assert verdict.at in calibration.METHODS


def test_each_layer_says_once_when_its_pruning_begins(found):
    said = [line.partition(" s, ")[2] for line in found[1]]
    assert said == [f"{method}: layer {at} of 3" for method in calibration.METHODS for at in range(3)]


def test_weights_are_dense_before_and_pruned_by_calibrate(monkeypatch):
    model = calibration.dense_decoder(SMALL, "cpu")
    kept = [int((p.unflatten(1, (-1, 4)) != 0).sum(-1).max()) for p in model.parameters()]
    assert kept == [4] * (4 * SMALL.layers)
    assert all(float(p.std()) == pytest.approx(SMALL.hidden**-0.5, rel=0.1) for p in model.parameters())
    pruned = []
    calibrate = calibration.calibrate
    monkeypatch.setattr(
        calibration, "calibrate", lambda *args, **named: pruned.append(calibrate(*args, **named))
    )
    step = calibration.steps(SMALL, "cpu", sequences=8, length=16)[1]
    step.measure(set())
    (report,) = pruned
    assert (report.method, len(report.layers)) == ("wanda", 4 * SMALL.layers)
    assert all(layer.output_error > 0 for layer in report.layers)
    assert torch.bfloat16 == model.layers[0].down.weight.dtype
