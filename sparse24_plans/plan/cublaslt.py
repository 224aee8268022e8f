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

_LARGEST_ALPHA = 2.0**20


def beyond_alpha(alpha: float) -> str | None:
    """Why the library isn't trusted with such an alpha, or None.

    Some of its kernels multiply an operand by alpha before they add: with 1e37 that gave inf * 0 = NaN.
    """
    if alpha == 0 or 1 / _LARGEST_ALPHA <= abs(alpha) <= _LARGEST_ALPHA:
        return None
    return f"serves alpha 0 and from 2^-20 to 2^20: cuBLAS may scale operands by it, got {alpha}"


def needs_cublaslt(device: DeviceProperties) -> str | None:
    """Why the library can't be used, or None."""
    return None if device.cublaslt else f"cuBLASLt doesn't load; {install_advice('cuda')}"
