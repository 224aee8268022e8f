"""Compiles CUDA sources to cubins through NVRTC.

CuPy's own compilation adds ``-ftz=true`` and builds for sm_90 when sm_90a is requested.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ...errors import BackendUnavailableError, DriverError
from ..install import import_cupy, install_advice, lock_across_forks

_PACKAGE = Path(__file__).parents[2]
KERNEL_FOLDER = _PACKAGE / "kernels_cu"
if not KERNEL_FOLDER.is_dir():  # an editable install of a tree without its symbolic links
    KERNEL_FOLDER = _PACKAGE.parent / "kernels_cu"

_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def closure(source: str) -> dict[str, bytes]:
    """Return the contents of ``source`` and of every file it includes, by name, in order of first mention."""
    found: dict[str, bytes] = {}
    pending = [source]
    while pending:
        name = pending.pop(0)
        if name not in found:
            found[name] = (KERNEL_FOLDER / name).read_bytes()
            pending += _included(found[name])
    return found


@lru_cache(256)
def _included(text: bytes) -> tuple[str, ...]:
    """Return the files that ``text`` includes. A search takes longer than to read the file again."""
    return tuple(match.decode() for match in _INCLUDE.findall(text))


def sources_sha256(source: str) -> str:
    """Hash ``source`` and every file it includes."""
    found = hashlib.sha256()
    for name, text in closure(source).items():
        found.update(name.encode() + b"\0" + text + b"\0")
    return found.hexdigest()


def digest(source: str) -> str:
    """Shorten ``sources_sha256``; a tuned configuration is valid for one digest of its kernel."""
    return sources_sha256(source)[:16]


def compile_cubin(source: str, arch: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """Compile ``kernels_cu/<source>`` for ``arch`` ("sm_90a"). Returns the cubin and the report of ptxas.

    Compilation needs NVRTC but no GPU. ``defines`` become ``-DS24_NAME=value``. Raises DriverError with the
    compiler's log.
    """
    cubin, log = _compile(closure(source), options(arch, defines), "getCUBIN", f"{source} for {arch}")
    # CuPy treats the cubin as a C string and drops its last byte, a zero.
    return cubin + b"\0", log


def _compile(files: Mapping[str, bytes], flags: list[str], result: str, subject: str) -> tuple[bytes, str]:
    """Compile the first of ``files``, which includes the others; return NVRTC's ``result`` and its log."""
    nvrtc = load_nvrtc()
    (name, text), *headers = files.items()
    program = nvrtc.createProgram(
        text.decode(), name, [text for _, text in headers], [name.encode() for name, _ in headers]
    )
    try:
        nvrtc.compileProgram(program, flags)
        return getattr(nvrtc, result)(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DriverError(f"NVRTC on {subject}", error.status, log) from error
    finally:
        nvrtc.destroyProgram(program)


def options(arch: str, defines: Mapping[str, int]) -> list[str]:
    """Return the compiler options."""
    fixed = [f"-arch={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v"]
    # NVRTC 12 warns of unused variables if their only uses are in branches that "if constexpr" discards.
    fixed.append("--diag-suppress=177")
    return fixed + [f"-DS24_{name}={value}" for name, value in sorted(defines.items())]


_nvrtc_loading = lock_across_forks()


def load_nvrtc() -> Any:
    """Return CuPy's bindings of NVRTC. Raises BackendUnavailableError, which says what to install."""
    import_cupy()
    try:
        with _nvrtc_loading:  # CuPy loads several libraries, and lets another thread call the first meanwhile
            from cupy.cuda import nvrtc

            nvrtc.getVersion()
    except Exception as error:
        raise BackendUnavailableError(f"NVRTC doesn't load ({error}); {install_advice('cuda')}") from error
    return nvrtc


@cache
def nvrtc_build() -> str:
    """Return NVRTC's full version ("V12.9.86") and build; ``getVersion`` gives major and minor alone.

    Both stand in the comments at the head of the PTX of an empty program. Compiling it takes 40 ms, once.
    """
    ptx, _ = _compile({"empty.cu": b""}, [], "getPTX", "an empty program")
    return "\n".join(line for line in ptx.decode().splitlines() if line.startswith("//"))
