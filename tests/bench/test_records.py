"""The committed records are well-formed. ``python -m benchmarks.check`` judges their figures."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.check import FIELDS, faults
from benchmarks.kinds import kind_of

from .records import RESULTS, record

NAMES = sorted(path.name for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_record_is_well_formed(name):
    assert faults(kind_of(name), record(name)) == []


def test_the_records_of_a_release_are_there():
    assert {"grid", "random", "torch", "blocksparse", "compile", "tests"} <= {kind_of(name) for name in NAMES}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("h200.json", "grid"), ("h100.json", "grid"), ("h100-random.json", "random"), ("a-b-c.json", "b-c")],
)
def test_files_name_says_its_kind_and_no_gpu_is_special(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", [name for name in NAMES if FIELDS[kind_of(name)]])
def test_rows_without_field_or_with_wrong_one_are_named(name):
    kind = kind_of(name)
    short = {**record(name), **{part: record(name)[part][:1] for part in FIELDS[kind]}}
    known = faults(kind, short)
    for part, fields in FIELDS[kind].items():
        for field in fields if short[part] else ():
            for change in ("removed", "wrong"):
                broken: Any = {**short, part: copy.deepcopy(short[part])}
                if change == "removed":
                    del broken[part][0][field]
                else:
                    broken[part][0][field] = [1]
                found = [one for one in faults(kind, broken) if one not in known]
                assert any(field in one for one in found), (part, field, change)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema": 2}, "schema"),
        ({"gpu": ""}, "gpu"),
        ({"gemm": {}}, "list of rows"),
        ({"kernel_files": None}, "kernel_files"),
    ],
)
def test_a_malformed_head_is_named(change, word):
    assert any(word in one for one in faults("grid", {**record("h200.json"), **change}))


def test_what_is_no_record_at_all():
    assert faults("grid", [])
    assert faults("typo", {})


def test_two_rows_of_a_cell_and_unknown_backends_are_named():
    row = record("h200.json")["gemm"][0]
    found = faults("grid", {**record("h200.json"), "gemm": [row, row, {**row, "backend": "typo"}]})
    assert [one.split(":")[0] for one in found] == ["gemm", "gemm"]
    assert "'typo'" in found[0]
    assert "2 rows" in found[1]
