"""CUDA sources to cubins through NVRTC.

Not through CuPy, which adds ``-ftz=true`` and builds for sm_90 where sm_90a is asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import BackendUnavailableError, DriverError
from ..tensors import import_cupy

KERNEL_FOLDER = Path(__file__).parents[2] / "kernels_cu"

_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def closure(source: str) -> dict[str, bytes]:
    """``source`` and every file it includes, name -> contents, in order of first mention."""
    found: dict[str, bytes] = {}
    pending = [source]
    while pending:
        name = pending.pop(0)
        if name not in found:
            found[name] = (KERNEL_FOLDER / name).read_bytes()
            pending += [match.decode() for match in _INCLUDE.findall(found[name])]
    return found


def sources_sha256(source: str) -> str:
    """A hash of ``source`` and of every file it includes."""
    found = hashlib.sha256()
    for name, text in closure(source).items():
        found.update(name.encode() + b"\0" + text + b"\0")
    return found.hexdigest()


def digest(source: str) -> str:
    """A short form of ``sources_sha256``: what a tuned configuration of the kernel is bound to."""
    return sources_sha256(source)[:16]


def compile_cubin(source: str, arch: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """Compile ``kernels_cu/<source>`` for ``arch`` ("sm_90a"). Returns the cubin and ptxas's report.

    Needs NVRTC but no GPU. ``defines`` become ``-DS24_NAME=value``.
    """
    nvrtc = load_nvrtc()
    files = closure(source)
    flags = options(arch, defines)
    headers = {name: text for name, text in files.items() if name != source}
    program = nvrtc.createProgram(
        files[source].decode(), source, list(headers.values()), [name.encode() for name in headers]
    )
    try:
        nvrtc.compileProgram(program, flags)
        cubin, log = nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DriverError(f"NVRTC on {source} for {arch}", error.status, log) from error
    finally:
        nvrtc.destroyProgram(program)
    # CuPy takes the cubin for a C string and cuts its last byte, a zero.
    return cubin + b"\0", log


def options(arch: str, defines: Mapping[str, int]) -> list[str]:
    """What NVRTC is given."""
    fixed = [f"-arch={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v"]
    return fixed + [f"-DS24_{name}={value}" for name, value in sorted(defines.items())]


def load_nvrtc() -> Any:
    """CuPy's bindings of NVRTC. Raises BackendUnavailableError, which says what to install."""
    import_cupy()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        raise BackendUnavailableError(
            f"NVRTC doesn't load ({error}): pip install 'sparse24_plans[cuda12]' (or [cuda13])"
        ) from error
    return nvrtc
