from __future__ import annotations

import ctypes
import ctypes.util
import shutil
from collections.abc import Iterator

import pytest

from tests.export.c_library import C, compiled
from tests.export.choices import named_cubins_everywhere


@pytest.fixture(scope="session")
def c(tmp_path_factory: pytest.TempPathFactory) -> C:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    if ctypes.util.find_library("cuda"):
        pytest.skip("the stub takes the place of the CUDA driver, which is installed here")
    return compiled(tmp_path_factory.mktemp("export"))


@pytest.fixture
def named_cubins() -> Iterator[None]:
    """Cubins are texts of their source and macros, so that the stub can tell which one it launches."""
    with named_cubins_everywhere():
        yield
