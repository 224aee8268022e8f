"""Compiled kernels on disk.

A file's name holds a hash of the source, its includes, the options and the compiler's full version. The last
32 bytes of a file are a SHA-256 over its name and its cubin. A file that is damaged, or that another user can
have written, is compiled again and replaced. The driver loads the bytes that were checked, not the file.

A cubin runs with the caller's rights. The folder must therefore belong to the caller or root and, if its
group or everybody can write there, be sticky like /tmp; any other folder raises StorageError. New folders and
files are as readable as the umask allows and writable for their owner alone, so one cache of root's serves
all users.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ...errors import StorageError
from ..files import open_regular, storage_errors, written_whole
from ..log import COMPILE
from . import compiler

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class CompiledKernel(NamedTuple):
    """A compiled kernel in the cache."""

    source: str
    """Path of the source below kernels_cu/."""
    arch: str
    """The compiler's target, such as ``sm_90a``."""
    path: Path
    """Path of the cubin in the cache."""
    nbytes: int
    """Size of the cubin in bytes."""
    seconds: float | None
    """Seconds of compilation; None if the cache held the kernel."""


def cache_folder() -> Path:
    """Return the folder of cubins: SPARSE24_CACHE_DIR, or sparse24_plans in the user's cache folder.

    Raises StorageError if SPARSE24_CACHE_DIR, XDG_CACHE_HOME and the home folder are all unknown.
    """
    if chosen := os.environ.get("SPARSE24_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "sparse24_plans"
    try:
        return Path.home() / ".cache" / "sparse24_plans"
    except RuntimeError as error:
        raise StorageError(errno.ENOENT, "kernel cache: no home folder; set SPARSE24_CACHE_DIR") from error


def cubin(source: str, arch: str, defines: Mapping[str, int]) -> bytes:
    """Return the kernel from the cache, compiled now if need be. Safe across threads and processes.

    Raises StorageError, which names the folder, if the folder can't be read or written or isn't safe.
    """
    return _load_or_compile(source, arch, defines)[1]


def compiled(source: str, arch: str, defines: Mapping[str, int]) -> CompiledKernel:
    """Compile the kernel into the cache if needed and describe it. Raises what :func:`cubin` raises."""
    path, found, seconds = _load_or_compile(source, arch, defines)
    return CompiledKernel(source, arch, path, len(found), seconds)


def _load_or_compile(source: str, arch: str, defines: Mapping[str, int]) -> tuple[Path, bytes, float | None]:
    folder = cache_folder()
    path = folder / f"{Path(source).stem}-{_key(source, arch, defines)}.cubin"
    with _cache_errors(folder):
        _check_safe(folder)
        found = _read(path)
    if found is not None:
        COMPILE.debug("%s for %s: from the cache, %s", source, arch, path)
        return path, found, None
    begin = time.perf_counter()
    found, _ = compiler.compile_cubin(source, arch, defines)
    seconds = time.perf_counter() - begin
    with _cache_errors(folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_safe(folder)
        _write(path, found)
    COMPILE.info("%s for %s: compiled in %.2f s, %s", source, arch, seconds, path)
    return path, found, seconds


def _key(source: str, arch: str, defines: Mapping[str, int]) -> str:
    parts = (
        compiler.options(arch, defines),
        compiler.load_nvrtc().getVersion(),
        compiler.nvrtc_build(),
        compiler.sources_sha256(source),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        with storage_errors(folder):
            yield
    except StorageError as error:
        raise StorageError(
            error.errno, f"kernel cache: {error.strerror}; set SPARSE24_CACHE_DIR", str(folder)
        ) from error


def _is_ours(about: os.stat_result) -> bool:
    return about.st_uid in (0, os.geteuid())


def _check_safe(folder: Path) -> None:
    """Raise PermissionError if another user can replace files in the folder."""
    try:
        about = os.stat(folder)
    except FileNotFoundError:
        return
    if not _is_ours(about):
        raise PermissionError(errno.EPERM, f"a folder of another user (uid {about.st_uid})")
    if about.st_mode & _OTHERS_WRITE and not about.st_mode & stat.S_ISVTX:
        who = "everybody" if about.st_mode & stat.S_IWOTH else f"its group (gid {about.st_gid})"
        raise PermissionError(errno.EPERM, f"a folder that {who} can write; remove that permission")


def _checksum(path: Path, found: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + found).digest()


def _read(path: Path) -> bytes | None:
    """Return the cubin of a file, or None if the file is absent, damaged or writable by another user."""
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            if not _is_ours(about) or about.st_mode & _OTHERS_WRITE:
                COMPILE.warning("%s: another user can have written it; it is compiled again", path)
                return None
            data = file.readall()
    except OSError:  # absent or unreadable: if it can't be replaced either, writing raises
        return None
    found, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum == _checksum(path, found):
        return found
    COMPILE.warning("%s: damaged; it is compiled again", path)
    return None


def _write(path: Path, found: bytes) -> None:
    with written_whole(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & _OTHERS_WRITE:
            os.fchmod(file.fileno(), mode & ~_OTHERS_WRITE)
        file.write(found + _checksum(path, found))
