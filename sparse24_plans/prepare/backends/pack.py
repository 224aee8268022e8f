"""Launches ``prepare/pack.cu``: canonical weights to tiles of 64 rows and back, without a workspace."""

from __future__ import annotations

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Views
from ...vocab import PrepareOp
from ...weights.packed_layouts import layout_of
from ..descriptor import PackSparse24Descriptor
from ..kernel import PrepareKernel, element_defines, reset_then

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

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        down, across, _ = layout_of(desc.element).packed_shape(desc.m, desc.k)
        self._blocks = down * across
        self._reports = desc.op is PrepareOp.UNPACK
        self.launches = 2 if self._reports else 1
        self.details = f"{desc.op}, {self._blocks} tiles"
        self._function = load(
            _SOURCE,
            str(desc.op),
            _THREADS,
            choice.device,
            element_defines(desc.element),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        names = ("values", "metadata", "packed", "status")
        at = {name: views[name].address for name in names if name in views}
        kernel: Launch = nothing
        if self._blocks:
            kernel = self._function.bind(
                self._blocks, PackParams(m=self.descriptor.m, k=self.descriptor.k, **at)
            )
        return reset_then(views["status"], kernel) if self._reports else kernel
