"""Limits of cuBLASLt, for every family that inflates and then multiplies with it."""

from __future__ import annotations

from .._vendor import cublaslt_abi
from ..device.install import install_advice
from ..vocab import DeviceProperties, ElementKind

SPLIT_K_BYTES = 32 << 20
"""Largest scratch in bytes. NVIDIA's documentation advises it on Hopper; smaller devices use less."""
TYPES = {
    ElementKind.F32: cublaslt_abi.R_32F,
    ElementKind.F16: cublaslt_abi.R_16F,
    ElementKind.BF16: cublaslt_abi.R_16BF,
}
"""The library's codes of the elements that are multiplied with it."""

_LARGEST_ALPHA = 2.0**20


def beyond_alpha(alpha: float) -> str | None:
    """A refusal of alphas that the library may mishandle, or None.

    Some of its kernels multiply an operand by alpha before they add: with 1e37 that gave inf * 0 = NaN.
    """
    if alpha == 0 or 1 / _LARGEST_ALPHA <= abs(alpha) <= _LARGEST_ALPHA:
        return None
    return f"serves alpha 0 and from 2^-20 to 2^20: cuBLAS may scale operands by it, got {alpha}"


def needs_cublaslt(device: DeviceProperties) -> str | None:
    """A message that says why the library can't be used, or None."""
    return None if device.cublaslt else f"cuBLASLt doesn't load; {install_advice('cuda')}"
