"""Launches ``prepare/prune.cu``: prune, compress, both at once, or apply a mask. One kernel, no workspace."""

from __future__ import annotations

import ctypes

from ...device.jit.enum_codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Views
from ...vocab import ElementKind, MaskLayout, PrepareOp
from ..descriptor import MaskSparse24Descriptor, PrepareDescriptor
from ..kernel import PrepareKernel, element_defines, reset_then
from ..kernel_table import BLOCK_BYTES

_SOURCE = "prepare/prune.cu"
_THREADS = 256


class _Parameters(ctypes.Structure):
    """PruneParams of the kernels."""

    _fields_ = [
        ("dense", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("mask_in", ctypes.c_void_p),
        ("pruned", ctypes.c_void_p),
        ("mask_out", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("cells", ctypes.c_uint64),
        ("row_cells", ctypes.c_uint64),
    ]


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
        self._function = load(_SOURCE, name, _THREADS, choice.device, defines(desc), _Parameters)

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
            _Parameters(
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
    """The kernel of the file that serves the op."""
    if isinstance(desc, MaskSparse24Descriptor):
        return "mask_by_tiles" if desc.layout is MaskLayout.TILES else "mask_by_rows"
    return str(desc.op)


def defines(desc: PrepareDescriptor) -> dict[str, int]:
    """Macros of the kernel for one descriptor."""
    scores: ElementKind | None = getattr(desc, "scores", None)
    return {**element_defines(desc.element), "SCORES": -1 if scores is None else ELEMENT_CODES[scores]}
