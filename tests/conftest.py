from __future__ import annotations

import gc
import sys
from pathlib import Path
from zlib import crc32

import pytest

from .support import HAS_GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="I/N",
        default="1/1",
        help="only one of N shares of the tests, each about as many; failures are named as they happen",
    )
    parser.addoption(
        "--every-compilation",
        action="store_true",
        help="kernels are compiled for all that plans are known to ask for, not for a covering set of it",
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A suite that is cut off has still said what failed."""
    if report.failed and any(word.startswith("--share") for word in sys.argv):
        print(f"\nfailed: {report.nodeid}", file=sys.__stderr__, flush=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--share").split("/"))
    # By its name, so that every process of a run keeps the same ones.
    left_out = [item for item in items if crc32(item.nodeid.encode()) % count != index - 1]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % count == index - 1]
    if not HAS_GPU:
        skip = pytest.mark.skip(reason="no CUDA device that CuPy can use")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """The tests themselves, of which there are many, are not searched for garbage again each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["host", pytest.param(0, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> int | str:
    """Every place that a plan can run on here."""
    return request.param


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors"
