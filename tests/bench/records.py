"""The committed records, and where they lie."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def record(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())
