"""What a record says of the machine and the kernels. Everything is timed by sparse24_plans/timing.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import cupy

from ..device.devices import driver_version

ROOT = Path(__file__).resolve().parents[2]


def kernels_sha256() -> str:
    """SHA-256 over every kernel source: path, NUL, contents, NUL, in path order."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kernels_cu").rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """What a record says of the machine."""
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    version = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "gpu": name,
        "driver": driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "kernels_sha256": kernels_sha256(),
    }
