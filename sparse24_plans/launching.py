"""Launches: the device made current around them, and several kernels made one graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import DriverError
from .tensors import Device, import_cupy

Launch = Callable[[int], None]

_bound_threads = threading.local()


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
