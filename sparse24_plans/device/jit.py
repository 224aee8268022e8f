"""CUDA sources to cubins through NVRTC, with a disk cache, and thin launchers for them.

The cache key covers the source, everything it includes, the options and the compiler's version, which
CuPy's own cache key does not; and sm_90a is asked for where CuPy would build for sm_90.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from .._vendor import cuda_driver_abi
from ..errors import BackendUnavailableError, DriverError, StorageError
from ..vocab import ElementKind, EpilogueKind
from .tensors import import_cupy

KERNEL_FOLDER = Path(__file__).parent.parent / "kernels_cu"

# The numbers that kernels_cu/common.cuh gives these words.
ELEMENT_CODES = {
    ElementKind.F32: 0,
    ElementKind.F16: 1,
    ElementKind.BF16: 2,
    ElementKind.S8: 3,
    ElementKind.FP8_E4M3: 4,
    ElementKind.I32: 5,
}
EPILOGUE_CODES = {
    EpilogueKind.IDENTITY: 0,
    EpilogueKind.BIAS: 1,
    EpilogueKind.BIAS_RELU: 2,
    EpilogueKind.BIAS_GELU: 3,
    EpilogueKind.BIAS_SILU: 4,
}


class TypedProblem(Protocol):
    """What a kernel is compiled for."""

    element: ElementKind
    out_element: ElementKind
    bias_element: ElementKind
    epilogue: EpilogueKind


def type_defines(problem: TypedProblem) -> dict[str, int]:
    """The macros that common/common.cuh asks of every kernel with an epilogue."""
    return {
        "ELEMENT": ELEMENT_CODES[problem.element],
        "OUT": ELEMENT_CODES[problem.out_element],
        "BIAS": ELEMENT_CODES[problem.bias_element],
        "EPILOGUE": EPILOGUE_CODES[problem.epilogue],
    }


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


def digest(source: str) -> str:
    """A hash of ``source`` and of every file it includes: what a tuned configuration of it is bound to."""
    found = hashlib.sha256()
    for name, text in closure(source).items():
        found.update(name.encode() + b"\0" + text + b"\0")
    return found.hexdigest()[:16]


def compile_cubin(source: str, arch: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """Compile ``kernels_cu/<source>`` for ``arch`` ("sm_90a"). Returns the cubin and ptxas's report.

    Needs NVRTC but no GPU. ``defines`` become ``-DS24_NAME=value``.
    """
    nvrtc = _nvrtc()
    files = closure(source)
    options = _options(arch, defines)
    headers = {name: text for name, text in files.items() if name != source}
    program = nvrtc.createProgram(
        files[source].decode(), source, list(headers.values()), [name.encode() for name in headers]
    )
    try:
        nvrtc.compileProgram(program, options)
        cubin, log = nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DriverError(f"NVRTC on {source} for {arch}", error.status, log) from error
    finally:
        nvrtc.destroyProgram(program)
    # CuPy takes the cubin for a C string and cuts its last byte, a zero.
    return cubin + b"\0", log


def _options(arch: str, defines: Mapping[str, int]) -> list[str]:
    fixed = [f"-arch={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v"]
    return fixed + [f"-DS24_{name}={value}" for name, value in sorted(defines.items())]


def _nvrtc() -> Any:
    import_cupy()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        raise BackendUnavailableError(
            f"NVRTC doesn't load ({error}): pip install 'sparse24_plans[cuda12]' (or [cuda13])"
        ) from error
    return nvrtc


def cache_folder() -> Path:
    """Where cubins are kept: SPARSE24_CACHE_DIR, or sparse24_plans in the user's cache folder."""
    chosen = os.environ.get("SPARSE24_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "sparse24_plans"


def _key(source: str, arch: str, defines: Mapping[str, int]) -> str:
    digest = hashlib.sha256(repr((_options(arch, defines), _nvrtc().getVersion())).encode())
    for name, text in closure(source).items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


def cubin_path(source: str, arch: str, defines: Mapping[str, int]) -> Path:
    """The compiled kernel on disk; compiles at first need. Safe between threads and processes."""
    folder = cache_folder()
    path = folder / f"{Path(source).stem}-{_key(source, arch, defines)}.cubin"
    if path.exists():
        return path
    cubin, _ = compile_cubin(source, arch, defines)
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


_SHARED_BY_DEFAULT = 48 << 10
"""Bytes of dynamic shared memory that a kernel gets without asking."""


class Function:
    """A loaded kernel of one device; ``threads`` and ``shared_bytes`` a block, one struct of parameters."""

    def __init__(self, module: Any, name: str, threads: int, shared_bytes: int) -> None:
        self._module, self._threads, self._shared = module, threads, shared_bytes
        raw = module.get_function(name)
        if shared_bytes > _SHARED_BY_DEFAULT:
            raw.max_dynamic_shared_size_bytes = shared_bytes
        self._function = raw.kernel
        self._launch = import_cupy().cuda.driver.launchKernel
        self._overlapping: dict[int, cuda_driver_abi.OverlappingLaunch] = {}

    def bind(
        self, blocks: int, parameters: ctypes.Structure, *, overlapping: bool = False
    ) -> Callable[[int], None]:
        """A launcher of ``blocks`` blocks: call it with a stream handle, its device being current.

        ``overlapping``: the kernel waits for its predecessors by itself, so it may start before they end.
        """
        launch, function = self._launch, self._function.ptr
        threads, shared = self._threads, self._shared
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        address = ctypes.addressof(pointers)
        keep = (self, parameters, pointers)
        if overlapping:
            early = self._overlapping.get(blocks)
            if early is None:
                early = cuda_driver_abi.OverlappingLaunch(function, blocks, threads, shared)
                self._overlapping[blocks] = early

            def launch_early(stream: int, _keep: Any = keep) -> None:
                early(stream, address)

            return launch_early

        def launch_on(stream: int, _keep: Any = keep) -> None:
            launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, address, 0)

        return launch_on


@cache
def _module(source: str, arch: str, defines: tuple[tuple[str, int], ...], ordinal: int) -> Any:
    cupy = import_cupy()
    path = cubin_path(source, arch, dict(defines))
    with cupy.cuda.Device(ordinal):
        return cupy.RawModule(path=str(path))


_load_lock = threading.Lock()


def load(
    source: str,
    name: str,
    threads: int,
    arch: str,
    ordinal: int,
    defines: Mapping[str, int],
    shared_bytes: int = 0,
) -> Function:
    """Kernel ``name`` of ``source``, compiled for ``arch`` and loaded on device ``ordinal``."""
    cupy = import_cupy()
    with _load_lock, cupy.cuda.Device(ordinal):
        module = _module(source, arch, tuple(sorted(defines.items())), ordinal)
        return Function(module, name, threads, shared_bytes)
