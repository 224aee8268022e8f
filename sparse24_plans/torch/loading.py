"""Loads a compressed checkpoint into a model: matches names and shapes, swaps layers, fills them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.layers import Layer, origin_in
from ..checkpoints.quantization import scale_obstacle
from ..checkpoints.selection import families_of
from ..device.log import LOAD
from ..errors import FormatError, InvalidProblemError, UnsupportedError
from ..weights.packed_layouts import Quantization
from .activations import is_gated, row_order, rows_in_order
from .checkpoint_names import Merged, conversions_of, place_of, placed
from .checkpoint_source import Source
from .conv1d import is_conv1d, is_swappable, linear_of
from .elements import DTYPE_OF, stored_form
from .experts import STACKS, Sparse24Experts, holds_stacks, kernel_obstacle, no_kernel, obstacle
from .gated import Sparse24GatedMLP, fuse_saved
from .layer_state import META_KEY, VALUES_KEY
from .linear import DTYPES, Sparse24Linear
from .module_places import aliases_of
from .quantized_linear import SCALES, Sparse24QuantizedLinear
from .saved_experts import Source as ExpertsSource
from .saved_experts import StoredExperts, stack_of, stack_shapes, state_of
from .saved_form import SavedForm, SavedLayer
from .weight_only_linear import SCALES_KEY, Sparse24WeightOnlyLinear

_WEIGHT = ".weight"
_VALUES, _META, _SCALES = (key.rpartition(".")[2] for key in (VALUES_KEY, META_KEY, SCALES_KEY))


class Load:
    """One load, which matches the checkpoint's tensors with the model's.

    ``options`` are arguments of Sparse24Linear that win over those that layers were saved with.
    """

    def __init__(
        self, model: nn.Module, source: Source, dtype: torch.dtype | None, options: Mapping[str, Any]
    ) -> None:
        self._model, self._source, self._dtype = model, source, dtype
        self._options = {name: one for name, one in options.items() if name not in ("dequantize", "device")}
        self._dequantize: bool | None = options.get("dequantize")
        self._device: torch.device | None = options.get("device")
        self._wanted: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._aliases = aliases_of(model)
        self._owners = Counter(map(id, self._wanted.values()))
        self._stacks = {own: one for own, one in stack_shapes(model).items() if own not in self._wanted}
        known = {*self._wanted, *(name.removesuffix(f".{_VALUES}") for name in self._wanted), *self._stacks}
        names = [*source.weights, *source.others]
        self._names, self._merged = placed(model, names, known, conversions_of(model))
        self._form = source.form or SavedForm()
        self._experts = StoredExperts(
            model,
            self._form,
            source.weights,
            self._names,
            self._merged,
            stay_dense=bool(options.get("trainable")) or self._no_kernel_for_experts(),
        )
        used = {name for one in self._merged for name, _ in one.sources} | source.accessories()
        self.unexpected = [name for name in names if name not in self._names and name not in used]
        self.dense: list[str] = []
        self.dequantized = [
            own
            for name, own in self._names.items()
            if name in source.quantized or (source.scales(name) and self._module(own) is None)
        ]
        for one in self._merged:
            if any(name in source.quantized or source.scales(name) for name, _ in one.sources):
                self.dequantized.append(one.target)

    def _no_kernel_for_experts(self) -> bool:
        """Whether some experts have no kernel on the device, by default that of their weights."""
        wishes = {name: one for name, one in self._options.items() if name != "trainable"}
        for name, module in self._model.named_modules():
            if not holds_stacks(module) or obstacle(module) is not None:
                continue
            place: torch.device = self._device or module.down_proj.device
            if (reason := no_kernel(module, place, **wishes)) is not None:
                LOAD.warning("experts stay dense: %s: %s", name, reason)
                return True
        return False

    def _is_sparse(self, own: str) -> bool:
        """Whether the model already has a Sparse24Linear with this weight."""
        return f"{own}.{_VALUES}" in self._wanted

    def _parts(self, own: str) -> list[Tensor]:
        """The model's tensor of this name, or the tensors of a compressed weight or stack.

        A compressed weight has those under its layer's other names, too: a state_dict has copies of them.
        """
        place = own.removesuffix(_WEIGHT)
        homes = [home for one in self._aliases.get(place, [place]) for home in (one, one + _WEIGHT)]
        names = [own, *(f"{home}.{part}" for home in homes for part in (_VALUES, _META, _SCALES))]
        return [self._wanted[name] for name in names if name in self._wanted]

    def _shape(self, own: str) -> tuple[int, ...]:
        """The dense shape of the model's tensor of this name."""
        return self._stacks[own] if own in self._stacks else tuple(self._wanted[own].shape)

    def _takes_sparse_only(self, own: str) -> bool:
        """Whether the checkpoint's tensor has to be 2:4 for the model, but isn't."""
        return self._is_sparse(own) or (own in self._stacks and own not in self._experts.targets)

    def _module(self, own: str) -> Any:
        """The layer whose weight is the tensor, or None if no 2:4 layer can replace its module."""
        if not own.endswith(_WEIGHT):
            return None
        module = self._model.get_submodule(own.removesuffix(_WEIGHT))
        alone = own in self._wanted and self._owners[id(self._wanted[own])] == 1
        return module if isinstance(module, Sparse24Linear) or (alone and is_swappable(module)) else None

    def check(self) -> None:
        """Raise InvalidProblemError for missing tensors or wrong shapes, UnsupportedError for 8 bits."""
        made: dict[str, Tensor] = {}
        for one in self._merged:
            made |= self._made(one, lambda name: torch.empty(self._source.shape(name), device="meta"))
        found = {id(part) for own in [*self._names.values(), *made] for part in self._parts(own)}
        missing = [own for own, tensor in self._wanted.items() if id(tensor) not in found]
        if missing:
            raise InvalidProblemError(
                f"path: expected all {len(self._wanted)} tensors of the model, {len(missing)} are missing: "
                f"{', '.join(missing[:5])}"
            )
        for name, own in self._names.items():
            self._check_shape(name, own)
        for own, tensor in made.items():
            no_dense = self._takes_sparse_only(own) or own not in {*self._wanted, *self._stacks}
            if no_dense or tuple(tensor.shape) != self._shape(own):
                wanted = "no dense weight" if no_dense else list(self._shape(own))
                raise InvalidProblemError(f"{own}: expected {wanted}, got {list(tensor.shape)}")
        for place in self._experts.sources:
            module: Any = self._model.get_submodule(place)
            if isinstance(getattr(module, STACKS[0]), Sparse24WeightOnlyLinear):
                for form in self._experts.forms(place):
                    _check_form(place, getattr(module, STACKS[0]), form)
        for name, layer in self._source.weights.items():
            if DTYPE_OF[layer.element] not in DTYPES:
                self._check_quantized(name, layer)
        for name in sorted(self._source.quantized):
            home = self._names.get(name, "").rpartition(".")[0]
            reason = scale_obstacle(self._source.reader, name)
            if is_conv1d(self._model.get_submodule(home)):
                reason = "expected [out, in], as quantized matrices are stored, for a layer of [in, out]"
            if reason is not None:
                raise UnsupportedError(f"{name}: {reason}")

    def _made(self, merged: Merged, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return what a converter makes; a stack that is 2:4 as the model holds it stays as it is."""
        source = self._experts.source_of(merged.target)
        if isinstance(source, str):
            return {merged.target: read(source)}
        return merged.result(self._model, read)

    def _check_quantized(self, name: str, layer: Layer) -> None:
        """Raise UnsupportedError for a weight of 8 bits that no layer takes."""
        scale = self._source.scales(name).get(SCALES[0])
        if scale is None:
            raise UnsupportedError(
                f"{name}: expected a weight of f32, f16 or bf16, or of 8 bits with {SCALES[0]}, "
                f"got {layer.element}"
            )
        count = math.prod(self._source.shape(scale))
        if count not in (1, layer.m):
            raise UnsupportedError(f"{scale}: expected a scale for each of {layer.m} rows, got {count}")

    def _check_shape(self, name: str, own: str) -> None:
        weight = self._source.weights.get(name)
        if weight is None and self._takes_sparse_only(own):
            raise InvalidProblemError(f"{name}: expected a 2:4 weight, as the layer's is, got a dense one")
        if weight is not None and not self._source.is_state:
            check_orientation(weight, self._model.get_submodule(own.rpartition(".")[0]))
        module = None if weight is None else self._module(own)
        if isinstance(module, Sparse24WeightOnlyLinear):
            _check_form(name, module, None if weight is None else weight.quantization)
        if weight is not None and module is not None:
            wanted: tuple[int, ...] = sizes_of(module, weight)
            got: tuple[int, ...] = (weight.m, weight.columns)
            if self._source.is_state and weight.k == wanted[1] + 8 and self._source.scales(name):
                got = weight.m, wanted[1]  # it has the layer's padding to 16 columns
        else:
            wanted, got = self._shape(own), self._source.shape(name)
        if got != wanted:
            raise InvalidProblemError(f"{name}: expected shape {list(wanted)}, got {list(got)}")

    def swap(self) -> None:
        """Replace each linear layer whose weight is compressed, and experts, by layers of zeros."""
        known = dict(self._model.named_modules())
        saved = {place_of(self._model, name, known): one for name, one in self._form.layers.items()}
        swapped: dict[str, nn.Module] = {}
        for name in self._source.weights:
            own = self._names.get(name, "")
            module = self._module(own)
            if module is not None and not isinstance(module, Sparse24Linear):
                place = own.removesuffix(_WEIGHT)
                about = {**saved.get(place, SavedLayer()).options, **self._options}
                swapped[place] = self._layer_for(name, module, about)
        wishes = {name: one for name, one in self._options.items() if name != "trainable"}
        for place in self._experts.sources:
            if not isinstance(known[place], Sparse24Experts):
                form = self._form_of_experts(place, known[place], wishes)
                swapped[place] = self._experts.like(place, known[place], **form, **wishes)
        for place, layer in swapped.items():
            self._model.set_submodule(place, layer)

    def _layer_for(self, name: str, module: Any, options: Mapping[str, Any]) -> Sparse24Linear:
        """The layer of zeros that a weight is loaded into."""
        weight = self._source.weights[name]
        shapes = {key: self._source.shape(one) for key, one in self._source.scales(name).items()}
        if weight.quantization is None:
            return layer_like(module, weight, shapes, options)
        if not (self._dequantize or options.get("trainable")):
            layer = layer_like(module, weight, shapes, options)
            device = self._device or linear_of(module).weight.device
            if self._dequantize is False or kernel_obstacle(layer, device) is None:
                self._check_dtype(name, linear_of(module).weight)
                return layer
        return sparse_like(module, options)

    def _form_of_experts(self, place: str, module: Any, wishes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by which experts store values as the checkpoint does, or none for 16 bits."""
        form = {} if self._dequantize else self._experts.form_of(place)
        if form and self._dequantize is None:
            device = self._device or module.down_proj.device
            if no_kernel(module, device, **form, **wishes) is not None:
                return {}
        if form:
            self._check_dtype(self._experts.names_of(place)[0], module.down_proj)
        return form

    def _check_dtype(self, name: str, held: Tensor) -> None:
        """Raise InvalidProblemError for a layer that keeps stored values in a model of another dtype.

        A parameter on the meta device has the checkpoint's dtype, unless another is asked for.
        """
        dtype = (self._dtype or self._source.model_dtype) if held.is_meta else held.dtype
        check_dtype(self._source.weights[name], dtype, "or dequantize=True")

    def fill(self) -> None:
        """Read one tensor after the other and load it into its module."""
        for place, stacks in self._experts.sources.items():
            for stack, source in stacks.items():
                self._fill_stack(place, stack, source)
        for name, own in self._names.items():
            if own in self._experts.targets:
                continue
            module = self._module(own)
            if name in self._source.weights and isinstance(module, Sparse24Linear):
                self._give(own.removesuffix(_WEIGHT), self._tensors_for(module, name, own))
                module.origin = origin_in(self._source.weights[name].options)
            else:
                self._fill_dense(own, self._source.tensor(name))
        for one in self._merged:
            if one.target not in self._experts.targets:
                for own, tensor in one.result(self._model, self._source.tensor).items():
                    self._fill_dense(own, tensor)
        if self.dequantized:
            LOAD.warning("quantized, but loaded dense: %s", ", ".join(families_of(self.dequantized)))
        kept = {
            name
            for place in self._experts.sources
            if isinstance(self._model.get_submodule(f"{place}.{STACKS[0]}"), Sparse24WeightOnlyLinear)
            for name in self._experts.names_of(place)
        }
        wide = [
            name
            for name, one in self._source.weights.items()
            if one.quantization is not None
            and name not in kept
            and not isinstance(self._module(self._names.get(name, "")), Sparse24WeightOnlyLinear)
        ]
        if wide:
            LOAD.warning("quantized, but loaded as 2:4 weights of 16 bits: %s", ", ".join(families_of(wide)))

    def _tensors_for(self, module: Sparse24Linear, name: str, own: str) -> dict[str, Tensor]:
        """The tensors of a compressed weight by their names in its layer."""
        if isinstance(module, Sparse24WeightOnlyLinear):
            return self._source.stored(name)
        values, meta = self._source.canonical(name)
        if isinstance(module, Sparse24QuantizedLinear):
            values, meta = module.padded(values, meta)
        values = self._converted(values, self._parts(own)[0])
        scales = {key: self._source.tensor(one) for key, one in self._source.scales(name).items()}
        return {VALUES_KEY: values, META_KEY: meta, **scales}

    def _fill_stack(self, place: str, stack: str, source: ExpertsSource) -> None:
        """Load one of the two weights of experts."""
        layer: Any = self._model.get_submodule(f"{place}.{stack}")
        is_stored = isinstance(layer, Sparse24WeightOnlyLinear)
        read = cache(self._source.stored if is_stored else self._source.canonical_parts)
        shape = layer.num_experts, layer.out_features // layer.num_experts
        parts = {
            key: stack_of(self._model, source, read, key, shape)
            for key in (VALUES_KEY, META_KEY, SCALES_KEY)[: 2 + is_stored]
        }
        if not is_stored:
            parts[VALUES_KEY] = self._converted(parts[VALUES_KEY], layer.stored()[0])
        self._give(f"{place}.{stack}", state_of(stack, parts))
        layer.origin = self._experts.origin_of(place, stack)

    def _fill_dense(self, own: str, tensor: Tensor) -> None:
        home, _, attribute = own.rpartition(".")
        self._give(home, {attribute: self._converted(tensor, self._wanted[own])})
        self.dense.append(own)

    def _converted(self, tensor: Tensor, old: Tensor) -> Tensor:
        """The tensor in the requested dtype if it replaces a parameter on the meta device."""
        is_float = tensor.is_floating_point() and tensor.element_size() > 1
        return tensor.to(self._dtype) if self._dtype and is_float and old.is_meta else tensor

    def _give(self, place: str, tensors: Mapping[str, Tensor]) -> None:
        module: Any = self._model.get_submodule(place)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        on_meta = any(tensor.is_meta for name, tensor in own.items() if "." not in name)
        if not self._source.is_state and isinstance(module, Sparse24Linear):
            tensors = in_order_of(module, tensors)
        try:
            module.load_state_dict(dict(tensors), strict=False, assign=on_meta)
        except RuntimeError as error:
            raise FormatError(f"{self._source.reader.path}: {error}") from error

    def fuse(self) -> None:
        """Fuse the blocks that were fused when the model was saved."""
        fuse_blocks(self._model, self._form, self._options)


def _check_form(name: str, layer: Sparse24WeightOnlyLinear, got: Quantization | None) -> None:
    """Raise InvalidProblemError for values that are stored otherwise than the layer stores them."""
    if got != layer.quantization:
        raise InvalidProblemError(
            f"{name}: expected {layer.quantization}, as the layer stores, "
            f"got {got or 'values that are not quantized'}"
        )


def check_dtype(stored: Layer, dtype: torch.dtype | None, otherwise: str = "") -> None:
    """Raise InvalidProblemError for a quantized weight that isn't multiplied in the model's dtype.

    ``otherwise`` ends the error's advice.
    """
    wanted = DTYPE_OF[stored.element]
    if stored.quantization is not None and dtype not in (None, wanted):
        raise InvalidProblemError(
            f"{stored.name}: dtype: expected a model of {wanted}, in which weights of {stored.quantization} "
            f"are multiplied, got {dtype}; pass dtype={wanted} {otherwise}".rstrip()
        )


def check_orientation(weight: Layer, module: Any) -> None:
    """Raise InvalidProblemError for a weight whose groups of four lie along the layer's outputs."""
    holds = is_conv1d(module) or getattr(module, "transposed", False)
    if holds != weight.transposed:
        raise InvalidProblemError(
            f"{weight.name}: expected groups of four along the inputs, got them along the outputs: the "
            f"model's layer holds {'[in, out]' if holds else '[out, in]'}; compress the dense model again"
        )


def sizes_of(module: Any, stored: Layer) -> tuple[int, int]:
    """M and K of a layer's weight, with its padding unless the stored weight says what it has itself."""
    linear = module if isinstance(module, Sparse24Linear) else linear_of(module)
    if stored.padding:
        return linear.out_features, linear.in_features
    if isinstance(linear, Sparse24Linear) and not isinstance(linear, Sparse24QuantizedLinear):
        return linear.out_features, linear.k
    return linear.out_features, linear.in_features + -linear.in_features % 8


def layer_like(
    module: Any, stored: Layer, scales: Mapping[str, tuple[int, ...]], options: Mapping[str, Any]
) -> Sparse24Linear:
    """The layer of zeros for a stored weight. ``scales`` has the shapes of its scales by their names."""
    if (by := stored.quantization) is not None:
        form = stored_form(by, stored.element)
        return sparse_like(module, {**form, **options}, kind=Sparse24WeightOnlyLinear)
    if not scales:
        return sparse_like(module, options)
    quantized = {
        "dtype": DTYPE_OF[stored.element],
        "scales": "tensor" if math.prod(scales[SCALES[0]]) == 1 else "row",
        "static_input": SCALES[1] in scales,
    }
    return sparse_like(module, {**quantized, **options}, kind=Sparse24QuantizedLinear)


def sparse_like(module: Any, options: Mapping[str, Any], kind: Any = Sparse24Linear) -> Sparse24Linear:
    """A layer of zeros in place of an nn.Linear or a Conv1D, by default on its device and of its dtype."""
    linear = linear_of(module)
    options = {"device": linear.weight.device, "dtype": linear.weight.dtype, **options}
    layer: Sparse24Linear = kind(linear.in_features, linear.out_features, linear.bias is not None, **options)
    layer.transposed = is_conv1d(module)
    layer.train(linear.training)
    return layer


def in_order_of(layer: Sparse24Linear, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors of a layer, with their rows in the order that its activation wants."""
    if not is_gated(layer.activation):
        return dict(tensors)
    order = row_order(layer.activation, layer.out_features, torch.device("cpu"))
    return rows_in_order(tensors, order, layer.out_features)


def fuse_blocks(model: nn.Module, form: SavedForm, options: Mapping[str, Any]) -> None:
    """Fuse the loaded blocks that ``form`` names. ``options`` win over those that were saved."""
    known = dict(model.named_modules())
    for name, saved in form.gated_blocks.items():
        own = place_of(model, name, known)
        if own is not None and not isinstance(known[own], Sparse24GatedMLP):
            fuse_saved(model, own, {**saved.options, **options})
