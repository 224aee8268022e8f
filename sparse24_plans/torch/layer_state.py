"""Saves 2:4 layers to a state_dict and loads them from it, with all that nn.Module does besides."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ..errors import FormatError, InvalidProblemError, Sparse24Error
from .elements import META_DTYPES, canonical_weight
from .packed_weight_cache import cupy_on_torch_stream

VALUES_KEY, META_KEY = "weight.values24", "weight.meta24"
"""Keys of the canonical weight in a state_dict and in our checkpoints."""


def save(layer: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Add the layer's canonical weight, bias, scales, further tensors and extra state to ``destination``."""
    values, meta = layer.canonical()
    held = {VALUES_KEY: values, META_KEY: meta.view(torch.uint16), "bias": layer.bias, **layer._scales()}
    for key, tensor in held.items():
        if tensor is not None:
            destination[prefix + key] = layer._shown(key, tensor if keep_vars else tensor.detach())
    _further(layer)._save_to_state_dict(destination, prefix, keep_vars)
    if type(layer).get_extra_state is not nn.Module.get_extra_state:
        destination[prefix + _EXTRA_STATE_KEY_SUFFIX] = layer.get_extra_state()


def load(layer: Any, state_dict: Mapping[str, Any], prefix: str, *about: Any) -> None:
    """Load the layer's own part of ``state_dict``.

    ``about`` are the other arguments of nn.Module's ``_load_from_state_dict``, some of which are lists of
    problems to extend.
    """
    local_metadata, strict, missing_keys, unexpected_keys, error_msgs = about
    for hook in layer._load_state_dict_pre_hooks.values():
        hook(state_dict, prefix, *about)
    if prefix + "weight" in state_dict and prefix + VALUES_KEY not in state_dict:
        error_msgs.append(
            f"{prefix}weight: expected {prefix}{VALUES_KEY} and {prefix}{META_KEY}, got a dense weight; "
            "make the layer with Sparse24Linear.from_linear"
        )
        return
    tensors = [VALUES_KEY, META_KEY, *["bias"] * (layer.bias is not None), *layer._scales()]
    takes_extra = type(layer).set_extra_state is not nn.Module.set_extra_state
    wanted = [*tensors, *[_EXTRA_STATE_KEY_SUFFIX] * takes_extra]
    further = _further(layer)
    if strict:
        missing_keys += [prefix + key for key in wanted if prefix + key not in state_dict]
        known = {*wanted, *further.state_dict()}
        here = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        unexpected_keys += [prefix + key for key in here if key not in known and not _is_of_child(layer, key)]
    found = {key: state_dict[prefix + key] for key in tensors if prefix + key in state_dict}
    if strange := [key for key, one in found.items() if not isinstance(one, Tensor)]:
        got = type(found[strange[0]]).__name__
        error_msgs.append(f"{prefix}{strange[0]}: expected a tensor, got a {got}")
        return
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    if not assign and layer._weight.is_meta and any(not one.is_meta for one in found.values()):
        warnings.warn(
            f"{prefix}weight: it is on the meta device, so loading changes nothing; pass assign=True to "
            "load_state_dict, or call to_empty first",
            stacklevel=2,
        )
    further._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, [], error_msgs)
    if assign:
        for name, tensor in further.state_dict(keep_vars=True).items():
            setattr(layer, name, tensor)
    try:
        _load_tensors(layer, found, assign)
    except Sparse24Error as error:
        error_msgs.append(f"{prefix}{error}")
    if takes_extra and prefix + _EXTRA_STATE_KEY_SUFFIX in state_dict:
        layer.set_extra_state(state_dict[prefix + _EXTRA_STATE_KEY_SUFFIX])


def _further(layer: Any) -> nn.Module:
    """A module of the layer's parameters and persistent buffers that users and torch.nn.utils gave it."""
    own = {"values", "metadata", "packed", "bias", *layer._SCALES.values()}
    further = nn.Module()
    for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
        if name not in own:
            further.register_parameter(name, parameter)
    for name, buffer in layer.named_buffers(recurse=False, remove_duplicate=False):
        if name not in own and name not in layer._non_persistent_buffers_set:
            further.register_buffer(name, buffer)
    return further


def _is_computed(tensor: Tensor | None) -> bool:
    """Whether torch.nn.utils computes the tensor. Then no parameter may replace it."""
    return tensor is not None and not isinstance(tensor, nn.Parameter)


def _is_of_child(layer: Any, key: str) -> bool:
    """Whether the key of a state_dict is that of a module inside the layer, which loads it by itself."""
    child, dot, _ = key.partition(".")
    return bool(dot) and isinstance(getattr(layer, child, None), nn.Module)


def _load_tensors(layer: Any, found: Mapping[str, Tensor], assign: bool) -> None:
    """Load the tensors that were found, converted to the layer's dtype and device unless ``assign``.

    Without ``assign`` the layer's own tensors take the values, so that later writes to the state_dict don't
    reach the layer, and references to its tensors stay valid. A packed layer makes new ones.
    """
    values, meta = (t.detach() for t in layer.canonical())
    bias, scales = None if layer.bias is None else layer.bias.detach(), layer._scales()
    held: dict[str, Any] = {VALUES_KEY: values, META_KEY: meta, "bias": bias, **scales}
    for key, own in held.items():
        if key not in found:
            continue
        given = layer._taken(key, found[key].detach(), own)
        if own is None or given.shape != own.shape:
            shape = None if own is None else list(own.shape)
            raise InvalidProblemError(f"{key}: expected {shape}, got {list(given.shape)}")
        if given.is_meta and not (assign or own.is_meta):
            raise InvalidProblemError(f"{key}: expected a tensor with data, got one on the meta device")
        if key == META_KEY:
            if given.dtype not in META_DTYPES:
                raise InvalidProblemError(f"{key}: expected uint16 or int16, got {given.dtype}")
            given = given.view(torch.int16)
        elif key not in scales:
            layer._check_loaded(key, given.dtype)
        moved = given if assign else given.to(own.device, own.dtype, copy=layer.values is None)
        if moved.stride() != own.stride():  # even where contiguous() finds a single element contiguous
            moved = moved.clone(memory_format=torch.contiguous_format)
        held[key] = moved
    if VALUES_KEY in found:
        layer.origin = {}  # a state_dict doesn't say how its values were made
    values, meta, bias, *new = held.values()
    if bias is not None:
        layer._check_bias(bias.dtype, values.dtype)
    if META_KEY in found and meta.device.type != "meta":
        check_metadata(values, meta)
    if layer.values is None or (assign and not _is_computed(layer.values)):
        layer._hold(values, meta, None if _is_computed(layer.bias) else bias)
    else:
        layer._copy(values, meta, bias)
    for (key, own), scale in zip(scales.items(), new, strict=True):
        if assign:
            setattr(layer, layer._SCALES[key], scale)
        else:
            own.copy_(scale)


def words_of(metadata: Any) -> Tensor:
    """A layer's metadata uint8 [M, K/4] as int16 [M, K/8], which ops take."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # TorchScript can't view as another dtype
        joined: Tensor = metadata[:, ::2].short() | metadata[:, 1::2].short() << 8
        return joined
    words: Tensor = metadata.view(torch.int16) if metadata.shape[1] else metadata.to(torch.int16)
    return words


def bytes_of(meta: Tensor) -> Tensor:
    """The inverse of :func:`words_of`."""
    return meta.contiguous().view(torch.uint8) if meta.shape[1] else meta.to(torch.uint8)


def check_metadata(values: Tensor, meta: Tensor) -> None:
    """Raise FormatError, with row and group, for metadata that doesn't name two positions."""
    plain = type(values) in (Tensor, nn.Parameter) and values.dtype != torch.uint8
    if not plain:  # a DTensor's values, and two in a byte, aren't looked at
        values = torch.empty(len(meta), 4 * meta.shape[1], dtype=torch.int8, device=meta.device)
    with cupy_on_torch_stream(values):
        try:
            canonical_weight(values, meta, validate=True)
        except FormatError as error:
            located = FormatError(f"{META_KEY}: {error}")
            located.row, located.group = error.row, error.group
            raise located from error
