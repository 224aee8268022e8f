"""The kernels whose machine code differs from another commit's, and the GPU tests of what uses them.

Both trees compile what their own tests compile for an architecture. Code is compared by kernel file, as the
set of its compilations' machine code. So macros, functions, headers and files can be renamed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_SCRIPT = "tests/kernels/compiled_code.py"
_UNTOUCHED = {
    "gemm": {"tests/blocksparse", "tests/prepare", "tests/torch/blocksparse"},
    "blocksparse": {"tests/gemm", "tests/prepare", "tests/weights", "tests/formats", "tests/checkpoints"},
    "prepare": {"tests/blocksparse", "tests/torch/blocksparse"},
}
"""Folder of kernels_cu -> the tests that never run its kernels. Kernels of other folders need all tests."""
Rows = list[dict[str, Any]]


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit in a folder of their own, with this tree's script that lists compilations."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
        if archive.returncode:
            raise SystemExit(f"--since: expected a commit, got {commit!r}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        path = Path(folder, _SCRIPT)
        path.write_bytes((ROOT / _SCRIPT).read_bytes())
        yield Path(folder)


def compiled(tree: Path, arch: str, *, known: Iterable[str] = (), texts: bool = False) -> Rows:
    """Machine code of a tree's tested compilations, or only the source text if it is known."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sorted(known), file)
        file.flush()
        command = [sys.executable, "-m", "tests.kernels.compiled_code", "--arch", arch, "--known", file.name]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(
            [*command, *(["--texts"] if texts else [])],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def differing(old: Rows, new: Rows, renamed: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Kernel file -> how many codes only the new and only the old tree have, where that is any.

    ``renamed`` gives the new names of files. A file that only one tree has, with the codes of one that only
    the other has, is the same file under another name.
    """
    before, after = _codes(old, renamed), _codes(new, {})
    for name in sorted(before.keys() - after.keys()):
        same = (other for other in after.keys() - before.keys() if after[other] == before[name])
        if (other := next(same, None)) is not None:
            before[other] = before.pop(name)
    found = {}
    for name in sorted(before.keys() | after.keys()):
        added, gone = after[name] - before[name], before[name] - after[name]
        if added or gone:
            found[name] = len(added), len(gone)
    return found


def _codes(rows: Rows, renamed: Mapping[str, str]) -> defaultdict[str, set[str]]:
    """The machine code of each file's compilations, or their text where both trees have the same."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        found[renamed.get(row["source"], row["source"])].add(row["code"] or row["text"])
    return found


def changed_since(
    commit: str, renamed: Mapping[str, str], arch: str = "sm_90a"
) -> dict[str, tuple[int, int]]:
    """The kernel files whose machine code differs from the commit's, as ``differing`` gives them.

    A file of which all source texts are the same in both trees is not compiled.
    """
    with tree_of(commit) as tree:
        old, new = (_texts(compiled(one, arch, texts=True)) for one in (tree, ROOT))
        if old == new:
            return {}
        same = {text for name, its in old.items() if its == new.get(name) for text in its}
        return differing(compiled(tree, arch, known=same), compiled(ROOT, arch, known=same), renamed)


def _texts(rows: Rows) -> dict[str, set[str]]:
    found = defaultdict(set)
    for row in rows:
        found[row["source"]].add(row["text"])
    return dict(found)


def options_of(changed: Iterable[str]) -> list[str]:
    """Options of pytest that leave out the tests that never run these kernel files."""
    untouched = [_UNTOUCHED.get(name.split("/")[0], set()) for name in changed]
    return [f"--ignore={path}" for path in sorted(set.intersection(*untouched))] if untouched else []
