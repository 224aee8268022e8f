"""Runs the GPU suite and the fuzzer of a checkout, and writes their record.

From the checkout's root: ``python -m benchmarks.record_tests OUT.json [pytest arguments]``. With
``--only=suite`` or ``--only=fuzz`` behind the file's name that part alone is run, and the other stays as the
file has it, if it is of the same kernels. With ``--only=suite --share=I/N`` one of N shares of the tests is
run; the record says how the suite ended once all of them have been. ``--only=again`` runs the tests that
failed, after they have been mended: the record counts them as they end now, and how many they were.

``python -m benchmarks.record_tests --only=changed --since COMMIT`` writes no record: it runs the GPU tests of
the kernels whose machine code differs from the commit's, or from main's. ``--list`` only names these kernels
and needs no GPU; ``--renamed OLD=NEW`` tells of a kernel file that has another name now. Both trees are
compiled, which takes half an hour on two cores if every kernel has changed, and a minute if none has.

Where pytest-xdist is installed, the tests share the GPUs between processes, since most of their time is
compilation: each process sees one of the GPUs that CUDA_VISIBLE_DEVICES names. Tests marked ``alone`` (they
measure the device's free memory, or fill it) follow one by one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparse24_plans.bench.record import kernel_files, kernels_sha256, machine

from . import changed_kernels
from .gpus import visible_gpus

_PROCESSES = 16
"""Processes of each GPU."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of each process. Its reference products use one thread, since processes use all cores."""
_FUZZ_SECONDS = 120
_COUNTED = ("replayed", "replay_mismatches")
"""Properties of tests: results of the GPU that were computed again on the host, and those that differed."""
_FAILED, _AGAIN = "failed_tests", "run_again"
"""Names of tests, and how many were run once more."""
_SHARES, _SHARE = "shares", "--share="
"""Key of a record that holds the summary of each share of the suite until all have run, and its option."""
_BOUND = "bound of "
"""Prefix of the properties that hold a kernel's largest error, as a share of the allowed error."""


def _tests(expression: str, arguments: tuple[str, ...]) -> list[ElementTree.Element]:
    """The report of a run, in a list."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The project's own options would set the number of processes, which undoes --tx.
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--strict-markers", "-m", expression]
        command += ["--durations=15", f"--junitxml={report}", *arguments]
        subprocess.run(command, env={**os.environ, **_ONE_THREAD})
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    return [suite]


def _processes() -> list[str]:
    """Options of pytest-xdist: a fixed number of processes for each GPU."""
    return [f"--tx={_PROCESSES}*popen//env:CUDA_VISIBLE_DEVICES={gpu}" for gpu in visible_gpus()]


def _suite(arguments: tuple[str, ...]) -> dict[str, Any]:
    if importlib.util.find_spec("xdist"):
        together = _tests("gpu and not alone", ("--dist=worksteal", *_processes(), *arguments))
        return _summary(
            together + _tests("gpu and alone", (*arguments, *_files_with("mark.alone", arguments)))
        )
    return _summary(_tests("gpu", arguments))


def _files_with(marker: str, arguments: tuple[str, ...]) -> list[str]:
    """The test files that use the marker, as collecting the others takes long; none if some are named."""
    if any(Path(one.split("::")[0]).exists() for one in arguments):
        return []
    return sorted(str(path) for path in Path("tests").rglob("test_*.py") if marker in path.read_text())


def _summary(suites: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """How many tests ended how, the sums of what they count, and the largest share of each kernel's bound."""
    count: Counter[str] = Counter()
    bounds: dict[str, float] = {}
    names: list[str] = []
    for suite in suites:
        names += [
            _name(one) for one in suite.iter("testcase") if {"failure", "error"} & {it.tag for it in one}
        ]
        count.update({key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")})
        for one in suite.iter("property"):
            name, value = one.get("name", ""), one.get("value", "0")
            if name in _COUNTED:
                count[name] += int(value)
            elif name.startswith(_BOUND):
                row = name.removeprefix(_BOUND)
                bounds[row] = max(bounds.get(row, 0.0), float(value))
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    counted = {name: count[name] for name in _COUNTED}
    found = {"passed": passed, "failed": failed, "skipped": count["skipped"], **counted, "bounds": bounds}
    return {**found, _FAILED: list(dict.fromkeys(names))} if names else found


def _name(test: ElementTree.Element) -> str:
    """The test's name as pytest takes it."""
    return f"{test.get('classname', '').replace('.', '/')}.py::{test.get('name')}"


def _added(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Summaries, as one."""
    total: dict[str, Any] = {"bounds": {}}
    for part in parts:
        for name, found in part.items():
            if name != "bounds":
                total[name] = total[name] + found if name in total else found
        for row, share in part["bounds"].items():
            total["bounds"][row] = max(total["bounds"].get(row, 0.0), share)
    return total


def _again(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary, or a record, after failed tests have been run once more."""
    if _SHARES in summary:
        return {**summary, _SHARES: {share: _again(one) for share, one in summary[_SHARES].items()}}
    if _FAILED not in summary:
        return summary
    names = summary[_FAILED]
    found = {**_summary(_tests("gpu", tuple(names))), _AGAIN: len(names)}
    rest = {name: value for name, value in summary.items() if name != _FAILED}
    before = {name: rest[name] for name in found.keys() & rest.keys()}
    return {**rest, **_added(({**before, "failed": 0}, found))}


def _fuzz() -> dict[str, Any]:
    """Random problems, other ones every time."""
    seed = secrets.randbelow(2**32)
    gpus = visible_gpus()
    options = {
        "seconds": _FUZZ_SECONDS,
        "seed": seed,
        "processes": _PROCESSES * len(gpus),
        "device": 0,
        "gpus": ",".join(gpus),
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.fuzz", *words, "--json"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
    return {"fuzz_cases": found["cases"], "fuzz_seed": seed, "fuzz_failures": len(found["failures"])}


def _kept(out: str, kernels: str) -> dict[str, Any]:
    """The existing record, of which a part is kept."""
    if not Path(out).exists():
        return {}
    found: dict[str, Any] = json.loads(Path(out).read_text())
    if found["kernels_sha256"] != kernels:
        raise SystemExit(f"expected {out} to be of these kernels; run both parts")
    return found


def _with_share(kept: dict[str, Any], share: str, found: dict[str, Any]) -> dict[str, Any]:
    """The record with one more share; all of them together are the suite."""
    shares = {**kept.get(_SHARES, {}), share: found}
    count = int(share.split("/")[1])
    wanted = [f"{one}/{count}" for one in range(1, count + 1)]
    rest = {name: value for name, value in kept.items() if name != _SHARES}
    if not set(wanted) <= shares.keys():
        return {**rest, _SHARES: shares}
    return {**rest, **_added(shares[name] for name in wanted)}


def _changed(arguments: tuple[str, ...]) -> int:
    """Run the tests of what changed, or name it. The exit status is 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_tests --only=changed")
    parser.add_argument("--since", metavar="COMMIT", default="main")
    parser.add_argument("--renamed", metavar="OLD=NEW", action="append", default=[])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--list", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    renamed = dict(one.split("=", 1) for one in options.renamed)
    found = changed_kernels.changed_since(options.since, renamed, options.arch)
    for name, (added, gone) in found.items():
        print(f"{name}: {added} compilations are new, {gone} are gone")
    print(f"{len(found)} kernel files whose machine code differs from {options.since}'s", flush=True)
    if options.list or not found:
        return 0
    suite = _suite((*changed_kernels.options_of(found), *rest))
    print(json.dumps(suite))
    return int(suite["failed"] > 0)


def main(*given: str) -> int:
    if not Path("tests/fuzz").is_dir():
        raise SystemExit("expected to run from the root of a checkout, there is no tests/fuzz here")
    if given[:1] == ("--only=changed",):
        return _changed(given[1:])
    if not given or given[0].startswith("-"):
        raise SystemExit("expected the name of the record's file first")
    out, *words = given
    arguments = tuple(words)
    only = arguments[0].removeprefix("--only=") if arguments and arguments[0].startswith("--only=") else None
    if only not in (None, "suite", "fuzz", "again"):
        raise SystemExit(f"--only: expected suite, fuzz or again, got {only}")
    rest = arguments if only is None else arguments[1:]
    share = rest[0].removeprefix(_SHARE) if only == "suite" and rest and rest[0].startswith(_SHARE) else None
    kernels = kernels_sha256(kernel_files())
    record = {**({} if only is None else _kept(out, kernels)), **machine(), "kernels_sha256": kernels}
    if only == "again":
        record = _again(record)
    elif only != "fuzz":
        suite = _suite(rest)
        record = {**record, **suite} if share is None else _with_share(record, share, suite)
    if only in (None, "fuzz"):
        record |= _fuzz()
    record["date"] = datetime.date.today().isoformat()
    Path(out).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return int(record.get("failed", 0) + record.get("fuzz_failures", 0) > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
