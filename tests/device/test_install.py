"""Errors say which libraries to install, as the installed package's metadata names them."""

from __future__ import annotations

import re
import subprocess
import sys
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
def test_in_tree_that_is_not_installed_tree_is_named(monkeypatch, requires):
    def answer(name: str) -> list[str] | None:
        if requires is None:
            raise metadata.PackageNotFoundError(name)
        return requires

    monkeypatch.setattr(metadata, "requires", answer)
    assert "pip install '.[cuda13]' in the package's source folder" in install.install_advice("cuda")


def test_nothing_tells_to_fetch_the_package_from_an_index():
    """No index has the package; another one may have taken its name."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*")]
    texts += [*(ROOT / "sparse24_plans").rglob("*.py"), *(ROOT / "vendor").rglob("*.py")]
    wrong = re.compile(r"pip install [^`|\n]*\bsparse24[_-]plans\b")
    assert [path.name for path in texts if path.is_file() and wrong.search(path.read_text())] == []


# Importing CuPy -----------------------------------------------------------------------------------

WITHOUT_CUPY = """
import sys
from sparse24_plans import BackendUnavailableError, GemmSparse24Descriptor, GemmSparse24Plan
from sparse24_plans.device.install import import_cupy

searches = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "cupy":
            searches.append(name)
            raise {error}

sys.meta_path.insert(0, Finder())
for _ in range(3):
    GemmSparse24Plan.select(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"))
    try:
        import_cupy()
    except BackendUnavailableError as error:
        print(error)
assert searches == ["cupy"], searches
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ModuleNotFoundError(name='cupy')", "CuPy is not installed; "),
        ("ImportError('libfoo.so is missing')", "CuPy can't be imported (libfoo.so is missing); "),
        ("OSError('bad image')", "CuPy can't be imported (bad image); "),
    ],
)
def test_an_import_of_cupy_that_failed_is_not_tried_again(error, said):
    script = WITHOUT_CUPY.format(error=error)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line == f"{said}{install.install_advice('cuda')}" for line in lines)
