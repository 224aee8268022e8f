"""transformers saves models with 2:4 layers, and loads compressed checkpoints by its own ``from_pretrained``.

Its import registers the quantization method ``sparse24``, and makes ``save_pretrained`` of a model with
2:4 layers write our format and an entry in ``config.json``. ``sparse24_plans.torch`` imports it after
transformers, which must be 5.8 or later.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoints.checkpoint_format import CONFIG_KEY, Sparse24Checkpoint
from ..checkpoints.folder import ModelReader
from ..checkpoints.layers import (
    META_SUFFIX,
    SPARSE24,
    VALUES_SUFFIX,
    Layer,
    compressed_layer,
    compressed_names,
    origin_in,
)
from ..errors import FormatError, InvalidProblemError, UnsupportedError
from ..torch.checkpoint_names import (
    Merged,
    conversions_of,
    is_converter,
    place_of,
    placed,
    renamed_by,
    stacks_rows,
)
from ..torch.checkpoint_source import check_names, scales_of
from ..torch.conv1d import is_swappable
from ..torch.elements import DTYPE_OF
from ..torch.experts import STACKS, ExpertsWeight, Sparse24Experts
from ..torch.layer_state import META_KEY, VALUES_KEY, check_metadata
from ..torch.linear import DTYPES, Sparse24Linear
from ..torch.loading import check_dtype, check_orientation, fuse_blocks, in_order_of, layer_like, sizes_of
from ..torch.quantized_linear import SCALES, Sparse24QuantizedLinear
from ..torch.saved_experts import StoredExperts, state_of
from ..torch.saved_form import SavedForm, SavedLayer, form_of, modules_of, saved_state

_WEIGHT = ".weight"
_ABSENT = object()
_VALUES, _META = (re.escape(suffix) for suffix in (VALUES_SUFFIX, META_SUFFIX))


if not hasattr(HfQuantizer, "update_weight_conversions"):
    raise ImportError("it needs transformers 5.8 or later")


@register_quantization_config(SPARSE24)
class Sparse24Config(QuantizationConfigMixin):  # type: ignore[misc]
    """Our entry in ``config.json``: see :class:`SavedForm`, which checks its fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(SavedForm(**fields).dumped())


class Stored(NamedTuple):
    """A compressed weight of a checkpoint, and the shapes of its scales by their names in a layer."""

    layer: Layer
    scales: Mapping[str, tuple[int, ...]]


class _Parts(nn.Module):
    """Stands in for a linear layer while transformers loads: it has a checkpoint's tensors by their names."""

    def __init__(self, original: Any, stored: Stored) -> None:
        super().__init__()
        self._original, self._stored = [original], stored  # in a list, so that it is no submodule
        for name in ("in_features", "out_features"):  # some models' initialisation reads them
            setattr(self, name, getattr(original, name, None))
        m, k = stored.layer.m, stored.layer.k
        dtype = DTYPE_OF[stored.layer.element] if stored.scales else original.weight.dtype
        self.weight: Any = nn.Module()
        width, by = k // 2, stored.layer.quantization
        if by is not None:
            check_dtype(stored.layer, original.weight.dtype)
            made: Any = layer_like(original, stored.layer, {}, {"device": "meta"})
            width, dtype = made.values.shape[1], made.values.dtype
            self.weight.register_buffer("scales24", made.scales)
        self.weight.values24 = nn.Parameter(_on_meta(m, width, dtype=dtype), requires_grad=False)
        self.weight.register_buffer("meta24", _on_meta(m, k // 8, dtype=torch.uint16))
        self.bias = original.bias
        for name, shape in stored.scales.items():
            self.register_buffer(name, _on_meta(*shape, dtype=torch.float32))
        if stored.scales and self.bias is not None:
            self.bias = nn.Parameter(_on_meta(m, dtype=torch.float32), requires_grad=False)

    def layer(self, saved: SavedLayer) -> Sparse24Linear:
        """The layer with the loaded parts. Raises FormatError for bad metadata, UnsupportedError for no data.

        A hook of accelerate, which brings inputs to the layer's device, moves along.
        """
        options = {**saved.options, "device": "meta"}
        layer = layer_like(self._original[0], self._stored.layer, self._stored.scales, options)
        state = self.state_dict()
        if isinstance(layer, Sparse24QuantizedLinear):
            state[VALUES_KEY], state[META_KEY] = layer.padded(state[VALUES_KEY], state[META_KEY])
        _fill(layer, state)
        layer.origin = origin_in(self._stored.layer.options)
        _move_hook(self, layer)
        layer.train(self.training)
        return layer


class _ExpertParts(nn.Module):
    """Stands in for a module of experts while transformers loads: it has the stacked parts of weights."""

    def __init__(self, name: str, original: Any, stored: StoredExperts) -> None:
        super().__init__()
        made = stored.like(name, original, device="meta", **stored.form_of(name))
        self._made = [made]  # in a list, so that it is no submodule
        self._origins = {stack: stored.origin_of(name, stack) for stack in STACKS}
        for stack in STACKS:
            setattr(self, stack, _parts_of(getattr(made, stack)))

    def layer(self) -> Sparse24Experts:
        """The experts with the loaded parts. Raises as :meth:`_Parts.layer`, and moves a hook along."""
        (experts,) = self._made
        for stack in STACKS:
            parts = getattr(self, stack)
            _fill(getattr(experts, stack), state_of(stack, parts.state_dict(prefix="weight.")))
            getattr(experts, stack).origin = self._origins[stack]
        _move_hook(self, experts)
        experts.train(self.training)
        return experts


def _parts_of(weight: ExpertsWeight) -> nn.Module:
    """A module with the parts of a stack [E, M, K], without memory.

    Metadata is int16, for PyTorch doesn't join uint16 on every device; valid words are the same. It is a
    parameter, because converters ask for the shape of one.
    """
    found = nn.Module()
    for key, part in weight.state_dict().items():
        dtype = torch.int16 if key == META_KEY else part.dtype
        stack = _on_meta(*part.shape, dtype=dtype).unflatten(0, (weight.num_experts, -1))
        setattr(found, key.rpartition(".")[2], nn.Parameter(stack, requires_grad=False))
    return found


def _fill(layer: Sparse24Linear, state: Mapping[str, Tensor]) -> None:
    """Load a layer's tensors. Raises FormatError for bad metadata, UnsupportedError for no data."""
    if any(tensor.is_meta for tensor in state.values()):
        raise UnsupportedError("device_map: expected devices that hold 2:4 weights, got offloaded ones")
    try:
        layer.load_state_dict(in_order_of(layer, state), assign=True)
    except RuntimeError as error:
        raise FormatError(str(error)) from error


def _move_hook(old: nn.Module, new: nn.Module) -> None:
    """Give a hook of accelerate to the module that takes the old one's place."""
    if (hook := getattr(old, "_hf_hook", None)) is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)


def _on_meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class _Decompress(ConversionOps):  # type: ignore[misc]
    """Makes dense matrices of compressed ones that the model holds dense, or stacked by a converter.

    A converter of one matrix ``alone`` is made for its weight.
    """

    supports_many_to_many = True
    """The two parts of a matrix may come before a converter that makes several of it."""

    def __init__(self, alone: Layer | None = None) -> None:
        self._alone = alone

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, list[Tensor]]:
        """The matrices of each pattern; of one alone, by its full name."""
        found = {}
        for pattern in source_patterns:
            base, is_values, _ = pattern.partition(_VALUES)
            if pattern in input_dict and is_values:
                parts = zip(input_dict[pattern], input_dict[base + _META], strict=True)
                found[base if self._alone is None else more["full_layer_name"]] = [
                    self._dense(*one) for one in parts
                ]
            elif pattern in input_dict and not pattern.endswith(_META):
                found[pattern] = input_dict[pattern]
        return found

    def _dense(self, values: Tensor, meta: Tensor) -> Tensor:
        *stack, _ = values.shape
        values, meta = values.flatten(0, -2), meta.flatten(0, -2)
        check_metadata(values, meta)
        dense: Tensor = torch.ops.sparse24.decompress(values, meta).reshape(*stack, -1)
        if self._alone is None:
            return dense
        dense = dense[..., : self._alone.columns]
        return (dense.T if self._alone.transposed else dense).contiguous()


@register_quantizer(SPARSE24)
class Sparse24HfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads compressed checkpoints in transformers' own loader, and describes a model that is saved.

    A dense checkpoint isn't pruned by loading it: call ``to_sparse24`` afterwards.
    """

    requires_calibration = True
    is_trainable = True

    def __init__(self, quantization_config: Sparse24Config, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._model: Any = None
        self._files: list[str] = []
        self._originals: dict[int, Any] = {}
        """The model's own converter, or None, for each converter that this made; by its id."""
        self.saved: tuple[dict[str, Tensor], dict[str, str]] | None = None
        """Tensors and the files' metadata while a model is saved."""

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise UnsupportedError for weights that would be on a disk."""
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise UnsupportedError("device_map: expected devices that hold 2:4 weights, got the disk")

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        return self.saved or (None, {})

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self._model, self._files = model, list(checkpoint_files or ())

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Prepare the model for the checkpoint, once transformers knows all conversions of names.

        Linear layers whose weights are compressed give way to their parts. Other compressed matrices are
        decompressed before the model's own converters see them.
        """
        if not self._files:
            return weight_conversions
        model = self._model
        path = Path(self._files[0])
        with ModelReader(path if len(self._files) == 1 else path.parent) as reader:
            stored = {
                name: _stored(reader, compressed_layer(reader, shard, name))
                for name, shard in compressed_names(reader).items()
            }
            layers = {name: one.layer for name, one in stored.items()}
            parts = {part for one in layers.values() for part in one.sources}
            rest = [name for name in reader.tensors if name not in parts]
        check_names(layers, rest)
        state = model.state_dict(keep_vars=True)
        direct, merged = placed(model, [*layers, *rest], state, weight_conversions)
        form = SavedForm(**dict(self.quantization_config))
        experts = StoredExperts(model, form, layers, direct, merged)
        for place in experts.sources:
            for name in () if experts.form_of(place) else experts.names_of(place):
                _check_dense(layers[name])
        uses = Counter(map(id, state.values()))
        ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
        tied = {*ties, *ties.values()}  # transformers ties them again once they are loaded
        renamings = [one for one in weight_conversions if not is_converter(one)]
        converters = []
        for name, own in direct.items():
            if name in layers and renamed_by(renamings, name + VALUES_SUFFIX) != (
                renamed_by(renamings, name) + VALUES_SUFFIX
            ):
                raise UnsupportedError(f"{name}: expected a name whose end transformers keeps, got {own}")
            if own in experts.targets:
                if layers[name].dense_shape != tuple(state[own].shape):
                    wanted, got = list(state[own].shape), list(layers[name].dense_shape)
                    raise InvalidProblemError(f"{name}: expected shape {wanted}, got {got}")
            elif name in layers and not (
                uses[id(state[own])] == 1 and own not in tied and _take_apart(model, own, stored[name])
            ):
                _check_dense(layers[name])
                renamed = renamed_by(renamings, name)
                converters.append(_decompressing(renamed, layers[name]))
                self._originals[id(converters[-1])] = None
        for name in experts.sources:
            module: Any = model.get_submodule(name)
            check_dtype(layers[experts.names_of(name)[0]], module.down_proj.dtype)
            model.set_submodule(name, _ExpertParts(name, module, experts))
        others = [one for one in merged if one.target not in experts.targets]
        changed = {id(one.converter): _with_parts(one.converter) for one in others if _is_stored(one, layers)}
        for one in weight_conversions:
            converters.append(changed.get(id(one), one))
            self._originals[id(converters[-1])] = one
        return converters

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        form = SavedForm(**dict(self.quantization_config))
        saved = {place_of(model, name, dict(model.named_modules())): one for name, one in form.layers.items()}
        for name, module in list(model.named_modules()):
            if isinstance(module, _Parts):
                model.set_submodule(name, module.layer(saved.get(name, SavedLayer())))
            elif isinstance(module, _ExpertParts):
                model.set_submodule(name, module.layer())
        fuse_blocks(model, form, {})
        used = [self._originals.get(id(one)) for one in model._weight_conversions]
        model._weight_conversions = [one for one in used if one is not None]
        self._model, self._files, self._originals = None, [], {}
        model.is_quantized = False  # otherwise transformers refuses half(), float() and training
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # some models compute otherwise if this field is set
                vars(module.config).pop("_is_quantized", None)
        return model


def _stored(reader: ModelReader, layer: Layer) -> Stored:
    """A compressed weight. Raises UnsupportedError for one of 8 bits without scales."""
    if layer.quantization is not None:
        return Stored(layer, {})
    shapes = {key: reader.tensors[name].shape for key, name in scales_of(reader, layer).items()}
    if DTYPE_OF[layer.element] not in DTYPES and SCALES[0] not in shapes:
        raise UnsupportedError(
            f"{layer.name}: expected a weight of f32, f16 or bf16, or of 8 bits with {SCALES[0]}, "
            f"got {layer.element}"
        )
    return Stored(layer, shapes)


def _check_dense(layer: Layer) -> None:
    """Raise UnsupportedError for a quantized weight that the model holds dense, or in a stack."""
    if DTYPE_OF[layer.element] not in DTYPES or layer.quantization is not None:
        raise UnsupportedError(
            f"{layer.name}: expected a linear layer for a weight of {layer.quantization or layer.element}, "
            "got none; use from_pretrained of sparse24_plans"
        )


def _take_apart(model: Any, own: str, stored: Stored) -> bool:
    """Put the parts of a weight in place of its linear layer. False if the model holds the matrix otherwise.

    Raises InvalidProblemError for another shape.
    """
    layer = stored.layer
    place = own.removesuffix(_WEIGHT)
    check_orientation(layer, model.get_submodule(own.rpartition(".")[0]))
    if place == own or not is_swappable(module := model.get_submodule(place)):
        return False
    if (got := (layer.m, layer.columns)) != (wanted := sizes_of(module, layer)):
        raise InvalidProblemError(f"{layer.name}: expected shape {list(wanted)}, got {list(got)}")
    model.set_submodule(place, _Parts(module, stored))
    return True


def _decompressing(name: str, layer: Layer) -> Any:
    """The converter of one compressed matrix that the model holds dense."""
    sources = [f"^{re.escape(name)}{suffix}" for suffix in (_VALUES, _META)]
    return WeightConverter(sources, name, [_Decompress(layer)])


def _with_parts(converter: Any) -> Any:
    """A converter that takes matrices compressed or dense."""
    sources = [one + suffix for one in converter._original_source_patterns for suffix in ("", _VALUES, _META)]
    targets = list(converter._original_target_patterns)
    made = WeightConverter(sources, targets, [_Decompress(), *converter.operations])
    for name in ("scope_prefix", "base_model_prefix"):
        if hasattr(converter, name):  # versions differ in what they scope a converter by
            setattr(made, name, getattr(converter, name))
    return made


def _is_stored(merged: Merged, layers: Mapping[str, Layer]) -> bool:
    """Whether the matrices that are merged are compressed.

    Raises UnsupportedError if only some are, because a converter gets each form in a list of its own, and for
    patterns that end before ``weight``, to which no part can be added.
    """
    for name, _ in merged.sources:
        if name in layers:
            _check_dense(layers[name])
    kinds = {name in layers for name, _ in merged.sources}
    if kinds == {False}:
        return False
    if len(kinds) > 1 or not all(pattern.endswith("weight") for _, pattern in merged.sources):
        raise UnsupportedError(
            f"{merged.target}: expected a weight that transformers doesn't compute from 2:4 ones, got "
            f"{', '.join(name for name, _ in merged.sources[:3])}; use from_pretrained of sparse24_plans"
        )
    return True


# Saving -------------------------------------------------------------------------------------------


def _saving(original: Any) -> Any:
    """``save_pretrained`` that writes models with 2:4 layers in our format, and others as it did.

    A model that was loaded from our format may have none: subclasses of nn.Linear get dense weights.
    """

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        is_adapter = getattr(self, "_hf_peft_config_loaded", False)
        is_sparse = next(modules_of(self, Sparse24Linear), None) is not None
        if not is_adapter and not is_sparse and type(vars(self).get("hf_quantizer")) is Sparse24HfQuantizer:
            with _described(self, None):
                return original(self, save_directory, *args, **options)
        if is_adapter or not is_sparse:
            return original(self, save_directory, *args, **options)
        tensors, layers = saved_state(self, options.get("state_dict"))
        if _are_converted(self, layers):
            options["save_original_format"] = False
        if options.get("save_original_format", True):
            layers = _renamed(self, layers)
        metadata: dict[str, str] = {}
        Sparse24Checkpoint().stamp(metadata)
        for layer in layers:
            Sparse24Checkpoint().note(metadata, layer)
        quantizer = Sparse24HfQuantizer(Sparse24Config(**form_of(self).dumped()))
        quantizer.saved = tensors, metadata
        with _described(self, quantizer):
            return original(self, save_directory, *args, **options)

    return save_pretrained


@contextmanager
def _described(model: Any, quantizer: Sparse24HfQuantizer | None) -> Iterator[None]:
    """The model has this quantizer and its entry in the configuration in this context, or neither.

    Other models may share the configuration, so it is restored.
    """
    entry = _ABSENT if quantizer is None else quantizer.quantization_config
    wanted = ((model, "hf_quantizer", quantizer), (model.config, CONFIG_KEY, entry))
    before = [vars(place).get(name, _ABSENT) for place, name, _ in wanted]
    try:
        for place, name, value in wanted:
            _put(place, name, value)
        yield
    finally:
        for (place, name, _), old in zip(wanted, before, strict=True):
            _put(place, name, old)


def _put(place: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it for ``_ABSENT``."""
    if value is not _ABSENT:
        setattr(place, name, value)
    elif name in vars(place):
        delattr(place, name)


def _are_converted(model: Any, layers: Iterable[Layer]) -> bool:
    """Whether a converter of the model would change a compressed weight, which has another form.

    A converter that takes stacks apart does the same to their parts.
    """
    transforms = getattr(model, "_weight_conversions", None)
    converters = filter(is_converter, conversions_of(model) if transforms is None else transforms)
    reverse = [(one.reverse_transform(), stacks_rows(one)) for one in converters]
    return any(
        one.rename_source_key(layer.name)[1] and not (layer.stack and by_rows)
        for layer in layers
        for one, by_rows in reverse
    )


def _renamed(model: Any, layers: list[Layer]) -> list[Layer]:
    """The weights by the names that transformers gives them in its checkpoint, which may part stacks."""
    marks = {one.name: torch.empty(0) for one in layers if not one.stack}
    names = {id(mark): name for name, mark in revert_weight_conversion(model, marks).items()}
    found = [replace(one, name=names[id(marks[one.name])]) for one in layers if not one.stack]
    for layer in (one for one in layers if one.stack):
        whole = {layer.name: torch.empty(layer.dense_shape, device="meta")}
        for name, part in revert_weight_conversion(model, whole).items():
            *stack, m, _ = part.shape
            found.append(replace(layer, name=name, m=m * sum(stack or [1]), stack=sum(stack)))
    return found


PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]
