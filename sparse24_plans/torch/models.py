"""Loads compressed checkpoints into models: our own format and compressed-tensors' ``sparse-24-bitmask``.

Only :func:`from_pretrained` needs transformers. It builds the model that a folder's ``config.json`` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint_format import (
    CHECKPOINT_FORMATS,
    DENSE,
    CheckpointFormat,
    checkpoint_format,
    without_sparsity,
)
from ..checkpoints.folder import ModelReader
from ..checkpoints.layers import FORMAT_KEY, SPARSE24, Layer
from ..checkpoints.selection import Selection
from ..device.files import StrPath, path_of
from ..errors import BackendUnavailableError, FormatError, InvalidProblemError, UnsupportedError
from ..vocab import ElementKind
from .conv1d import is_conv1d, linear_of
from .elements import DTYPE_OF, tensor_of
from .linear import DTYPES, META_KEY, VALUES_KEY, PreferenceLike, RequirementLike, Sparse24Linear

_WEIGHT = ".weight"
_VALUES, _META = (key.rpartition(".")[2] for key in (VALUES_KEY, META_KEY))
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BITMASK = "compressed_tensors"


@dataclass(frozen=True)
class LoadReport:
    """The result of ``load_sparse24``, in names of the model's modules and tensors.

    ``sparse`` lists the layers that are Sparse24Linear now. ``dense`` lists the tensors that were loaded
    dense, compressed ones of modules other than linear layers among them. ``unexpected`` lists tensors of the
    checkpoint that the model doesn't have.
    """

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_sparse24(
    model: nn.Module,
    path: StrPath,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    trainable: bool = False,
    require: RequirementLike = None,
    preference: PreferenceLike = None,
) -> LoadReport:
    """Load a compressed checkpoint into ``model``, in place; its compressed linear layers are swapped.

    Parameters
    ----------
    model : torch.nn.Module
        A model with the checkpoint's configuration. Parameters on the meta device are replaced. Others keep
        their dtype and device, and the checkpoint's tensors are converted. Layers may be Sparse24Linear
        already, also sharded over devices: each rank keeps its part of what it reads.
    path : str or path
        A safetensors file, or a folder with one or with shards and their index.
    format : str, optional
        ``sparse24`` (our own) or a foreign format. The default is our own if the file's metadata says so,
        else compressed-tensors'.
    dtype : torch.dtype, optional
        The dtype of floating point parameters that replace those on the meta device; by default the
        checkpoint's.
    trainable, require, preference
        Arguments of Sparse24Linear.

    Raises InvalidProblemError if the checkpoint has no compressed weight or lacks tensors of the model;
    UnsupportedError for 8-bit weights; FormatError, naming file and tensor; StorageError. Names, shapes and
    elements are compared before anything is changed.
    """
    if not isinstance(model, nn.Module):
        raise InvalidProblemError(f"model: expected a module, got a {type(model).__name__}")
    with ModelReader(path_of("path", path)) as reader:
        source = _Source(reader, format)
        load = _Load(model, source, dtype)
        load.check()
        load.swap({"trainable": trainable, "require": require, "preference": preference})
        load.fill()
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    return LoadReport(tuple(load.swapped), tuple(load.dense), tuple(load.unexpected))


class _Source:
    """A checkpoint: its compressed weights and its other tensors by name."""

    def __init__(self, reader: ModelReader, name: str | None) -> None:
        self.reader = reader
        if name is None:
            ours = any(FORMAT_KEY in shard.reader.metadata for shard in reader.shards)
            name = SPARSE24 if ours else _BITMASK
        if name not in CHECKPOINT_FORMATS or name == DENSE:
            known = ", ".join(one for one in CHECKPOINT_FORMATS if one != DENSE)
            raise InvalidProblemError(f"format: expected one of {known}, got {name!r}")
        self._format: CheckpointFormat = checkpoint_format(name, Selection((), ()), None)
        layers, _ = self._format.find(reader, checkpoint_format(SPARSE24, Selection((), ()), None))
        if not layers:
            raise InvalidProblemError(f"path: expected a checkpoint with 2:4 weights, got {reader.path}")
        self.weights: dict[str, Layer] = {layer.name: layer for layer in layers}
        parts = {part for layer in layers for part in layer.sources}
        self.others = [name for name in reader.tensors if name not in parts]

    def shape(self, name: str) -> tuple[int, ...]:
        """The dense shape of a tensor."""
        layer = self.weights.get(name)
        return self.reader.tensors[name].shape if layer is None else layer.dense_shape

    def canonical(self, name: str) -> tuple[Tensor, Tensor]:
        """Values and metadata of a compressed weight."""
        weight = self._format.read(self.reader, self.weights[name])
        values = tensor_of(weight.values, weight.element)
        return values, tensor_of(weight.metadata, ElementKind.U16)

    def tensor(self, name: str) -> Tensor:
        """A tensor or compressed weight as a dense tensor."""
        if name in self.weights:
            dense: Tensor = torch.ops.sparse24.decompress(*self.canonical(name))
            return dense.T if self.weights[name].transposed else dense
        info = self.reader.tensors[name]
        if info.dtype not in _DTYPES:
            raise FormatError(f"{name}: expected one of {', '.join(_DTYPES)}, got {info.dtype}")
        flat = torch.from_numpy(self.reader.read(name).copy())
        return flat.view(_DTYPES[info.dtype]).reshape(info.shape)


class _Load:
    """One load, which matches the checkpoint's tensors with the model's."""

    def __init__(self, model: nn.Module, source: _Source, dtype: torch.dtype | None) -> None:
        self._model, self._source, self._dtype = model, source, dtype
        self._wanted: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        names = [*source.weights, *source.others]
        self._names = self._matched(names)
        self.unexpected = [name for name in names if name not in self._names]
        self.swapped: list[str] = []
        self.dense: list[str] = []

    def _matched(self, names: list[str]) -> dict[str, str]:
        """The model's name for each of the checkpoint's, which may differ by the inner model's prefix."""
        inner = getattr(self._model, "base_model_prefix", "") + "."
        found: dict[str, str] = {}
        for name in names:
            for own in (name, inner + name, name.removeprefix(inner)):
                if own in self._wanted or self._is_sparse(own):
                    found[name] = own
                    break
        return found

    def _is_sparse(self, own: str) -> bool:
        """Whether the model already has a Sparse24Linear with this weight."""
        return f"{own}.{_VALUES}" in self._wanted

    def _parts(self, own: str) -> list[Tensor]:
        """The model's tensor of this name, or the two tensors of a compressed weight."""
        names = [f"{own}.{part}" for part in (_VALUES, _META)] if self._is_sparse(own) else [own]
        return [self._wanted[name] for name in names]

    def _shape(self, own: str) -> tuple[int, ...]:
        if not self._is_sparse(own):
            return tuple(self._wanted[own].shape)
        layer: Any = self._model.get_submodule(own.removesuffix(_WEIGHT))
        return (layer.k, layer.out_features) if layer.transposed else (layer.out_features, layer.k)

    def check(self) -> None:
        """Raise InvalidProblemError for missing tensors or wrong shapes, UnsupportedError for 8 bits."""
        found = {id(part) for own in self._names.values() for part in self._parts(own)}
        missing = [own for own, tensor in self._wanted.items() if id(tensor) not in found]
        if missing:
            raise InvalidProblemError(
                f"path: expected all {len(self._wanted)} tensors of the model, {len(missing)} are missing: "
                f"{', '.join(missing[:5])}"
            )
        for name, own in self._names.items():
            shape = self._shape(own)
            if self._is_sparse(own) and name not in self._source.weights:
                raise InvalidProblemError(
                    f"{name}: expected a 2:4 weight, as the layer's is, got a dense one"
                )
            if self._source.shape(name) != shape:
                raise InvalidProblemError(
                    f"{name}: expected shape {list(shape)}, got {list(self._source.shape(name))}"
                )
            if name in self._source.weights:
                self._check_orientation(name, own)
        for name, layer in self._source.weights.items():
            if DTYPE_OF[layer.element] not in DTYPES:
                raise UnsupportedError(f"{name}: expected a weight of f32, f16 or bf16, got {layer.element}")

    def _check_orientation(self, name: str, own: str) -> None:
        """Raise InvalidProblemError for a square weight along whose outputs 2:4 goes."""
        module = self._model.get_submodule(own.rpartition(".")[0])
        holds = is_conv1d(module) or getattr(module, "transposed", False)
        if holds != self._source.weights[name].transposed:
            raise InvalidProblemError(
                f"{name}: expected a weight compressed along its inputs, which the model's layer holds as "
                f"{'[in, out]' if holds else '[out, in]'}; compress the dense model anew"
            )

    def swap(self, options: Mapping[str, Any]) -> None:
        """Replace each linear layer whose weight is compressed by a Sparse24Linear."""
        for name in self._source.weights:
            place = self._names.get(name, "").removesuffix(_WEIGHT)
            if place and self._is_sparse(self._names[name]):
                self.swapped.append(place)
                continue
            module: Any = self._model.get_submodule(place) if place else None
            known = type(module) is nn.Linear or (module is not None and is_conv1d(module))
            if not known or not self._names[name].endswith(_WEIGHT):
                continue
            linear = linear_of(module)
            weight = linear.weight
            k, m, where = linear.in_features, linear.out_features, weight.device
            has_bias = linear.bias is not None
            layer = Sparse24Linear(k, m, has_bias, device=where, dtype=weight.dtype, **options)
            layer.transposed = is_conv1d(module)
            parent, _, own = place.rpartition(".")
            setattr(self._model.get_submodule(parent), own, layer.train(linear.training))
            self.swapped.append(place)

    def fill(self) -> None:
        """Read one tensor after the other and load it into its module."""
        swapped = set(self.swapped)
        for name, own in self._names.items():
            place = own.removesuffix(_WEIGHT)
            if name in self._source.weights and place in swapped:
                values, meta = self._source.canonical(name)
                values = self._converted(values, self._parts(own)[0])
                self._give(place, {VALUES_KEY: values, META_KEY: meta})
                continue
            home, _, attribute = own.rpartition(".")
            tensor = self._converted(self._source.tensor(name), self._wanted[own])
            self._give(home, {attribute: tensor})
            self.dense.append(own)

    def _converted(self, tensor: Tensor, old: Tensor) -> Tensor:
        """The tensor in the requested dtype if it replaces a parameter on the meta device."""
        is_float = tensor.is_floating_point() and tensor.element_size() > 1
        return tensor.to(self._dtype) if self._dtype and is_float and old.is_meta else tensor

    def _give(self, place: str, tensors: Mapping[str, Tensor]) -> None:
        module = self._model.get_submodule(place)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        on_meta = any(tensor.is_meta for name, tensor in own.items() if "." not in name)
        try:
            module.load_state_dict(dict(tensors), strict=False, assign=on_meta)
        except RuntimeError as error:
            raise FormatError(f"{self._source.reader.path}: {error}") from error


# transformers -------------------------------------------------------------------------------------


def from_pretrained(
    path: StrPath,
    *,
    model_class: Any = None,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    require: RequirementLike = None,
    preference: PreferenceLike = None,
) -> Any:
    """Load the transformers model of a folder with a compressed checkpoint, in evaluation mode.

    No loader of transformers is used, so any version that knows the model serves. The model is built without
    memory for its parameters, so weights are never dense.

    Parameters
    ----------
    path : str or path
        A folder with ``config.json`` and a checkpoint that :func:`load_sparse24` takes.
    model_class : class, optional
        The model's class, or one of transformers' auto classes. The default is the architecture that the
        configuration names.
    dtype : torch.dtype, optional
        The dtype of the parameters; by default the checkpoint's.
    device
        The model's device; the CPU by default.
    format, require, preference
        Arguments of :func:`load_sparse24`.

    Raises BackendUnavailableError without transformers; InvalidProblemError for a configuration that names
    no class; the errors of :func:`load_sparse24`.
    """
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailableError("transformers is not installed: pip install transformers") from error
    path = path_of("path", path)
    with ModelReader(path) as reader:
        stored = reader.config()
    if stored is None:
        raise InvalidProblemError(f"path: expected a folder with a config.json, got {path}")
    stored = without_sparsity(stored)
    kind = stored.pop("model_type", None)
    if not isinstance(kind, str):
        raise InvalidProblemError(f"path: expected a config.json with a model_type, got {kind!r}")
    config = transformers.AutoConfig.for_model(kind, **stored)
    if model_class is None:
        names = stored.get("architectures") or [""]
        model_class = getattr(transformers, str(names[0]), None)
        if model_class is None:
            raise InvalidProblemError(f"model_class: expected one; the configuration names {names[0]!r}")
    with _parameters_on_meta():
        is_auto = not isinstance(model_class, type) or not issubclass(model_class, nn.Module)
        model = model_class.from_config(config) if is_auto else model_class(config)
    load_sparse24(model, path, format=format, dtype=dtype, require=require, preference=preference)
    if model.can_generate() and (Path(path) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.to(device).eval() if device is not None else model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built in this context have parameters without memory and ordinary buffers."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
