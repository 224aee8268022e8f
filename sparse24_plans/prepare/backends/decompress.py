"""Launches ``weights/inflate.cu``: canonical weights to dense matrices, without a workspace."""

from __future__ import annotations

from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Views
from ...weights.inflate import SOURCE, Inflate
from ..descriptor import DecompressSparse24Descriptor
from ..kernel import PrepareKernel


class Kernel(PrepareKernel[DecompressSparse24Descriptor]):
    sources = (SOURCE,)
    details = "one vector of 16 dense bytes a step"

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._inflate = Inflate(self.descriptor.element, choice.device)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self.descriptor.m * self.descriptor.k == 0:
            return nothing
        return self._inflate.bind(views["values"], views["metadata"], views["dense"].address)
