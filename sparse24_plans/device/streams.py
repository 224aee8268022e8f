"""Streams of any framework, and launches on them with the device made current."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

from .._vendor.library_error import LibraryError
from ..errors import BackendUnavailableError, DriverError, InvalidProblemError, Sparse24Error, shown
from .install import import_cupy
from .tensors import HOST, Device, wrong

Launch = Callable[[int], None]
"""Enqueues work on the stream with the given handle, whose device is current."""
CurrentStream = Callable[[int], int]
"""Gives the handle of a framework's current stream on the CUDA device with the given ordinal."""

_MAX_HANDLE = 1 << 64
_bound_threads = threading.local()


def driver_error(error: LibraryError) -> DriverError:
    """The DriverError for an error code that a library returned."""
    return DriverError(error.call, error.status, error.name)


@cache
def _cuda() -> Any:
    """``cupy.cuda``. An import statement would cost every launch some 0.3 us."""
    return import_cupy().cuda


def launch_on(device: Device, launch: Launch, stream: int) -> None:
    """Call ``launch(stream)`` with ``device`` current, and the caller's device current after it.

    Raises DriverError where the driver refuses the launch, and InvalidProblemError for a stream on the host.
    """
    if device.kind == "host":
        if stream != 0:
            raise wrong("stream", "0 for a host plan, which runs synchronously", stream)
        launch(stream)
        return
    cuda = _cuda()
    runtime, ordinal = cuda.runtime, device.ordinal
    before = runtime.getDevice()
    try:
        if before == ordinal and getattr(_bound_threads, "ready", False):
            launch(stream)
            return
        runtime.setDevice(ordinal)  # also binds the device's context to a new thread
        try:
            launch(stream)
        finally:
            runtime.setDevice(before)
        _bound_threads.ready = before == ordinal
    except LibraryError as error:
        raise driver_error(error) from error
    except (cuda.driver.CUDADriverError, runtime.CUDARuntimeError) as error:
        raise DriverError("kernel launch", error.status, str(error)) from error


@contextmanager
def on_stream(device: Device, stream: Any) -> Iterator[None]:
    """Make ``stream`` CuPy's current one on ``device``, so that all work is queued and memory taken there.

    The host has no streams and takes None alone. Raises what :func:`stream_handle` raises.
    """
    handle = stream_handle(stream, device)
    if device == HOST:
        yield
        return
    cuda = import_cupy().cuda
    with cuda.Device(device.ordinal), cuda.ExternalStream(handle, device.ordinal):
        yield


def stream_of_cupy(ordinal: int) -> int:
    """The handle of CuPy's current stream. Raises BackendUnavailableError where there is no device."""
    cuda = import_cupy().cuda
    try:
        return int(cuda.get_current_stream(ordinal).ptr)
    except cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(f"no usable CUDA device: {error}") from error


def stream_of_torch(ordinal: int) -> int:
    """The handle of PyTorch's current stream. PyTorch must have been imported."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # costs the host a tenth of a stream object
    return int(torch.cuda.current_stream(ordinal).cuda_stream if raw is None else raw(ordinal))


def current_stream_of(operands: Iterable[Any]) -> CurrentStream:
    """The stream that None stands for beside these operands: the current one of their own framework.

    That is PyTorch's for its tensors and CuPy's for its arrays. Operands of other types follow those; if
    there are none, it is CuPy's. Operands of both frameworks are accepted if both have the same current
    stream. Otherwise the function raises InvalidProblemError, because neither stream would order the work
    before and after it.
    """
    of_type: Any = _stream_of_type  # mypy takes no class for hashable
    named = (of_type(type(one)) for one in operands)
    found = tuple(dict.fromkeys(stream for stream in named if stream is not None))
    return partial(_common, found) if len(found) > 1 else (*found, stream_of_cupy)[0]


@lru_cache(256)
def _stream_of_type(kind: type) -> CurrentStream | None:
    """The current stream of the framework that defines the type or one of its bases, if it has one."""
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_STREAM_OF[root] for root in roots if root in _STREAM_OF), None)


_STREAM_OF: dict[str, CurrentStream] = {"cupy": stream_of_cupy, "torch": stream_of_torch}


def _common(streams: tuple[CurrentStream, ...], ordinal: int) -> int:
    handles = {stream(ordinal) for stream in streams}
    if len(handles) > 1:
        raise InvalidProblemError(
            "stream: expected a stream, because the current ones of the operands' frameworks differ, got None"
        )
    return handles.pop()


def stream_handle(stream: Any, device: Device, current: CurrentStream = stream_of_cupy) -> int:
    """The ``cudaStream_t`` of ``stream`` as an integer.

    None is what ``current`` gives for the device. Otherwise an integer handle, or an object with ``ptr``
    (CuPy), ``cuda_stream`` (PyTorch) or ``__cuda_stream__`` (cuda.core). Host plans take only None. Raises
    InvalidProblemError, and BackendUnavailableError for None where there is no device.
    """
    if device.kind == "host":
        if stream is not None:
            raise wrong("stream", "None for a host plan, which runs synchronously", stream)
        return 0
    if stream is None:
        return current(device.ordinal)
    if type(stream) is int:
        handle, home = stream, None
    else:
        try:
            handle, home = _stream_of_object(stream)
        except Sparse24Error:
            raise
        except Exception as error:  # whatever a broken protocol raises
            raise InvalidProblemError(
                f"stream: expected a CUDA stream, got {type(stream).__name__} that can't be read "
                f"({type(error).__name__}: {error})"
            ) from error
    if type(handle) is not int or not 0 <= handle < _MAX_HANDLE:
        raise wrong("stream", f"an open CUDA stream ({type(stream).__name__})", handle)
    if home is not None and home not in (-1, device.ordinal):
        raise InvalidProblemError(f"stream: expected a stream of {device}, got one of cuda:{shown(home)}")
    return handle


def _stream_of_object(stream: Any) -> tuple[Any, int | None]:
    """Handle, and the ordinal of its device where it says one."""
    home = getattr(stream, "device_id", None)
    if hasattr(stream, "ptr"):
        handle = stream.ptr
    elif hasattr(stream, "cuda_stream"):
        handle, home = stream.cuda_stream, getattr(getattr(stream, "device", None), "index", None)
    elif hasattr(stream, "__cuda_stream__"):
        handle, home = _stream_of_protocol(stream.__cuda_stream__), None
    else:
        raise InvalidProblemError(
            "stream: expected None, an integer handle, or an object with ptr, cuda_stream or "
            f"__cuda_stream__, got {type(stream).__name__}"
        )
    return handle, home if type(home) is int else None


def _stream_of_protocol(protocol: Any) -> int | None:
    answer = protocol() if callable(protocol) else protocol
    try:
        version, handle = answer
        handle = None if handle is None else int(handle)
    except (TypeError, ValueError) as error:
        raise wrong("stream", "(version, handle) from __cuda_stream__", answer) from error
    if version != 0:
        raise wrong("stream", "__cuda_stream__ protocol 0", version)
    return handle
