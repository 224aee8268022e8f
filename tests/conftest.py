from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from sparse24_plans import BackendUnavailableError
from sparse24_plans.device.jit.compiler import load_nvrtc

from .plan.cases import is_on_host_alone
from .support import HAS_GPU

_HANGS_AFTER_S = 300
_OBJECTS_BEFORE_A_SEARCH = 10_000
_watched_since, _log = -float("inf"), 2
settings.register_profile("thorough", deadline=None)  # a busy machine is slow, and no test fails for that
settings.register_profile("tests", settings.get_profile("thorough"), max_examples=30)  # new ones each run
settings.load_profile("tests")
FOR_GPUS = pytest.StashKey[int]()
"""The number of tests that were left out because they need a GPU."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="I/N",
        default="1/1",
        help="only one of N shares of the tests, each about as many",
    )
    parser.addoption(
        "--compile",
        choices=["kinds", "values", "pairs", "everything"],
        default="kinds",
        help="kernels are compiled for one architecture and each element, for each value of each macro, "
        "for every two that plans ask for together, or for all that plans are known to ask for",
    )


def pytest_configure() -> None:
    """Kernels are compiled without a GPU too, so the compiler has to be there."""
    try:
        load_nvrtc()
    except BackendUnavailableError as error:
        pytest.exit(f"{error}; for tests without a GPU the extra nvrtc12 or nvrtc13 is enough", returncode=4)
    os.fsync = lambda _: None  # no test cuts the power, and a disk takes longer than a test
    # PyTorch's threads wait for one another in a loop, which costs more than the tests' small tensors.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # the tests, which collection makes, are no garbage
    global _log
    _log = os.dup(sys.__stderr__.fileno())  # what is captured later is no log


def pytest_runtest_setup() -> None:
    """Print what a test waits for that hangs for minutes. A timer is a thread, so not every test sets one."""
    global _watched_since
    if time.monotonic() - _watched_since > _HANGS_AFTER_S / 5:
        _watched_since = time.monotonic()
        faulthandler.dump_traceback_later(_HANGS_AFTER_S, file=_log)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a log, a suite that is cut off has still said what failed."""
    if report.failed and not sys.__stderr__.isatty():
        print(f"\nfailed: {report.nodeid}", file=sys.__stderr__, flush=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--share").split("/"))
    # The name decides, so that every process of a run keeps the same tests.
    left_out = [item for item in items if crc32(item.nodeid.encode()) % count != index - 1]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % count == index - 1]
    items[:] = [item for item in items if not _is_served_on_the_host_alone(item)]
    if not HAS_GPU:
        for_gpus = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=for_gpus)
        config.stash[FOR_GPUS] = len(for_gpus)


def _is_served_on_the_host_alone(item: pytest.Item) -> bool:
    """Whether the test is of a GPU and of a problem that no kernel of a GPU serves."""
    call = getattr(item, "callspec", None)
    parameters = call.params if call else {}
    return parameters.get("device") == 0 and is_on_host_alone(parameters.get("desc"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The whole suite runs on every core; a part of it, or tests that share a GPU, in one process."""
    asked_for_all = config.args == config.getini("testpaths")
    return None if asked_for_all and not HAS_GPU else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """The processes share the cores, so each multiplies in one thread, as the fuzzer's do."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that reports how many tests need a GPU."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["for_gpus"] = session.config.stash.get(FOR_GPUS, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects all tests, so any worker's number is the number of all."""
    node.config.stash[FOR_GPUS] = getattr(node, "workeroutput", {}).get("for_gpus", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for each reason why tests were not run."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if count := config.stash.get(FOR_GPUS, 0):
        reasons["They need a CUDA device that CuPy can use."] = count
    if reasons:
        terminalreporter.section("tests that were not run")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:6,}  {reason}")


def pytest_collection_finish() -> None:
    """The tests themselves, of which there are many, are never searched for garbage, and others seldom."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_A_SEARCH, *gc.get_threshold()[1:])
    gc.enable()


@pytest.fixture(params=["host", pytest.param(0, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> int | str:
    """Every place that a plan can run on here."""
    return request.param


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors"
