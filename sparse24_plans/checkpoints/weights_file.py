"""Saves and loads compressed weights by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ..device.files import StrPath, path_of
from ..device.tensors import wrong
from ..errors import check_type
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import Sparse24Weight
from .folder import ModelReader
from .layers import (
    FORMAT_KEY,
    FORMAT_VERSION,
    Layer,
    compressed_layer,
    compressed_names,
    read_weight,
    stored_tensors,
    write_note,
    write_weight,
)
from .safetensors_file import SafetensorsWriter, TensorInfo, shown

Weight: TypeAlias = Sparse24Weight | Sparse24QuantizedWeight


def save_weights(path: StrPath, weights: Mapping[str, Weight]) -> None:
    """Write ``weights``, a mapping from names, as a compressed checkpoint. Device weights are fetched.

    Raises InvalidProblemError for other types or unusable names; StorageError if the file can't be written,
    in which case an existing file stays as it was.
    """
    path = path_of("path", path)
    if not isinstance(weights, Mapping):
        raise wrong("weights", "weights by name", weights)
    outputs: list[TensorInfo] = []
    metadata = {FORMAT_KEY: FORMAT_VERSION}
    for name, weight in weights.items():
        if not isinstance(name, str):
            raise wrong("weights", "names as strings", name)
        kinds = (Sparse24Weight, Sparse24QuantizedWeight)
        check_type(shown(name), weight, kinds, " or ".join(kind.__name__ for kind in kinds))
        layer = Layer(name, weight.m, weight.k, weight.element, (), quantization=weight.quantization)
        outputs += stored_tensors(layer)
        write_note(metadata, layer)
    with SafetensorsWriter(path, outputs, metadata) as writer:
        for name, weight in weights.items():
            write_weight(writer, name, weight.to("host"))


def load_weight(path: StrPath, name: str) -> Weight:
    """The compressed tensor ``name`` of a file or folder of shards, validated, in host memory.

    It is [out, in] also where the model holds the dense tensor as [in, out], and [E*out, in] for a stack. A
    tensor that is stored quantized is a Sparse24QuantizedWeight.
    Raises InvalidProblemError for a name that no compressed tensor has; FormatError, naming file and tensor,
    if a file breaks the format; StorageError if it can't be read.
    """
    path = path_of("path", path)
    with ModelReader(path) as model:
        names = compressed_names(model)
        if not isinstance(name, str) or name not in names:
            raise wrong("name", f"one of the {len(names)} compressed tensors of {path}", name)
        return read_weight(model, compressed_layer(model, names[name], name))


def iter_weights(path: StrPath) -> Iterator[tuple[str, Weight]]:
    """Every compressed tensor of a file or folder with its name, loaded one at a time.

    Raises the errors of :func:`load_weight`, each when its tensor is reached.
    """
    with ModelReader(path_of("path", path)) as model:
        for name, shard in compressed_names(model).items():
            yield name, read_weight(model, compressed_layer(model, shard, name))
