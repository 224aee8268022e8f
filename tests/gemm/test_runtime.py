"""On a GPU: capture and replay, threads, streams, devices, large operands, nothing allocated, sanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest

from sparse24_plans import (
    DriverError,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Weight,
)
from sparse24_plans._vendor.library_error import LibraryError
from sparse24_plans.device.streams import launch_on
from sparse24_plans.device.tensors import Device

from ..support import ELEMENTS, check_that_nothing_is_allocated, make_case, run_from_threads, same_bits

pytestmark = pytest.mark.gpu
BACKENDS = ("inflate_cublas", "inflate_strict", "mma_sp", "wgmma_sp")
backends = pytest.mark.parametrize("backend", BACKENDS)


def forced(backend: str) -> PlanPreference:
    return PlanPreference(prefer_backend=backend)


def medium(backend: str, **change):
    problem = {"n": 70, "m": 1024, "k": 512, "element": "bf16", "epilogue": "bias_gelu", **change}
    return make_case(GemmSparse24Descriptor(**problem), 0, forced(backend))


@backends
def test_capture_and_replay(backend):
    import cupy

    case = medium(backend)
    want = case.run()
    space = case.workspace and case.workspace.view
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = case.plan.bind(case.args, workspace=space)
    with stream:
        stream.begin_capture()
        bound.launch()
        case.plan.run(case.args, workspace=space)
        graph = stream.end_capture()
    case.result.fill(np.full(want.shape, np.nan, want.dtype))
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(case.fetch(), want)


@backends
def test_a_launch_follows_what_else_is_captured(backend):
    """Kernels that may start early still wait for a memset and a copy in front of them."""
    import cupy

    case = medium(backend)
    want = case.run()
    x, y = case.inputs[0].view, case.result.view
    space = case.workspace and case.workspace.view
    bound = case.plan.bind(case.args, workspace=space)
    source = cupy.asarray(case.inputs[0].numpy().view(np.uint16))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    runtime = cupy.cuda.runtime
    with stream:
        stream.begin_capture()
        runtime.memsetAsync(x.address, 0xFF, source.nbytes, stream.ptr)
        bound.launch()
        runtime.memcpyAsync(
            x.address, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, stream.ptr
        )
        bound.launch()
        runtime.memsetAsync(x.address, 0xFF, source.nbytes, stream.ptr)
        graph = stream.end_capture()
    for _ in range(20):
        runtime.memsetAsync(y.address, 0xFF, want.nbytes, stream.ptr)
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(case.result.numpy(), want)


def test_what_a_library_refuses_is_a_driver_error():
    def refused(stream: int) -> None:
        raise LibraryError("cublasLtMatmul", 7, "CUBLAS_STATUS_INVALID_VALUE")

    with pytest.raises(DriverError, match="cublasLtMatmul failed with code 7: CUBLAS_STATUS_INVALID_VALUE"):
        launch_on(Device("cuda", 0), refused, 0)


FIRST_LAUNCH_IN_CAPTURE = """
import cupy
from tests.test_runtime import medium
case = medium("{backend}")
stream = cupy.cuda.Stream(non_blocking=True)
stream.begin_capture()
free = cupy.cuda.runtime.memGetInfo()[0]
case.plan.run(case.args, workspace=case.workspace and case.workspace.view, stream=stream)
assert cupy.cuda.runtime.memGetInfo()[0] == free, "run allocated device memory"
graph = stream.end_capture()
graph.launch(stream)
stream.synchronize()
case.check(case.fetch())
print("done")
"""


@pytest.mark.alone
@backends
def test_the_first_launch_may_be_a_capture(backend):
    """In a fresh process: whatever loads lazily loads at select."""
    code = FIRST_LAUNCH_IN_CAPTURE.format(backend=backend)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.alone
@backends
def test_run_allocates_no_device_memory(backend):
    case = medium(backend)
    case.run()
    space = case.workspace and case.workspace.view
    check_that_nothing_is_allocated(partial(case.plan.run, case.args, workspace=space))


@backends
def test_threads_share_a_plan(backend):
    cases = [medium(backend) for _ in range(4)]
    assert len({id(case.plan) for case in cases}) == 1
    want = cases[0].run()
    spaces = [case.workspace and case.workspace.view for case in cases]
    runs = [partial(case.plan.run, case.args, workspace=s) for case, s in zip(cases, spaces, strict=True)]
    run_from_threads(runs, 100)
    assert all(same_bits(case.fetch(), want) for case in cases)


def test_threads_selecting_at_once_get_one_answer():
    desc = GemmSparse24Descriptor(n=33, m=264, k=136, element="f16")
    found: list[GemmSparse24Plan] = []
    threads = [
        threading.Thread(target=lambda: found.append(GemmSparse24Plan.select(desc, device=0)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({plan.sku for plan in found}) == 1


class _CudaStream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@backends
@pytest.mark.parametrize("form", ["none", "handle", "cupy", "protocol", "torch"])
def test_every_form_of_stream(backend, form):
    import cupy

    case = medium(backend)
    stream = cupy.cuda.Stream(non_blocking=True)
    if form == "torch":
        torch = pytest.importorskip("torch")
        given = torch.cuda.Stream()
    else:
        given = {"none": None, "handle": stream.ptr, "cupy": stream, "protocol": _CudaStream(stream.ptr)}[
            form
        ]
    case.check(case.run(stream=given))


@backends
def test_torch_tensors(backend):
    torch = pytest.importorskip("torch")
    n, m, k = 9, 64, 96
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", epilogue="bias")
    plan = GemmSparse24Plan.select(desc, device=0, preference=forced(backend))
    dense = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = Sparse24Weight.prune_compress(dense)
    x = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    y = torch.full((n, m), float("nan"), device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(m, device="cuda", dtype=torch.bfloat16)
    space = torch.empty(max(plan.workspace_size(), 1), device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    plan.run(
        GemmSparse24Args(plan.pack(weight), x, y, bias),
        workspace=space,
        stream=torch.cuda.current_stream(),
    )
    host = torch.from_numpy(weight.to("host").decompress().astype(np.float32)).double()
    want = x.cpu().double() @ host.T + bias.cpu().double()
    assert torch.allclose(y.cpu().double(), want, rtol=1e-2, atol=1e-1)


def random_on_device(shape, element: str, seed: int):
    import cupy

    cupy.random.seed(seed)
    bits = cupy.empty(shape, {"f32": "u4"}.get(element, "u2"))
    rows = max(1, (1 << 28) // max(shape[1], 1))
    for start in range(0, shape[0], rows):
        part = cupy.random.standard_normal((min(rows, shape[0] - start), shape[1]), dtype=cupy.float32)
        bits[start : start + rows] = part.astype(cupy.float16).view("u2")
    return bits


@backends
@pytest.mark.parametrize(
    ("n", "m", "k", "huge"),
    [(3, 70_000, 32_768, "W"), (66_000, 24, 32_768, "X"), (66_000, 32_776, 16, "Y")],
)
def test_operands_beyond_2_to_the_31_elements(backend, n, m, k, huge):
    """Checked at rows and columns spread over the whole, the last ones included."""
    import cupy

    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f16", out_element="f16")
    assert {"W": m * k, "X": n * k, "Y": n * m}[huge] > 2**31
    plan = GemmSparse24Plan.select(desc, device=0, preference=forced(backend))
    weight = Sparse24Weight.prune_compress(random_on_device((m, k), "f16", 1).view(cupy.float16))
    x = random_on_device((n, k), "f16", 2).view(cupy.float16)
    y = cupy.full((n, m), cupy.nan, cupy.float16)
    space = cupy.empty(plan.workspace_size(), "u1")
    plan.run(GemmSparse24Args(plan.pack(weight), x, y), workspace=space)
    assert not bool(cupy.isnan(y).any())
    rng = np.random.default_rng(0)
    rows = np.unique(np.append(rng.integers(0, n, 6), n - 1))
    columns = np.unique(np.append(rng.integers(0, m, 40), m - 1))
    part = Sparse24Weight(weight.values[columns], weight.metadata[columns]).to("host").decompress()
    xs = cupy.asnumpy(x[rows]).astype(np.float64)
    exact, abs_sum = xs @ part.astype(np.float64).T, np.abs(xs) @ np.abs(part.astype(np.float64)).T
    tolerance = plan.guarantee.tolerance(k, exact, abs_sum, desc.out_element)
    got = cupy.asnumpy(y[rows][:, columns]).astype(np.float64)
    assert (np.abs(got - exact) <= tolerance).all()


def test_the_callers_device_stays_current():
    import cupy

    case = medium("inflate_strict")
    before = cupy.cuda.runtime.getDevice()
    case.run()
    assert cupy.cuda.runtime.getDevice() == before


@pytest.mark.parametrize("element", ELEMENTS)
def test_cupy_format_functions_equal_the_hosts(element):
    import cupy

    desc = GemmSparse24Descriptor(n=1, m=1, k=8, element=element)
    dense = np.random.default_rng(0).standard_normal((130, 264)).astype(np.float32).astype(desc.element.dtype)
    dense[::7] = 0
    on_device = cupy.asarray(dense.view(desc.element.bits_dtype))
    host = Sparse24Weight.prune_compress(dense)
    if element != "bf16":
        on_device = on_device.view(dense.dtype)
    gpu = Sparse24Weight.prune_compress(on_device, element=element)
    assert gpu.device.kind == "cuda"
    assert same_bits(gpu.to("host").values, host.values)
    assert same_bits(gpu.to("host").metadata, host.metadata)
    bits = desc.element.bits_dtype
    assert same_bits(cupy.asnumpy(gpu.decompress().view(bits)), host.decompress().view(bits))


SANITIZED = """
import sys
from tests.support import make_case
from sparse24_plans import GemmSparse24Descriptor, PlanPreference
ops = (("forward", "bias_gelu"), ("dgrad", "identity"))
for op, epilogue in ops[:1] if sys.argv[1].endswith("mma_sp") else ops:
    wide = 9000 if op == "forward" else 24
    for n, m, k in ((1, 1, 8), (3, 33, 24), (40, 72, 520), (130, 24, 40), (67, wide, 16)):
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=sys.argv[2], op=op, epilogue=epilogue)
        pad = 3 if sys.argv[1] == "inflate_strict" else 8
        case = make_case(desc, 0, PlanPreference(prefer_backend=sys.argv[1]), pad=pad)
        case.check(case.run())
print("done")
"""


@backends
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(backend, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    for element in ("bf16",) if tool != "memcheck" or backend.endswith("mma_sp") else ("bf16", "f32"):
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        command += [sys.executable, "-c", SANITIZED, backend, element]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert "done" in done.stdout
        assert re.search(r"SUMMARY: .*\b0 errors", done.stdout), done.stdout
