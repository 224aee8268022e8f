"""Layers whose 2:4 weights are stored in 4 or 8 bits compute what their dense weights would."""

from __future__ import annotations

import copy
import gc
import io

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from sparse24_plans import InvalidProblemError, UnsupportedError  # noqa: E402
from sparse24_plans.torch import (  # noqa: E402
    Sparse24Linear,
    Sparse24Recipe,
    Sparse24WeightOnlyLinear,
    fuse_gated,
    to_sparse24,
)
from sparse24_plans.torch.packed_weight_cache import kept_copies  # noqa: E402

from .cases import S, randn, weight  # noqa: E402

STRICT = {"prefer_kernel": "host_strict"}
"""The kernel whose bits are the same whenever its operands are."""
STORED = pytest.mark.parametrize("stored", ["s4", "s8", "fp8_e4m3"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def a_linear(k: int = 203, m: int = 48, dtype=torch.bfloat16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, m, bias).to(dtype)


def plain_of(layer: Sparse24WeightOnlyLinear) -> Sparse24Linear:
    """The layer that holds the dequantized values."""
    dense = nn.Linear(layer.in_features, layer.out_features, dtype=layer.dtype)
    dense.weight = nn.Parameter(layer.dense_weight())
    order = torch.argsort(torch.as_tensor(rows_of(layer)))
    dense.bias = nn.Parameter(layer.bias.detach()[order])
    options = {"activation": layer.activation, "out_dtype": layer.out_dtype, "preference": layer.preference}
    return Sparse24Linear.from_linear(dense, method="compress", **options)


def rows_of(layer: Sparse24WeightOnlyLinear) -> list[int]:
    from sparse24_plans.torch.activations import row_order

    found = torch.arange(layer.out_features)
    return found[row_order(layer.activation, layer.out_features, torch.device("cpu"))].tolist()


@STORED
@DTYPES
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("activation", ["none", "silu", "swiglu"])
def test_results_are_those_of_the_dequantized_weight(stored, dtype, group, activation):
    options = {"activation": activation, "preference": STRICT, "out_dtype": torch.float32}
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(dtype=dtype), stored=stored, group=group, **options)
    x = torch.randn(2, 5, 203, dtype=dtype)
    with torch.no_grad():
        found = layer(x)
        assert torch.equal(found, plain_of(layer)(x))
    assert found.shape == (2, 5, 24 if activation == "swiglu" else 48)
    assert layer.plan(10).kernel == "host_strict"
    assert layer.plan().descriptor.weight_element == stored
    assert layer.plan().descriptor.weight_group == group


@STORED
def test_the_weight_is_near_the_pruned_one(stored):
    linear = a_linear()
    pruned = Sparse24Linear.from_linear(linear).dense_weight().float()
    found = Sparse24WeightOnlyLinear.from_linear(linear, stored=stored, group=32).dense_weight().float()
    assert ((found == 0) | (pruned != 0)).all()
    lost = (found - pruned).norm() / pruned.norm()
    assert lost < {"s4": 0.1, "s8": 0.01, "fp8_e4m3": 0.04}[stored]


def test_four_bits_take_the_bytes_that_they_say():
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(1024, 512, bias=False))
    kept = 512 * 1024 // 2
    assert layer.weight_bytes == kept // 2 + kept // 2 + 2 * 512 * 8  # values, metadata, scales
    assert layer.weight.shape == (512, 1024)
    assert layer.weight.dtype == torch.bfloat16


@DTYPES
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_gradients_are_those_of_the_dequantized_weight(dtype, activation):
    layer = Sparse24WeightOnlyLinear.from_linear(
        a_linear(dtype=dtype), activation=activation, preference=STRICT
    )
    layer.bias.requires_grad_()
    other = plain_of(layer)
    other.bias.requires_grad_()
    results = []
    for one in (layer, other):
        x = torch.randn(7, 203, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
        one(x).float().square().sum().backward()
        results.append((x.grad, one.bias.grad))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert layer.values.grad is None


@STORED
def test_state_dicts_copies_and_pickles_hold_the_bits(stored):
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(), stored=stored, group=64, preference=STRICT)
    state = layer.state_dict()
    assert list(state) == ["weight.values24", "weight.meta24", "bias", "weight.scales24"]
    fresh = Sparse24WeightOnlyLinear(203, 48, stored=stored, group=64, preference=STRICT)
    assert not fresh.dense_weight().any()
    fresh.load_state_dict(state)
    on_meta = Sparse24WeightOnlyLinear(203, 48, stored=stored, group=64, preference=STRICT, device="meta")
    on_meta.load_state_dict(state, assign=True)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    x = torch.randn(3, 203, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        for one in (fresh, on_meta, copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
            assert torch.equal(one(x), wanted)


def held_packed(layer: Sparse24WeightOnlyLinear) -> Sparse24WeightOnlyLinear:
    """The layer as on a GPU whose kernels read a layout of their own; those of the CPU do not."""
    layer._pack()
    assert (layer.values, layer.metadata, layer.scales) == (None, None, None)
    return layer


@STORED
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("scale_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_a_packed_layer_gives_the_same_bits(stored, group, scale_dtype, activation):
    by = {"stored": stored, "group": group, "scale_dtype": scale_dtype, "activation": activation}
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(), preference=STRICT, **by)
    packed = held_packed(copy.deepcopy(layer))
    x = torch.randn(2, 5, 203, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(packed(x), layer(x))
    assert torch.equal(packed.dense_weight(), layer.dense_weight())
    tile = {"s4": 2048, "s8": 4096, "fp8_e4m3": 4096}[stored] + 1024
    scales = 64 * (2 if group else 1) * (4 if scale_dtype else 2)
    assert packed.weight_bytes == 2 * (tile + scales)  # 48 rows, 208 columns


@STORED
def test_packed_layer_is_saved_loaded_and_moved_as_any_other(stored):
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(), stored=stored, preference=STRICT)
    packed, state = held_packed(copy.deepcopy(layer)), layer.state_dict()
    assert packed.state_dict().keys() == state.keys()
    for key, tensor in packed.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), state[key].view(torch.uint8))
    moved, loaded = held_packed(copy.deepcopy(layer)).to("cpu"), held_packed(copy.deepcopy(layer))
    loaded.load_state_dict(state)
    x = torch.randn(3, 203, dtype=torch.bfloat16)
    wanted = layer(x)
    layer.scales.zero_()
    for one in (moved, loaded):
        assert one.packed is None
        assert torch.equal(one(x), wanted)


def test_a_packed_layer_refuses_what_it_cannot_compute():
    packed = held_packed(Sparse24WeightOnlyLinear.from_linear(a_linear(200)))
    with pytest.raises(InvalidProblemError, match=r"x: expected \[\.\.\., 200\], the weight's K"):
        packed(torch.randn(3, 208, dtype=torch.bfloat16))
    x = torch.randn(3, 200, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="for gradients, got a packed weight"):
        packed(x).sum().backward()


def test_kernels_of_the_cpu_read_the_canonical_weight():
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear())
    layer.hold_packed()
    assert layer.packed is None
    assert layer.values is not None


@pytest.mark.gpu
@STORED
def test_packed_layer_is_captured_without_copy_of_its_weight(stored):
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(256, 192), stored=stored, group=64)
    x = torch.randn(5, 256, dtype=torch.bfloat16, device="cuda")
    layer = layer.cuda()
    if torch.cuda.get_device_capability() != (9, 0):
        with pytest.raises(UnsupportedError):
            layer.hold_packed()
        return
    packed = copy.deepcopy(layer)
    packed.hold_packed()
    assert packed.values is None
    gc.collect()  # copies of other tests' layers would go at any time
    kept = kept_copies()
    with torch.no_grad():
        packed(x)  # selects the plan
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = packed(x)
    graph.replay()
    assert kept_copies() == kept
    with torch.no_grad():
        assert torch.equal(y, layer(x))
    assert torch.equal(packed.dense_weight(), layer.dense_weight())


def test_a_layer_without_data_becomes_zero():
    layer = Sparse24WeightOnlyLinear(203, 48, device="meta").to_empty(device="cpu")
    assert not layer.dense_weight().any()
    assert (layer.scales == 1).all()


def test_state_dict_that_does_not_fit_is_refused_by_name():
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(), group=64)
    state = layer.state_dict()
    wrong = {
        "weight.scales24": state["weight.scales24"].float(),
        "weight.values24": state["weight.values24"].view(torch.int8),
        "weight.meta24": torch.zeros_like(state["weight.meta24"]),
    }
    for key, tensor in wrong.items():
        with pytest.raises(RuntimeError, match=key):
            layer.load_state_dict({**state, key: tensor})
    del state["weight.scales24"]
    with pytest.raises(RuntimeError, match=r"weight\.scales24"):
        layer.load_state_dict(state)


def test_dtypes_stay():
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear())
    assert layer.half().scales.dtype == layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    with pytest.raises(InvalidProblemError, match=r"x: expected torch\.bfloat16, as the weight, got"):
        layer(torch.randn(1, 203).half())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 203)).dtype == torch.bfloat16


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_layers_give_the_same_bits(packed):
    layer = Sparse24WeightOnlyLinear.from_linear(a_linear(), activation="silu", preference=STRICT)
    x = torch.randn(4, 203, dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        if packed:
            held_packed(layer)
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), wanted)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stored": "bf16"}, "stored: expected one of s4, s8, fp8_e4m3"),
        ({"group": 16}, "group: expected one of 0, 32, 64, 128"),
        ({"scale_dtype": torch.float16}, r"scale_dtype: expected torch\.bfloat16 or torch\.float32"),
    ],
)
def test_wrong_options_are_named(options, word):
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24WeightOnlyLinear(64, 16, **options)


def test_float32_and_training_are_refused():
    with pytest.raises(UnsupportedError, match="dtype"):
        Sparse24WeightOnlyLinear.from_linear(a_linear(dtype=torch.float32))
    with pytest.raises(UnsupportedError, match="trainable"):
        Sparse24WeightOnlyLinear(64, 16, trainable=True)


# Models -----------------------------------------------------------------------------------------------


def test_a_recipe_swaps_layers_for_stored_values():
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(torch.bfloat16)
    dense = sum(one.weight.nbytes for one in model if isinstance(one, nn.Linear))
    report = to_sparse24(model, recipe=Sparse24Recipe(stored="s4", group=64))
    assert [type(one).__name__ for one in model] == [
        "Sparse24WeightOnlyLinear",
        "SiLU",
        "Sparse24WeightOnlyLinear",
    ]
    assert report.dense_bytes == dense
    assert report.sparse_bytes < 0.28 * dense
    assert all(0.5 < layer.kept_energy < 1 for layer in report.layers)
    assert model(torch.randn(2, 64, dtype=torch.bfloat16)).isfinite().all()


def test_float32_models_are_left_dense_with_the_reason():
    report = to_sparse24(nn.Sequential(nn.Linear(64, 128)), recipe=Sparse24Recipe(stored="s4"))
    assert not report.layers
    assert "values in s4 need a weight of float16 or bfloat16" in report.skipped["0"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"stored": "f16"}, "stored"),
        ({"stored": "s4", "group": 48}, "group"),
        ({"stored": "s4", "weight_dtype": torch.int8}, "stored: expected None with a weight_dtype"),
    ],
)
def test_wrong_recipes_are_named(fields, word):
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24Recipe(**fields)


class Block(nn.Module):
    """A gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 128, False), nn.Linear(64, 128, False)
        self.down_proj, self.act_fn = nn.Linear(128, 64, False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_gated_blocks_fuse_with_stored_values():
    model = nn.Sequential(Block()).to(torch.bfloat16)
    recipe = Sparse24Recipe(stored="s8", group=32)
    assert fuse_gated(model, recipe)["0"].activation == "swiglu"
    assert type(model[0].gate_up_proj) is Sparse24WeightOnlyLinear
    to_sparse24(model, recipe=recipe)
    assert type(model[0].down_proj) is Sparse24WeightOnlyLinear
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    gate, up = (model[0].gate_up_proj.dense_weight().float() @ x.float().T).T.chunk(2, -1)
    hidden = nn.functional.silu(gate) * up
    wanted = hidden @ model[0].down_proj.dense_weight().float().T
    assert torch.allclose(model(x).float(), wanted, atol=0.02 * float(wanted.abs().max()))


def test_swapping_works_without_data():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 128)).to(torch.bfloat16)
    to_sparse24(model, recipe=Sparse24Recipe(stored="s4"))
    assert type(model[0]) is Sparse24WeightOnlyLinear
    assert model[0].values.is_meta


def test_a_call_without_scales_is_refused_whatever_ran_before():
    """A packed weight of 16 bits has the form of another op's call, whose plan must not serve this one."""
    values, meta, _ = weight(dtype=torch.bfloat16)
    x = randn(5, 64, dtype=torch.bfloat16)
    S.linear(x, values, meta)
    with pytest.raises(InvalidProblemError, match="scales: expected meta and scales of stored values"):
        S.weight_only_linear(x, values, meta, None)
