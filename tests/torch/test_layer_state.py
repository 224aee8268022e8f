"""Saving and loading a Sparse24Linear: states, copies, and what a broken state leaves as it was."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from sparse24_plans.torch import Sparse24Linear
from sparse24_plans.torch.activations import movable

from .cases import DEVICE, randn
from .layers import KINDS, dense_layer, every_kind, filled, same, state


def test_the_state_is_that_of_our_checkpoints():
    layer = Sparse24Linear.from_linear(dense_layer(60, 96, dtype=torch.bfloat16))
    found = {name: (tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()}
    assert found == {
        "weight.values24": ((96, 32), torch.bfloat16),
        "weight.meta24": ((96, 8), torch.uint16),
        "bias": ((96,), torch.bfloat16),
    }


def test_weight_says_what_it_is_and_has_tensors_of_state():
    """Models ask a layer's weight for its dtype and device; torch.distributed walks the names of a state."""
    layer = Sparse24Linear.from_linear(dense_layer(60, 96, dtype=torch.bfloat16))
    weight, found = layer.weight, layer.state_dict()
    assert (weight.shape, weight.dtype, weight.device.type) == ((96, 60), torch.bfloat16, DEVICE)
    assert torch.equal(weight.values24, found["weight.values24"])
    assert torch.equal(weight.meta24.view(torch.int16), found["weight.meta24"].view(torch.int16))
    assert repr(weight).startswith("LayerWeight(shape=[96, 60]")


def test_torch_distributeds_own_state_functions():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    layers = [nn.Sequential(Sparse24Linear.from_linear(dense_layer())), nn.Sequential(Sparse24Linear(64, 96))]
    found = get_model_state_dict(layers[0])
    assert found.keys() == layers[0].state_dict().keys()
    set_model_state_dict(layers[1].to(DEVICE), found)
    assert same(layers[0][0], layers[1][0])


def test_memory_that_to_empty_gives_holds_a_fresh_layer():
    """Such memory holds no valid metadata that could be packed, or unpacked for a load."""
    layer = Sparse24Linear(64, 96, device="meta", dtype=torch.bfloat16).to_empty(device=DEVICE)
    assert not layer(randn(5, 64, dtype=torch.bfloat16)).any()
    layer.load_state_dict(Sparse24Linear.from_linear(dense_layer(dtype=torch.bfloat16)).state_dict())
    assert same(layer, Sparse24Linear.from_linear(dense_layer(dtype=torch.bfloat16)))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": lambda layer: _saved(layer, lambda file: torch.load(file, weights_only=False)),
    "state_dict": lambda layer: _loaded(layer, state(layer)),
    "torch.save of the state_dict": lambda layer: _loaded(layer, _saved(state(layer), torch.load)),
    "assign": lambda layer: _loaded(layer, state(layer), assign=True),
}


def _saved(thing, load):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return load(file)


def _loaded(like: Sparse24Linear, found: dict, **options) -> Sparse24Linear:
    layer = Sparse24Linear(like.in_features, like.out_features, device=DEVICE, dtype=found["bias"].dtype)
    layer.load_state_dict(found, **options)
    return layer


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_give_the_same_bits_and_share_no_memory(way, dtype):
    layer = Sparse24Linear.from_linear(dense_layer(dtype=dtype), trainable=True)
    other = way(layer)
    assert same(layer, other)
    with torch.no_grad():
        other.values.zero_() if other.values is not None else other.packed.zero_()
    assert not same(layer, other)


def test_a_state_of_another_dtype_is_converted():
    layer = Sparse24Linear.from_linear(dense_layer())
    half = Sparse24Linear(64, 96, device=DEVICE, dtype=torch.bfloat16)
    half.load_state_dict(layer.state_dict())
    assert torch.equal(half.dense_weight(), layer.dense_weight().bfloat16())


def test_optimizer_goes_on_with_layer_that_loads_state():
    """The layer's own tensors take the values, as those of nn.Linear do."""
    layer = Sparse24Linear.from_linear(dense_layer(), trainable=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    torch.manual_seed(9)
    layer.load_state_dict(Sparse24Linear.from_linear(nn.Linear(64, 96, device=DEVICE)).state_dict())
    before = layer.dense_weight()
    layer(randn(5, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.dense_weight(), before)


BROKEN = {
    "a dense weight": lambda s: {"weight": torch.zeros(96, 64), "bias": s["bias"]},
    "expected \\[96, 32\\]": lambda s: {**s, "weight.values24": torch.zeros(96, 30)},
    "expected uint16 or int16": lambda s: {**s, "weight.meta24": s["weight.meta24"].int()},
    "row 3, group 0": lambda s: {**s, "weight.meta24": _spoiled(s["weight.meta24"])},
    "Missing key": lambda s: {name: t for name, t in s.items() if name != "weight.meta24"},
    "values24: expected a tensor, got a NoneType": lambda s: {**s, "weight.values24": None},
    "bias: expected a tensor, got a ndarray": lambda s: {**s, "bias": s["bias"].cpu().numpy()},
    "meta24: expected a tensor with data": lambda s: {**s, "weight.meta24": s["weight.meta24"].to("meta")},
    "bias: expected a tensor with data": lambda s: {**s, "bias": s["bias"].to("meta")},
    "Unexpected key": lambda s: {**s, "scale": torch.ones(1)},
}


def _spoiled(meta: torch.Tensor) -> torch.Tensor:
    words = meta.view(torch.int16).clone()
    words[3, 0] = 0x0400  # both positions 0
    return words.view(torch.uint16)


@pytest.mark.parametrize("message", BROKEN)
def test_a_state_that_is_broken_is_refused_and_nothing_changes(message):
    layer = Sparse24Linear.from_linear(dense_layer())
    before = state(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(BROKEN[message](state(layer)))
    if "key" not in message:
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def new(kind: str, cls: type | None = None, **options) -> Sparse24Linear:
    own, more = KINDS[kind]
    more = {"static_input": True} if "input_scale" in more else more
    if kind == "plain":
        options["dtype"] = torch.bfloat16
    return (cls or own)(64, 96, **more, **options)


def equal_states(one: nn.Module, other: nn.Module) -> bool:
    found, wanted = one.state_dict(), other.state_dict()
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key].contiguous().view(torch.uint8), wanted[key].contiguous().view(torch.uint8))
        for key in wanted
    )


@every_kind
def test_loading_copies_into_the_layers_own_tensors(kind):
    """A later write to the state, or to the layer that it came from, therefore changes nothing."""
    source, layer = filled(kind), new(kind)
    held = {name: t.data_ptr() for name, t in (*layer.named_parameters(), *layer.named_buffers())}
    layer.load_state_dict(source.state_dict())
    assert {n: t.data_ptr() for n, t in (*layer.named_parameters(), *layer.named_buffers())} == held
    assert equal_states(layer, source)
    before = state(layer)
    for tensor in source.state_dict().values():
        tensor.view(torch.uint8).zero_()
    assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in state(layer).items())


@every_kind
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_may_have_any_strides(kind, assign):
    """A tensor that was gathered along its columns, or cut out of a larger one, isn't contiguous."""
    source, layer = filled(kind), new(kind)
    spread = {}
    for key, tensor in source.state_dict().items():
        wide = torch.empty(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
        wide.view(torch.uint8).fill_(0)
        spread[key] = wide[..., 0]
        spread[key].view(movable(tensor).dtype).copy_(movable(tensor))
    layer.load_state_dict(spread, assign=assign)
    assert equal_states(layer, source)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(layer.to(x.device)(x), source.to(x.device)(x))


@every_kind
def test_layers_without_memory_load_only_assigned_tensors(kind):
    source, layer = filled(kind), new(kind, device="meta")
    with pytest.warns(UserWarning, match="weight: it is on the meta device"):
        layer.load_state_dict(source.state_dict())
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    layer.load_state_dict(source.state_dict(), assign=True)
    assert equal_states(layer, source)


@every_kind
def test_hooks_before_loading_see_and_change_the_state(kind):
    source, layer, seen = filled(kind), new(kind), []

    def rename(module, found, prefix, *about):
        seen.append((module, prefix))
        for key in [key for key in found if key.startswith(f"{prefix}old_")]:
            found[key.replace("old_", "")] = found.pop(key)

    layer.register_load_state_dict_pre_hook(rename)
    nn.Sequential(layer).load_state_dict({f"0.old_{key}": t for key, t in source.state_dict().items()})
    assert seen == [(layer, "0.")]
    assert equal_states(layer, source)


@every_kind
def test_extra_state_of_a_subclass_is_saved_and_loaded(kind):
    class Counting(KINDS[kind][0]):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, found):
            self.calls = found["calls"]

    layer, other = new(kind, Counting), new(kind, Counting)
    layer.calls = 3
    found = nn.Sequential(layer).state_dict()
    nn.Sequential(other).load_state_dict(found)
    assert other.calls == 3
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\._extra_state"):
        nn.Sequential(new(kind)).load_state_dict(found)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\._extra_state"):
        nn.Sequential(other).load_state_dict(nn.Sequential(new(kind)).state_dict())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_loading_leaves_parameters_frozen_or_trained(assign, learns):
    layer = Sparse24Linear.from_linear(dense_layer(), trainable=True).requires_grad_(learns)
    layer.load_state_dict(state(layer), assign=assign)
    assert [one.requires_grad for one in layer.parameters()] == [learns] * 2


def with_tensors_of_its_users(kind: str, filling: float) -> nn.Module:
    layer = filled(kind)
    layer.register_buffer("importance", torch.full((3,), filling))
    layer.register_buffer("scratch", torch.zeros(3), persistent=False)
    layer.gain = nn.Parameter(torch.full((2,), filling))
    layer.beside = nn.Linear(2, 2)
    return layer


@pytest.mark.parametrize("assign", [False, True])
@every_kind
def test_tensors_and_modules_added_to_a_layer_are_saved(kind, assign):
    layer, other = (nn.Sequential(with_tensors_of_its_users(kind, one)) for one in (1.0, 2.0))
    found = state(layer)
    assert {"0.importance", "0.gain", "0.beside.weight"} < found.keys()
    assert "0.scratch" not in found
    other.load_state_dict(found, assign=assign)
    assert all(torch.equal(movable(one), movable(other.state_dict()[name])) for name, one in found.items())
    assert isinstance(other[0].gain, nn.Parameter)
    missing = other.load_state_dict(nn.Sequential(filled(kind)).state_dict(), strict=False).missing_keys
    assert missing == ["0.gain", "0.importance", "0.beside.weight", "0.beside.bias"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*importance.*beside\.weight"):
        nn.Sequential(filled(kind)).load_state_dict(found)


COMPUTED = {
    "prune": lambda layer: prune.l1_unstructured(layer, "values", 0.5),
    "prune the bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "weight_norm": lambda layer: nn.utils.weight_norm(layer, "values"),
    "parametrize the bias": lambda layer: parametrize.register_parametrization(
        layer, "bias", nn.Hardtanh(-0.01, 0.01)
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("way", COMPUTED)
def test_tensors_that_pytorchs_utilities_compute_from_others_survive_a_state(way, assign):
    torch.manual_seed(2)
    layers = [Sparse24Linear.from_linear(nn.Linear(64, 96).to(DEVICE), trainable=True) for _ in range(2)]
    for layer in layers:
        COMPUTED[way](layer)
    assert not same(*layers)
    layers[1].load_state_dict(state(layers[0]), assign=assign)
    assert same(*layers)
    layers[1](randn(5, 64)).sum().backward()
