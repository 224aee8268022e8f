"""The documents and examples, and the Python that they show.

``python -m tests.documents FOLDER`` writes the Python of every page, and a copy of every example, for type
checkers: a module each, line for line where the page has it, and pyright's own rules as its configuration.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = sorted({*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("[be]*/**/*.md")})
FENCE = re.compile(r"^```(?P<mark>.*)\n(?P<body>(?:(?!```).*\n)*)```$", re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(first line, mark, text) of every fenced block."""
    text = page.read_text()
    return [
        (text.count("\n", 0, block.start("body")) + 1, block["mark"].strip(), block["body"])
        for block in FENCE.finditer(text)
    ]


def code_of(page: Path) -> str:
    """The Python of a page on the page's own lines, including blocks that need a GPU."""
    lines: list[str] = []
    for first, mark, body in blocks(page):
        if mark.startswith("python"):
            lines += [""] * (first - 1 - len(lines)) + body.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def write_modules(folder: Path) -> list[Path]:
    """One for each page with Python in it, named after the page, and one for each example."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{page.stem.lower()}_page.py": code_of(page) for page in DOCUMENTS}
    for name, code in pages.items():
        if code:
            (folder / name).write_text(code)
    for path in EXAMPLES:
        shutil.copy(path, folder / f"example_{path.name}")
    return sorted(folder.glob("*.py"))


if __name__ == "__main__":
    rules = {
        "typeCheckingMode": "standard",
        "reportMissingImports": "none",
        "reportMissingModuleSource": "none",
    }
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    Path(sys.argv[1], "pyrightconfig.json").write_text(json.dumps(rules))
    print(*write_modules(Path(sys.argv[1])), sep="\n")
