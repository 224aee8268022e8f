"""Launches ``prepare/prune.cu``: prune, compress, both at once, or apply a mask. One kernel, no workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ...device.jit.codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.tensors import TensorView, import_cupy
from ...vocab import DeviceProperties, ElementKind, MaskLayout, PrepareOp
from ...weights import canonical
from ..descriptor import MaskSparse24Descriptor, PrepareDescriptor
from ..table import BLOCK_BYTES

_THREADS = 256
_STATUS_BYTES = 8
_INTEGERS = {ElementKind.U8: 0, ElementKind.S8: 1}
_FLOAT = 2  # S24_SIGN_MAGNITUDE


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


def element_defines(element: ElementKind) -> dict[str, int]:
    """The macros that prepare/groups.cuh asks for."""
    return {
        "WIDTH": element.itemsize,
        "NUMBER": _INTEGERS.get(element, _FLOAT),
        "FIRST_NAN": canonical.FIRST_NAN.get(element, 0),
    }


def reset_then(status: TensorView, kernel: Callable[[int], None]) -> Callable[[int], None]:
    """``kernel`` behind a fill of the status with ones, which say that nothing was found."""
    fill = import_cupy().cuda.runtime.memsetAsync

    def launch(stream: int) -> None:
        fill(status.address, 0xFF, _STATUS_BYTES, stream)
        kernel(stream)

    return launch


class Kernel:
    alignment = 16

    def __init__(self, desc: PrepareDescriptor, device: DeviceProperties) -> None:
        self._desc = desc
        self._kind = desc.kind
        name = str(self._kind)
        if isinstance(desc, MaskSparse24Descriptor):
            name = "mask_by_tiles" if desc.layout is MaskLayout.TILES else "mask_by_rows"
        scores = getattr(desc, "scores", None)
        self.launches = 2 if self._kind is PrepareOp.COMPRESS else 1
        self._blocks = -(-desc.m * desc.k * desc.element.itemsize // BLOCK_BYTES)
        self.details = f"{name}, {self._blocks} blocks"
        self._function = load(
            "prepare/prune.cu",
            name,
            _THREADS,
            device,
            {
                **element_defines(desc.element),
                "SCORES": -1 if scores is None else ELEMENT_CODES[scores],
            },
            _Parameters,
        )

    def prepare(self, views: dict[str, TensorView]) -> Callable[[int], None]:
        kernel = self._bind(views)
        return reset_then(views["status"], kernel) if self._kind is PrepareOp.COMPRESS else kernel

    def _bind(self, views: dict[str, TensorView]) -> Callable[[int], None]:
        if self._blocks == 0:
            return lambda stream: None
        at = {name: view.address for name, view in views.items()}
        reads_mask = self._kind is PrepareOp.MASK
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
                cells=self._desc.m * self._desc.k,
                row_cells=self._desc.k,
            ),
        )
