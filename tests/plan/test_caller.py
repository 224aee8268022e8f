"""``plan.caller``: operands that only move are looked at for their addresses alone."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseTables,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    MisalignedOperandError,
    PackedBlocks,
    PackedWeight,
    TensorView,
    WorkspaceTooSmallError,
)
from sparse24_plans.plan.operands import fields_of

from .cases import PROBLEMS, case_of, equal, name_of
from .toy import ToyArgs, ToyDescriptor, ToyPlan


def of_arrays(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
def test_a_caller_launches_what_run_runs(desc, device):
    case = case_of(desc, device)
    want = case.run()
    caller = case.plan.caller(case.args)
    addresses = tuple(address_of(case.args, name) for name in caller.operands)
    space = 0 if case.space is None else case.space.address
    for _ in range(3):
        case.poison()
        caller.launch(addresses, space, 0)
        assert equal(case.fetch(), want)


def address_of(args: object, name: str) -> int:
    """The address of a field of the arguments; of a weight's field, of one of its buffers."""
    field, _, buffer = name.partition(".")
    given = getattr(args, field)
    if isinstance(given, BlockSparseTables):
        return given.view.address
    if buffer and isinstance(given, PackedWeight):  # a canonical one
        return given.buffers[("values", "metadata").index(buffer)].address
    if isinstance(given, PackedBlocks):
        return given.buffers[int(buffer == "tables")].address
    if buffer:
        return given.views[("values", "metadata", "scales").index(buffer)].address
    if isinstance(given, PackedWeight):
        (only,) = given.buffers
        return only.address
    return TensorView.of(given).address


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
def test_operands_have_the_names_of_the_arguments(desc):
    case = case_of(desc, "host")
    caller = case.plan.caller(case.args)
    given = [one for one in fields_of(type(case.args)) if getattr(case.args, one) is not None]
    assert sorted({name.partition(".")[0] for name in caller.operands}) == sorted(given)
    assert all(caller.alignment(name) >= 1 for name in caller.operands)
    for wrong in ("source", "result", "", 3):
        with pytest.raises(InvalidProblemError, match=f"operand: expected one of {caller.operands[0]}"):
            caller.alignment(wrong)


def gemm() -> tuple[GemmSparse24Plan, GemmSparse24Args, tuple[np.ndarray, ...]]:
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(n=2, m=8, k=8, element="f32"), device="host")
    values, metadata = np.ones((8, 4), np.float32), np.full((8, 1), 0x0404, np.uint16)
    from sparse24_plans import Sparse24Weight

    x, y = np.ones((2, 8), np.float32), np.empty((2, 8), np.float32)
    weight = plan.pack(Sparse24Weight(values, metadata))
    return plan, GemmSparse24Args(weight, x, y), (x, y)


def test_callers_refuse_bad_addresses_before_writing():
    plan, args, (x, y) = gemm()
    caller = plan.caller(args)
    weight = [view.address for view in args.weight.buffers]
    y[...] = 7
    for source, result, error, match in (
        (x.ctypes.data + 1, y.ctypes.data, MisalignedOperandError, "x: expected"),
        (0, y.ctypes.data, InvalidProblemError, "x: expected memory, got a null address"),
        (x.ctypes.data, x.ctypes.data + 4, InvalidProblemError, "y: expected memory apart from x"),
        (x.ctypes.data, weight[0], InvalidProblemError, "y: expected memory apart from weight"),
    ):
        with pytest.raises(error, match=match):
            caller.launch((*weight, source, result), 0, 0)
    with pytest.raises(InvalidProblemError, match=r"addresses: expected those of weight, x, y, got 1"):
        caller.launch((x.ctypes.data,), 0, 0)
    assert (y == 7).all()
    assert (x == 1).all()
    caller.launch((*weight, x.ctypes.data, y.ctypes.data), 0, 0)
    assert (y == 4).all()


WRONG_ADDRESSES = r"addresses: expected a tuple of the integer addresses of weight, x, y, got "
LAUNCHES = {
    "a list": (lambda good: (list(good), 0, 0), WRONG_ADDRESSES),
    "one address": (lambda good: (good[0], 0, 0), WRONG_ADDRESSES),
    "words": (lambda good: (("a", *good[1:]), 0, 0), WRONG_ADDRESSES),
    "a float": (lambda good: ((*good[:2], good[2] + 0.5), 0, 0), WRONG_ADDRESSES),
    "a negative address": (lambda good: ((-8, *good[1:]), 0, 0), WRONG_ADDRESSES),
    "an address beyond 64 bits": (lambda good: ((1 << 64, *good[1:]), 0, 0), WRONG_ADDRESSES),
    "a workspace beyond 64 bits": (lambda good: (good, 1 << 64, 0), "workspace: expected an address, got"),
    "a workspace that is a word": (lambda good: (good, "x", 0), "workspace: expected an address, got 'x'"),
    "no workspace": (lambda good: (good, None, 0), "workspace: expected an address, got None"),
    "a workspace that is a list": (lambda good: (good, [], 0), r"workspace: expected an address, got \[\]"),
    "a stream": (
        lambda good: (good, 0, 5),
        "stream: expected 0 for a host plan, which runs synchronously, got 5",
    ),
}


@pytest.mark.parametrize(("arguments_of", "match"), LAUNCHES.values(), ids=LAUNCHES)
def test_what_is_no_address_is_refused_by_name(arguments_of, match):
    plan, args, (x, y) = gemm()
    caller = plan.caller(args)
    y[...] = 7
    good = (*(view.address for view in args.weight.buffers), x.ctypes.data, y.ctypes.data)
    with pytest.raises(InvalidProblemError, match=match):
        caller.launch(*arguments_of(good))
    assert (y == 7).all()


def test_a_caller_is_copied_as_itself_and_never_pickled():
    plan, args, _ = gemm()
    caller = plan.caller(args)
    assert copy.copy(caller) is copy.deepcopy(caller) is caller
    with pytest.raises(InvalidProblemError, match="Caller: cannot be pickled"):
        pickle.dumps(caller)


def test_a_workspace_is_looked_at_too():
    plan = ToyPlan.select(ToyDescriptor(factor=3.0), device="host")
    x, out = np.ones(16, np.float32), np.zeros(16, np.float32)
    caller = plan.caller(ToyArgs(x, out))
    addresses = tuple({"x": x, "out": out}[name].ctypes.data for name in caller.operands)
    for space, match in ((0, "null address"), (out.ctypes.data // 32 * 32, "overlap|multiple")):
        with pytest.raises(
            (InvalidProblemError, WorkspaceTooSmallError, MisalignedOperandError), match=match
        ):
            caller.launch(addresses, space, 0)
    assert (out == 0).all()


def test_the_launches_of_seen_addresses_are_kept_and_bounded(monkeypatch):
    from sparse24_plans.plan import launches as module

    monkeypatch.setattr(module, "MAX_LAUNCHES", 4)
    plan = ToyPlan.select(ToyDescriptor(factor=3.0), device="host")
    space = np.zeros(128, np.uint8)
    space = space[-space.ctypes.data % 32 :][:96]
    x, outs = np.ones(16, np.float32), np.zeros((6, 16), np.float32)
    caller = plan.caller(ToyArgs(x, outs[0]))
    before = plan._kernel.launchers
    for _ in range(3):
        places = {"x": x.ctypes.data, "out": outs[0].ctypes.data}
        caller.launch(tuple(places[name] for name in caller.operands), space.ctypes.data, 0)
    assert plan._kernel.launchers == before + 1
    for out in outs:
        places = {"x": x.ctypes.data, "out": out.ctypes.data}
        caller.launch(tuple(places[name] for name in caller.operands), space.ctypes.data, 0)
        assert (out == 3).all()
    assert len(plan._launches) <= 4
    monkeypatch.setattr(module, "MAX_KERNELS", 6)
    monkeypatch.setattr(plan._kernel, "launches", 3)
    for out in outs:
        places = {"x": x.ctypes.data, "out": out.ctypes.data}
        caller.launch(tuple(places[name] for name in caller.operands), space.ctypes.data, 0)
        assert len(plan._launches) <= 2
