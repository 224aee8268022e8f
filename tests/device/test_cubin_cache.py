"""Compiled kernels on disk: shared by users, checked before they are loaded, refused where it isn't safe."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import StorageError
from sparse24_plans.device.jit import cache as cubins
from sparse24_plans.device.jit import compiler

INFLATE = ("weights/inflate.cu", "sm_80", {"ELEMENT": 0, "OUT": 0, "BIAS": 0, "EPILOGUE": 0})
CUBIN = b"\x7fELF and what follows\0"
ANOTHER_USER = 12345


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """Stands in for the compiler, and counts."""
    calls: list[str] = []

    def compile_cubin(source, arch, defines):
        calls.append(source)
        return CUBIN, ""

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return calls


def someone_elses(monkeypatch, path: Path) -> None:
    """Let ``path`` look as if another user owned it: only root could give it away."""

    def pretend(call):
        def answer(target, *args, **options):
            about = call(target, *args, **options)
            if about.st_ino == inode:
                values = [*about]
                values[stat.ST_UID] = ANOTHER_USER
                return os.stat_result(values)
            return about

        return answer

    inode = path.stat().st_ino
    for name in ("stat", "fstat"):
        monkeypatch.setattr(os, name, pretend(getattr(os, name)))


# Sharing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"),
    [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o644, 0o755), (0, 0o644, 0o755)],
)
def test_what_is_made_is_as_readable_as_the_umask_allows(folder, compilations, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        path = cubins.compiled(*INFLATE).path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == file_mode
    assert stat.S_IMODE(folder.stat().st_mode) == folder_mode
    assert cubins.cubin(*INFLATE) == CUBIN
    assert compilations == ["weights/inflate.cu"], "its own cache was not good enough"


def test_roots_cache_serves_a_user_who_cannot_write_it(monkeypatch, folder, compilations):
    path = cubins.compiled(*INFLATE).path
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    owner = path.stat().st_uid
    if owner != 0:
        pytest.skip("only root's files are trusted by others, and this isn't root")
    folder.chmod(0o555)
    assert cubins.cubin(*INFLATE) == CUBIN
    assert len(compilations) == 1


# Checking -----------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_never_loaded_but_replaced(folder, compilations, data):
    """The file is shortened, lengthened or replaced, or one bit of its data or checksum is changed."""
    path = cubins.compiled(*INFLATE).path
    whole = path.read_bytes()
    how = data.draw(st.sampled_from(["cut", "flip", "more", "garbage"]))
    if how == "cut":
        bad = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif how == "flip":
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        bad = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    elif how == "more":
        bad = whole + data.draw(st.binary(min_size=1))
    else:
        bad = data.draw(st.binary().filter(lambda found: found != whole))
    path.write_bytes(bad)
    before = len(compilations)
    assert cubins.cubin(*INFLATE) == CUBIN
    assert len(compilations) == before + 1
    assert path.read_bytes() == whole
    assert list(folder.iterdir()) == [path]


def test_a_sound_file_under_another_kernels_name_is_not_loaded(folder, compilations):
    one = cubins.compiled(*INFLATE).path
    other = cubins.compiled(INFLATE[0], "sm_90a", INFLATE[2]).path
    one.write_bytes(other.read_bytes())
    cubins.cubin(*INFLATE)
    assert len(compilations) == 3


@pytest.mark.parametrize("mode", [None, 0o666, 0o664, 0o620], ids=["another user's", "666", "664", "620"])
def test_a_file_that_another_user_can_have_written_is_replaced(monkeypatch, folder, compilations, mode):
    path = cubins.compiled(*INFLATE).path
    inode = path.stat().st_ino
    if mode is None:
        someone_elses(monkeypatch, path)
    else:
        path.chmod(mode)
    assert cubins.cubin(*INFLATE) == CUBIN
    assert len(compilations) == 2
    assert path.stat().st_ino != inode


def test_what_is_no_file_is_neither_read_nor_replaced(folder, compilations):
    """Opening a pipe would never return."""
    path = cubins.compiled(*INFLATE).path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StorageError, match=r"regular file.*SPARSE24_CACHE_DIR"):
        cubins.cubin(*INFLATE)


# Folders that aren't safe -------------------------------------------------------------------------


def assert_refused(folder: Path, match: str) -> None:
    with pytest.raises(StorageError, match=f"{match}.*SPARSE24_CACHE_DIR") as caught:
        cubins.cubin(*INFLATE)
    assert caught.value.filename == str(folder)
    assert caught.value.errno == errno.EPERM


def test_a_folder_of_another_user_is_refused(monkeypatch, folder, compilations):
    cubins.cubin(*INFLATE)
    someone_elses(monkeypatch, folder)
    assert_refused(folder, f"another user .uid {ANOTHER_USER}")
    assert len(compilations) == 1, "compiled for nothing"


@pytest.mark.parametrize(
    ("mode", "who"),
    [
        (0o777, "everybody"),
        (0o757, "everybody"),
        (0o703, "everybody"),
        (0o775, r"its group \(gid \d+\)"),
        (0o730, "its group .*"),
        (0o2770, "its group .*"),
    ],
)
def test_a_folder_that_others_can_write_is_refused(folder, compilations, mode, who):
    folder.mkdir()
    folder.chmod(mode)
    assert_refused(folder, f"a folder that {who} can write")
    assert not compilations


@pytest.mark.parametrize("mode", [0o1777, 0o1775, 0o755, 0o700, 0o2755])
def test_other_folders_are_taken(folder, compilations, mode):
    folder.mkdir()
    folder.chmod(mode)
    assert cubins.cubin(*INFLATE) == CUBIN


# Folders that can't be used -----------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["SPARSE24_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_name_that_is_too_long_is_typed(monkeypatch, compilations, variable, tmp_path):
    monkeypatch.delenv("SPARSE24_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / ("x" * 300)))
    with pytest.raises(StorageError, match="SPARSE24_CACHE_DIR") as caught:
        cubins.cubin(*INFLATE)
    assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize("call", ["stat", "mkdir"])
def test_a_folder_without_permission_is_typed(monkeypatch, folder, compilations, call):
    """The system calls are made to fail, because root may do everything."""

    original = getattr(os, call)

    def denied(path, *args: object, **options: object) -> object:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *args, **options)

    monkeypatch.setattr(os, call, denied)
    with pytest.raises(StorageError, match=r"Permission denied.*SPARSE24_CACHE_DIR") as caught:
        cubins.cubin(*INFLATE)
    assert caught.value.filename == str(folder)


HOMELESS = """
import os, pathlib
def home(): raise RuntimeError("Could not determine home directory.")
pathlib.Path.home = home
from sparse24_plans.device.jit.cache import cache_folder
for variable in ("SPARSE24_CACHE_DIR", "XDG_CACHE_HOME"):
    os.environ[variable] = "/chosen"
    print(cache_folder())
    del os.environ[variable]
print(cache_folder())
"""


def test_a_home_is_needed_only_where_no_folder_is_named():
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = subprocess.run([sys.executable, "-c", HOMELESS], env=kept, capture_output=True, text=True)
    assert done.stdout.split() == ["/chosen", "/chosen/sparse24_plans"]
    assert "StorageError: [Errno 2] kernel cache: no home folder; set SPARSE24_CACHE_DIR" in done.stderr


# The key ------------------------------------------------------------------------------------------


def test_the_compilers_version_is_known_to_the_patch():
    from cupy.cuda import nvrtc

    major, minor = nvrtc.getVersion()
    assert re.search(rf"\bV{major}\.{minor}\.\d+", compiler.nvrtc_build())


def test_another_patch_of_the_compiler_is_another_file(monkeypatch, folder, compilations):
    before = cubins.compiled(*INFLATE).path
    build = compiler.nvrtc_build()
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: build + "1")
    assert cubins.compiled(*INFLATE).path != before
