"""The clock and the power of GPU 0, from NVML. Without that library both are None."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from ..device.install import import_cupy

_SM_CLOCK = 1
_POWER_INSTANT = 186
"""NVML_FI_DEV_POWER_INSTANT: nvmlDeviceGetPowerUsage averages over a second on recent GPUs."""


class Sample(NamedTuple):
    """One reading of the sensors."""

    sm_mhz: float | None = None
    watts: float | None = None


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t, with its union read as unsigned int."""

    _fields_ = (
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_uint),
        ("_rest", ctypes.c_uint),
    )


def sample() -> Sample:
    """Readings of the sensors at this moment."""
    device = _device()
    if device is None:
        return Sample()
    nvml, handle = device
    mhz, field = ctypes.c_uint(), _FieldValue(field_id=_POWER_INSTANT)
    has_clock = nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(mhz)) == 0
    has_power = nvml.nvmlDeviceGetFieldValues(handle, 1, ctypes.byref(field)) == 0 and field.result == 0
    return Sample(float(mhz.value) if has_clock else None, field.value / 1e3 if has_power else None)


@cache
def _device() -> tuple[Any, ctypes.c_void_p] | None:
    """The library and GPU 0's handle; None where either is missing."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        bus = import_cupy().cuda.runtime.deviceGetPCIBusId(0)
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() != 0:
            return None
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(handle)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return nvml, handle
