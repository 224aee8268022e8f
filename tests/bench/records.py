"""The committed records, and where they lie."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def record(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def missed(*values: object, reason: str) -> object:
    """Parameters of a test that the record doesn't pass yet."""
    return pytest.param(*values, marks=pytest.mark.xfail(strict=True, reason=reason))


def asked(cases: Iterable[tuple], not_reached: Mapping[tuple, str]) -> list:
    """Parameters of a test, of which the record doesn't pass some yet: why."""
    return [missed(*case, reason=not_reached[case]) if case in not_reached else case for case in cases]
