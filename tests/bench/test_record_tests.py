"""The record of the GPU suite: what pytest's report becomes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from sparse24_plans.bench import record_tests

REPORT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase name="a"><properties><property name="replayed" value="60000"/>
<property name="replay_mismatches" value="0"/></properties></testcase>
<testcase name="b"><properties><property name="replayed" value="500"/>
<property name="replay_mismatches" value="3"/><property name="other" value="x"/></properties></testcase>
<testcase name="c"/></testsuite></testsuites>"""


def test_what_tests_count_is_added_up():
    suite = next(ElementTree.fromstring(REPORT).iter("testsuite"))
    found = record_tests._counts(suite)
    assert (found["tests"], found["failures"], found["skipped"]) == (4, 1, 1)
    assert (found["replayed"], found["replay_mismatches"]) == (60500, 3)


def test_the_record_has_the_counts(monkeypatch):
    suite = next(ElementTree.fromstring(REPORT).iter("testsuite"))
    monkeypatch.setattr(record_tests, "_tests", lambda *given: record_tests._counts(suite))
    monkeypatch.setattr(record_tests.importlib.util, "find_spec", lambda name: None)
    assert record_tests._suite(()) == {
        "passed": 2,
        "failed": 1,
        "skipped": 1,
        "replayed": 60500,
        "replay_mismatches": 3,
    }
