"""The examples run, and so does every Python block of README.md and docs/.

A block marked ``python`` is executed; one marked ``python gpu-only`` where there is a GPU. The blocks of a
file share one namespace, in order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .support import HAS_GPU

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCUMENTS, *(ROOT / name for name in ("VENDOR.md", "CHANGELOG.md", "examples/README.md"))]

FENCE = re.compile(r"^```(?P<mark>.*)\n(?P<body>(?:(?!```).*\n)*)```$", re.MULTILINE)
MARKS = {"python", "python gpu-only", "bash", "text"}


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(first line, mark, text) of every fenced block."""
    text = page.read_text()
    return [
        (text.count("\n", 0, block.start("body")) + 1, block["mark"].strip(), block["body"])
        for block in FENCE.finditer(text)
    ]


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_ladder_is_numbered_and_listed():
    assert [path.name[:3] for path in EXAMPLES] == [f"{i:02}_" for i in range(1, len(EXAMPLES) + 1)]
    listed = re.findall(r"^\| `(\w+\.py)`", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert listed == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_python_blocks(page):
    namespace: dict[str, object] = {"__name__": "document"}
    ran = 0
    for line, mark, body in blocks(page):
        if mark == "python" or (mark == "python gpu-only" and HAS_GPU):
            # Line numbers in a traceback are those of the page.
            exec(compile("\n" * (line - 1) + body, str(page), "exec"), namespace)
            ran += 1
    assert ran, f"{relative(page)} has no Python block"


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_blocks_are_marked(page):
    """A block that is opened but not closed, or marked with a typo, would never run."""
    found = blocks(page)
    assert 2 * len(found) == len(re.findall(r"^```", page.read_text(), re.MULTILINE))
    assert {mark for _, mark, _ in found} <= MARKS


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_named_tests_exist():
    """Pages name tests as their evidence; a name may end in an ellipsis."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    functions = re.findall(r"def (test_\w+)", sources)
    for page in PAGES:
        for name, ellipsis in re.findall(r"`(test_\w+?)(\.\.\.)?`", page.read_text()):
            known = any(f.startswith(name) for f in functions) if ellipsis else name in functions
            assert known, f"{relative(page)} names {name}"
