"""Run the GPU suite, write its record: ``python -m benchmarks.record_tests OUT.json [pytest arguments]``."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from .harness import ROOT, environment


def main(out: str, *arguments: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
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
