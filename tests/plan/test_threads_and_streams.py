"""Plans are shared: by threads that select, run and launch at once, and by every form of stream."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ..support import run_from_threads
from .cases import KERNELS, PROBLEMS, PlanCase, case_of, equal, kernel_case, name_of, random_inputs, select

gpu = pytest.mark.gpu
every_kernel = pytest.mark.parametrize("name", KERNELS)
THREADS = 8


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
def test_threads_selecting_at_once_get_one_answer(desc, device):
    size = "k" if hasattr(desc, "k") else "batch"  # of its own: plans are cached
    fields = {**desc.model_dump(exclude_unset=True), size: 40 + 8 * (device == 0)}
    fresh = type(desc)(**fields)
    start = threading.Barrier(THREADS, timeout=60)

    def ask(_: int):
        start.wait()
        return select(fresh, device)

    with ThreadPoolExecutor(THREADS) as pool:
        plans = list(pool.map(ask, range(THREADS)))
    assert len({plan.sku for plan in plans}) == 1
    assert len({plan.explain() for plan in plans}) == 1


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
def test_threads_share_a_host_plan(desc):
    cases = [case_of(desc, "host", seed) for seed in range(4)]
    assert len({id(case.plan) for case in cases}) == 1
    want = [case.run() for case in cases]
    start = threading.Barrier(len(cases), timeout=60)

    def work(case: PlanCase) -> None:
        start.wait()
        for _ in range(4):
            case.plan.run(case.args)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(work, cases))
    assert all(equal(case.fetch(), bits) for case, bits in zip(cases, want, strict=True))


def test_threads_share_arguments():
    """A cached launch is read and replaced as one object."""
    other = select(PROBLEMS[0], "host", preference={"require": {"batch_invariant": True}})
    case = PlanCase(other, random_inputs(PROBLEMS[0]))  # with a canonical weight, which both plans read
    fast = select(PROBLEMS[0], "host")
    want = {id(plan): PlanCase(plan, random_inputs(case.desc)).run() for plan in (fast, other)}
    errors: list[BaseException] = []

    def work(plan) -> None:
        try:
            for _ in range(200):
                plan.run(case.args)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(plan,)) for plan in (fast, other, fast, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for plan in (fast, other):
        plan.run(case.args)
        assert equal(case.fetch(), want[id(plan)])


@gpu
@every_kernel
def test_threads_share_a_plan(name):
    cases = [kernel_case(name, seed=seed) for seed in range(4)]
    assert len({id(case.plan) for case in cases}) == 1
    want = [case.run() for case in cases]
    for case in cases:
        case.poison()
    run_from_threads([partial(case.plan.run, case.args, workspace=case.space) for case in cases], 100)
    assert all(equal(case.fetch(), bits) for case, bits in zip(cases, want, strict=True))


class _CudaStream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@gpu
@every_kernel
@pytest.mark.parametrize("form", ["none", "handle", "cupy", "protocol", "torch"])
def test_every_form_of_stream(name, form):
    import cupy

    case = kernel_case(name)
    want = case.run()
    case.poison()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    forms = {"none": None, "handle": stream.ptr, "cupy": stream, "protocol": _CudaStream(stream.ptr)}
    given = pytest.importorskip("torch").cuda.Stream() if form == "torch" else forms[form]
    assert equal(case.run(stream=given), want)
