"""Reads a compressed checkpoint: its 2:4 weights, its other tensors, and the scales of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from ..checkpoints.checkpoint_base import CheckpointFormat
from ..checkpoints.checkpoint_format import BITMASK, CONFIG_KEY, DENSE, READ_FORMATS, checkpoint_format
from ..checkpoints.folder import ModelReader
from ..checkpoints.layers import FORMAT_KEY, SPARSE24, VALUES_SUFFIX, Layer, is_compressed
from ..checkpoints.quantization import SCALE_DTYPES, check_groups, parts_of
from ..checkpoints.selection import Selection
from ..errors import FormatError, InvalidProblemError, check_choice
from ..weights.quantize import SCALE_SUFFIX
from .elements import DTYPE_OF, host_bytes, tensor_of, tensors_of
from .layer_state import META_KEY, VALUES_KEY
from .linear import DTYPES
from .quantized_linear import LARGEST, SCALES
from .saved_form import form_in
from .weight_only_linear import SCALES_KEY

DTYPES_BY_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Source:
    """A checkpoint: its compressed weights and its other tensors by name."""

    def __init__(self, reader: ModelReader, name: str | None) -> None:
        self.reader = reader
        if name is None:
            name = SPARSE24 if is_compressed(reader) else BITMASK
        check_choice("format", name, (one for one in READ_FORMATS if one != DENSE))
        self._format: CheckpointFormat = checkpoint_format(name, Selection((), ()), None)
        layers, _ = self._format.find(reader, checkpoint_format(SPARSE24, Selection((), ()), None))
        if not layers:
            raise InvalidProblemError(f"path: expected a checkpoint with 2:4 weights, got {reader.path}")
        self.weights: dict[str, Layer] = {layer.name: layer for layer in layers}
        config = reader.config() or {}
        if any(DTYPE_OF[layer.element] in LARGEST for layer in layers):
            entry = config.get(CONFIG_KEY)
            check_groups(entry if isinstance(entry, Mapping) else {})
        parts = {part for layer in layers for part in layer.sources}
        self.form = form_in(config)
        dtypes = {str(one).removeprefix("torch."): one for one in DTYPES}
        self.model_dtype = dtypes.get(str(config.get("dtype", config.get("torch_dtype"))))
        """The dtype of the model's parameters by its configuration, if that tells."""
        marked = any(FORMAT_KEY in shard.reader.metadata for shard in reader.shards)
        self.is_state = name == SPARSE24 and not marked
        """Whether this is a layer's state_dict in a file: rows have the layer's order, not the model's."""
        self.others = [name for name in reader.tensors if name not in parts]
        check_names(self.weights, self.others)
        self.quantized = {
            name
            for name in self.others
            if name + SCALE_SUFFIX in reader.tensors and DTYPES_BY_NAME.get(self._type(name)) in LARGEST
        }
        """Matrices of 8 bits that aren't 2:4. They are dequantized and loaded dense."""
        plain = set(self.others) - self.accessories()
        floats = Counter(DTYPES_BY_NAME.get(self._type(name)) for name in plain)
        self._dtype = max(DTYPES, key=lambda dtype: floats[dtype])

    def _type(self, name: str) -> str:
        return self.reader.tensors[name].dtype

    def accessories(self) -> set[str]:
        """The names of the scales of all quantized matrices."""
        return {part for name in (*self.weights, *self.quantized) for part in parts_of(name)}

    def shape(self, name: str) -> tuple[int, ...]:
        """The dense shape of a tensor."""
        layer = self.weights.get(name)
        return self.reader.tensors[name].shape if layer is None else layer.dense_shape

    def scales(self, name: str) -> dict[str, str]:
        """The names of a quantized 2:4 weight's scales in the checkpoint, by those in a layer."""
        return scales_of(self.reader, self.weights[name]) if name in self.weights else {}

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a quantized weight by their names in a Sparse24WeightOnlyLinear."""
        weight = self._format.read_stored(self.reader, self.weights[name])
        parts = (tensor_of(view.bits(), view.element) for view in weight.views)
        return dict(zip((VALUES_KEY, META_KEY, SCALES_KEY), parts, strict=True))

    def canonical(self, name: str) -> tuple[Tensor, Tensor]:
        """Values and metadata of a compressed weight, dequantized if it has scales of groups.

        A weight of float32 is quantized as one of bfloat16, so its values are float32 again for its model.
        """
        values, meta = tensors_of(self._format.read(self.reader, self.weights[name]))
        is_quantized = self.weights[name].quantization is not None
        return values.to(self.model_dtype) if is_quantized and self.model_dtype else values, meta

    def canonical_parts(self, name: str) -> dict[str, Tensor]:
        """The tensors that :meth:`canonical` gives, by the names in a layer."""
        return dict(zip((VALUES_KEY, META_KEY), self.canonical(name), strict=True))

    def tensor(self, name: str) -> Tensor:
        """A tensor or compressed weight as a dense tensor, dequantized if it is quantized."""
        if name in self.weights:
            layer = self.weights[name]
            dense: Tensor = torch.ops.sparse24.decompress(*self.canonical(name))[:, : layer.columns]
            if self.scales(name):
                dense = self._dequantized(name, dense)
            return dense.T if layer.transposed else dense.reshape(layer.dense_shape)
        stored = self._stored(name)
        return self._dequantized(name, stored) if name in self.quantized else stored

    def _dequantized(self, name: str, stored: Tensor) -> Tensor:
        scale = self._stored(name + SCALE_SUFFIX).float()
        whole = scale.reshape(-1) if scale.numel() == 1 else scale.reshape(*stored.shape[:-1], 1)
        return (stored.float() * whole).to(self._dtype)

    def _stored(self, name: str) -> Tensor:
        info = self.reader.tensors[name]
        if info.dtype not in DTYPES_BY_NAME:
            raise FormatError(f"{name}: expected one of {', '.join(DTYPES_BY_NAME)}, got {info.dtype}")
        stored = torch.empty(info.shape, dtype=DTYPES_BY_NAME[info.dtype], device="cpu")
        host_bytes(stored)[:] = self.reader.read(name)
        return stored


def check_names(weights: Collection[str], others: Iterable[str]) -> None:
    """Raise FormatError for other tensors that are a weight, too, or values of one that no note describes."""
    for name in others:
        if name in weights:
            raise FormatError(f"{name}: expected the parts of a compressed weight alone, got a tensor, too")
        if name.endswith(VALUES_SUFFIX):
            raise FormatError(f"{name}: expected a note on its weight in the file's metadata, got none")


def scales_of(reader: ModelReader, weight: Layer) -> dict[str, str]:
    """The names of a quantized 2:4 weight's scales in a checkpoint, by those in a layer.

    Raises FormatError for scales of another type, which a layer would convert.
    """
    if DTYPE_OF[weight.element] not in LARGEST:
        return {}
    home = weight.name.removesuffix("weight")
    found = {key: home + key for key in SCALES if home + key in reader.tensors}
    for name in found.values():
        if (got := reader.tensors[name].dtype) not in SCALE_DTYPES:
            raise FormatError(f"{name}: expected one of {', '.join(SCALE_DTYPES)}, got {got}")
    return found
