"""Errors say which libraries to install, as the installed package's metadata names them."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from sparse24_plans.device import install

ROOT = Path(__file__).parents[2]
METADATA = [
    "numpy>=2.0",
    'cupy-cuda12x>=14; extra == "cuda12"',
    'nvidia-cuda-nvrtc-cu12>=12.5; python_version >= "3" and extra == "cuda12"',
    "cupy-cuda13x>=14 ; extra == 'cuda13'",
    'pytest; extra == "test"',
]


@pytest.fixture(autouse=True)
def fresh():
    install._command.cache_clear()
    yield
    install._command.cache_clear()


def test_the_libraries_of_both_cuda_versions_are_named(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: METADATA)
    assert install.install_advice("cuda") == (
        "for CUDA 13: pip install 'cupy-cuda13x>=14'; "
        "for CUDA 12: pip install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.5'"
    )


@pytest.mark.parametrize("requires", [None, []], ids=["unknown", "without extras"])
def test_in_a_tree_that_is_not_installed_the_tree_is_named(monkeypatch, requires):
    def answer(name: str) -> list[str] | None:
        if requires is None:
            raise metadata.PackageNotFoundError(name)
        return requires

    monkeypatch.setattr(metadata, "requires", answer)
    assert "pip install '.[cuda13]' in the package's source folder" in install.install_advice("cuda")


def test_nothing_tells_to_fetch_the_package_from_an_index():
    """No index has it, or not this one."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*")]
    texts += [*(ROOT / "sparse24_plans").rglob("*.py"), *(ROOT / "vendor").rglob("*.py")]
    wrong = re.compile(r"pip install [^`|\n]*\bsparse24[_-]plans\b")
    assert [path.name for path in texts if path.is_file() and wrong.search(path.read_text())] == []
