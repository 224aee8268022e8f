"""Workers: the search survives those that die and hang, and a real one finds what is fastest and right."""

from __future__ import annotations

import warnings

import pytest

from sparse24_plans import (
    BackendUnavailableError,
    DriverError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    tune,
)
from sparse24_plans.gemm.table import find

from .cases import of_n


def test_the_search_survives_dying_and_hanging_workers(played):
    trials: list = []
    found = tune(of_n(16, 128), kernels=["cusparselt"], on_trials=trials.append)
    assert [dict(one.configuration) for one in found.entries] == [{"algorithm": 5}] * 2
    assert {(one.microseconds, one.default_microseconds) for one in found.entries} == {(4.0, 9.0)}
    assert (found.gpu, found.driver) == ("NVIDIA H200", "580.1")
    assert {one.version for one in found.entries} == {"cuSPARSELt 0.8.0"}
    first, second = trials
    fatal = [{"algorithm": 2}, {"algorithm": 4}]
    assert (first.right, first.refused_or_wrong, first.fatal) == (4, 1, fatal)
    assert second.fatal == fatal
    # Three workers for the first problem, none more for the second: it leaves out what was fatal before.
    log = played()
    assert log.count("started") == 4, "the last one confirms"
    assert [request for request in log if request[0] == "search"][-1] == ["search", 128, fatal]


def test_what_was_tried_is_not_tried_again(played):
    tune(of_n(16), kernels=["cusparselt"])
    searches = [request for request in played() if request[0] == "search"]
    assert [len(known) for _, _, known in searches] == [0, 4, 6]


@pytest.mark.parametrize(("n", "words"), [(32, "not of a configuration"), (48, "ValueError: played")])
def test_a_worker_that_fails_by_itself_is_an_error(played, n, words):
    with pytest.raises(DriverError, match=words):
        tune(of_n(n), kernels=["cusparselt"])


@pytest.mark.gpu
def test_a_real_search():
    problem = GemmSparse24Descriptor(n=16, m=512, k=512, element="bf16")
    trials: list = []
    try:
        found = tune([problem], on_trials=trials.append)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert len(found) == len(trials) >= 1
    for one in found.entries:
        assert one.microseconds <= one.default_microseconds
        assert "deterministic" in one.promises
    backends = [find(one.kernel).backend for one in found.entries]
    for backend in backends:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = GemmSparse24Plan.select(
                problem, device=0, preference=PlanPreference(prefer_backend=backend), tuning=found
            )
        assert plan.guarantee.deterministic
