from __future__ import annotations

from pathlib import Path

import pytest

from .support import HAS_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        skip = pytest.mark.skip(reason="no CUDA device that CuPy can use")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(params=["host", pytest.param(0, marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> int | str:
    """Every place that a plan can run on here."""
    return request.param


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors"
