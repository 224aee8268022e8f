"""Plans of cuSPARSELt live: captured, shared by threads, each run with a bias of its own, and let go."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest

from sparse24_plans import (
    BackendUnavailableError,
    ElementKind,
    GemmSparse24Args,
)
from sparse24_plans._vendor import cusparselt_abi as abi
from sparse24_plans._vendor.library_error import LibraryError
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.gemm import kernel_table
from sparse24_plans.gemm.backends import cusparselt
from sparse24_plans.plan.kernel import Choice

from ..support import (
    check_that_nothing_is_allocated,
    random_values,
    run_from_threads,
)
from .cusparselt_cases import (
    FORCED,
    case_of,
    descriptor,
    elements,
    medium,
    needs_cusparselt,
)

pytestmark = needs_cusparselt


# Plans that live ----------------------------------------------------------------------------------


def test_one_weight_serves_every_n():
    rng = np.random.default_rng(3)
    dense = random_values(rng, (96, 160), ElementKind.BF16)
    cases = [case_of(descriptor("bf16", n=n), dense=dense) for n in (8, 64, 512)]
    packed = cases[0].args.weight
    for case in cases:
        args = GemmSparse24Args(packed, case.args.x, case.args.y)
        case.plan.run(args, workspace=case.workspace.view)
        case.check(case.fetch())


@elements
def test_capture_and_replay(element):
    import cupy

    case = medium(element)
    want = case.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = case.plan.bind(case.args, workspace=case.workspace.view)
    with stream:
        stream.begin_capture()
        bound.launch()
        case.plan.run(case.args, workspace=case.workspace.view)
        graph = stream.end_capture()
    for _ in range(3):
        case.result.view.bits()[...] = 1
        graph.launch(stream)
        stream.synchronize()
        case.check(case.fetch())
    assert want.shape == case.fetch().shape


FIRST_LAUNCH_IN_CAPTURE = """
import cupy
from tests.gemm.cusparselt_cases import medium
case = medium()
stream = cupy.cuda.Stream(non_blocking=True)
stream.begin_capture()
case.plan.run(case.args, workspace=case.workspace.view, stream=stream)
graph = stream.end_capture()
graph.launch(stream)
stream.synchronize()
case.check(case.fetch())
print("done")
"""


def test_the_first_launch_may_be_a_capture():
    done = subprocess.run([sys.executable, "-c", FIRST_LAUNCH_IN_CAPTURE], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.alone
def test_run_allocates_no_device_memory():
    case = medium()
    case.run()
    check_that_nothing_is_allocated(partial(case.plan.run, case.args, workspace=case.workspace.view))


def test_the_bias_of_a_run_is_its_own():
    """The library keeps the bias's address in the plan: runs in turn, bound ones too, each get theirs."""
    cases = [case_of(descriptor("bf16", epilogue="bias"), seed=seed) for seed in range(3)]
    assert len({id(case.plan) for case in cases}) == 1
    bound = [case.plan.bind(case.args, workspace=case.workspace.view) for case in cases]
    for case, one in zip(cases, bound, strict=True):
        case.check(case.run())
        case.result.view.bits()[...] = 1
        one.launch()
        case.check(case.fetch())


def test_four_threads_on_four_streams_share_a_plan():
    cases = [case_of(descriptor("bf16", n=96, m=512, k=512, epilogue="bias"), seed=s) for s in range(4)]
    assert len({id(case.plan) for case in cases}) == 1
    runs = [partial(case.plan.run, case.args, workspace=case.workspace.view) for case in cases]
    run_from_threads(runs, 200)
    for case in cases:
        case.check(case.fetch())


def test_threads_plan_and_run_at_once():
    """Each thread has a handle of its own; plans of several threads live side by side and outlive them."""
    errors: list[BaseException] = []
    cases: list = []

    def work(seed: int) -> None:
        try:
            for n in range(8, 8 * 9, 8):
                case = case_of(descriptor("bf16", n=n, m=64 + 16 * seed, k=128), seed=seed)
                case.check(case.run())
            cases.append(case)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for case in cases:
        case.check(case.run())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.alone
def test_ten_thousand_plans_leave_no_memory_behind():
    import gc

    import cupy

    desc, device = descriptor("bf16", epilogue="bias_relu"), cuda_properties(0)

    choice = Choice(desc, device, kernel_table.find("cusparselt"), FORCED, {})

    def cycles(count: int) -> None:
        for _ in range(count):
            cusparselt.Kernel(choice)

    cycles(1000)  # what the library keeps once, it keeps now
    gc.collect()
    host, free = resident_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    cycles(10_000)
    gc.collect()
    assert cupy.cuda.runtime.memGetInfo()[0] == free
    assert resident_bytes() - host < 4 << 20, "over 400 bytes a plan stay behind"


def test_a_library_without_kernels_for_the_gpu(monkeypatch):
    def refuse(library) -> None:
        raise LibraryError("cusparseLtInit", abi.ARCH_MISMATCH, "ARCH_MISMATCH")

    monkeypatch.setattr(abi, "handle", refuse)
    choice = Choice(descriptor("bf16"), cuda_properties(0), kernel_table.find("cusparselt"), FORCED, {})
    with pytest.raises(BackendUnavailableError, match="pip install"):
        cusparselt.Kernel(choice)
