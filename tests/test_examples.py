"""The examples run, and so does every Python block of README.md and docs/.

A block marked ``python`` is executed. A block marked ``python gpu-only`` needs a GPU. A block that is marked
``python torch`` or imports torch needs PyTorch, one marked ``python peft`` PEFT as well. The blocks of a file
share one namespace, in order.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

import sparse24_plans
from benchmarks.guarantee_table import BITS, ERRORS
from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.formats.table import FORMATS
from sparse24_plans.gemm.kernel_table import ENTRIES

from .documents import DOCUMENTS, EXAMPLES, FENCE, PAGES, ROOT, blocks
from .forks import Fork
from .support import HAS_GPU

MARKS = {"python", "python gpu-only", "python torch", "python peft", "bash", "c", "console", "text"}


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_ladder_is_numbered_and_listed():
    assert [path.name[:3] for path in EXAMPLES] == [f"{i:02}_" for i in range(1, len(EXAMPLES) + 1)]
    listed = re.findall(r"^\|`(\w+\.py)`", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert listed == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    done = Fork(path, cwd=ROOT).wait()
    assert done.returncode == 0, (done.stdout[-2000:] + done.stderr[-4000:]).decode()
    assert done.stdout.strip()


def runs_here(mark: str, body: str) -> bool:
    has_torch = find_spec("torch") is not None
    plain = has_torch or not re.search(r"^import torch$", body, re.MULTILINE)
    has_peft = has_torch and find_spec("peft") is not None
    known = {"python": plain, "python gpu-only": HAS_GPU, "python torch": has_torch, "python peft": has_peft}
    return known.get(mark, False)


@pytest.mark.parametrize("page", DOCUMENTS, ids=relative)
def test_python_blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they may write
    with patch.dict(FORMATS):  # what a page registers ends with it
        run_blocks(page)


def run_blocks(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "document"}
    for line, mark, body in blocks(page):
        if runs_here(mark, body):
            # Line numbers in a traceback are those of the page.
            exec(compile("\n" * (line - 1) + body, str(page), "exec"), namespace)


def test_the_guides_show_code_that_runs():
    """Pages of tables and advice, the contributors' page and the page on versions need no code."""
    shown = {
        relative(page)
        for page in DOCUMENTS
        for _, mark, _ in blocks(page)
        if mark in ("python", "python torch")
    }
    assert {relative(page) for page in DOCUMENTS} - shown <= {
        "docs/architecture.md",
        "docs/command-line.md",
        "docs/export.md",  # its code is C: tests/export/test_document.py
        "docs/kernels.md",
        "docs/operations.md",
        "docs/performance.md",
        "docs/versioning.md",
        "docs/when-it-pays.md",
    }


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


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = FENCE.sub("", page.read_text())
    heads = [re.sub(r"[`*]|\[|\]\(.*?\)", "", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_to_headings_lead_somewhere(page):
    found = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{target}#{anchor}"
        for target, anchor in found
        if anchor not in anchors((page.parent / target) if target else page)
    ]
    assert not missing


def test_named_files_of_tests_exist():
    for page in PAGES:
        for name in re.findall(r"\btests/[\w/]*\w(?:\.py|\.json)?", page.read_text()):
            assert (ROOT / name).exists(), f"{relative(page)} names {name}"


def test_named_tests_exist():
    """Pages name tests as their evidence; a name may end in an ellipsis."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    functions = re.findall(r"def (test_\w+)", sources)
    for page in PAGES:
        for name, ellipsis in re.findall(r"`(test_\w+?)(\.\.\.)?`", page.read_text()):
            known = any(f.startswith(name) for f in functions) if ellipsis else name in functions
            assert known, f"{relative(page)} names {name}"


def imported(code: str) -> set[str]:
    """Modules of ours that the code imports from or names in an import."""
    nodes = list(ast.walk(ast.parse(code)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    taken = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in plain | taken if name.split(".")[0] == "sparse24_plans"}


def names_taken(code: str) -> set[str]:
    """Names imported from the package itself."""
    return {
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module == "sparse24_plans"
        for alias in node.names
    }


CODE = {relative(path): path.read_text() for path in EXAMPLES} | {
    f"{relative(page)}:{line}": body
    for page in [*DOCUMENTS, ROOT / "examples" / "README.md"]
    for line, mark, body in blocks(page)
    if mark.startswith("python")
}


@pytest.mark.parametrize("code", CODE.values(), ids=list(CODE))
def test_what_is_shown_imports_from_the_package_alone(code):
    """Or from its part for PyTorch; what users need is public."""
    assert imported(code) <= {"sparse24_plans", "sparse24_plans.torch"}
    assert names_taken(code) <= set(sparse24_plans.__all__)


def promises_in_the_guide() -> dict[str, dict[str, str]]:
    """Return what the tables of docs/guarantees.md say: kernel -> field -> cell."""
    text = (ROOT / "docs" / "guarantees.md").read_text()
    tables = text.partition("<!-- figures: guarantees -->")[2].partition("<!-- end -->")[0]
    fields = {head: field for field, head in (BITS | ERRORS).items()}
    found: dict[str, dict[str, str]] = {}
    for table in tables.strip().split("\n\n"):
        head, _, *lines = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        )
        for first, *cells in lines:
            for name in re.findall(r"`(\w+)`", first):
                said = zip((fields[label] for label in head[1:]), cells, strict=True)
                found.setdefault(name, {}).update(said)
    return found


@pytest.mark.parametrize("name", promises_in_the_guide())
def test_the_guide_says_what_the_registry_says(name):
    said = promises_in_the_guide()[name]
    spec = next(spec for spec in ENTRIES if spec.name == name)
    element = "bf16" if "bf16" in spec.elements else spec.elements[0]
    promised = spec.guarantee(GemmSparse24Descriptor(n=1, m=8, k=8, element=element)).model_dump(mode="json")
    assert said.keys() == promised.keys()
    usual = {field: cell.split(";")[0].removesuffix("\\*").strip("`") for field, cell in said.items()}
    for field in ("subnormals", "nonfinite", "accumulator"):
        assert usual[field] == promised[field]
    for field in (field for field, value in promised.items() if isinstance(value, bool)):
        assert usual[field] == ("yes" if promised[field] else "no")
    short = {"s8": "s8", "fp8_e4m3": "fp8"}.get(element)
    roundoffs = dict(part.split(": ") for part in said["unit_roundoff"].split("; ")[1:])
    words = {0.0: "0", 3 * 2.0**-24: "3 * 2^-24"} | {2.0**-i: f"2^-{i}" for i in (11, 13, 22, 24)}
    assert roundoffs.get(short, usual["unit_roundoff"]) == words[promised["unit_roundoff"]]
    assert usual["tanh_error"] == words[promised["tanh_error"]]
    assert usual["promoted_every"] == str(promised["promoted_every"] or "none")
    assert float(usual["terms_per_k"]) == promised["terms_per_k"]
    assert promised["arithmetic"] in (None, usual["arithmetic"])


@pytest.mark.parametrize("field", BITS | ERRORS)
def test_the_guide_explains_every_field_and_names_its_test(field):
    text = (ROOT / "docs" / "guarantees.md").read_text().partition("## The fields")[2].partition("\n## ")[0]
    (row,) = re.findall(rf"^\|`{field}`.*\|$", text, re.MULTILINE)
    assert re.search(r"\|`test_\w+(?:\.\.\.)?`[^|]*\|$", row)
    head = (BITS | ERRORS)[field]
    assert head == field or f"({head})" in row.split("|")[1]


def test_every_row_of_the_registry_is_documented():
    names = [spec.name for spec in ENTRIES]
    page = (ROOT / "docs" / "kernels.md").read_text().partition("\n## ")[0]
    assert re.findall(r"^\|`(\w+)`\|", page, re.MULTILINE) == names
    assert sorted(promises_in_the_guide()) == sorted(names)
