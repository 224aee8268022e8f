"""``run`` and ``bind`` write the same bits, and what a Bound holds on to."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

from sparse24_plans import Bound, GemmSparse24Args, GemmSparse24Descriptor, InvalidProblemError
from sparse24_plans.plan import bound as bound_module

from .cases import (
    GEMM,
    KERNELS,
    PREPARE,
    PROBLEMS,
    PlanCase,
    case_of,
    equal,
    kernel_case,
    name_of,
    random_inputs,
    select,
)
from .toy import ToyArgs, ToyDescriptor, ToyPlan

every_problem = pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)


@every_problem
def test_bind_launches_what_run_runs(desc, device):
    case = case_of(desc, device)
    want = case.run()
    bound = case.plan.bind(case.args, workspace=case.space)
    assert type(bound) is Bound
    for _ in range(3):
        case.poison()
        bound.launch()
        assert equal(case.fetch(), want)


@every_problem
def test_a_launch_reads_what_the_operands_hold_then(desc):
    first, inputs = case_of(desc, "host", seed=1), random_inputs(desc, seed=2)
    if getattr(desc, "packed", False):  # a packed operand keeps its layout
        inputs["layout"] = random_inputs(desc, seed=1)["layout"]
    second = PlanCase(first.plan, inputs)
    want = second.run()
    bound = first.plan.bind(first.args)
    first.run()
    for name, memory in first.guarded.items():
        if name not in first.written:
            memory.view.bits()[...] = second.guarded[name].view.bits()
    if hasattr(first.args, "weight") and "values" not in first.guarded:  # what plan.pack made
        for ours, theirs in zip(first.args.weight.buffers, second.args.weight.buffers, strict=True):
            ours.bits()[...] = theirs.bits()
    if getattr(first.args, "layout", None) is not None:  # tables, in place
        first.args.layout.update(inputs["layout"])
    bound.launch()
    assert equal(first.fetch(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_bind_launches_what_run_runs_on_a_gpu(name):
    case = kernel_case(name)
    want = case.run()
    bound = case.plan.bind(case.args, workspace=case.space)
    for _ in range(3):
        case.poison()
        bound.launch()
        assert equal(case.fetch(), want)


def test_the_operands_are_checked_once():
    plan = ToyPlan.select(ToyDescriptor(factor=3.0), device="host")
    x = np.ones(16, np.float32)
    args = ToyArgs(x, np.zeros(16, np.float32))
    space = np.zeros(128, np.uint8)
    space = space[-space.ctypes.data % 32 :][:96]
    before = plan._kernel.launchers
    bound = plan.bind(args, workspace=space)
    for _ in range(5):
        bound.launch()
    assert plan._kernel.launchers == before + 1
    assert (args.out == 3).all()


def test_a_bound_keeps_its_operands_and_nothing_keeps_a_bound():
    class Array(np.ndarray):
        """With weak references."""

    desc = GemmSparse24Descriptor(n=2, m=8, k=8, element="f32")
    case = case_of(desc, "host")
    x, y = (np.ones((2, 8), np.float32).view(Array) for _ in range(2))
    seen = weakref.ref(x), weakref.ref(y)
    bound = case.plan.bind(GemmSparse24Args(case.args.weight, x, y))
    del x, y
    gc.collect()
    assert all(one() is not None for one in seen)
    bound.launch()
    del bound
    gc.collect()
    assert all(one() is None for one in seen)


@every_problem
def test_a_host_plan_takes_no_stream(desc):
    case = case_of(desc, "host")
    for stream in (0, 7):
        with pytest.raises(InvalidProblemError, match="stream"):
            case.plan.run(case.args, stream=stream)
    assert case.untouched()
    bound = case.plan.bind(case.args)
    with pytest.raises(InvalidProblemError, match="stream"):
        bound.launch(stream=0)
    assert case.untouched()


class ClosedStream:
    ptr = None


class ForeignStream:
    handle = 1


class OldProtocol:
    def __cuda_stream__(self):
        return (9, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("desc", [PROBLEMS[0], PROBLEMS[3]], ids=name_of)
@pytest.mark.parametrize("stream", [ClosedStream(), ForeignStream(), OldProtocol(), -1, 1.0, "s", True])
def test_a_stream_that_is_none(desc, stream):
    case = case_of(desc, 0)
    with pytest.raises(InvalidProblemError, match="stream"):
        case.plan.run(case.args, workspace=case.space, stream=stream)
    bound = case.plan.bind(case.args, workspace=case.space)
    with pytest.raises(InvalidProblemError, match="stream"):
        bound.launch(stream=stream)
    assert case.untouched()


@pytest.mark.gpu
def test_the_callers_device_stays_current():
    import cupy

    before = cupy.cuda.runtime.getDevice()
    for desc in (*GEMM, *PREPARE):
        case_of(desc, 0).run()
        assert select(desc, 0).device.ordinal == 0
    assert cupy.cuda.runtime.getDevice() == before


def test_bound_graph_is_freed_while_thread_may_free_anything(monkeypatch):
    """tests/plan/test_capture.py has captures on a GPU."""
    events = []

    class Graph:
        def __del__(self) -> None:
            events.append("freed")

    @contextmanager
    def relaxed():
        events.append("relaxed")
        yield
        events.append("as before")

    monkeypatch.setattr(bound_module, "relaxed_capture_mode", relaxed)
    kept = bound_module._Graph(Graph())
    assert events == []
    del kept
    assert events == ["relaxed", "freed", "as before"]
