"""Compiled kernels on disk.

A file's name covers the source, all it includes, the options and the compiler's full version. Its last 32
bytes are a SHA-256 over that name and the cubin before them. A file that is cut short or changed, or that
another user can have written, is never loaded: it is compiled again and replaced. What gets loaded are the
bytes that were checked, not the file.

A cubin runs with the caller's rights. So the folder has to be the caller's or root's and, if everybody can
write there, sticky (as /tmp is); any other is refused with a StorageError. Folders and files that are made
here are as readable as the umask allows, and never writable for everybody: a cache that root has filled
serves all users.
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

_CHECKSUM_BYTES = hashlib.sha256().digest_size


class CompiledKernel(NamedTuple):
    """A compiled kernel in the cache, and what it took to get it there."""

    source: str
    """The file of kernels_cu that it was compiled from."""
    arch: str
    """The compiler's target, such as ``sm_90a``."""
    path: Path
    """The file in the cache."""
    nbytes: int
    """Size of the cubin, in bytes."""
    seconds: float | None
    """What the compiler took; None where the cache had the kernel."""


def cache_folder() -> Path:
    """Where cubins are kept: SPARSE24_CACHE_DIR, or sparse24_plans in the user's cache folder.

    Raises StorageError where neither that, XDG_CACHE_HOME nor a home is known.
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
    """The compiled kernel, from the cache or compiled and put there. Safe between threads and processes.

    Raises StorageError, naming the folder, where it can't be read, isn't safe, or can't be written.
    """
    return _kept(source, arch, defines)[1]


def cubin_path(source: str, arch: str, defines: Mapping[str, int]) -> Path:
    """The file that keeps the compiled kernel; it is there and sound when this returns."""
    return compiled(source, arch, defines).path


def compiled(source: str, arch: str, defines: Mapping[str, int]) -> CompiledKernel:
    """What the cache keeps of the kernel once this returns. Raises what :func:`cubin` raises."""
    path, found, seconds = _kept(source, arch, defines)
    return CompiledKernel(source, arch, path, len(found), seconds)


def _kept(source: str, arch: str, defines: Mapping[str, int]) -> tuple[Path, bytes, float | None]:
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
    """Raise PermissionError for a folder where somebody else can put files in place of ours."""
    try:
        about = os.stat(folder)
    except FileNotFoundError:
        return
    if not _is_ours(about):
        raise PermissionError(errno.EPERM, f"a folder of another user (uid {about.st_uid})")
    if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "a folder that everybody can write")


def _checksum(path: Path, found: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + found).digest()


def _read(path: Path) -> bytes | None:
    """The cubin in a file that is sound and ours, or None."""
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            if not _is_ours(about) or about.st_mode & stat.S_IWOTH:
                COMPILE.warning("%s: another user can have written it; it is compiled again", path)
                return None
            data = file.readall()
    except OSError:  # not there, or not readable: if it can't be replaced either, that is raised
        return None
    found, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum == _checksum(path, found):
        return found
    COMPILE.warning("%s: damaged; it is compiled again", path)
    return None


def _write(path: Path, found: bytes) -> None:
    with written_whole(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & stat.S_IWOTH:
            os.fchmod(file.fileno(), mode & ~stat.S_IWOTH)
        file.write(found + _checksum(path, found))
