"""Runs PyTorch's own tests of semi-structured tensors with Sparse24Tensor in the place of PyTorch's classes.

``python -m benchmarks.pytorch_tests FILE`` takes ``test/test_sparse_semi_structured.py`` of the installed
PyTorch's sources. It needs a GPU and expecttest, and lifts skips by compute capability, which PyTorch's own
kernels need. The status is 0 if as many tests pass whole as did on an H200 with PyTorch 2.11.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from sparse24_plans.torch import use_as_default

WHOLE, OF = 37, 42
"""Tests that passed whole, and all of them, in PyTorch 2.11. Other versions have other tests."""
_ASKS_FOR_A_DEVICE = re.compile(r"torch\.cuda\.get_device_capability\(0\)\[0\] == [89]")
_TEST = re.compile(r"^ +def (test_\w+)\(", re.MULTILINE)
Counts = dict[str, Counter[str]]
"""The cases of each test by their outcome: passed, failed or skipped. Parameters make cases of a test."""


class _Result(unittest.TestResult):
    """Outcomes that also name the cases that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[tuple[Any, str]] = []

    def addSuccess(self, test: Any) -> None:  # noqa: N802 - unittest's name
        self.passed.append((test, ""))


def run(file: Path) -> Counts:
    """Run the tests of PyTorch's file. Tracebacks of those that fail go to stderr."""
    text = file.read_text(encoding="utf-8")
    result = _Result()
    with tempfile.TemporaryDirectory() as folder, use_as_default(functions=True, cut=True):
        lifted = Path(folder, file.name)  # a file, because torch.compile reads the sources of functions
        lifted.write_text(_ASKS_FOR_A_DEVICE.sub("True", text), encoding="utf-8")
        spec = spec_from_file_location(file.stem, lifted)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[file.stem] = module_from_spec(spec)
        spec.loader.exec_module(module)
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    succeeded = [(case, "unexpected success") for case in result.unexpectedSuccesses]
    failed = [*result.failures, *result.errors, *succeeded]
    for case, words in failed:
        print(f"{case}\n{words}", file=sys.stderr)
    kinds = {
        "passed": [*result.passed, *result.expectedFailures],
        "failed": failed,
        "skipped": result.skipped,
    }
    return _counts(_TEST.findall(text), kinds)


def _counts(names: Sequence[str], kinds: dict[str, list[tuple[Any, str]]]) -> Counts:
    found: Counts = {name: Counter() for name in names}
    for kind, cases in kinds.items():
        for case, _ in cases:
            found[_test_of(case.id(), names)][kind] += 1
    return found


def _test_of(case: str, names: Iterable[str]) -> str:
    """The test of a case, whose name begins with the test's."""
    own = case.split(" ")[0].rpartition(".")[2]
    return max((name for name in names if f"{own}_".startswith(f"{name}_")), key=len)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pytorch_tests", description=__doc__.split("\n")[0]
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="test_sparse_semi_structured.py")
    tests = run(parser.parse_args(arguments).file)
    whole = 0
    for name, counts in tests.items():
        is_whole = bool(counts["passed"]) and not counts["failed"]
        whole += is_whole
        state = "whole" if is_whole else "differs" if counts["failed"] else "skipped"
        print(
            f"{state:8}{name}: {', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'no case'}"
        )
    print(f"{whole} of {len(tests)} tests pass whole; expected {WHOLE} of {OF}")
    return int(whole < WHOLE)


if __name__ == "__main__":
    raise SystemExit(main())
