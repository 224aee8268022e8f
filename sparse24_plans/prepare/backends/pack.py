"""Launches ``prepare/pack.cu``: canonical weights to tiles of 64 rows and back, without a workspace."""

from __future__ import annotations

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...plan.kernel import Choice
from ...weights.packed_layouts import layout_of
from ..descriptor import PackSparse24Descriptor
from ..kernel import PrepareKernel, element_defines

_SOURCE = "prepare/pack.cu"
_THREADS = 256


@kernel_params("prepare/params/pack.cuh")
class PackParams(KernelParams):
    """Parameters of the kernels of ``prepare/pack.cu``."""

    values = field("u8*", "Kept values [m, k / 2].")
    metadata = field("u16*", "Positions of the kept values [m, k / 8].")
    packed = field("u8*", "Packed tiles of 64 rows.")
    status = field("u64*", "First group with invalid metadata and its code.")
    m = field("i64", "Number of rows.")
    k = field("i64", "Number of columns of the dense matrix.")


class Kernel(PrepareKernel[PackSparse24Descriptor]):
    sources = (_SOURCE,)
    parameters = PackParams

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        down, across, _ = layout_of(desc.element).packed_shape(desc.m, desc.k)
        self.blocks, self.sizes = down * across, {"m": desc.m, "k": desc.k}
        self.details = f"{desc.op}, {self.blocks} tiles"
        self.function = load(_SOURCE, str(desc.op), _THREADS, choice.device, element_defines(desc.element))
