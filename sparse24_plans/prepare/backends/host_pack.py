"""Packing on the host, in NumPy: packing.py behind plans."""

from __future__ import annotations

from collections.abc import Callable

from ...device.tensors import HOST, TensorView
from ...vocab import DeviceProperties, PrepareOp
from ...weights import canonical, packing
from ...weights.weight import PackedWeight, Sparse24Weight
from ..descriptor import PackSparse24Descriptor
from .host_prepare import write_status


class Kernel:
    alignment = 1
    launches = 1
    details = "NumPy"

    def __init__(self, desc: PackSparse24Descriptor, device: DeviceProperties) -> None:
        self._desc = desc

    def prepare(self, views: dict[str, TensorView]) -> Callable[[int], None]:
        act = self._unpack if self._desc.kind is PrepareOp.UNPACK else self._pack
        return lambda stream: act(views)

    def _pack(self, views: dict[str, TensorView]) -> None:
        weight = Sparse24Weight(
            views["values"], views["metadata"], element=self._desc.element, validate=False
        )
        views["packed"].bits()[...] = packing.pack(weight).buffers[0].bits()

    def _unpack(self, views: dict[str, TensorView]) -> None:
        desc = self._desc
        layout, tiles = packing.layout_of(desc.element), views["packed"]
        packed = PackedWeight(layout.layout_id, desc.m, desc.k, desc.element, HOST, (tiles,))
        values, metadata = packing.unpack_tiles(layout, tiles.bits(), packed)
        views["values"].bits()[...] = values
        views["metadata"].bits()[...] = metadata
        write_status(views["status"], desc.k, canonical.first_invalid(metadata))
