"""Configurations of cuSPARSELt: promises that a self-test has earned, those that are shipped, candidates."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

from sparse24_plans import (
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    UnsupportedError,
)
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.gemm.backends import cusparselt
from sparse24_plans.gemm.tuned import EMPTY, TunedKernel, TuningTable, shipped
from sparse24_plans.tuning import worker as tuning_worker
from sparse24_plans.tuning.data import digest

from .cusparselt_cases import (
    FORCED,
    descriptor,
    needs_cusparselt,
    row_for,
)

pytestmark = needs_cusparselt


def test_the_row_promises_nothing_of_bits_by_itself():
    plan = GemmSparse24Plan.select(descriptor("bf16"), device=0, preference=FORCED, tuning=EMPTY)
    assert not plan.guarantee.deterministic
    assert not plan.guarantee.bit_stable_on_same_hardware


def table_of(desc: GemmSparse24Descriptor, configuration: dict[str, int], *promises: str) -> TuningTable:
    device = cuda_properties(0)
    entry = TunedKernel(
        kernel=row_for(desc.element),
        version=cusparselt.Kernel.tuning_version(device),
        problem=desc,
        configuration=configuration,
        promises=promises,
        microseconds=1,
        default_microseconds=1,
    )
    return TuningTable(device.name, device.driver, [entry])


def test_a_self_tested_configuration_promises_what_it_passed():
    desc = descriptor("bf16")
    table = table_of(desc, {"algorithm": 1}, "deterministic")
    require = PlanPreference(prefer_backend="cusparselt", require={"deterministic": True})
    plan = GemmSparse24Plan.select(desc, device=0, preference=require, tuning=table)
    assert plan.guarantee.deterministic
    assert not plan.guarantee.bit_stable_on_same_hardware
    assert "algorithm 1 of" in plan.explain().details
    assert "tuned" in plan.explain().details
    with pytest.raises(UnsupportedError, match="cusparselt: does not guarantee deterministic"):
        GemmSparse24Plan.select(desc, device=0, preference=require, tuning=EMPTY)


def shipped_entries(count: int) -> list[TunedKernel]:
    """Return some entries of the table for this GPU that apply here and are quick to check."""
    device = cuda_properties(0)
    table = shipped(device.name)
    small = [
        entry
        for entry in table.entries
        if entry.kernel.startswith("cusparselt")
        and entry.problem.n <= 1024
        and entry.problem.m * entry.problem.k <= 1 << 26
        and table.mismatch(entry, device, cusparselt.Kernel.tuning_version(device)) is None
    ]
    if not small:
        pytest.skip("no table for this GPU, driver and library comes with the package")
    return small[:: max(1, len(small) // count)]


def test_the_shipped_configurations_are_right_and_keep_their_promises():
    for entry in shipped_entries(40):
        problem = tuning_worker.Experiment(entry.problem, 0)
        plan = problem.plan(entry.kernel, dict(entry.configuration))
        assert problem.is_right(plan), entry
        assert problem.is_deterministic(plan) or "deterministic" not in entry.promises, entry
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            by_default = GemmSparse24Plan.select(entry.problem, device=0, preference=FORCED)
        assert by_default.explain().details == plan.explain().details
        assert by_default.guarantee.deterministic == ("deterministic" in entry.promises)


def digests() -> list[int]:
    """Return hashes of the results of some shipped configurations."""
    found = []
    for entry in shipped_entries(8):
        problem = tuning_worker.Experiment(entry.problem, 0)
        plan = problem.plan(entry.kernel, dict(entry.configuration))
        found.append(digest(problem.bits(plan)))
    return found


IN_ANOTHER_PROCESS = "from tests.gemm.test_cusparselt_configurations import digests; print(digests())"


def test_the_shipped_configurations_give_the_same_bits_in_another_process():
    promised = ["bit_stable_on_same_hardware" in entry.promises for entry in shipped_entries(8)]
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = zip(digests(), json.loads(done.stdout), promised, strict=True)
    assert all(here == there for here, there, kept in pairs if kept)


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ({"algorithm": 10**6}, "cuSPARSELt refuses"),
        ({"algorithm": -1}, "configuration: cusparselt has no algorithm -1"),
        ({"split_k": -7}, "configuration: cusparselt has no split_k -7"),
    ],
    ids=["past the last", "negative", "a negative split"],
)
def test_a_configuration_that_does_not_exist_is_refused(configuration, reason):
    desc = descriptor("bf16")
    with pytest.raises(UnsupportedError, match=reason):
        GemmSparse24Plan.select(desc, device=0, preference=FORCED, tuning=table_of(desc, configuration))


def test_candidates_are_algorithms_of_the_library():
    found = cusparselt.Kernel.candidates(descriptor("bf16"), cuda_properties(0))
    ids = [one["algorithm"] for one in found if set(one) == {"algorithm"}]
    assert ids == sorted(set(ids))
    assert len(ids) > 1
