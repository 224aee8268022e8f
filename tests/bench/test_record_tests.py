"""The record of the GPU suite: what pytest's report becomes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from sparse24_plans.bench import record_tests

REPORT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase name="a"><properties><property name="replayed" value="60000"/>
<property name="replay_mismatches" value="0"/></properties></testcase>
<testcase name="b"><properties><property name="replayed" value="500"/>
<property name="replay_mismatches" value="3"/><property name="other" value="x"/></properties></testcase>
<testcase name="c"><properties><property name="bound of mma_sp" value="0.25"/></properties></testcase>
<testcase name="d"><properties><property name="bound of mma_sp" value="0.125"/></properties></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("runs", [1, 2], ids=["in one", "and those that run alone"])
def test_the_record_adds_up_what_tests_count_and_keeps_the_largest_share_of_a_bound(monkeypatch, runs):
    suite = next(ElementTree.fromstring(REPORT).iter("testsuite"))
    monkeypatch.setattr(record_tests, "_tests", lambda *given: [suite])
    monkeypatch.setattr(record_tests.importlib.util, "find_spec", lambda name: runs == 2 or None)
    assert record_tests._suite(()) == {
        "passed": 2 * runs,
        "failed": runs,
        "skipped": runs,
        "replayed": 60500 * runs,
        "replay_mismatches": 3 * runs,
        "bounds": {"mma_sp": 0.25},
    }
