"""Files are read only if they are regular and of a sane size, and written whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FormatError, InvalidProblemError, StorageError, shown

StrPath = str | os.PathLike[str]
_STEP_BYTES = 1 << 20


@contextmanager
def storage_errors(path: StrPath) -> Iterator[None]:
    """Raise the OSErrors of the block as StorageError with their ``errno`` and ``path`` as ``filename``."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno, error.strerror or str(error), str(path)) from error


def open_regular(path: StrPath) -> io.FileIO:
    """Open a file to read, unbuffered.

    Raises StorageError where it can't be read, or is a folder, a pipe or a device: to open a pipe would wait
    for a writer, and a device may never end.
    """
    _check_name(path)
    with storage_errors(path):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return io.FileIO(path, "rb")


def read_whole(path: StrPath, most: int) -> bytes:
    """The contents of a file of at most ``most`` bytes.

    Raises FormatError for a larger one, and what :func:`open_regular` raises.
    """
    data = bytearray()
    with open_regular(path) as file, storage_errors(path):
        while len(data) <= most and (chunk := file.read(_STEP_BYTES)):
            data += chunk
    if len(data) > most:
        raise FormatError(f"{path}: expected at most {most} bytes, got more")
    return bytes(data)


@contextmanager
def written_whole(path: StrPath) -> Iterator[BinaryIO]:
    """A binary file, unbuffered, that becomes ``path`` when the block ends well, and disappears otherwise.

    It is written under a temporary name in the same folder, with the permissions that the umask leaves. A
    link is written through, not replaced. ``write`` takes all that it is given.

    Raises StorageError, naming ``path``, where the folder can't be written, the disk is full, or ``path`` is
    a folder, a pipe, a device or a link to itself.
    """
    target = new_target(path)
    temporary = target.with_name(f".sparse24-{secrets.token_hex(8)}.tmp")
    with storage_errors(path):
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
    try:  # a signal may end the run as soon as the file is there
        with storage_errors(path):
            file = _NewFile(temporary, path)
        with file:
            yield file
            with storage_errors(path):
                os.fsync(file.fileno())
                file.close()
                os.replace(temporary, target)
    finally:
        with suppress(OSError):  # nothing is left of it once it has been renamed
            os.unlink(temporary)


class _AbandonedError(Exception):
    pass


def check_writable(path: StrPath) -> None:
    """Raise what :func:`written_whole` would where ``path`` can't be written. Nothing is left behind."""
    with suppress(_AbandonedError), written_whole(path):
        raise _AbandonedError


def new_target(path: StrPath) -> Path:
    """The file that a write to ``path`` reaches, links followed. It need not exist.

    Raises StorageError for a link to itself, a name that is too long, a folder that can't be searched.
    """
    _check_name(path)
    with storage_errors(path), suppress(FileNotFoundError):
        os.stat(path)  # realpath is silent about what it can't follow
    return Path(os.path.realpath(path))


class _NewFile(io.FileIO):
    """A file that must not exist yet. Errors name it ``path``."""

    def __init__(self, temporary: Path, path: StrPath) -> None:
        super().__init__(temporary, "xb")
        self._path = path

    def write(self, data: Any, /) -> int:
        if not memoryview(data).nbytes:
            return 0
        rest = memoryview(data).cast("B")
        size = len(rest)
        with storage_errors(self._path):
            while rest:
                rest = rest[super().write(rest) or 0 :]
        return size


def path_of(argument: str, path: Any) -> str:
    """``path`` as a string. Raises InvalidProblemError, naming ``argument``, for anything but a path."""
    try:
        found: Any = os.fspath(path)
    except Exception:  # noqa: BLE001 - whatever a broken object raises
        found = None
    if not isinstance(found, str):
        raise InvalidProblemError(f"{argument}: expected a path, got {shown(path)}")
    return found


def _check_name(path: StrPath) -> None:
    """Raise InvalidProblemError for anything but a path.

    Raises StorageError for a NUL, or a character that no name of the file system has.
    """
    path = path_of("path", path)
    try:
        usable = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise StorageError(errno.EINVAL, "not a name that a file can have", str(path))


def new_folder_at(path: StrPath, argument: str = "destination") -> Path:
    """The folder to make. Raises InvalidProblemError unless it is missing or empty; StorageError."""
    target = new_target(path)
    with storage_errors(target):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise InvalidProblemError(f"{argument}: expected a new or an empty folder, got {target}")
    return target


@contextmanager
def new_folder(path: StrPath, argument: str = "destination") -> Iterator[Path]:
    """A temporary folder that becomes ``path`` when the block ends well, and disappears otherwise.

    Raises what :func:`new_folder_at` raises; StorageError also if the folder can't be written, with the final
    path of a file in place of the temporary one.
    """
    target = new_folder_at(path, argument)
    temporary = target.with_name(f".sparse24-{secrets.token_hex(8)}.tmp")
    try:  # a signal may end the run as soon as the folder is there
        with storage_errors(target):
            temporary.mkdir()
        yield temporary
        with storage_errors(target):
            os.replace(temporary, target)
    except StorageError as error:
        file = Path(str(error.filename))
        if temporary not in file.parents:
            raise
        raise StorageError(error.errno, error.strerror, str(target / file.relative_to(temporary))) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)
