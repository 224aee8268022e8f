"""Messages of the logger ``sparse24_plans``, and calls that log nothing."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    Sparse24Weight,
    UnsupportedError,
)
from sparse24_plans.device import devices
from sparse24_plans.device.jit import cache as cubins
from sparse24_plans.device.jit import compiler
from sparse24_plans.plan.kernel_table import consider, log_choice
from sparse24_plans.plan.preference import PlanPreference

from ..sample_devices import AMPERE, HOST, gpu_of

INFLATE = ("weights/inflate.cu", "sm_80", {"ELEMENT": 0, "OUT": 0, "BIAS": 0, "EPILOGUE": 0})


@pytest.fixture
def said(caplog):
    """(logger's last name, level, message) of everything so far."""
    caplog.set_level(logging.DEBUG, logger="sparse24_plans")
    return lambda: [(one.name.rpartition(".")[2], one.levelname, one.getMessage()) for one in caplog.records]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_cubin", lambda source, arch, defines: (b"cubin\0", ""))
    return tmp_path


def problem(n: int) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(n=n, m=24, k=40, element="f32")


# Compiling ----------------------------------------------------------------------------------------


def test_a_compilation_and_a_kernel_from_the_cache(folder, said):
    path = cubins.compiled(*INFLATE).path
    cubins.compiled(*INFLATE)
    (first, second) = said()
    assert first[:2] == ("compile", "INFO")
    assert first[2].startswith("weights/inflate.cu for sm_80: compiled in ")
    assert first[2].endswith(str(path))
    assert second == ("compile", "DEBUG", f"weights/inflate.cu for sm_80: from the cache, {path}")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(b"short"), "damaged"),
        (lambda path: path.chmod(0o666), "another user can have written it"),
    ],
    ids=["damaged", "writable"],
)
def test_a_file_that_is_not_loaded_is_a_warning(folder, said, spoil, words):
    path = cubins.compiled(*INFLATE).path
    spoil(path)
    cubins.compiled(*INFLATE)
    warnings = [message for _, level, message in said() if level == "WARNING"]
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert words in warnings[0]


# Selection ----------------------------------------------------------------------------------------


def test_selection_says_what_was_chosen_and_why_not_others(said):
    GemmSparse24Plan.select(problem(3), device="host", preference={"require": {"deterministic": True}})
    (chosen, *others) = said()
    assert chosen[:2] == ("select", "INFO")
    assert chosen[2].startswith("host_strict for GemmSparse24Descriptor(")
    assert chosen[2].endswith(" on host")
    assert ("select", "DEBUG", "not host_blas: does not guarantee deterministic") in others
    assert {(name, level) for name, level, _ in others} == {("select", "DEBUG")}


def test_a_refusal_is_said_too(said):
    with pytest.raises(UnsupportedError):
        GemmSparse24Plan.select(problem(4), device="host", preference={"prefer_backend": "mma_sp"})
    assert said()[0][1] == "INFO"
    assert said()[0][2].startswith("no kernel for ")


def test_a_better_kernel_that_lacks_a_library_is_a_warning(said):
    bare = gpu_of(8, 0, libraries=False)
    considered = consider(GemmSparse24Plan.table, problem(512), PlanPreference(), bare)
    log_choice(problem(512), bare, considered)
    warnings = [message for _, level, message in said() if level == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("not inflate_cublas: ")


def test_a_missing_library_that_would_not_be_chosen_is_none(said):
    bare = gpu_of(9, 0, libraries=False)
    desc = GemmSparse24Descriptor(n=16, m=64, k=64, element="bf16")
    log_choice(desc, bare, consider(GemmSparse24Plan.table, desc, PlanPreference(), bare))
    assert [message for _, level, message in said() if level == "WARNING"] == []


def test_the_host_in_place_of_a_gpu_is_said_once(monkeypatch, said):
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 0)
    devices._say_no_gpu.cache_clear()
    for _ in range(3):
        assert devices.resolve(None).kind == "host"
    assert [message for name, _, message in said() if name == "select"] == [
        "no usable CUDA device: where no device is named, the host serves"
    ]


# Silence ------------------------------------------------------------------------------------------


def test_running_launching_and_a_cached_select_say_nothing(said, caplog):
    plan = GemmSparse24Plan.select(problem(5), device="host")
    weight = Sparse24Weight.prune_compress(np.ones((24, 40), np.float32))
    x, y = np.ones((5, 40), np.float32), np.empty((5, 24), np.float32)
    args = GemmSparse24Args(plan.pack(weight), x, y)
    caplog.clear()
    for _ in range(3):
        plan.run(args)
    plan.run(GemmSparse24Args(plan.pack(weight), x, y))
    bound = plan.bind(args)
    bound.launch()
    assert plan.can_implement(args)
    assert GemmSparse24Plan.select(problem(5), device="host") is plan
    assert said() == []


def test_explaining_says_nothing(said):
    GemmSparse24Plan.explain_choice(problem(6), device=AMPERE)
    GemmSparse24Plan.explain_choice(problem(6), device=HOST)
    assert said() == []


QUIET = """
import logging
from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan
from sparse24_plans.device.log import COMPILE, SELECT, TUNING
GemmSparse24Plan.select(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"))
for logger in (COMPILE, SELECT, TUNING):
    logger.warning("nobody asked")
    assert logger.parent is logging.getLogger("sparse24_plans")
"""


def test_an_application_without_logging_sees_nothing():
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
