"""What the machine has: device properties, read once a process and device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

from .._vendor import cublaslt_abi, cusparselt_abi
from ..errors import BackendUnavailableError
from ..vocab import DeviceProperties
from .log import SELECT
from .tensors import HOST, Device, import_cupy, wrong

_MOST_ORDINAL = 1 << 31
HOST_PROPERTIES = DeviceProperties(kind="host")


def cuda_device_count() -> int:
    """CUDA devices that can be used, without raising: 0 where CuPy or a driver is missing."""
    try:
        return int(import_cupy().cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 - CuPy raises several unrelated types where no driver is
        return 0


@cache
def cuda_properties(ordinal: int) -> DeviceProperties:
    """Properties of a CUDA device. Raises BackendUnavailableError where it can't be used."""
    cupy = import_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise BackendUnavailableError(f"no usable CUDA device: {error}") from error
    if not count:
        raise BackendUnavailableError("no usable CUDA device: the driver sees 0")
    if ordinal >= count:
        raise BackendUnavailableError(f"device: expected a CUDA ordinal below {count}, got {ordinal}")
    about = cupy.cuda.runtime.getDeviceProperties(ordinal)
    return DeviceProperties(
        kind="cuda",
        ordinal=ordinal,
        name=about["name"].decode(),
        compute_capability=(about["major"], about["minor"]),
        multiprocessors=about["multiProcessorCount"],
        cublaslt=cublaslt_abi.version(cuda_major()),
        cusparselt=cusparselt_abi.version(),
        driver=driver_version(),
    )


@cache
def driver_version() -> str:
    """The GPU driver's own version ("580.65.06") where the system tells it, else that of its CUDA API."""
    with suppress(OSError, UnicodeDecodeError):
        for word in Path("/proc/driver/nvidia/version").read_text().split():
            if word.count(".") >= 1 and word.replace(".", "").isdigit():
                return word
    return str(import_cupy().cuda.runtime.driverGetVersion())


def cuda_major() -> int:
    """The CUDA major version that the installed CuPy was built for."""
    return int(import_cupy().cuda.runtime.runtimeGetVersion()) // 1000


def resolve(device: int | str | None) -> DeviceProperties:
    """``None``: the current CUDA device, or the host where there is none; else what is named.

    Raises InvalidProblemError for no device's name, BackendUnavailableError for a device that isn't there.
    """
    if isinstance(device, str) and device in ("host", "cpu"):
        return HOST_PROPERTIES
    if device is None:
        if not cuda_device_count():
            _say_no_gpu()
            return HOST_PROPERTIES
        return cuda_properties(import_cupy().cuda.runtime.getDevice())
    if type(device) is not int or not 0 <= device < _MOST_ORDINAL:
        raise wrong("device", "None, 'host' or a CUDA ordinal", device)
    return cuda_properties(device)


@cache
def _say_no_gpu() -> None:
    """Once a process: a caller who named no device may have expected one."""
    SELECT.info("no usable CUDA device: where no device is named, the host serves")


def home_of(properties: DeviceProperties) -> Device:
    """Where the device's memory lives."""
    return HOST if properties.kind == "host" else Device("cuda", properties.ordinal)


def current_on(device: Device) -> AbstractContextManager[Any]:
    """CuPy allocates and computes on its current device: make that the operands' own."""
    if device == HOST:
        return nullcontext()
    guard: AbstractContextManager[Any] = import_cupy().cuda.Device(device.ordinal)
    return guard
