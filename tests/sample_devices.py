"""Devices that needn't be here."""

from __future__ import annotations

from typing import Any

from sparse24_plans import DeviceProperties

HOST = DeviceProperties(kind="host")


def gpu_of(major: int, minor: int, *, libraries: bool = True, **more: Any) -> DeviceProperties:
    return DeviceProperties(
        kind="cuda",
        compute_capability=(major, minor),
        cublaslt="120900" if libraries else None,
        cusparselt="0.8.0" if libraries else None,
        **{"name": f"invented sm_{major}{minor}", "multiprocessors": 100, **more},
    )


H200 = gpu_of(9, 0, name="NVIDIA H200", multiprocessors=132)
A100 = gpu_of(8, 0, name="NVIDIA A100", multiprocessors=108)
TURING, AMPERE, ADA, HOPPER = gpu_of(7, 5), gpu_of(8, 0), gpu_of(8, 9), gpu_of(9, 0)
PLACES = (HOST, TURING, AMPERE, gpu_of(8, 0, libraries=False), ADA, HOPPER, gpu_of(12, 0))
