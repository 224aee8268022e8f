"""``sparse24 replay``: what it says, and its exit codes."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, save_run
from sparse24_plans.cli import replaying

from ..gemm.grouped_cases import Routing, grouped_case
from ..gemm.test_replay import ran
from ..support import plan_of_row
from .commands import run, run_json


@pytest.fixture
def record(tmp_path):
    def written(flip: tuple[int, int] | None = None):
        plan, args, bits = ran("hopper_tc/slices=4", element="bf16", out_element="f32")
        if flip is not None:
            bits[flip] ^= 1
        save_run(tmp_path / "run.safetensors", plan, args)
        return tmp_path / "run.safetensors"

    return written


def test_equal_bits_are_reported(record):
    said = run("replay", record()).stdout
    assert "forward: n=5 m=24 k=520, bf16 to f32, epilogue identity" in said
    assert "recorded: host_tensor_core on host, version " in said
    assert "arithmetic: hopper_tc/slices=4" in said
    assert "120 of 120 results computed again: all bits are equal" in said


def test_a_difference_is_named_by_its_place(record):
    said = run("replay", record((3, 11)), exit_code=1).stdout
    assert "120 of 120 results computed again: 1 differ" in said
    assert "the first: token 3, output 11" in said
    for word in ("recorded", "computed", "diverged"):
        assert f"\n  {word}" in said


def test_json_has_the_counts_and_the_difference(record):
    answer = run_json("replay", record(), "--samples", 50, "--seed", 2)
    assert (answer["equal"], answer["compared"], answer["results"]) == (True, 50, 120)
    answer = run_json("replay", record((0, 0)), exit_code=1)
    assert (answer["equal"], answer["differing"]) == (False, 1)
    assert (answer["first"]["token"], answer["first"]["output"]) == (0, 0)


def test_rows_that_a_router_sends_are_told_and_counted(tmp_path, monkeypatch):
    totals = []

    @contextmanager
    def progress(title, total, quiet):
        totals.append(total)
        yield lambda step: None

    monkeypatch.setattr(replaying, "progress", progress)
    desc = GemmSparse24Descriptor(n=6, m=16, k=32, element="f32", groups=2, x_rows=5, y_rows=3, top_k=2)
    plan = plan_of_row("host_strict").select(desc, device="host")
    index = np.arange(6, dtype=np.int32)
    case = grouped_case(plan, [0, 3, 6], routing=Routing(index, index.reshape(3, 2)))
    case.run()
    save_run(tmp_path / "run", plan, case.args)
    said = run("replay", tmp_path / "run").stdout
    assert (
        "forward: n=6 m=16 k=32, f32 to f32, epilogue identity, groups 2, x_rows 5, y_rows 3, top_k 2" in said
    )
    assert "48 of 48 results computed again: all bits are equal" in said
    assert totals == [48]


def test_a_seed_without_samples_is_wrong_usage(record):
    result = run("replay", record(), "--seed", 0, exit_code=2)
    assert "--seed: expected --samples with it, got 0 alone" in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_what_is_no_record(tmp_path):
    (tmp_path / "text").write_text("no record")
    assert "expected a safetensors file" in run("replay", tmp_path / "text", exit_code=1).stderr
    assert "--samples" in run("replay", tmp_path / "text", "--samples", 0, exit_code=2).stderr
