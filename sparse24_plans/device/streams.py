"""Streams of any framework, and launches on them with the device made current."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .._vendor.library_error import LibraryError
from ..errors import DriverError, InvalidProblemError
from .tensors import Device, import_cupy

Launch = Callable[[int], None]

_bound_threads = threading.local()


def driver_error(error: LibraryError) -> DriverError:
    return DriverError(error.call, error.status, error.name)


def launch_on(device: Device, launch: Launch, stream: int) -> None:
    """Call ``launch(stream)`` with ``device`` current, and the caller's device current after it.

    Raises DriverError where the driver refuses the launch.
    """
    if device.kind == "host":
        launch(stream)
        return
    cuda = import_cupy().cuda
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


def stream_handle(stream: Any, device: Device) -> int:
    """The ``cudaStream_t`` of ``stream`` as an integer.

    None is CuPy's current stream on the device. Otherwise an integer handle, or an object with ``ptr``
    (CuPy), ``cuda_stream`` (PyTorch) or ``__cuda_stream__`` (cuda.core). Host plans take only None.
    """
    if device.kind == "host":
        if stream is not None:
            raise InvalidProblemError(
                f"stream: expected None for a host plan, which runs synchronously, got {stream!r}"
            )
        return 0
    if stream is None:
        return int(import_cupy().cuda.get_current_stream(device.ordinal).ptr)
    if type(stream) is int:
        handle, home = stream, None
    else:
        handle, home = _stream_of_object(stream)
    if type(handle) is not int or handle < 0:
        raise InvalidProblemError(
            f"stream: expected an open CUDA stream, got {type(stream).__name__} with handle {handle!r}"
        )
    if home is not None and home not in (-1, device.ordinal):
        raise InvalidProblemError(f"stream: expected a stream of {device}, got one of cuda:{home}")
    return handle


def _stream_of_object(stream: Any) -> tuple[Any, int | None]:
    home = getattr(stream, "device_id", None)
    if hasattr(stream, "ptr"):
        return stream.ptr, home if type(home) is int else None
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream, getattr(getattr(stream, "device", None), "index", None)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        answer = protocol() if callable(protocol) else protocol
        try:
            version, handle = answer
            handle = None if handle is None else int(handle)
        except (TypeError, ValueError) as error:
            raise InvalidProblemError(
                f"stream: expected (version, handle) from __cuda_stream__, got {answer!r}"
            ) from error
        if version != 0:
            raise InvalidProblemError(f"stream: expected __cuda_stream__ protocol 0, got {version!r}")
        return handle, None
    raise InvalidProblemError(
        "stream: expected None, an integer handle, or an object with ptr, cuda_stream or "
        f"__cuda_stream__, got {type(stream).__name__}"
    )
