"""Loads compiled kernels on a device and launches them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...errors import DriverError
from ...vocab import DeviceProperties
from ..install import import_cupy
from ..streams import driver_error
from .cache import CompiledKernel, compiled, cubin
from .structs import KernelParams

_OVERLAPS = (9, 0)
"""Least compute capability on which a kernel may start before its predecessors end."""


def put_maps(parameters: ctypes.Structure, make: Callable[..., bytes], *given: object, at: int = 0) -> None:
    """Write the tensor maps ``make(*given)`` to ``parameters`` from byte ``at`` on. Raises DriverError."""
    try:
        maps = make(*given)
    except LibraryError as error:
        raise driver_error(error) from error
    ctypes.memmove(ctypes.addressof(parameters) + at, maps, len(maps))


class Function:
    """A kernel loaded on one device. Each CTA has ``threads`` threads and ``shared_bytes`` bytes."""

    def __init__(self, module: Any, code: KernelCode) -> None:
        self._module, self._threads, self._shared = module, code.threads, code.shared_bytes
        self._overlaps, shared_bytes = code.overlaps, code.shared_bytes
        self._function = module.get_function(code.name)  # keeps the module loaded
        driver = import_cupy().cuda.driver
        most = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if driver.funcGetAttribute(most, self._function.ptr) < shared_bytes:  # other plans share the kernel
            driver.funcSetAttribute(self._function.ptr, most, shared_bytes)
        self._launch = driver.launchKernel
        self._overlapping: dict[int, cuda_driver_abi.OverlappingLaunch] = {}

    def bind(
        self, blocks: int, parameters: ctypes.Structure, *, overlapping: bool = False
    ) -> Callable[[int], None]:
        """Return a launcher of ``blocks`` CTAs. It takes a stream handle and needs its device to be current.

        An ``overlapping`` kernel waits for its predecessors itself, so it may start before they end where the
        device can do that.
        """
        launch, function = self._launch, self._function.ptr
        threads, shared = self._threads, self._shared
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        address = ctypes.addressof(pointers)
        keep = (self, parameters, pointers)
        if overlapping and self._overlaps:
            early = self._overlapping.get(blocks)
            if early is None:
                early = cuda_driver_abi.OverlappingLaunch(function, blocks, threads, shared)
                self._overlapping[blocks] = early
            return early.bind(address, keep)

        def launch_on(stream: int, _keep: Any = keep) -> None:
            launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, address, 0)

        return launch_on


@cache
def _module(source: str, arch: str, defines: tuple[tuple[str, int], ...], ordinal: int) -> Any:
    cuda = import_cupy().cuda
    module = cuda.Module()
    with cuda.Device(ordinal):
        module.load(cubin(source, arch, dict(defines)))
    return module


_load_lock = threading.Lock()


class KernelCode(NamedTuple):
    """The arguments of :func:`load`, with what the launch needs to know of the device."""

    source: str
    """Path below kernels_cu/."""
    arch: str
    """The compiler's target."""
    defines: tuple[tuple[str, int], ...]
    name: str
    """The kernel's symbol."""
    threads: int
    shared_bytes: int
    overlaps: bool
    """Whether a kernel may start before its predecessors end."""


_instead: ContextVar[Callable[[KernelCode], Function | None] | None] = ContextVar("instead", default=None)
"""The function that :func:`load` calls where it touches no device. Its result is then :func:`load`'s."""


@contextmanager
def _loading_nothing(instead: Callable[[KernelCode], Function | None]) -> Iterator[None]:
    before = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(before)


@contextmanager
def compiling_only() -> Iterator[list[CompiledKernel]]:
    """Make :func:`load` compile into the cache and touch no device. Yields the compiled kernels."""
    found: list[CompiledKernel] = []
    with _loading_nothing(lambda code: found.append(compiled(code.source, code.arch, dict(code.defines)))):
        yield found


def sizing_only() -> AbstractContextManager[None]:
    """Make :func:`load` do nothing, so that kernels of an absent GPU can size their workspaces."""
    return _loading_nothing(_nothing)


def is_sizing() -> bool:
    """Whether :func:`sizing_only` applies, so that a library must not be asked either."""
    return _instead.get() is _nothing


def _nothing(code: KernelCode) -> None:
    pass


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch of a kernel that :func:`recording` has not loaded. A call with a list appends it there."""

    code: KernelCode
    blocks: int
    parameters: KernelParams
    overlapping: bool

    def __call__(self, stream: Any) -> None:
        stream.append(self)


@dataclass(frozen=True)
class RecordedFill:
    """A fill under :func:`recording`. A call with a list appends it there."""

    address: int
    byte: int
    nbytes: int

    def __call__(self, stream: Any) -> None:
        stream.append(self)


@contextmanager
def recording() -> Iterator[None]:
    """Make kernels whose launches are :class:`RecordedLaunch`, and encode tensor maps without a driver.

    It touches neither NVRTC nor a device. Make launches inside of it, and call them with a list.
    """
    with _loading_nothing(_Recorded), cuda_driver_abi.describing_maps():
        yield


def fill(address: int, byte: int, nbytes: int) -> Callable[[int], None]:
    """A launch that fills memory with a byte. Raises BackendUnavailableError without CuPy."""
    if _instead.get() is _Recorded:
        return RecordedFill(address, byte, nbytes)
    enqueue = import_cupy().cuda.runtime.memsetAsync
    return lambda stream: enqueue(address, byte, nbytes, stream)


class _NotLoaded(Function):
    """Returned by :func:`load` where it loads nothing."""

    def __init__(self) -> None:
        pass


class _Recorded(Function):
    """Returned by :func:`load` under :func:`recording`."""

    def __init__(self, code: KernelCode) -> None:
        self._code = code

    def bind(
        self, blocks: int, parameters: ctypes.Structure, *, overlapping: bool = False
    ) -> Callable[[int], None]:
        assert isinstance(parameters, KernelParams)
        return RecordedLaunch(self._code, blocks, parameters, overlapping and self._code.overlaps)


def load(
    source: str,
    name: str,
    threads: int,
    device: DeviceProperties,
    defines: Mapping[str, int],
    shared_bytes: int = 0,
) -> Function:
    """Return kernel ``name`` of ``source``, compiled for ``device`` and loaded on it.

    Raises BackendUnavailableError without CuPy or NVRTC, DriverError if the compiler or the driver refuses
    the kernel, and StorageError if the cache can't be used.
    """
    macros, overlaps = tuple(sorted(defines.items())), device.compute_capability >= _OVERLAPS
    code = KernelCode(source, device.cuda_arch, macros, name, threads, shared_bytes, overlaps)
    if (instead := _instead.get()) is not None:
        return instead(code) or _NotLoaded()
    cuda = import_cupy().cuda
    try:
        with _load_lock, cuda.Device(device.ordinal):
            module = _module(code.source, code.arch, code.defines, device.ordinal)
            return Function(module, code)
    except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
        raise DriverError(f"loading {name} of {source}", error.status, str(error)) from error
