"""Keys of the cache of compiled kernels, and messages of failed compilations."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparse24_plans import DriverError, StorageError
from sparse24_plans.device.jit import cache as cubins
from sparse24_plans.device.jit import compiler

from .covering import compiled

INFLATE = ("weights/inflate.cu", "sm_80", {"WIDTH": 2})


@pytest.fixture
def kernels(monkeypatch, tmp_path) -> Path:
    """A copy of the kernels' folder that the test may change."""
    folder = tmp_path / "kernels"
    shutil.copytree(compiler.KERNEL_FOLDER, folder)
    monkeypatch.setattr(compiler, "KERNEL_FOLDER", folder)
    return folder


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / "not" / "yet" / "there"
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """Stands in for the compiler, and counts."""
    calls: list[str] = []

    def compile_cubin(source, arch, defines):
        calls.append(source)
        return b"a cubin", ""

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return calls


def test_a_kernel_is_compiled_once_and_kept(cache, compilations):
    path = cubins.compiled(*INFLATE).path
    assert cubins.cubin(*INFLATE) == b"a cubin"
    assert cubins.compiled(*INFLATE).path == path
    assert compilations == ["weights/inflate.cu"]
    assert list(cache.iterdir()) == [path]


def test_what_is_kept_is_what_was_compiled(cache):
    assert cubins.cubin(*INFLATE) == compiled(INFLATE[0], INFLATE[1], tuple(INFLATE[2].items()))[0]


@pytest.mark.parametrize(
    "other",
    [
        ("weights/inflate.cu", "sm_86", INFLATE[2]),
        ("weights/inflate.cu", "sm_80", {**INFLATE[2], "ELEMENT": 1}),
        ("weights/inflate.cu", "sm_80", {**INFLATE[2], "MORE": 0}),
        ("gemm/inflate_cublas.cu", "sm_80", INFLATE[2]),
    ],
)
def test_another_kernel_architecture_or_macro_is_another_file(cache, compilations, other):
    assert cubins.compiled(*other).path != cubins.compiled(*INFLATE).path
    assert len(compilations) == 2


def test_the_order_of_macros_does_not_matter(cache, compilations):
    backwards = dict(reversed(INFLATE[2].items()))
    assert cubins.compiled(INFLATE[0], INFLATE[1], backwards).path == cubins.compiled(*INFLATE).path


@pytest.mark.parametrize("name", ["weights/inflate.cu", "weights/params/inflate.cuh", "common/types.cuh"])
def test_a_changed_source_or_header_is_another_file(cache, compilations, kernels, name):
    before = cubins.compiled(*INFLATE).path
    with open(kernels / name, "a") as file:
        file.write("// changed\n")
    assert cubins.compiled(*INFLATE).path != before
    assert len(compilations) == 2


def test_a_changed_file_that_is_not_included_changes_nothing(cache, compilations, kernels):
    before = cubins.compiled(*INFLATE).path
    (kernels / "gemm/inflate_cublas.cu").write_text("")
    assert cubins.compiled(*INFLATE).path == before


def test_another_compiler_is_another_file(cache, compilations, monkeypatch):
    from cupy.cuda import nvrtc

    before = cubins.compiled(*INFLATE).path
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (99, 0))
    assert cubins.compiled(*INFLATE).path != before


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SPARSE24_CACHE_DIR": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/sparse24_plans"),
        ({"SPARSE24_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/sparse24_plans"),
        ({}, "/home/someone/.cache/sparse24_plans"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, folder):
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("SPARSE24_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cubins.cache_folder() == Path(folder)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="SPARSE24_CACHE_DIR") as caught:
        cubins.compiled(*INFLATE)
    assert caught.value.filename == str(tmp_path / "file" / "cache")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_full_disk_leaves_nothing_behind(monkeypatch, cache, compilations):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cubins.os, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        cubins.compiled(*INFLATE)
    assert list(cache.iterdir()) == []


def test_a_syntax_error_shows_the_compilers_log(cache, kernels):
    (kernels / "weights/inflate.cu").write_text('#include "common/types.cuh"\nint broken( { return 0; }\n')
    with pytest.raises(DriverError) as caught:
        cubins.compiled(*INFLATE)
    for word in ("weights/inflate.cu", "sm_80", "weights/inflate.cu(2): error"):
        assert word in str(caught.value)
    assert caught.value.code == 6  # NVRTC_ERROR_COMPILATION
    assert not cache.exists()


def test_an_architecture_that_the_compiler_does_not_know(cache):
    with pytest.raises(DriverError, match="sm_999"):
        cubins.compiled(INFLATE[0], "sm_999", INFLATE[2])


COMPILE = f"""
from sparse24_plans.device.jit.cache import compiled
print(compiled{INFLATE!r}.path)
"""


COMPILE_IN_THREADS = f"""
from concurrent.futures import ThreadPoolExecutor
from sparse24_plans.device.jit.cache import compiled
with ThreadPoolExecutor(4) as pool:
    (path,) = {{one.path for one in pool.map(lambda _: compiled{INFLATE!r}, range(4))}}
print(path)
"""


def test_the_first_compilations_of_a_process_may_be_in_threads(cache):
    """CuPy loads NVRTC at the first call."""
    done = subprocess.run([sys.executable, "-c", COMPILE_IN_THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(cache.iterdir()) == [Path(done.stdout.strip())]


def test_two_processes_may_compile_at_once(cache):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    path = Path(answers[0][0].strip())
    assert answers[0][0] == answers[1][0]
    assert list(cache.iterdir()) == [path]
    assert path.read_bytes()[:4] == b"\x7fELF"
