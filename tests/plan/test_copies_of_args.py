"""Copies and pickles of arguments own their memory, or are refused: none writes into the original's."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseTables,
    GemmSparse24Args,
    InvalidProblemError,
    TensorView,
    UnsupportedError,
)

from .cases import PROBLEMS, PlanCase, case_of, name_of

every_problem = pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda args: pickle.loads(pickle.dumps(args))}
every_way = pytest.mark.parametrize("way", WAYS)


def with_arrays(case: PlanCase) -> Any:
    """The case's arguments with NumPy arrays in place of views."""
    arrays = {
        one.name: getattr(case.args, one.name).array().copy()
        for one in fields(case.args)
        if one.init and type(getattr(case.args, one.name)) is TensorView
    }
    return replace(case.args, **arrays)


def memory_of(args: Any) -> list[TensorView]:
    found: list[TensorView] = []
    for one in fields(args):
        value = getattr(args, one.name)
        if isinstance(value, np.ndarray):
            found.append(TensorView.of(value))
        elif hasattr(value, "buffers"):
            found += value.buffers
        elif isinstance(value, BlockSparseTables):
            found.append(value.view)
        elif hasattr(value, "values_view"):
            found += [value.values_view, value.metadata_view]
    return found


@every_way
@every_problem
def test_a_copy_owns_its_memory(desc, way):
    case = case_of(desc, "host")
    args = with_arrays(case)
    case.plan.run(args)
    case.plan.run(args)  # and remembers where everything lies
    made = WAYS[way](args)
    assert type(made) is type(args)
    for ours, theirs in zip(memory_of(made), memory_of(args), strict=True):
        assert ours.address != theirs.address
        np.testing.assert_array_equal(ours.bits(), theirs.bits())
    results = [one.argument for one in desc.operands() if one.name in case.written]
    for name in results:
        getattr(args, name).view(np.uint8)[...] = 0xA5
        getattr(made, name).view(np.uint8)[...] = 0xFF
    case.plan.run(made)
    want = case.run()
    by_argument = {one.argument: one.name for one in desc.operands()}
    for name in results:
        assert (getattr(args, name).view(np.uint8) == 0xA5).all(), "the copy wrote into the original"
        got = getattr(made, name)
        np.testing.assert_array_equal(got.view(want[by_argument[name]].dtype), want[by_argument[name]])


@every_way
@every_problem
def test_what_borrows_its_memory_is_refused(desc, way):
    """Views: nobody would keep the memory of a copy."""
    case = case_of(desc, "host")
    assert any(type(getattr(case.args, one.name)) is TensorView for one in fields(case.args))
    with pytest.raises(InvalidProblemError, match="no deep copy and no pickle"):
        WAYS[way](case.args)


@every_problem
def test_a_shallow_copy_is_of_the_same_tensors(desc):
    case = case_of(desc, "host")
    case.run(), case.run()
    other = copy.copy(case.args)
    want = case.run()
    case.poison()
    case.plan.run(other)
    assert all(np.array_equal(case.fetch()[name], want[name]) for name in want)


@every_way
def test_equal_arguments_stay_equal(way):
    plain = GemmSparse24Args(None, 1, 2)
    assert WAYS[way](plain) == plain


def test_arguments_are_frozen():
    args = GemmSparse24Args(None, 1, 2)
    with pytest.raises(AttributeError):
        args.x = 3
    with pytest.raises((AttributeError, TypeError)):
        args.typo = 3


@pytest.mark.gpu
def test_weights_in_device_memory():
    case = case_of(PROBLEMS[0], 0)
    made = copy.deepcopy(case.args.weight)
    assert all(a.address != b.address for a, b in zip(made.buffers, case.args.weight.buffers, strict=True))
    with pytest.raises(UnsupportedError, match=r"weight.to\('host'\)"):
        pickle.dumps(case.args.weight)
