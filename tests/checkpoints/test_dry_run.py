"""A dry run of compression reports what a run reports, by the headers alone, and writes nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sparse24_plans import InvalidProblemError
from sparse24_plans.checkpoints.compress import compress_checkpoint

from ..cli.commands import run, run_json
from .models import dense_file, random_array, snapshot


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    path = tmp_path / "dense.safetensors"
    weights = {f"layer.{i}.weight": random_array((16 + 8 * i, 32)) for i in range(7)}
    dense_file(path, {**weights, "embed.weight": random_array((40, 32)), "norm": random_array((24,))})
    return path


@pytest.mark.parametrize("patterns", [{}, {"include": ["embed*"]}, {"exclude": ["layer.[123].*"]}])
def test_it_reports_what_a_run_reports(dense, patterns):
    out, seen = dense.with_name("out"), []
    foreseen = compress_checkpoint(dense, out, dry_run=True, on_tensor=seen.append, **patterns)
    assert list(dense.parent.iterdir()) == [dense]
    done = compress_checkpoint(dense, out, device="host", **patterns)
    assert seen == foreseen == [replace(report, kept_energy=None) for report in done]


def test_it_reads_no_data(dense):
    """Values of a file whose data is gone, but for its size."""
    header = 8 + int.from_bytes(dense.read_bytes()[:8], "little")
    size = dense.stat().st_size
    os.truncate(dense, header)
    os.truncate(dense, size)
    assert len(compress_checkpoint(dense, dense.with_name("out"), dry_run=True)) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["typo*"]}, "matches no tensor"),
        ({"exclude": "layer*"}, "expected a sequence of patterns"),
    ],
)
def test_it_refuses_what_a_run_refuses(dense, options, message):
    with pytest.raises(InvalidProblemError, match=message):
        compress_checkpoint(dense, dense.with_name("out"), dry_run=True, **options)


def test_names_that_a_run_would_write_twice(tmp_path):
    path = tmp_path / "dense.safetensors"
    dense_file(path, {"w": random_array((8, 16)), "w.meta24": random_array((3,))})
    with pytest.raises(InvalidProblemError, match="expected names that occur once"):
        compress_checkpoint(path, tmp_path / "out", dry_run=True)


def test_the_command_says_so(dense):
    out = dense.with_name("out")
    out.write_bytes(b"precious")
    before = snapshot(dense.parent)
    words = ("compress", dense, "-o", out, "--dry-run")
    text = run(*words).stdout
    assert "7 tensors to compress; the 5 largest (--all shows the others):" in text
    assert text.splitlines()[-1].startswith("dry run, nothing was written: 7 compressed, 2 copied: ")
    assert "would become about" in text
    document = run_json(*words)
    assert document["dry_run"] is True
    assert {tensor["kept_energy"] for tensor in document["tensors"]} == {None}
    assert snapshot(dense.parent) == before
    run("compress", dense, "-o", out, "--force")
    assert document["destination_bytes"] == pytest.approx(out.stat().st_size, rel=0.2)
