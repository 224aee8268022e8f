"""The formats of 2:4 weights in a checkpoint: dense, our own, and those of other libraries.

The parts of a foreign weight ``NAME`` are the tensors ``NAME.PART``, and the file's metadata has a note about
the weight. A format can be read without notes if the shape of its values tells M and K. compressed-tensors
has no notes and other names: ``PREFIX.PART`` for a weight ``PREFIX.weight``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .._vendor import compressed_tensors
from ..errors import FormatError, InvalidProblemError, Sparse24Error, UnsupportedError
from ..formats.base import VALUES, ForeignFormat, WeightShape
from ..formats.convert import from_foreign, to_foreign
from ..formats.table import BUILT_IN, QUANTIZED_FORMATS, find_format, format_names
from ..weights import canonical
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import Sparse24Weight
from .checkpoint_base import NUMPY_TYPES, CheckpointFormat, array_of, checked, dense_weight, parts_in
from .folder import CONFIG_NAME, DTYPES, ELEMENTS, ModelReader
from .layers import (
    CALIBRATED,
    FORMAT_KEY,
    FORMAT_VERSION,
    SPARSE24,
    SUFFIXES,
    Layer,
    broken,
    compressed_layer,
    compressed_names,
    dense_blocks,
    located,
    read_note,
    read_weight,
    stored_tensors,
    write_note,
)
from .quantization import quantized_layers
from .quantized_formats import QuantizedCheckpoint
from .safetensors_file import TensorInfo, shown
from .selection import Selection, families_of

DENSE = "dense"
CHECKPOINT_FORMATS = (DENSE, SPARSE24, *BUILT_IN)
"""The formats that ``convert_checkpoint`` reads and writes, without registered ones."""
READ_FORMATS = (*CHECKPOINT_FORMATS, *QUANTIZED_FORMATS)
"""The formats that ``convert_checkpoint`` reads, without registered ones."""
BITMASK = "compressed_tensors"
"""The format that :class:`BitmaskCheckpoint` reads and writes."""
CONFIG_KEY = compressed_tensors.CONFIG_KEYS[0]
"""The entry of ``config.json`` that says how a model's weights are stored."""

_SAFETENSORS_TYPES = {name: dtype for dtype, name in NUMPY_TYPES.items()}
_WORD_BYTES = {"U16": 2, "I16": 2, "U32": 4, "I32": 4}


def checkpoint_formats(*, read: bool = False) -> tuple[str, ...]:
    """The formats that ``convert_checkpoint`` writes, or all that it reads, with registered ones."""
    return DENSE, SPARSE24, *format_names(), *(QUANTIZED_FORMATS if read else ())


def checkpoint_format(name: str, selection: Selection, tile_k: int | None) -> CheckpointFormat:
    """The format with a name of :func:`checkpoint_formats`.

    ``selection`` selects the weights of a dense checkpoint; ``tile_k`` is an option of ``cutlass_sm90``.
    """
    if name == DENSE:
        return DenseCheckpoint(selection)
    if name == SPARSE24:
        return Sparse24Checkpoint()
    if name in QUANTIZED_FORMATS:
        return QuantizedCheckpoint(QUANTIZED_FORMATS[name])
    kind = BitmaskCheckpoint if name == BITMASK else ForeignCheckpoint
    known = find_format(name)
    assert known is not None  # callers have checked the name
    return kind(known, tile_k)


class DenseCheckpoint(CheckpointFormat):
    """Plain matrices. Weights are those that ``selection`` takes and the target can hold."""

    name = DENSE

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    def find(self, model: ModelReader, target: CheckpointFormat) -> tuple[list[Layer], dict[str, str]]:
        """Weights that can't be converted are copied, but an error if the selection includes their names.

        Raises InvalidProblemError if none can be converted.
        """
        candidates, reasons = self._selection.split(model)
        layers, dense = [], False
        for layer in candidates:
            try:
                target.check(layer)
                target.check_dense(model, layer)
                layers.append(layer)
            except (InvalidProblemError, UnsupportedError, FormatError) as error:
                if self._selection.names(layer.name):
                    if isinstance(error, FormatError):
                        raise located(model, layer, error) from error
                    raise
                reasons[layer.name] = str(error).removeprefix(f"{shown(layer.name)}: ")
                dense |= isinstance(error, FormatError)
        if not layers:
            why = "; run `sparse24 compress` first" if dense else _why_not(model, reasons)
            raise InvalidProblemError(f"expected a 2:4 matrix in {model.path}, got none{why}")
        return layers, reasons

    def read(self, model: ModelReader, layer: Layer) -> Sparse24Weight:
        return dense_weight(model, layer)

    def stored(self, layer: Layer) -> list[TensorInfo]:
        nbytes = layer.m * layer.columns * layer.element.itemsize
        return [TensorInfo(layer.name, DTYPES[layer.element], layer.dense_shape, nbytes)]

    def arrays(self, layer: Layer, weight: Sparse24Weight) -> Iterator[tuple[str, Any]]:
        dense = weight.decompress()[:, : layer.columns]
        yield layer.name, np.ascontiguousarray(dense.T if layer.transposed else dense)


def _why_not(model: ModelReader, reasons: Mapping[str, str]) -> str:
    """The end of a message with the reasons of the matrices that can't be converted."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if len(model.tensors[name].shape) > 1:
            groups.setdefault(reason, []).append(shown(name))
    return "".join(f"; {', '.join(families_of(names))}: {reason}" for reason, names in groups.items())


class Sparse24Checkpoint(CheckpointFormat):
    """Our own format, which :mod:`layers` describes."""

    name = SPARSE24
    holds_quantized = True

    def find(self, model: ModelReader, target: CheckpointFormat) -> tuple[list[Layer], dict[str, str]]:
        names = compressed_names(model)
        return checked(target, [compressed_layer(model, shard, name) for name, shard in names.items()])

    def read(self, model: ModelReader, layer: Layer) -> Sparse24Weight:
        """A weight in host memory; a quantized one dequantized."""
        weight = read_weight(model, layer)
        return weight.dequantize() if isinstance(weight, Sparse24QuantizedWeight) else weight

    def read_stored(self, model: ModelReader, layer: Layer) -> Sparse24Weight | Sparse24QuantizedWeight:
        return read_weight(model, layer)

    def stored(self, layer: Layer) -> list[TensorInfo]:
        return list(stored_tensors(layer))

    def arrays(self, layer: Layer, weight: Sparse24Weight) -> Iterator[tuple[str, Any]]:
        for suffix, view in zip(SUFFIXES, weight.views, strict=False):
            yield layer.name + suffix, view.array()

    def check_dense(self, model: ModelReader, layer: Layer) -> None:
        for rows, dense in dense_blocks(model, layer):
            canonical.occupancy_codes(dense.view(layer.element.bits_dtype), layer.element, rows.start)

    def stamp(self, metadata: dict[str, str]) -> None:
        metadata[FORMAT_KEY] = FORMAT_VERSION

    def note(self, metadata: dict[str, str], layer: Layer) -> None:
        write_note(metadata, layer)

    def configure(self, config: dict[str, Any], layers: list[Layer], sparsity: float) -> dict[str, Any]:
        """Add the entry by which transformers finds its quantizer, unless another method has one."""
        if not layers or config.get(CONFIG_KEY) is not None:
            return config
        return {**config, CONFIG_KEY: {"quant_method": SPARSE24}}


class ForeignCheckpoint(CheckpointFormat):
    """A format of another library. Each part of a weight is a tensor."""

    def __init__(self, known: ForeignFormat, tile_k: int | None) -> None:
        self.name, self._known, self._tile_k = known.name, known, tile_k

    def prefix_of(self, name: str) -> str:
        """The prefix of the names of a weight's parts."""
        return name

    def name_of(self, prefix: str) -> str:
        """The name of the weight whose parts have this prefix."""
        return prefix

    def find(self, model: ModelReader, target: CheckpointFormat) -> tuple[list[Layer], dict[str, str]]:
        suffix = f".{self._known.parts[0]}"
        names = [name for name in model.tensors if name.endswith(suffix)]
        return checked(target, [self._layer(model, name.removesuffix(suffix)) for name in names])

    def read(self, model: ModelReader, layer: Layer) -> Sparse24Weight:
        parts = {name.rpartition(".")[2]: array_of(model, name) for name in layer.sources}
        sizes = (layer.m, layer.k) if "shape" in self._known.options else None
        options = {name: one for name, one in layer.options.items() if name != CALIBRATED}
        return from_foreign(self.name, parts, shape=sizes, **options)

    def stored(self, layer: Layer) -> list[TensorInfo]:
        infos = []
        for part, (kind, sizes) in self._known.layout(self._shape(layer)).items():
            dtype = DTYPES[layer.element] if kind == VALUES else _SAFETENSORS_TYPES[kind]
            itemsize = layer.element.itemsize if kind == VALUES else np.dtype(kind).itemsize
            name = f"{self.prefix_of(layer.name)}.{part}"
            infos.append(TensorInfo(name, dtype, sizes, math.prod(sizes) * itemsize))
        return infos

    def arrays(self, layer: Layer, weight: Sparse24Weight) -> Iterator[tuple[str, Any]]:
        for part, array in to_foreign(self.name, weight, **self._shape(layer).options).items():
            yield f"{self.prefix_of(layer.name)}.{part}", array

    def check(self, layer: Layer) -> None:
        if layer.transposed or layer.stack or layer.padding:
            got = "a stack of them" if layer.stack else "one of [in, out]"
            if layer.padding:
                got = f"one of K={layer.columns}, which is padded to {layer.k}"
            raise UnsupportedError(
                f"{shown(layer.name)}: expected a matrix that the model holds as [out, in], got {got}, "
                f"which {self.name} can't express"
            )
        try:
            self._known.check(self._shape(layer))
        except Sparse24Error as error:
            raise type(error)(f"{shown(layer.name)}: {error}") from error

    def note(self, metadata: dict[str, str], layer: Layer) -> None:
        dequantized = replace(layer, quantization=None)
        write_note(metadata, dequantized, format=self.name, **self._shape(layer).options)

    def _shape(self, layer: Layer) -> WeightShape:
        options = {"tile_k": self._tile_k} if "tile_k" in self._known.options else {}
        return self._known.shape_of(layer.m, layer.k, layer.element, **options)

    def _layer(self, model: ModelReader, prefix: str) -> Layer:
        """The weight whose parts have this prefix, described by its note, or without one by its values."""
        known = self._known
        names = parts_in(model, prefix, known)
        shard = model.shard_of(names[known.parts[0]])
        values = model.tensors[names[known.parts[0]]]
        if values.dtype not in ELEMENTS:
            complaint = f"expected a type of {', '.join(ELEMENTS)}, got {shown(values.dtype)}"
            raise broken(shard, prefix, f"{shown(values.name)}: {complaint}")
        name, element = self.name_of(prefix), ELEMENTS[values.dtype]
        note = read_note(shard, name, self.name)
        if note is not None:
            m, k = note.m, note.k
        elif len(values.shape) == 2 and values.shape[1] % 4 == 0:
            m, k = values.shape[0], 2 * values.shape[1]
        else:
            complaint = f"expected [M, K/2] with K a multiple of 8, got {list(values.shape)}"
            raise broken(shard, prefix, f"{shown(values.name)}: {complaint}")
        _, sizes = known.layout(known.shape_of(m, k, element))[known.parts[0]]
        if math.prod(sizes) * element.itemsize != values.nbytes:
            complaint = f"expected the values of {[m, k]}, got {list(values.shape)}"
            raise broken(shard, prefix, f"{shown(values.name)}: {complaint}")
        options = self._options(model, names, {} if note is None else note.options)
        return Layer(name, m, k, element, tuple(names.values()), options)

    def _options(
        self, model: ModelReader, names: Mapping[str, str], note: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options for reading a weight, from its note, its tensors or the caller."""
        options: dict[str, Any] = {}
        if "tile_k" in self._known.options:
            options["tile_k"] = note.get("tile_k", self._tile_k)
        if "word_bytes" in self._known.options:
            options["word_bytes"] = _WORD_BYTES.get(model.tensors[names["meta"]].dtype, 1)
        if CALIBRATED in note:
            options[CALIBRATED] = note[CALIBRATED]
        return options


class BitmaskCheckpoint(ForeignCheckpoint):
    """The format of compressed-tensors: other names, no notes, and an entry in ``config.json``.

    Quantized 2:4 matrices whose zeros are stored are read, too, but not written.
    """

    def find(self, model: ModelReader, target: CheckpointFormat) -> tuple[list[Layer], dict[str, str]]:
        layers, _ = super().find(model, target)
        stored, reasons = quantized_layers(model)
        return layers + checked(target, stored)[0], reasons

    def read(self, model: ModelReader, layer: Layer) -> Sparse24Weight:
        has_zeros = layer.sources == (layer.name,)
        return dense_weight(model, layer) if has_zeros else super().read(model, layer)

    def prefix_of(self, name: str) -> str:
        return compressed_tensors.prefix_of(name)

    def name_of(self, prefix: str) -> str:
        return prefix + compressed_tensors.WEIGHT_SUFFIX

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if not layer.name.endswith(compressed_tensors.WEIGHT_SUFFIX):
            raise InvalidProblemError(
                f"{shown(layer.name)}: {self.name}: expected a name that ends in .weight"
            )

    def stamp(self, metadata: dict[str, str]) -> None:
        metadata.setdefault("format", "pt")  # readers of such models want this entry

    def note(self, metadata: dict[str, str], layer: Layer) -> None:
        """Add nothing, because the tensors tell everything."""

    def configure(self, config: dict[str, Any], layers: list[Layer], sparsity: float) -> dict[str, Any]:
        return with_sparsity(config, sorted(self.prefix_of(layer.name) for layer in layers), sparsity)


# compressed-tensors in config.json ----------------------------------------------------------------


def without_sparsity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without entries for sparsity, ours and compressed-tensors'. Quantization stays."""
    changed = dict(config)
    for key in compressed_tensors.CONFIG_KEYS:
        section = changed.get(key)
        if isinstance(section, dict) and section.get("quant_method") == SPARSE24:
            del changed[key]
        elif isinstance(section, dict) and section.get("quant_method") in (None, compressed_tensors.METHOD):
            rest = {name: value for name, value in section.items() if name != "sparsity_config"}
            changed[key] = rest
            if not rest.get("config_groups"):  # it has configured nothing but sparsity
                del changed[key]
    return changed


def with_sparsity(config: Mapping[str, Any], modules: list[str], sparsity: float) -> dict[str, Any]:
    """The configuration with compressed-tensors' entry for a model whose ``modules`` are 2:4.

    Raises FormatError if its quantization isn't an object, InvalidProblemError if it isn't
    compressed-tensors'.
    """
    section = config.get(CONFIG_KEY)
    if section is None:
        section = {"quant_method": compressed_tensors.METHOD, "format": "dense"}
    if not isinstance(section, dict):
        raise FormatError(f"{CONFIG_NAME}: {CONFIG_KEY}: expected an object, got {type(section).__name__}")
    if section.get("quant_method") != compressed_tensors.METHOD:
        raise InvalidProblemError(
            f"{CONFIG_NAME}: expected no quantization, or compressed-tensors', got "
            f"{section.get('quant_method')!r:.80}"
        )
    return {
        **config,
        CONFIG_KEY: {**section, "sparsity_config": compressed_tensors.sparsity_config(modules, sparsity)},
    }
