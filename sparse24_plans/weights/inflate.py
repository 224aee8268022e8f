"""Launches ``weights/inflate.cu``, which expands a canonical weight to a dense matrix."""

from __future__ import annotations

from collections.abc import Callable

from ..device.jit.launcher import load
from ..device.jit.structs import KernelParams, field, kernel_params
from ..device.tensors import TensorView
from ..vocab import DeviceProperties, ElementKind

SOURCE = "weights/inflate.cu"
ALIGNMENT = 16
"""Bytes that must divide every address."""
BLOCK_BYTES = 16384
"""Dense bytes that a CTA writes."""
_THREADS = 256


@kernel_params("weights/params/inflate.cuh")
class InflateParams(KernelParams):
    """Parameters of ``weights/inflate.cu``."""

    values = field("const uint2*", "Kept values: 8 bytes for each vector of the dense matrix.")
    metadata = field("const void*", "Positions of the kept values: one byte for each group of four.")
    dense = field("uint4*", "Dense matrix, in vectors of 16 bytes.")
    bytes = field("u64", "Size of the dense matrix in bytes.")


class Inflate:
    """The inflate kernel for one element on one device."""

    def __init__(self, element: ElementKind, device: DeviceProperties) -> None:
        self._function = load(SOURCE, "inflate", _THREADS, device, {"WIDTH": element.itemsize})

    def bind(self, values: TensorView, metadata: TensorView, dense: int) -> Callable[[int], None]:
        """A launch that writes [M, K], row-major, to address ``dense``. The weight must not be empty."""
        nbytes = 2 * values.shape[0] * values.shape[1] * values.element.itemsize
        blocks = -(-nbytes // BLOCK_BYTES)
        parameters = InflateParams(
            values=values.address, metadata=metadata.address, dense=dense, bytes=nbytes
        )
        return self._function.bind(blocks, parameters)
