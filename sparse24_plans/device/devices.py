"""Device properties, read once per process and device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, TypeAlias

from .._vendor import cublaslt_abi, cusparselt_abi
from ..errors import BackendUnavailableError
from ..vocab import DeviceProperties, integer
from .install import import_cupy
from .log import SELECT
from .tensors import HOST, Device, wrong

_MAX_ORDINAL = 1 << 31
_MAX_DIGITS = 11
"""The longest decimal ordinal that is parsed."""
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


class FrameworkDevice(Protocol):
    """PyTorch's devices: ``type`` is "cpu" or "cuda", ``index`` an ordinal or None."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


DeviceLike: TypeAlias = SupportsIndex | str | Device | FrameworkDevice | None
"""A CUDA ordinal, ``"host"`` (or ``"cpu"``), ``"cuda"``, ``"cuda:1"``, a Device, a ``torch.device``, None."""


PlaceLike: TypeAlias = DeviceLike | DeviceProperties
"""A device, or a GPU that needn't be present: its DeviceProperties, or a name such as ``"h200"``."""


_DEVICES = "None, 'host', 'cuda', 'cuda:N', a CUDA ordinal or a device"


def resolve(device: DeviceLike, expected: str = _DEVICES) -> DeviceProperties:
    """Properties of a device. ``"cuda"`` is the current GPU; None is that GPU, or the host without one.

    ``expected`` says for the message what the caller takes.

    Raises InvalidProblemError for no device's name, BackendUnavailableError for a device that isn't there.
    """
    if device is None:
        if not cuda_device_count():
            _say_no_gpu()
            return HOST_PROPERTIES
        return _current()
    try:
        kind, ordinal = _named(device)
    except Exception:  # noqa: BLE001 - whatever a broken object raises
        kind, ordinal = "", None
    if kind == "host":
        return HOST_PROPERTIES
    if kind != "cuda" or (ordinal is not None and not 0 <= ordinal < _MAX_ORDINAL):
        raise wrong("device", expected, device)
    return _current() if ordinal is None else cuda_properties(ordinal)


def _current() -> DeviceProperties:
    cupy = import_cupy()
    return cuda_properties(cupy.cuda.runtime.getDevice() if cuda_device_count() else 0)


def _named(device: Any) -> tuple[str, int | None]:
    """``host`` or ``cuda``, or "" for neither, and the ordinal where one is named."""
    if isinstance(device, Device):
        return _checked(*device)
    if isinstance(device, str):
        kind, colon, digits = device.partition(":")
        if colon and not (digits.isdecimal() and digits.isascii() and len(digits) < _MAX_DIGITS):
            return "", None
        return _checked(kind, int(digits) if colon else None)
    if (ordinal := integer(device)) is not None:
        return "cuda", ordinal
    return _checked(device.type, device.index)


def _checked(kind: object, ordinal: object) -> tuple[str, int | None]:
    if ordinal is None or type(ordinal) is int:
        if kind in ("host", "cpu") and ordinal in (None, 0):
            return "host", None
        if kind == "cuda":
            return "cuda", ordinal
    return "", None


@cache
def _say_no_gpu() -> None:
    """Log once per process, because a caller who named no device may have expected a GPU."""
    SELECT.info("no usable CUDA device: where no device is named, the host serves")


_CARDS: dict[str, tuple[str, tuple[int, int], int]] = {
    "sm80": ("A100", (8, 0), 108),
    "sm86": ("A10", (8, 6), 72),
    "sm89": ("L40S", (8, 9), 142),
    "sm90a": ("H100", (9, 0), 132),
    "sm100": ("B200", (10, 0), 148),
    "sm120": ("RTX 5090", (12, 0), 170),
}
GPUS = {
    **_CARDS,
    **{about[0].replace(" ", "").lower(): about for about in _CARDS.values()},
    "h200": ("H200", (9, 0), 132),
}
"""A card's name, compute capability and number of SMs, by its architecture and by its name."""


@cache
def absent_gpu(name: str) -> DeviceProperties:
    """Assumed properties of a GPU, by its name in GPUS, with every library installed."""
    card, capability, multiprocessors = GPUS[name]
    return DeviceProperties(
        kind="cuda",
        name=f"{card}, assumed",
        compute_capability=capability,
        multiprocessors=multiprocessors,
        cublaslt="assumed",
        cusparselt="0.8.0",
    )


def described(device: PlaceLike) -> tuple[DeviceProperties, bool]:
    """Properties of a device, and whether they describe a GPU that needn't be present.

    Such a GPU is given as DeviceProperties or by a name in GPUS. Raises what :func:`resolve` raises.
    """
    if isinstance(device, DeviceProperties):
        return device, device.kind == "cuda"
    if isinstance(device, str) and device in GPUS:
        return absent_gpu(device), True
    absent = f"; or a GPU that needn't be present: {', '.join(GPUS)} or DeviceProperties"
    return resolve(device, _DEVICES + absent), False


def home_of(properties: DeviceProperties) -> Device:
    """The Device that the properties describe."""
    return HOST if properties.kind == "host" else Device("cuda", properties.ordinal)


def current_on(device: Device) -> AbstractContextManager[Any]:
    """Make ``device`` CuPy's current one, because CuPy allocates and computes there."""
    if device == HOST:
        return nullcontext()
    guard: AbstractContextManager[Any] = import_cupy().cuda.Device(device.ordinal)
    return guard
