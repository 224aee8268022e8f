"""Launches ``prepare/prune.cu``: prune, compress, both at once, or apply a mask, without a workspace."""

from __future__ import annotations

from ...device.jit.enum_codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Views
from ...vocab import ElementKind, MaskLayout, PrepareOp
from ..descriptor import MaskSparse24Descriptor, PrepareDescriptor
from ..kernel import PrepareKernel, element_defines, reset_then
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

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        name = entry_of(desc)
        self._reports = desc.op is PrepareOp.COMPRESS
        self.launches = 2 if self._reports else 1
        self._blocks = -(-desc.m * desc.k * desc.element.itemsize // BLOCK_BYTES)
        self.details = f"{name}, {self._blocks} blocks"
        self._function = load(_SOURCE, name, _THREADS, choice.device, defines(desc))

    def launcher(self, views: Views, workspace: int) -> Launch:
        kernel = self._bind(views)
        return reset_then(views["status"], kernel) if self._reports else kernel

    def _bind(self, views: Views) -> Launch:
        if self._blocks == 0:
            return nothing
        at = {name: view.address for name, view in views.items()}
        reads_mask = self.descriptor.op is PrepareOp.MASK
        return self._function.bind(
            self._blocks,
            PruneParams(
                dense=at["dense"],
                scores=at.get("scores", 0),
                mask_in=at["mask"] if reads_mask else 0,
                pruned=at.get("masked" if reads_mask else "pruned", 0),
                mask_out=0 if reads_mask else at.get("mask", 0),
                values=at.get("values", 0),
                metadata=at.get("metadata", 0),
                status=at.get("status", 0),
                cells=self.descriptor.m * self.descriptor.k,
                row_cells=self.descriptor.k,
            ),
        )


def entry_of(desc: PrepareDescriptor) -> str:
    """Name of the kernel that serves the op."""
    if isinstance(desc, MaskSparse24Descriptor):
        return "mask_by_tiles" if desc.layout is MaskLayout.TILES else "mask_by_rows"
    return str(desc.op)


def defines(desc: PrepareDescriptor) -> dict[str, int]:
    """Macros of the kernel for one descriptor."""
    scores: ElementKind | None = getattr(desc, "scores", None)
    return {**element_defines(desc.element), "SCORES": -1 if scores is None else ELEMENT_CODES[scores]}
