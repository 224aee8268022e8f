"""Cubins on disk. The key covers the source, all it includes, the options and the compiler's version."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ...errors import StorageError
from . import compiler


def cache_folder() -> Path:
    """Where cubins are kept: SPARSE24_CACHE_DIR, or sparse24_plans in the user's cache folder."""
    chosen = os.environ.get("SPARSE24_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "sparse24_plans"


def _key(source: str, arch: str, defines: Mapping[str, int]) -> str:
    parts = (
        compiler.options(arch, defines),
        compiler.load_nvrtc().getVersion(),
        compiler.sources_sha256(source),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cubin_path(source: str, arch: str, defines: Mapping[str, int]) -> Path:
    """The compiled kernel on disk; compiles at first need. Safe between threads and processes."""
    folder = cache_folder()
    path = folder / f"{Path(source).stem}-{_key(source, arch, defines)}.cubin"
    if path.exists():
        return path
    cubin, _ = compiler.compile_cubin(source, arch, defines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(cubin)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise StorageError(
            error.errno, f"kernel cache: {error.strerror}; set SPARSE24_CACHE_DIR", str(folder)
        ) from error
    return path
