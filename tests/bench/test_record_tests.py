"""The record of the GPU suite: what pytest's report becomes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import changed_kernels, record_tests
from sparse24_plans.bench.record import is_current
from sparse24_plans.device.jit import compiler

from ..kernels import compiled_code
from .records import ROOT

REPORT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase name="a"><properties><property name="replayed" value="60000"/>
<property name="replay_mismatches" value="0"/></properties></testcase>
<testcase name="b"><properties><property name="replayed" value="500"/>
<property name="replay_mismatches" value="3"/><property name="other" value="x"/></properties></testcase>
<testcase name="c"><properties><property name="bound of mma_sp" value="0.25"/></properties></testcase>
<testcase name="d[0-x]" classname="tests.plan.test_it"><failure message="no"/>
<properties><property name="bound of mma_sp" value="0.125"/></properties></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("runs", [1, 2], ids=["in one", "and those that run alone"])
def test_record_adds_up_counts_and_keeps_largest_share_of_bound(monkeypatch, runs):
    suite = next(ElementTree.fromstring(REPORT).iter("testsuite"))
    monkeypatch.setattr(record_tests, "_tests", lambda *given: [suite])
    monkeypatch.setattr(record_tests.importlib.util, "find_spec", lambda name: runs == 2 or None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert record_tests._suite(()) == {
        "passed": 2 * runs,
        "failed": runs,
        "skipped": runs,
        "replayed": 60500 * runs,
        "replay_mismatches": 3 * runs,
        "bounds": {"mma_sp": 0.25},
        "failed_tests": ["tests/plan/test_it.py::d[0-x]"],
    }


def test_every_gpu_that_is_visible_gets_its_processes(monkeypatch):
    given: list[str] = []

    def tests(expression: str, arguments: tuple[str, ...]) -> list[ElementTree.Element]:
        given.extend(arguments)
        return []

    monkeypatch.setattr(record_tests, "_tests", tests)
    monkeypatch.setattr(record_tests.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    record_tests._suite(())
    of = "--tx=16*popen//env:CUDA_VISIBLE_DEVICES="
    assert [word for word in given if word.startswith("--tx")] == [f"{of}1", f"{of}3"]


# Parts of a record ----------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The parts that were run, and the file that they are written to."""
    ran: list[str] = []
    monkeypatch.setattr(record_tests, "machine", lambda: {"gpu": "here"})
    monkeypatch.setattr(
        record_tests, "_suite", lambda given: ran.append("suite") or {"passed": 7, "failed": 0}
    )
    monkeypatch.setattr(
        record_tests, "_fuzz", lambda: ran.append("fuzz") or {"fuzz_cases": 9, "fuzz_failures": 0}
    )
    monkeypatch.chdir(Path(__file__).parents[2])
    return ran, tmp_path / "record.json"


def test_a_record_has_both_parts(parts):
    ran, path = parts
    assert record_tests.main(str(path)) == 0
    found = json.loads(path.read_text())
    assert ran == ["suite", "fuzz"]
    assert (found["passed"], found["fuzz_cases"]) == (7, 9)
    assert is_current(found)


@pytest.mark.parametrize(("only", "kept"), [("suite", "fuzz_cases"), ("fuzz", "passed")])
def test_a_part_alone_leaves_the_other(parts, only, kept):
    ran, path = parts
    record_tests.main(str(path))
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, kept: 1}))
    ran.clear()
    assert record_tests.main(str(path), f"--only={only}") == 0
    assert ran == [only]
    assert json.loads(path.read_text()) == {**before, kept: 1}


def test_the_first_part_makes_the_record(parts):
    ran, path = parts
    assert record_tests.main(str(path), "--only=suite") == 0
    assert ran == ["suite"]
    assert "fuzz_cases" not in json.loads(path.read_text())


def test_shares_of_the_suite_add_up_to_it(parts, monkeypatch):
    _, path = parts
    summaries = {
        "1/2": {"passed": 7, "failed": 1, "bounds": {"mma_sp": 0.5}},
        "2/2": {"passed": 5, "failed": 0, "bounds": {"mma_sp": 0.25, "wgmma_sp": 0.5}},
    }
    monkeypatch.setattr(record_tests, "_suite", lambda given: summaries[given[0].removeprefix("--share=")])
    assert record_tests.main(str(path), "--only=suite", "--share=1/2") == 0
    assert "passed" not in json.loads(path.read_text())
    assert record_tests.main(str(path), "--only=suite", "--share=2/2") == 1
    found = json.loads(path.read_text())
    assert (found["passed"], found["failed"]) == (12, 1)
    assert found["bounds"] == {"mma_sp": 0.5, "wgmma_sp": 0.5}
    assert "shares" not in found


@pytest.mark.parametrize("in_shares", [False, True])
def test_what_failed_is_run_again_and_counted_as_it_ends(parts, monkeypatch, in_shares):
    _, path = parts
    failed = ["tests/plan/test_it.py::a", "tests/plan/test_it.py::b[0]"]
    suite = {"passed": 7, "failed": 2, "skipped": 0, "bounds": {"mma_sp": 0.5}, "failed_tests": failed}
    good = {"passed": 3, "failed": 0, "skipped": 0, "bounds": {}}
    summaries = {(): suite, ("--share=1/2",): good, ("--share=2/2",): suite}
    monkeypatch.setattr(record_tests, "_suite", lambda given: summaries[given])
    for share in ("1/2", "2/2") if in_shares else ("",):
        record_tests.main(str(path), "--only=suite", *([f"--share={share}"] if share else ()))
    ran: list[tuple[str, ...]] = []
    report = (
        '<testsuite tests="2" failures="1"><testcase name="b[0]" classname="tests.plan.test_it"><failure/>'
    )
    again = ElementTree.fromstring(report + "</testcase></testsuite>")
    monkeypatch.setattr(record_tests, "_tests", lambda _, given: ran.append(given) or [again])
    assert record_tests.main(str(path), "--only=again") == 1
    found = json.loads(path.read_text())
    assert ran == [tuple(failed)]
    assert (found["passed"], found["failed"], found["run_again"]) == (8 + 3 * in_shares, 1, 2)
    assert found["failed_tests"] == failed[1:]
    assert found["bounds"] == {"mma_sp": 0.5}


def test_what_runs_alone_is_collected_alone(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    files = record_tests._files_with("mark.alone", ("--share=1/2",))
    assert "tests/plan/test_capture.py" in files
    assert "tests/plan/test_operands.py" not in files
    assert record_tests._files_with("mark.alone", ("tests/plan/test_capture.py::test_it",)) == []


def test_a_part_of_other_kernels_is_not_kept(parts):
    ran, path = parts
    path.write_text(json.dumps({"kernels_sha256": "of others", "passed": 1}))
    with pytest.raises(SystemExit, match="run both parts"):
        record_tests.main(str(path), "--only=fuzz")
    assert ran == []


def test_a_part_that_there_is_not(parts):
    with pytest.raises(SystemExit, match="expected suite, fuzz or again, got all"):
        record_tests.main(str(parts[1]), "--only=all")


# Changed kernels ----------------------------------------------------------------------------------


def compilation(source: str, code: str | None, text: str = "") -> dict:
    return {"source": source, "text": text or f"text of {code}", "code": code}


def test_kernels_differ_by_their_machine_code_alone():
    old = [
        compilation("gemm/a.cu", "1"),
        compilation("gemm/a.cu", "2"),
        compilation("gemm/b.cu", None, "same"),
    ]
    new = [compilation("gemm/a.cu", "2", "x"), compilation("gemm/a.cu", "1", "y")]
    new.append(compilation("gemm/b.cu", None, "same"))
    assert changed_kernels.differing(old, new, {}) == {}
    new[0] = compilation("gemm/a.cu", "3")
    assert changed_kernels.differing(old, new, {}) == {"gemm/a.cu": (1, 1)}


def test_renamed_file_is_found_by_code_or_by_option():
    old, new = [compilation("gemm/a.cu", "1")], [compilation("gemm/b.cu", "1")]
    assert changed_kernels.differing(old, new, {}) == {}
    new.append(compilation("gemm/b.cu", "2"))
    assert changed_kernels.differing(old, new, {}) == {"gemm/a.cu": (0, 1), "gemm/b.cu": (2, 0)}
    assert changed_kernels.differing(old, new, {"gemm/a.cu": "gemm/b.cu"}) == {"gemm/b.cu": (1, 0)}


def test_only_tests_without_changed_kernels_are_left_out():
    options = changed_kernels.options_of
    assert "--ignore=tests/blocksparse" in options(["gemm/wgmma_sp.cu"])
    assert "--ignore=tests/gemm" in options(["blocksparse/blocks_wgmma.cu"])
    assert options(["gemm/wgmma_sp.cu", "blocksparse/blocks_wgmma.cu"]) == ["--ignore=tests/prepare"]
    assert options(["gemm/wgmma_sp.cu", "weights/inflate.cu"]) == []
    named = {one for name in ("gemm", "blocksparse", "prepare") for one in options([f"{name}/x.cu"])}
    assert all((ROOT / one.removeprefix("--ignore=")).is_dir() for one in named)


def test_only_instructions_change_machine_code_not_macros_or_comments():
    """A small kernel is compiled with other macros, comments and instructions."""
    source = """extern "C" __global__ void NAME(float* p) { p[threadIdx.x] = CODE; }"""
    codes = {
        (name, code): compiled_code.machine_code(
            compiler._compile(
                {"a.cu": source.replace("NAME", name).replace("CODE", code).encode()},
                ["-arch=sm_90a"],
                "getCUBIN",
                "a test",
            )[0]
            + b"\0"
        )
        for name, code in (("f", "1.0f"), ("g", "1.0f /* one */"), ("f", "2.0f"))
    }
    assert codes["f", "1.0f"] == codes["g", "1.0f /* one */"] != codes["f", "2.0f"]


def played_trees(monkeypatch, old: list[dict], new: list[dict]) -> list[set[str]]:
    """Play the compilations of a commit's tree and this one. Return the texts that need no compiling."""
    left_out: list[set[str]] = []

    def compiled(tree: object, arch: str, *, known: Iterable[str] = (), texts: bool = False) -> list[dict]:
        assert arch == "sm_90a"
        if not texts:
            left_out.append(set(known))
        rows = new if tree == changed_kernels.ROOT else old
        return [{**one, "code": None} if texts or one["text"] in known else one for one in rows]

    monkeypatch.setattr(changed_kernels, "tree_of", lambda commit: nullcontext(f"tree of {commit}"))
    monkeypatch.setattr(changed_kernels, "compiled", compiled)
    return left_out


def test_files_with_the_same_texts_are_not_compiled(monkeypatch):
    same = compilation("gemm/a.cu", "one", "1")
    old, new = compilation("gemm/b.cu", "two", "2"), compilation("gemm/b.cu", "three", "3")
    left_out = played_trees(monkeypatch, [same, old], [same, new])
    assert changed_kernels.changed_since("main", {}) == {"gemm/b.cu": (1, 1)}
    assert left_out == [{"1"}, {"1"}]


def test_another_text_of_the_same_code_is_no_change(monkeypatch):
    one = compilation("gemm/a.cu", "one", "1")
    left_out = played_trees(monkeypatch, [one], [{**one, "text": "2"}])
    assert changed_kernels.changed_since("main", {}) == {}
    assert left_out == [set(), set()]


def test_nothing_is_compiled_if_no_text_differs(monkeypatch):
    one = compilation("gemm/a.cu", "one", "1")
    left_out = played_trees(monkeypatch, [one], [one])
    assert changed_kernels.changed_since("main", {}) == {}
    assert left_out == []


def test_a_commit_that_does_not_exist_is_refused():
    with pytest.raises(SystemExit, match="--since: expected a commit, got 'nowhere'"):
        record_tests.main("--only=changed", "--since", "nowhere")


def test_what_changed_since_a_commit_is_listed_or_tested(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    asked, ran = [], []

    def changed_since(commit: str, renamed: dict, arch: str) -> dict:
        assert arch == "sm_90a"
        asked.append((commit, renamed))
        return {"gemm/mma_sp.cu": (2, 1)}

    monkeypatch.setattr(changed_kernels, "changed_since", changed_since)
    monkeypatch.setattr(record_tests, "_suite", lambda given: ran.append(given) or {"failed": 1})
    words = ("--only=changed", "--since", "main", "--renamed", "gemm/a.cu=gemm/b.cu")
    assert record_tests.main(*words, "--list") == 0
    assert asked == [("main", {"gemm/a.cu": "gemm/b.cu"})]
    assert "gemm/mma_sp.cu: 2 compilations are new, 1 are gone" in capsys.readouterr().out
    assert ran == []
    assert record_tests.main(*words, "-x") == 1
    assert ran == [(*changed_kernels.options_of(["gemm/mma_sp.cu"]), "-x")]


def test_a_record_needs_the_name_of_its_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="name of the record"):
        record_tests.main("--only=suite")
