from __future__ import annotations

import ctypes
import ctypes.util
import shutil

import pytest

from sparse24_plans.export import folder as export_folder
from tests.export.c_library import C, compiled
from tests.export.choices import cubin_text


@pytest.fixture(scope="session")
def c(tmp_path_factory: pytest.TempPathFactory) -> C:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    if ctypes.util.find_library("cuda"):
        pytest.skip("the stub takes the place of the CUDA driver, which is installed here")
    return compiled(tmp_path_factory.mktemp("export"))


@pytest.fixture
def named_cubins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubins are texts of their source and macros, so that the stub can tell which one it launches."""
    monkeypatch.setattr(export_folder, "cubin", cubin_text)
