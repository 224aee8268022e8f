"""Workspaces are the caller's: large enough, aligned, at home, apart from every operand, or refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sparse24_plans import (
    Device,
    InvalidProblemError,
    MisalignedOperandError,
    TensorView,
    UnsupportedError,
    Workspace,
    WorkspaceTooSmallError,
)
from sparse24_plans.device.tensors import HOST

from .cases import PROBLEMS, case_of, name_of
from .toy import ALIGNMENT, BYTES, N, ToyArgs, ToyDescriptor, ToyPlan


class Memory:
    """Operands and workspace in one piece of guarded memory, each at an offset of its own."""

    def __init__(self) -> None:
        raw = np.full(4096 + 64, 0xA5, np.uint8)
        self.raw = raw[-raw.ctypes.data % 64 :][:4096]
        self.plan = ToyPlan.select(ToyDescriptor(), device="host")
        self.args = ToyArgs(self.tensor(1024), self.tensor(2048))
        self.args.x[...] = np.arange(N)

    def tensor(self, offset: int) -> np.ndarray:
        return self.raw[offset : offset + 4 * N].view(np.float32)

    def space(self, offset: int, nbytes: int = BYTES, device: Device = HOST) -> Workspace:
        return Workspace(self.raw.ctypes.data + offset, nbytes, device)

    def rejected(self, workspace: object, kind: type, words: str):
        before = self.raw.tobytes()
        for attempt in (self.plan.run, self.plan.bind):
            with pytest.raises(kind, match=words) as caught:
                attempt(self.args, workspace=workspace)
        assert self.raw.tobytes() == before
        return caught.value


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_a_workspace_that_fits_is_used_and_nothing_beyond_it(memory):
    before = memory.raw.copy()
    memory.plan.run(memory.args, workspace=memory.space(0))
    np.testing.assert_array_equal(memory.args.out, 2 * np.arange(N))
    changed = np.flatnonzero(memory.raw != before)
    assert set(changed) <= {*range(BYTES), *range(2048, 2048 + 4 * N)}


def test_size_and_alignment_are_the_kernels(memory):
    assert (memory.plan.workspace_size(), memory.plan.workspace_alignment) == (BYTES, ALIGNMENT)
    assert memory.plan.explain().workspace_size == BYTES


def test_absent_or_too_small(memory):
    error = memory.rejected(None, WorkspaceTooSmallError, "workspace: expected at least 96 bytes, got 0")
    assert (error.needed, error.got) == (BYTES, 0)
    error = memory.rejected(memory.space(0, BYTES - 1), WorkspaceTooSmallError, "got 95")
    assert (error.needed, error.got) == (BYTES, BYTES - 1)


def test_misaligned_memory_is_refused(memory):
    error = memory.rejected(memory.space(ALIGNMENT // 2), MisalignedOperandError, "workspace: expected")
    assert (error.argument, error.needed) == ("workspace", ALIGNMENT)


def test_memory_of_another_device_is_refused(memory):
    space = memory.space(0, device=Device("cuda", 3))
    memory.rejected(space, InvalidProblemError, "workspace: expected memory on host, got cuda:3")


@pytest.mark.parametrize("thing", [12345, "w", object(), np.zeros((9, 99), np.uint8)[:, ::2]])
def test_what_is_no_workspace(memory, thing):
    memory.rejected(thing, InvalidProblemError, "workspace: expected")


@pytest.mark.parametrize("name", ["x", "out"])
@pytest.mark.parametrize("shift", [-BYTES + ALIGNMENT, -ALIGNMENT, 0, ALIGNMENT])
def test_over_an_operand(memory, name, shift):
    offset = {"x": 1024, "out": 2048}[name] + shift
    memory.rejected(
        memory.space(offset), InvalidProblemError, f"workspace: expected memory apart from {name}"
    )


@pytest.mark.parametrize("offset", [1024 - BYTES, 1024 + 4 * N, 2048 - BYTES, 2048 + 4 * N])
def test_right_beside_an_operand(memory, offset):
    memory.plan.run(memory.args, workspace=memory.space(offset))
    np.testing.assert_array_equal(memory.args.out, 2 * np.arange(N))


def test_only_the_used_part_of_a_workspace_must_be_apart(memory):
    """A workspace may be a whole pool, whose end the operands lie in."""
    memory.plan.run(memory.args, workspace=memory.space(0, 4096))
    np.testing.assert_array_equal(memory.args.out, 2 * np.arange(N))


@pytest.mark.parametrize("form", ["array", "view", "object"])
def test_every_form_of_workspace_is_taken(memory, form):
    raw = memory.raw[:BYTES]
    given = {
        "array": raw,
        "view": TensorView.of(raw),
        "object": SimpleNamespace(ptr=raw.ctypes.data, size=BYTES),
    }
    memory.plan.run(memory.args, workspace=given[form])
    np.testing.assert_array_equal(memory.args.out, 2 * np.arange(N))


def test_the_verdict_doesnt_look_at_it(memory):
    assert memory.plan.can_implement(memory.args)


def test_the_limit_of_a_preference():
    enough = {"max_workspace_bytes": BYTES}
    assert ToyPlan.select(ToyDescriptor(), preference=enough, device="host").workspace_size() == BYTES
    with pytest.raises(UnsupportedError, match="needs a workspace of 96 bytes, max_workspace_bytes is 95"):
        ToyPlan.select(ToyDescriptor(), preference={"max_workspace_bytes": BYTES - 1}, device="host")


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
def test_a_plan_without_workspace_takes_any_workspace_object(desc):
    case = case_of(desc, "host")
    assert (case.plan.workspace_size(), case.plan.workspace_alignment) == (0, 1)
    with pytest.raises(InvalidProblemError, match="workspace: expected"):
        case.plan.run(case.args, workspace=7)
    assert case.untouched()
    case.plan.run(case.args, workspace=np.empty(3, np.uint8))
    case.plan.run(case.args, workspace=np.empty(0, np.uint8))
    case.fetch()


@pytest.mark.gpu
class TestOnAGpu:
    """A kernel that really needs one."""

    @pytest.fixture
    def case(self):
        from .cases import kernel_case

        return kernel_case("inflate_cublas")

    def test_absent_too_small_misaligned_elsewhere(self, case):
        view = case.space
        size = view.shape[0]
        for space, kind in (
            (None, WorkspaceTooSmallError),
            (Workspace(view.address, size - 1, view.device), WorkspaceTooSmallError),
            (Workspace(view.address + 16, size, view.device), MisalignedOperandError),
            (Workspace(view.address, size, Device("cuda", 1)), InvalidProblemError),
            (np.zeros(size, "u1"), InvalidProblemError),
        ):
            for attempt in (case.plan.run, case.plan.bind):
                with pytest.raises(kind, match="workspace: expected"):
                    attempt(case.args, workspace=space)
            assert case.untouched()

    @pytest.mark.parametrize("name", ["x", "y", "bias"])
    def test_over_an_operand(self, case, name):
        view = getattr(case.args, name)
        space = Workspace(view.address // 256 * 256, case.plan.workspace_size(), view.device)
        with pytest.raises(InvalidProblemError, match="workspace: expected memory apart from"):
            case.plan.run(case.args, workspace=space)
        assert case.untouched()

    def test_over_the_weight(self, case):
        values = case.args.weight.buffers[0]
        space = Workspace(values.address // 256 * 256, case.plan.workspace_size(), values.device)
        with pytest.raises(InvalidProblemError, match="workspace: expected memory apart from"):
            case.plan.run(case.args, workspace=space)
        assert case.untouched()
