"""Files are written whole or not at all, and read only where they are regular; no error is a wait."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from sparse24_plans import FormatError, StorageError
from sparse24_plans.device.files import open_regular, read_whole, storage_errors, written_whole


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")  # to open it would wait for ever
    return folder / "pipe"


def link_to_itself(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_bytes(b"")
    return folder / "file" / "x"


UNUSABLE: dict[str, Callable[[Path], Path]] = {
    "a pipe": pipe,
    "an endless device": lambda folder: Path("/dev/zero"),
    "a folder": lambda folder: folder,
    "a link to itself": link_to_itself,
    "a name of 256 bytes": lambda folder: folder / ("x" * 256),
    "a name with a NUL": lambda folder: folder / "a\0b",
    "a name with a lone surrogate": lambda folder: folder / "\ud800",
    "a file in a file": below_a_file,
    "a file in no folder": lambda folder: folder / "no" / "file",
}


@pytest.mark.parametrize("unusable", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("use", [written_whole, open_regular, lambda path: read_whole(path, 99)])
def test_what_is_no_regular_file_is_a_storage_error(tmp_path, unusable, use):
    path = unusable(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError) as caught, use(path):
        pytest.fail("it was opened")
    assert caught.value.filename == str(path)
    assert caught.value.errno
    assert sorted(tmp_path.rglob("*")) == before
    str(caught.value).encode()  # can be printed


def test_what_is_written_can_be_read_back(tmp_path):
    with written_whole(tmp_path / "f") as file:
        assert file.write(b"hello") == 5
        assert file.write(b"") == 0
        file.seek(1)
        assert file.write(memoryview(b"ELLO")) == 4
        assert not (tmp_path / "f").exists()
    assert read_whole(tmp_path / "f", 5) == b"hELLO"
    with open_regular(tmp_path / "f") as file:
        assert file.read(2) == b"hE"


def write_and(path: Path, then: Callable[[BinaryIO], object]) -> None:
    with written_whole(path) as file:
        file.write(b"half")
        then(file)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, OSError])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_the_folder_as_it_was(tmp_path, error, existing):
    path = tmp_path / "f"
    if existing:
        path.write_bytes(b"precious")

    def fail(file: BinaryIO) -> None:
        raise error

    with pytest.raises(error) as caught:
        write_and(path, fail)
    assert caught.type is error  # the block's own errors stay what they are
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    assert not existing or path.read_bytes() == b"precious"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_an_error_of_the_destination(tmp_path):
    def fill(file: BinaryIO) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file.fileno())
        os.close(full)
        file.write(b"more")

    with pytest.raises(StorageError, match="No space left") as caught:
        write_and(tmp_path / "f", fill)
    assert caught.value.filename == str(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for text in (b"1", b"2"):
        with written_whole(tmp_path / "link") as file:
            file.write(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_bytes() == text


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_what_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        with written_whole(tmp_path / "f"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o666 & ~umask


def test_a_file_larger_than_allowed_is_a_format_error(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read_whole(tmp_path / "f", 5) == b"12345"
    with pytest.raises(FormatError, match="expected at most 4 bytes"):
        read_whole(tmp_path / "f", 4)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="no /proc")
def test_file_that_does_not_tell_its_size_is_bounded_too():
    assert os.stat("/proc/self/smaps").st_size == 0
    with pytest.raises(FormatError, match="expected at most 100 bytes"):
        read_whole("/proc/self/smaps", 100)


def test_storage_errors_keep_number_and_inner_file():
    with pytest.raises(StorageError) as caught, storage_errors("outer"):
        raise PermissionError(13, "Permission denied", "whatever")
    assert (caught.value.errno, caught.value.filename) == (13, "outer")
    with pytest.raises(StorageError) as caught, storage_errors("outer"), storage_errors("inner"):
        raise FileNotFoundError(2, "No such file")
    assert caught.value.filename == "inner"
