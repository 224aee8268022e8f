"""The search: what replaces a default, in which order problems go, what it may promise, and its command."""

from __future__ import annotations

import json
from unittest import mock

import pytest
from typer.testing import CliRunner

from sparse24_plans import DeviceProperties, InvalidProblemError, TuningTable, UnsupportedError, tune
from sparse24_plans.cli import measuring
from sparse24_plans.cli.app import app
from sparse24_plans.tuning import search

from .cases import DESC, H200, of_n


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ([], (None, 0.0, 0.0)),
        ([({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 9.0), ({}, 10.0)], ({"a": 1}, 9.0, 10.0)),
        ([({"a": 1}, 9.8), ({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 10.0 / 1.03), ({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 12.0), ({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 12.0), ({"a": 2}, 11.0)], ({"a": 2}, 11.0, 11.0)),
    ],
    ids=str,
)
def test_only_a_gain_above_3_percent_flips(times, want):
    assert search.choose(times) == want


def test_problems_of_one_weight_follow_each_other(played):
    small, large = {"m": 256, "k": 256}, {"m": 4096, "k": 4096}
    problems = [DESC.model_copy(update={"n": n, **size}) for n in (16, 8) for size in (large, small)]
    trials: list = []
    tune([*problems, problems[0]], kernels=["cusparselt"], on_trials=trials.append)
    assert [(one.problem.m, one.problem.n) for one in trials] == [(256, 16), (256, 8), (4096, 16), (4096, 8)]


def test_a_promise_needs_the_self_test_and_another_process(played):
    found = tune(of_n(16, 24, 64), kernels=["cusparselt"])
    promises = {one.problem.n: one.promises for one in found.entries}
    assert promises == {16: ("deterministic", "bit_stable_on_same_hardware"), 24: (), 64: ()}


@pytest.mark.parametrize("name", ["inflate_cublas", "typo"])
def test_a_kernel_that_cannot_be_tuned(played, name):
    with pytest.raises(InvalidProblemError, match="kernels: expected names of kernels that can be tuned"):
        tune(of_n(16), kernels=[name])


def test_problems_that_no_kernel_serves(played):
    with pytest.raises(UnsupportedError, match="serves any of the problems"):
        tune(of_n(9), kernels=["cusparselt"])


def test_the_host_has_nothing_to_tune():
    host = mock.patch.object(search, "resolve", return_value=DeviceProperties(kind="host"))
    with host, pytest.raises(UnsupportedError, match="device"):
        tune(of_n(16))


# The command --------------------------------------------------------------------------------------


def test_the_command_writes_the_table(played, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "resolve", lambda device: H200)
    out = tmp_path / "table.json"
    words = ["tune", "-o", str(out), "--n", "16,64", "--shape", "4096x4096", "--kernel", "cusparselt"]
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["chosen"]["configuration"] for row in document["results"]] == [{"algorithm": 5}] * 2
    assert [one.problem.n for one in TuningTable.load(out).entries] == [16, 64]
    words[words.index("16,64")] = "128"
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    assert [one.problem.n for one in TuningTable.load(out).entries] == [16, 64, 128], "it adds"
    assert "algorithm 5" in shown.stdout
    assert "left out, it ended the CUDA context: cusparselt bf16 {'algorithm': 2}" in shown.stdout


@pytest.mark.parametrize("shape", ["4096", "4096x", "4096x4095", "axb"])
def test_the_command_refuses_what_is_no_shape(shape, tmp_path):
    words = ["tune", "-o", str(tmp_path / "t.json"), "--n", "16", "--shape", shape]
    assert CliRunner().invoke(app, words).exit_code == 2
