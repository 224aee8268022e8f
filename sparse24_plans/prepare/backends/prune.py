"""Launches ``prepare/prune.cu``: prune, compress, both at once, or apply a mask, without a workspace."""

from __future__ import annotations

from ...device.jit.enum_codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...plan.kernel import Choice
from ...vocab import ElementKind, MaskLayout, PrepareOp
from ..descriptor import MaskSparse24Descriptor, PrepareDescriptor
from ..kernel import PrepareKernel, element_defines
from ..kernel_table import BLOCK_BYTES

_SOURCE = "prepare/prune.cu"
_THREADS = 256


@kernel_params("prepare/params/prune.cuh")
class PruneParams(KernelParams):
    """Parameters of the kernels of ``prepare/prune.cu``. Operands that an op lacks are null."""

    dense = field("const void*", "Dense matrix to read.")
    scores = field("const void*", "Scores that rank the cells in place of their magnitudes.")
    mask_in = field("const void*", "Mask to apply: one bit a cell.")
    pruned = field("void*", "Pruned dense matrix.")
    mask_out = field("void*", "Mask of the kept cells: one bit a cell.")
    values = field("void*", "Kept values.")
    metadata = field("void*", "Positions of the kept values.")
    status = field("u64*", "First group that is not 2:4 and the number of its non-zeros.")
    cells = field("u64", "Number of cells of the matrix.")
    row_cells = field("u64", "Number of cells of a row.")


class Kernel(PrepareKernel[PrepareDescriptor]):
    sources = (_SOURCE,)
    parameters = PruneParams

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        name = entry_of(desc)
        reads_mask = desc.op is PrepareOp.MASK
        self.renamed = {"mask": "mask_in", "masked": "pruned"} if reads_mask else {"mask": "mask_out"}
        self.blocks = -(-desc.m * desc.k * desc.element.itemsize // BLOCK_BYTES)
        self.sizes = {"cells": desc.m * desc.k, "row_cells": desc.k}
        self.details = f"{name}, {self.blocks} blocks"
        self.function = load(_SOURCE, name, _THREADS, choice.device, defines(desc))


def entry_of(desc: PrepareDescriptor) -> str:
    """Name of the kernel that serves the op."""
    if isinstance(desc, MaskSparse24Descriptor):
        return "mask_by_tiles" if desc.layout is MaskLayout.TILES else "mask_by_rows"
    return str(desc.op)


def defines(desc: PrepareDescriptor) -> dict[str, int]:
    """Macros of the kernel for one descriptor."""
    scores: ElementKind | None = getattr(desc, "scores", None)
    return {**element_defines(desc.element), "SCORES": -1 if scores is None else ELEMENT_CODES[scores]}
