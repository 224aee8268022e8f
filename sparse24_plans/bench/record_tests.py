"""Run the GPU suite, write its record: ``python -m benchmarks.record_tests OUT.json [pytest arguments]``.

Where pytest-xdist is installed, the tests share the GPU between processes, since most of their time is
compilation; those marked ``alone`` (they measure the device's free memory, or fill it) follow one by one.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from .harness import ROOT, environment

_PROCESSES = 14


def _run(expression: str, arguments: tuple[str, ...]) -> tuple[int, Counter[str]]:
    """pytest's exit code, and how many tests ended how."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", expression]
        command += [f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    keys = ("tests", "failures", "errors", "skipped")
    return code, Counter({key: int(suite.get(key, "0")) for key in keys})


def main(out: str, *arguments: str) -> int:
    if importlib.util.find_spec("xdist"):
        together, first = _run("gpu and not alone", (f"-n{_PROCESSES}", *arguments))
        alone, second = _run("gpu and alone", arguments)
        code, count = together or alone, first + second
    else:
        code, count = _run("gpu", arguments)
    failed = count["failures"] + count["errors"]
    record = {
        **environment(),
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "date": datetime.date.today().isoformat(),
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
