"""Plans bound to operands. A plan of several kernels becomes one CUDA graph."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from .._vendor.cuda_driver_abi import relaxed_capture_mode
from ..device.install import import_cupy
from ..device.streams import CurrentStream, Launch, launch_on, stream_handle
from ..device.tensors import Device
from ..errors import InvalidProblemError


class _Graph:
    """Keeps a CUDA graph, which the garbage collector may free while this thread captures another one."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __del__(self) -> None:
        with relaxed_capture_mode():
            del self._graph


def as_graph(launch: Launch) -> Launch:
    """The work of ``launch`` as one CUDA graph, which costs the host one call instead of one per kernel.

    The work is captured on a new stream, so the device must be current. The graph takes device memory. A
    stream that is capturing gets the kernels one by one.
    """
    cuda = import_cupy().cuda
    runtime = cuda.runtime
    stream = cuda.Stream(non_blocking=True)
    stream.begin_capture(runtime.streamCaptureModeRelaxed)  # memory that is freed meanwhile doesn't end it
    try:
        launch(stream.ptr)
    finally:
        graph: Any = stream.end_capture()
    graph.upload(stream)
    stream.synchronize()
    executable, keep = graph.graphExec, _Graph(graph)
    lock = threading.Lock()  # CUDA forbids launching one executable graph from two threads at once

    def launch_graph(handle: int, _keep: _Graph = keep) -> None:
        if runtime.streamIsCapturing(handle):
            launch(handle)
            return
        with lock:
            runtime.graphLaunch(executable, handle)

    return launch_graph


class Bound:
    """A plan with its operands, which it keeps alive: ``launch`` checks nothing and only launches."""

    __slots__ = ("_current", "_device", "_keep", "_launch")

    def __init__(
        self, launch: Launch, launches: int, device: Device, current: CurrentStream, keep: tuple[Any, ...]
    ) -> None:
        """``launches``: the number of kernels and fills of a run. Several become one CUDA graph here.

        ``current`` is the stream that None stands for.
        """
        if launches > 1:
            made: list[Launch] = []
            launch_on(device, lambda _: made.append(as_graph(launch)), 0)
            launch = made[0]
        self._launch, self._device, self._current, self._keep = launch, device, current, keep

    def launch(self, stream: Any = None) -> None:
        """Enqueue on ``stream``. Never allocates, compiles or synchronises: safe in CUDA-graph capture.

        None is the current stream, at this call, of the operands' own framework.
        """
        launch_on(self._device, self._launch, stream_handle(stream, self._device, self._current))

    def __copy__(self) -> Bound:
        return self

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InvalidProblemError(
            "Bound: cannot be copied deeply, because its operands are the caller's; bind again"
        )

    def __reduce__(self) -> NoReturn:
        raise InvalidProblemError(
            "Bound: cannot be pickled, because it holds addresses of this process; pickle the plan instead"
        )
