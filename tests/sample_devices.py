"""Invented devices, for tests that need none."""

from __future__ import annotations

from typing import Any

from sparse24_plans import DeviceProperties

HOST = DeviceProperties(kind="host")


def gpu_of(major: int, minor: int, *, libraries: bool = True, **more: Any) -> DeviceProperties:
    """Return a GPU of the compute capability, with properties ``more``."""
    fields = {
        "name": f"invented sm_{major}{minor}",
        "multiprocessors": 100,
        "cublaslt": "120900" if libraries else None,
        "cusparselt": "0.8.0" if libraries else None,
    }
    return DeviceProperties(kind="cuda", compute_capability=(major, minor), **{**fields, **more})


H200 = gpu_of(9, 0, name="NVIDIA H200", multiprocessors=132)
A100 = gpu_of(8, 0, name="NVIDIA A100", multiprocessors=108)
TURING, AMPERE, ADA, HOPPER = gpu_of(7, 5), gpu_of(8, 0), gpu_of(8, 9), gpu_of(9, 0)
PLACES = (HOST, TURING, AMPERE, gpu_of(8, 0, libraries=False), ADA, HOPPER, gpu_of(12, 0))
