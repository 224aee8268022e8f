"""Transformers knows our models whichever is imported first; a host that we can't extend still works."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .llamas import saved_llama

folder = pytest.fixture(saved_llama, scope="module")


FIRST_OURS = """
import sparse24_plans.torch
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
"""
FIRST_THEIRS = """
from transformers import AutoModelForCausalLM
import sparse24_plans.torch
"""
IN_FORKS = """
import os, sys, torch, torch._dynamo, torch.distributed.tensor, huggingface_hub, safetensors, tokenizers
for imports in sys.argv[2:]:
    if os.fork() == 0:
        exec(imports)
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        print(type(model.model.layers[0].mlp).__name__, flush=True)
        os._exit(0)
    os.wait()
"""
"""Modules whose order of import doesn't matter are imported once, because that takes seconds."""


def test_importing_the_package_before_or_after_transformers_registers_it(folder):
    command = [sys.executable, "-c", IN_FORKS, str(folder), FIRST_OURS, FIRST_THEIRS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["Sparse24GatedMLP"] * 2, found.stderr


def test_host_that_lacks_what_is_needed_is_logged_and_works(tmp_path, monkeypatch, caplog):
    from sparse24_plans.torch.late_import import after_import

    (tmp_path / "some_host.py").write_text("name = 'host'")
    (tmp_path / "some_integration.py").write_text("raise ImportError('some_host is too old')")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    after_import("some_host", "some_integration")
    import some_host

    assert some_host.name == "host"
    assert "some_host is too old" in caplog.text
    assert sys.meta_path == before
