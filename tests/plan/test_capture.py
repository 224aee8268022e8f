"""On a GPU: launches may be captured, the first one too; they keep their place; nothing is allocated."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from sparse24_plans import DriverError
from sparse24_plans._vendor.library_error import LibraryError
from sparse24_plans.device.streams import launch_on
from sparse24_plans.device.tensors import Device
from sparse24_plans.plan.bound import as_graph

from ..support import check_that_nothing_is_allocated
from .cases import KERNELS, equal, kernel_case

pytestmark = pytest.mark.gpu
every_kernel = pytest.mark.parametrize("name", KERNELS)


@every_kernel
def test_capture_and_replay(name):
    import cupy

    case = kernel_case(name)
    want = case.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = case.plan.bind(case.args, workspace=case.space)
    with stream:
        stream.begin_capture()
        bound.launch()
        case.plan.run(case.args, workspace=case.space)
        graph = stream.end_capture()
    for _ in range(3):
        case.poison()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert equal(case.fetch(), want)
    case.poison()
    cupy.cuda.Device().synchronize()
    bound.launch(stream)
    stream.synchronize()
    assert equal(case.fetch(), want)


@every_kernel
def test_a_launch_follows_what_else_is_captured(name):
    """Kernels that may start early still wait for a memset and a copy in front of them."""
    import cupy

    case = kernel_case(name)
    want = case.run()
    read = next(one for one in case.guarded if one not in case.written)
    view = case.guarded[read].view
    bound = case.plan.bind(case.args, workspace=case.space)
    source = cupy.array(view.bits())
    cupy.cuda.Device().synchronize()
    stream, runtime = cupy.cuda.Stream(non_blocking=True), cupy.cuda.runtime
    copy = (view.address, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
    with stream:
        stream.begin_capture()
        runtime.memsetAsync(view.address, 0xFF, source.nbytes, stream.ptr)
        bound.launch()
        runtime.memcpyAsync(*copy)
        bound.launch()
        runtime.memsetAsync(view.address, 0xFF, source.nbytes, stream.ptr)
        graph = stream.end_capture()
    for _ in range(20):
        case.poison()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert equal(case.fetch(), want)


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_plan_of_several_launches_may_be_freed_in_capture(mode):
    """The plan holds a CUDA graph, and CUDA lets no thread free a graph while the thread captures another."""
    import cupy

    case = kernel_case("inflate_cublas")
    want = case.run()
    bound, freed = (case.plan.bind(case.args, workspace=case.space) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    gc.collect()  # graphs that other tests left
    with stream:
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        del freed
        gc.collect()
        bound.launch()
        graph = stream.end_capture()
    case.poison()
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert equal(case.fetch(), want)


def test_a_graph_may_be_freed_while_another_one_is_made():
    """The garbage collector runs at any time."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    marks = cupy.zeros(64, cupy.uint8)
    cupy.cuda.Device().synchronize()

    def launch(handle: int) -> None:
        freed.clear()
        cupy.cuda.runtime.memsetAsync(marks.data.ptr, 7, marks.nbytes, handle)

    other = cupy.cuda.Stream(non_blocking=True)
    other.begin_capture()
    cupy.cuda.runtime.memsetAsync(marks.data.ptr, 9, marks.nbytes, other.ptr)
    freed = [other.end_capture()]
    made = as_graph(launch)
    assert not freed
    made(stream.ptr)
    stream.synchronize()
    assert (marks == 7).all()


FIRST_LAUNCH_IN_CAPTURE = """
import sys
import cupy
from tests.plan.cases import kernel_case
case = kernel_case(sys.argv[1])
stream = cupy.cuda.Stream(non_blocking=True)
stream.begin_capture()
free = cupy.cuda.runtime.memGetInfo()[0]
case.plan.run(case.args, workspace=case.space, stream=stream)
assert cupy.cuda.runtime.memGetInfo()[0] == free, "run allocated device memory"
graph = stream.end_capture()
graph.launch(stream)
stream.synchronize()
captured = case.fetch()
case.poison()
assert all((captured[name] == bits).all() for name, bits in case.run().items())
print("done")
"""


@pytest.mark.alone
@every_kernel
def test_the_first_launch_may_be_a_capture(name):
    """In a fresh process: whatever loads lazily loads at select."""
    command = [sys.executable, "-c", FIRST_LAUNCH_IN_CAPTURE, name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.alone
@every_kernel
def test_run_allocates_no_device_memory(name):
    case = kernel_case(name)
    case.run()
    check_that_nothing_is_allocated(partial(case.plan.run, case.args, workspace=case.space))


def test_what_a_library_refuses_is_a_driver_error():
    def refused(stream: int) -> None:
        raise LibraryError("cublasLtMatmul", 7, "CUBLAS_STATUS_INVALID_VALUE")

    with pytest.raises(DriverError, match="cublasLtMatmul failed with code 7: CUBLAS_STATUS_INVALID_VALUE"):
        launch_on(Device("cuda", 0), refused, 0)


def test_the_tests_poison_what_they_look_at():
    case = kernel_case("prune")
    case.run()
    case.poison()
    assert all((bits.view(np.uint8) == 0xFF).all() for bits in case.fetch().values())
