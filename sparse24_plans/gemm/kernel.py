"""The base class of all gemm backends."""

from __future__ import annotations

from ..device.tensors import TensorView
from ..plan.kernel import Choice, Kernel
from ..vocab import CANONICAL_LAYOUT
from ..weights import packing
from ..weights.packed_layouts import layout_called
from ..weights.weight import PackedWeight, Sparse24Weight
from .descriptor import GemmSparse24Descriptor
from .kernel_table import GemmEntry

MOST_STRIDES = 64
"""Number of pairs of strides whose library plans are cached; the least recently used one is dropped first."""


class GemmKernel(Kernel[GemmSparse24Descriptor]):
    """Operands are ``source``, ``result``, ``bias``, ``scale_x``, ``scale_w`` and the weight's buffers."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.entry: GemmEntry = choice.entry

    def pack(self, weight: Sparse24Weight) -> PackedWeight:
        """``weight`` in the layout that the kernel reads."""
        if self.entry.layout == CANONICAL_LAYOUT:
            return PackedWeight.canonical(weight)
        return packing.pack(weight, layout_called(self.entry.layout))


def address(view: TensorView | None) -> int:
    """Return the operand's address, or 0 if the operand is absent."""
    return 0 if view is None else view.address
