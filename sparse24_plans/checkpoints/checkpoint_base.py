"""The base class of the formats that a checkpoint's 2:4 weights may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import FormatError
from ..formats.base import Format
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import Sparse24Weight
from .folder import ELEMENTS, ModelReader
from .layers import Layer, broken, read_dense
from .safetensors_file import SafetensorsWriter, TensorInfo, shown

NUMPY_TYPES = {
    **{f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
}
"""NumPy's integer types by safetensors' names."""


class CheckpointFormat(ABC):
    """A format: finds and reads weights in a model's files, and writes and describes them there."""

    name: str
    holds_quantized = False
    """Whether quantized weights stay quantized in this format."""

    @abstractmethod
    def find(self, model: ModelReader, target: CheckpointFormat) -> tuple[list[Layer], dict[str, str]]:
        """The model's weights in this format that ``target`` can hold, and why other tensors are copied.

        Raises FormatError for a weight that breaks the format, InvalidProblemError or UnsupportedError for
        one that ``target`` can't hold.
        """

    @abstractmethod
    def read(self, model: ModelReader, layer: Layer) -> Sparse24Weight:
        """A weight in host memory. Errors don't name the file; :func:`located` adds it."""

    def read_stored(self, model: ModelReader, layer: Layer) -> Sparse24Weight | Sparse24QuantizedWeight:
        """A weight in host memory as it is stored: quantized, if it is."""
        return self.read(model, layer)

    @abstractmethod
    def stored(self, layer: Layer) -> list[TensorInfo]:
        """The entries of a weight's tensors in this format."""

    @abstractmethod
    def arrays(self, layer: Layer, weight: Any) -> Iterator[tuple[str, Any]]:
        """A weight's tensors by name. Raises FormatError if the format can't express the weight."""

    def check(self, layer: Layer) -> None:  # noqa: B027 - by default nothing
        """Raise InvalidProblemError or UnsupportedError if this format can't hold the weight."""

    def check_dense(self, model: ModelReader, layer: Layer) -> None:
        """Raise FormatError if a dense weight has more non-zeros than this format can express."""
        for _ in self.arrays(layer, dense_weight(model, layer)):
            pass

    def write(
        self, layer: Layer, weight: Sparse24Weight | Sparse24QuantizedWeight, writer: SafetensorsWriter
    ) -> None:
        """Write a weight's tensors."""
        for name, array in self.arrays(layer, weight):
            writer.write(name, array)

    def stamp(self, metadata: dict[str, str]) -> None:  # noqa: B027 - by default nothing
        """Add the mark of this format to a file's metadata."""

    def note(self, metadata: dict[str, str], layer: Layer) -> None:  # noqa: B027 - by default nothing
        """Add the note about a weight to a file's metadata."""

    def configure(self, config: dict[str, Any], layers: list[Layer], sparsity: float) -> dict[str, Any]:
        """A model's ``config.json`` with this format's entry.

        ``sparsity`` is the share of the model's elements that compression left out.
        """
        return config


def checked(target: CheckpointFormat, layers: list[Layer]) -> tuple[list[Layer], dict[str, str]]:
    """The layers and no reasons. Raises the errors of ``target.check``."""
    for layer in layers:
        target.check(layer)
    return layers, {}


def parts_in(model: ModelReader, prefix: str, known: Format) -> dict[str, str]:
    """The names of a foreign weight's tensors by its parts. Raises FormatError if a part is missing."""
    names = {part: f"{prefix}.{part}" for part in known.parts if f"{prefix}.{part}" in model.tensors}
    for part in known.parts:
        if part not in names and part not in known.optional:
            shard = model.shard_of(names[known.parts[0]])
            raise broken(shard, prefix, f"{shown(prefix)}.{part} is missing")
    return names


def dense_weight(model: ModelReader, layer: Layer) -> Sparse24Weight:
    """A whole dense weight, compressed. Raises FormatError if it isn't 2:4."""
    return Sparse24Weight.compress(read_dense(model, layer))


def array_of(model: ModelReader, name: str) -> Any:
    """A whole stored tensor. I8 may be metadata or values, whose bytes are the same."""
    info = model.tensors[name]
    if info.dtype in ELEMENTS and info.dtype != "I8":
        dtype = ELEMENTS[info.dtype].dtype
    elif info.dtype in NUMPY_TYPES:
        dtype = np.dtype(NUMPY_TYPES[info.dtype])
    else:
        raise FormatError(f"{shown(name)}: expected a type that metadata can have, got {shown(info.dtype)}")
    return model.read(name).view(dtype).reshape(info.shape)
