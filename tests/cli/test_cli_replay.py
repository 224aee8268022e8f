"""``sparse24 replay``: what it says, and its exit codes."""

from __future__ import annotations

import pytest

from sparse24_plans import save_run

from ..gemm.test_replay import ran
from .test_cli import run, run_json


@pytest.fixture
def record(tmp_path):
    def written(flip: tuple[int, int] | None = None):
        plan, args, bits = ran("hopper_tc/slices=4", element="bf16", out_element="f32")
        if flip is not None:
            bits[flip] ^= 1
        save_run(tmp_path / "run.safetensors", plan, args)
        return tmp_path / "run.safetensors"

    return written


def test_equal_bits(record):
    said = run("replay", record()).stdout
    assert "forward: n=5 m=24 k=520, bf16 to f32, epilogue identity" in said
    assert "recorded: host_tensor_core on host, version " in said
    assert "arithmetic: hopper_tc/slices=4" in said
    assert "120 of 120 results computed again: all bits are equal" in said


def test_a_difference(record):
    said = run("replay", record((3, 11)), exit_code=1).stdout
    assert "120 of 120 results computed again: 1 differ" in said
    assert "the first: token 3, output 11" in said
    for word in ("recorded", "computed", "parted"):
        assert f"\n  {word}" in said


def test_as_json(record):
    answer = run_json("replay", record(), "--samples", 50, "--seed", 2)
    assert (answer["equal"], answer["compared"], answer["results"]) == (True, 50, 120)
    answer = run_json("replay", record((0, 0)), exit_code=1)
    assert (answer["equal"], answer["differing"]) == (False, 1)
    assert (answer["first"]["token"], answer["first"]["output"]) == (0, 0)


def test_what_is_no_record(tmp_path):
    (tmp_path / "text").write_text("no record")
    assert "expected a safetensors file" in run("replay", tmp_path / "text", exit_code=1).stderr
    assert "--samples" in run("replay", tmp_path / "text", "--samples", 0, exit_code=2).stderr
