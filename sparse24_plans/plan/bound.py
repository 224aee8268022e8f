"""Launches: the device made current around them, and several kernels made one graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .._vendor.library_error import LibraryError
from ..device.tensors import Device, import_cupy, stream_handle
from ..errors import DriverError

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


def as_graph(launch: Launch) -> Launch:
    """The same work as one CUDA graph: a launch then costs the host one call, not one a kernel.

    Captures ``launch`` on a stream of its own, so the device must be current; allocates the graph's
    memory. Into a stream that is capturing, the kernels go one by one.
    """
    cuda = import_cupy().cuda
    runtime = cuda.runtime
    stream = cuda.Stream(non_blocking=True)
    stream.begin_capture(runtime.streamCaptureModeThreadLocal)
    try:
        launch(stream.ptr)
    finally:
        graph: Any = stream.end_capture()
    graph.upload(stream)
    stream.synchronize()
    executable = graph.graphExec
    lock = threading.Lock()  # CUDA forbids launching one executable graph from two threads at once

    def launch_graph(handle: int, _keep: Any = graph) -> None:
        if runtime.streamIsCapturing(handle):
            launch(handle)
            return
        with lock:
            runtime.graphLaunch(executable, handle)

    return launch_graph


class Bound:
    """A plan with its operands: ``launch`` only launches. Keeps the operands alive."""

    __slots__ = ("_device", "_keep", "_launch")

    def __init__(self, launch: Launch, launches: int, device: Device, keep: tuple[Any, ...]) -> None:
        """``launches``: what one run enqueues. Where that is several, they become one CUDA graph here."""
        if launches > 1:
            made: list[Launch] = []
            launch_on(device, lambda _: made.append(as_graph(launch)), 0)
            launch = made[0]
        self._launch, self._device, self._keep = launch, device, keep

    def launch(self, stream: Any = None) -> None:
        """Enqueue on ``stream``. Never allocates, compiles or synchronises: safe in CUDA-graph capture."""
        launch_on(self._device, self._launch, stream_handle(stream, self._device))
