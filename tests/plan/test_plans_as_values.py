"""Plans show what they are, are shared by copies, and travel as what they were selected from."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sparse24_plans import (
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PlanPreference,
    PruneSparse24Descriptor,
    PruneSparse24Plan,
    TuningTable,
)

from ..tuning.cases import table
from .cases import PROBLEMS, case_of, name_of, select

DESC = GemmSparse24Descriptor(n=3, m=16, k=8, element="f32", epilogue="bias")
STRICT = PlanPreference(require={"batch_invariant": True})


def test_a_plan_shows_kernel_device_and_problem():
    shown = repr(GemmSparse24Plan.select(DESC, device="host", preference=STRICT))
    assert shown.startswith("GemmSparse24Plan(host_strict on host: ")
    for part in ("n=3", "m=16", "k=8", "element=f32", "epilogue=bias"):
        assert part in shown
    assert "alpha" not in shown, "defaults are left out"
    prune = PruneSparse24Plan.select(PruneSparse24Descriptor(m=8, k=8, element="s8"), device="host")
    assert repr(prune) == "PruneSparse24Plan(host on host: element=s8, m=8, k=8)"


@pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
def test_copies_and_pickles_of_a_plan(desc, device):
    plan = select(desc, device)
    assert copy.copy(plan) is copy.deepcopy(plan) is plan
    assert pickle.loads(pickle.dumps(plan)) is plan, "the same process has it still"


ELSEWHERE = """
import pickle, sys
plan = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps((plan.descriptor, plan.preference, plan.sku, plan.device, repr(plan))))
"""


@pytest.mark.parametrize("preference", [PlanPreference(), STRICT])
def test_a_plan_in_another_process(preference):
    plan = GemmSparse24Plan.select(DESC, device="host", preference=preference)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=pickle.dumps(plan), capture_output=True, check=True
    )
    there = pickle.loads(done.stdout)
    assert there == (plan.descriptor, plan.preference, plan.sku, plan.device, repr(plan))


def test_pickle_is_small_and_keeps_table_of_callers():
    plan = GemmSparse24Plan.select(DESC, device="host")
    assert len(pickle.dumps(plan)) < 2000
    own = TuningTable("my GPU", "1.0", table().entries)
    tuned = GemmSparse24Plan.select(DESC, device="host", tuning=own)
    again = pickle.loads(pickle.dumps(tuned))
    assert again.descriptor == DESC
    assert tuned.__reduce__()[1][-1] is own
    assert plan.__reduce__()[1][-1] is None
    assert pickle.loads(pickle.dumps(own)).entries == own.entries


def test_a_bound_plan_is_of_its_process_and_operands():
    case = case_of(DESC, "host")
    bound = case.plan.bind(case.args)
    assert copy.copy(bound) is bound
    with pytest.raises(InvalidProblemError, match="Bound: cannot be copied deeply"):
        copy.deepcopy(bound)
    with pytest.raises(InvalidProblemError, match="Bound: cannot be pickled"):
        pickle.dumps(bound)
    bound.launch()
    assert np.isfinite(case.fetch()["result"].view(np.float32)).all()
