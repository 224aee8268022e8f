"""Launches ``gemm/wgmma_sp.cu`` for groups of tokens with weights of their own. No workspace.

The grid doesn't depend on the groups' sizes, which the device alone knows: persistent CTAs find their work
tiles in a table that each makes of the groups. With split-K there is a cluster for each work tile that groups
without a common row can have; clusters without work exit at once. Groups with common rows can have more work
tiles, of which the last ones are then not computed.
"""

from __future__ import annotations

from ...device.streams import Launch
from ...plan.arithmetic import Arithmetic
from ...plan.kernel import Choice, nothing
from ...plan.operands import Views
from ...vocab import ElementKind
from ..arithmetic.tensor_core import named
from ..schedules.grouped import GROUPED
from ..wgmma import SOURCE, WgmmaKernel


class Kernel(WgmmaKernel):
    sources = (SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        if desc.is_empty:
            return
        self._load(desc, GROUPED.best(desc, choice.entry), choice.device, x_bytes=desc.element.itemsize)

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self.descriptor.is_empty:
            return nothing
        return self._multiply(self._parameters.of(views, views["source"], workspace))

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        desc = choice.descriptor
        if desc.element is ElementKind.S8 or desc.is_empty:
            return super().arithmetic(choice)  # the bits don't depend on the schedule
        return named(desc, str(Arithmetic.hopper(desc.element, GROUPED.best(desc, choice.entry).split_k)))
