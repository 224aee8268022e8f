"""What every family that inflates asks of cuBLASLt."""

from __future__ import annotations

from .._vendor import cublaslt_abi
from ..device.install import install_advice
from ..vocab import DeviceProperties, ElementKind

SPLIT_K_BYTES = 32 << 20
"""Of scratch at most: what NVIDIA's documentation advises on Hopper; smaller devices use less of it."""
TYPES = {
    ElementKind.F32: cublaslt_abi.R_32F,
    ElementKind.F16: cublaslt_abi.R_16F,
    ElementKind.BF16: cublaslt_abi.R_16BF,
}
"""The library's words for what it multiplies here."""


def needs_cublaslt(device: DeviceProperties) -> str | None:
    """Why the library can't be used, or None."""
    return None if device.cublaslt else f"cuBLASLt doesn't load; {install_advice('cuda')}"
