"""Workers: the search survives those that die and hang, and a real one finds what is fastest and right."""

from __future__ import annotations

import subprocess
import warnings

import pytest

from sparse24_plans import (
    BackendUnavailableError,
    DriverError,
    ElementKind,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    tune,
)
from sparse24_plans.gemm.kernel_table import find
from sparse24_plans.tuning import worker
from sparse24_plans.tuning.data import Matrix, Problem, random_bits, widened
from sparse24_plans.tuning.process import python_command

from .cases import of_n


def test_the_search_survives_dying_and_hanging_workers(hanging):
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
    log = hanging()
    assert log.count("started") == 4, "the last one confirms"
    assert [request for request in log if request[0] == "search"][-1] == ["search", 128, fatal]


def test_what_was_tried_is_not_tried_again(played):
    tune(of_n(16), kernels=["cusparselt"])
    searches = [request for request in played() if request[0] == "search"]
    assert [len(known) for _, _, known in searches] == [0, 4, 6]


@pytest.mark.parametrize(("n", "words"), [(32, "no single configuration"), (48, "ValueError: played")])
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


def test_a_worker_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("json", "numpy", "sparse24_plans"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    code = "import json, numpy, sparse24_plans.tuning.worker as found; print(found.__file__)"
    done = subprocess.run(python_command(code), capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (worker.__file__, "")


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "s8", "fp8_e4m3", "fp8_e5m2"])
def test_data_is_random_and_the_same_for_a_seed(element):
    kind = ElementKind(element)
    bits, again, other = (random_bits((512, 512), kind, seed) for seed in (1, 1, 2))
    assert (bits == again).all()
    assert (bits != other).mean() > 0.9
    values = widened(bits, kind)
    spread = (255**2 / 12) ** 0.5 if element == "s8" else 1.0
    assert abs(values.mean()) < 0.02 * spread
    assert abs(values.std() / spread - 1) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bf16", "s8", "fp8_e4m3"])
def test_x_never_has_the_numbers_of_the_weight(element):
    """A seed of n alone would make it W's where n is m + k, and sums of squares of every m-th result."""
    desc = GemmSparse24Descriptor(n=384, m=128, k=256, element=ElementKind(element))
    matrix = Matrix(desc.m, desc.k, desc.element)
    kept = matrix.dense[0] != 0
    same = (Problem(desc, matrix).x[: desc.m] == matrix.dense[0])[kept]
    assert same.mean() < 0.1


@pytest.mark.gpu
def test_matrix_is_packed_once_in_copies_of_same_bits():
    matrix = Matrix(128, 256, ElementKind.BF16)
    plan = GemmSparse24Plan.select(of_n(16)[0].model_copy(update={"m": 128, "k": 256}), device=0)
    copies = matrix.packed(plan)
    assert copies is matrix.packed(plan)
    assert len({one.buffers[0].address for one in copies}) == len(copies) >= 2
    assert all((one.buffers[0].bits() == copies[0].buffers[0].bits()).all() for one in copies)
