"""How a swapped model is written: its tensors in a checkpoint, and its entry in ``config.json``.

A checkpoint holds a model as it was before :func:`fuse_gated`: gate and up projection are matrices of their
own, and rows have the order of the model's own layers. Experts are stacks, as in the dense module. Every
reader of the format therefore understands it, and its dense form is the dense model's. The entry says what
the tensors don't: which blocks were fused, and what layers have besides their weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint_format import CONFIG_KEY
from ..checkpoints.layers import SPARSE24, Layer
from ..errors import InvalidProblemError, UnsupportedError
from ..plan.preference import PlanPreference
from ..vocab.model import Model
from .activations import is_gated, movable, row_order, rows_in_order
from .elements import element_of
from .experts import STACKS, ExpertsWeight, Sparse24Experts, as_stack
from .gated import Sparse24GatedMLP
from .layer_state import META_KEY, VALUES_KEY
from .linear import Sparse24Linear
from .quantized_linear import SCALES, Sparse24QuantizedLinear
from .tensor import Sparse24Tensor
from .weight_only_linear import SCALES_KEY, Sparse24WeightOnlyLinear

Kind = TypeVar("Kind", bound=nn.Module)
_SUFFIX = VALUES_KEY.removeprefix("weight")
_KEYS = (VALUES_KEY, META_KEY, SCALES_KEY, *SCALES, "bias")


class SavedLayer(Model):
    """The properties of a layer besides its weight and bias. The fields are arguments of Sparse24Linear."""

    activation: str = "none"
    out_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    preference: PlanPreference = PlanPreference()

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Sparse24Linear."""
        out_dtype = getattr(torch, self.out_dtype) if self.out_dtype else None
        return {"activation": self.activation, "out_dtype": out_dtype, "preference": self.preference}


class SavedForm(Model):
    """The entry ``quantization_config`` of ``config.json``. Names are those of the model's modules.

    ``layers`` has the layers that differ from ``SavedLayer()``. ``gated_blocks`` has the blocks that
    ``fuse_gated`` replaced, each with its gated layer, and ``experts`` has the Sparse24Experts.
    """

    quant_method: Literal["sparse24"] = "sparse24"
    layers: Mapping[str, SavedLayer] = {}
    gated_blocks: Mapping[str, SavedLayer] = {}
    experts: Mapping[str, SavedLayer] = {}

    def dumped(self) -> dict[str, Any]:
        """The entry as JSON values, without defaults."""
        return {"quant_method": SPARSE24, **self.model_dump(mode="json", exclude_defaults=True)}


def form_in(config: Mapping[str, Any] | None) -> SavedForm | None:
    """The entry in a ``config.json``, or None without one of ours. Raises InvalidProblemError."""
    entry = (config or {}).get(CONFIG_KEY)
    ours = isinstance(entry, Mapping) and entry.get("quant_method") == SPARSE24
    return SavedForm.model_validate(entry) if ours else None


def form_of(model: nn.Module) -> SavedForm:
    """The entry that a model is saved with."""
    blocks = {name: _saved(one.gate_up_proj) for name, one in modules_of(model, Sparse24GatedMLP)}
    experts = {name: _saved(one.gate_up_proj) for name, one in modules_of(model, Sparse24Experts)}
    inside = {f"{name}.gate_up_proj" for name in blocks}
    layers = {
        name: saved
        for name, layer in modules_of(model, Sparse24Linear)
        if name not in inside
        and not isinstance(layer, ExpertsWeight)
        and (saved := _saved(layer)) != SavedLayer()
    }
    return SavedForm(layers=layers, gated_blocks=blocks, experts=experts)


def modules_of(model: nn.Module, kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
    """The model's modules of a class, with their names."""
    return ((name, one) for name, one in model.named_modules() if isinstance(one, kind))


def saved_state(
    model: nn.Module, state: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], list[Layer]]:
    """The tensors of a checkpoint, and its compressed weights, by the names of the model's modules.

    ``state`` is the model's state_dict, if another than its own is to be saved. Raises InvalidProblemError
    for tensors without data, UnsupportedError for tensors cut over ranks and for Sparse24Tensors.
    """
    tensors = dict(model.state_dict(destination=_PartsOnHost()) if state is None else state)
    for name, layer in modules_of(model, Sparse24Linear):
        own = {key: tensors[f"{name}.{key}"] for key in _KEYS if f"{name}.{key}" in tensors}
        tensors |= {f"{name}.{key}": tensor for key, tensor in _as_stored(layer, own).items()}
    for name, block in modules_of(model, Sparse24GatedMLP):
        rows = block.gate_up_proj.out_features
        for key in _KEYS:
            whole = tensors.pop(f"{name}.gate_up_proj.{key}", None)
            if whole is not None:
                count = len(block.parts)
                shares = whole.chunk(count) if whole.shape[:1] == (rows,) else [whole] * count
                for part, share in zip(block.parts, shares, strict=True):
                    tensors[f"{name}.{part}.{key}"] = share.clone()
    _stack_experts(model, tensors)
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise InvalidProblemError(f"{name}: expected a tensor with data, got one on the meta device")
        if isinstance(tensor, Sparse24Tensor):
            raise UnsupportedError(
                f"{name}: expected a plain tensor, got a Sparse24Tensor; give its layer its to_dense(), "
                'which to_sparse24(model, recipe="compress") takes'
            )
        if hasattr(tensor, "device_mesh"):
            raise UnsupportedError(
                f"{name}: expected a tensor that is on one device, got one that is cut over ranks; save the "
                "model's state_dict with torch.distributed.checkpoint"
            )
    return tensors, list(_layers_in(model, tensors))


def _of_module(model: nn.Module, layer: Layer) -> Layer:
    """The weight with what its tensors don't tell: its orientation, origin, padding and quantization."""
    home, _, part = layer.name.removesuffix(".weight").rpartition(".")
    holder: Any = model.get_submodule(home)
    own = holder.gate_up_proj if isinstance(holder, Sparse24GatedMLP) and part != "down_proj" else None
    own = own or getattr(holder, part, None)
    if not isinstance(own, Sparse24Linear):
        return layer
    found = replace(layer, transposed=own.transposed, options=dict(own.origin))
    if isinstance(own, Sparse24WeightOnlyLinear):
        element = element_of(own.dtype, layer.name)
        found = replace(found, k=own.k, element=element, quantization=own.quantization)
    return replace(found, padding=found.k - own.in_features)


def _stack_experts(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the weights of experts the names and rows of the dense module's stacks."""
    for name, experts in modules_of(model, Sparse24Experts):
        for stack in STACKS:
            for key in (VALUES_KEY, META_KEY, SCALES_KEY):
                if (whole := f"{name}.{stack}.{key}") in tensors:
                    rows = tensors.pop(whole)
                    found = as_stack(stack, movable(rows), experts.num_experts).view(rows.dtype)
                    tensors[f"{name}.{stack}{key.removeprefix('weight')}"] = found


def _layers_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[Layer]:
    """The compressed weights among a checkpoint's tensors."""
    for key, values in tensors.items():
        if key.endswith(_SUFFIX):
            name, shape = key.removesuffix(_SUFFIX), values.shape
            stack = shape[0] if len(shape) == 3 else 0
            m, k, element = shape[:-1].numel(), 2 * shape[-1], element_of(values.dtype, name)
            yield _of_module(model, Layer(name, m, k, element, (), stack=stack))


def _as_stored(layer: Sparse24Linear, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's tensors with their rows in the model's order, and without columns beyond the next eight."""
    if isinstance(layer, Sparse24QuantizedLinear):
        k = layer.in_features + -layer.in_features % 8
        for key, columns in ((VALUES_KEY, k // 2), (META_KEY, k // 8)):
            if key in own:
                own[key] = own[key][:, :columns].contiguous()
    if not is_gated(layer.activation):
        return own
    order = row_order(layer.activation, layer.out_features, torch.device("cpu")).argsort()
    return rows_in_order(own, order, layer.out_features)


class _PartsOnHost(OrderedDict[str, Tensor]):
    """A state_dict whose compressed weights are on the host.

    A packed layer makes its canonical weight when it is asked, and a GPU may have no room for all of them.
    """

    def __setitem__(self, key: str, tensor: Tensor) -> None:
        is_part = key.endswith((VALUES_KEY, META_KEY, SCALES_KEY))
        super().__setitem__(key, tensor.cpu() if is_part and tensor.is_cuda else tensor)


def _saved(layer: Sparse24Linear) -> SavedLayer:
    """Properties of a layer besides its weight. Without ``out_dtype`` results have the weight's dtype."""
    out_dtype: Any = None
    if layer.out_dtype not in (None, layer.weight.dtype):
        out_dtype = str(layer.out_dtype).removeprefix("torch.")
    return SavedLayer(activation=layer.activation, out_dtype=out_dtype, preference=layer.preference)
