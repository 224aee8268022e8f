"""Canonical weights to dense matrices: ``weights/inflate.cu``, one launch, no workspace."""

from __future__ import annotations

from collections.abc import Callable

from ...device.tensors import TensorView
from ...vocab import DeviceProperties
from ...weights.inflate import ALIGNMENT, Inflate
from ..descriptor import DecompressSparse24Descriptor


class Kernel:
    alignment = ALIGNMENT
    launches = 1
    details = "one vector of 16 dense bytes a step"

    def __init__(self, desc: DecompressSparse24Descriptor, device: DeviceProperties) -> None:
        self._desc = desc
        self._inflate = Inflate(desc.element, device)

    def prepare(self, views: dict[str, TensorView]) -> Callable[[int], None]:
        if self._desc.m * self._desc.k == 0:
            return lambda stream: None
        return self._inflate.bind(views["values"], views["metadata"], views["dense"].address)
