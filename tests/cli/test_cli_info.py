"""``sparse24 info``, ``--version`` and ``--help``: what the command says of itself and of this machine."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import sparse24_plans
from sparse24_plans.device.install import install_advice
from sparse24_plans.gemm import kernel_table

from ..support import HAS_GPU
from .commands import run, run_json


def test_info_names_versions_devices_and_kernels():
    about = run_json("info")
    assert about["version"] == sparse24_plans.__version__
    assert about["numpy"] == np.__version__
    rows = {row["kernel"]: row for row in about["kernels"]}
    assert list(rows) == [spec.name for spec in kernel_table.ENTRIES]
    assert rows["host_strict"]["available"]
    assert bool(about["devices"]) == HAS_GPU
    for row in rows.values():
        assert row["available"] == (row["reason"] is None)
        assert row["available"] or row["tier"] != "host"


@pytest.mark.skipif(HAS_GPU, reason="a CUDA device is here")
def test_info_says_what_the_gpu_kernels_lack():
    about = run_json("info")
    reasons = {row["reason"] for row in about["kernels"] if row["tier"] != "host"}
    assert reasons == {about["no_device"]}
    assert "CUDA device" in about["no_device"] or "pip install" in about["no_device"]


def test_info_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    about = run_json("info")
    assert about["cupy"] is None
    assert {row["reason"] for row in about["kernels"] if row["tier"] != "host"} == {
        f"CuPy is not installed; {install_advice('cuda')}"
    }
    assert "CuPy is not installed" in run("info").stdout


def test_info_as_a_table():
    out = run("info").stdout
    assert sparse24_plans.__version__ in out
    for spec in kernel_table.ENTRIES:
        assert spec.name in out


def test_help_and_version():
    assert run("--version").stdout.strip() == sparse24_plans.__version__
    for command in ("info", "compress", "verify", "explain", "demo"):
        assert command in run("--help").stdout
        assert "--json" in run(command, "-h").stdout
