"""Sparse24QuantizedLinear: what it computes, what it holds, and what it refuses."""

import copy

import pytest
import torch

from sparse24_plans import (
    ElementKind,
    InvalidProblemError,
    UnsupportedError,
)
from sparse24_plans.torch import (
    Sparse24Linear,
    Sparse24QuantizedLinear,
    Sparse24Recipe,
    to_sparse24,
)
from sparse24_plans.weights.quantize import quantized_rows

F8, S8 = torch.float8_e4m3fn, torch.int8
LARGEST = {F8: 448, S8: 127}
OFF = {F8: 0.05, S8: 0.02}
"""Relative difference from the pruned layer that rounding to 8 bits may make, on normal data."""
each_dtype = pytest.mark.parametrize("dtype", [F8, S8], ids=["fp8", "int8"])


def dense_layer(k: int = 72, m: int = 48, *, bias: bool = True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Linear(k, m, bias).to(dtype)


def quantized_layer(dtype, k: int = 72, m: int = 48, **options):
    return Sparse24QuantizedLinear.from_linear(dense_layer(k, m), dtype=dtype, **options)


def exact(layer: Sparse24QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: x and W are rounded to 8 bits, nothing else is."""
    largest, dtype = LARGEST[layer.weight.dtype], layer.weight.dtype
    if layer.input_scale is None:
        scale = x.float().abs().amax(-1, keepdim=True) / largest
    else:
        scale = layer.input_scale
    scaled = (x.float() / scale).clamp(-largest, largest)
    rounded = scaled.round() if dtype == S8 else scaled.to(F8)
    y = rounded.double() * scale.double() @ layer.dense_weight().double().T
    return y if layer.bias is None else y + layer.bias.double()


@each_dtype
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("shape", [(72,), (1, 72), (5, 72), (2, 3, 72), (0, 72)])
@pytest.mark.parametrize("k_is_ragged", [False, True])
def test_the_product_of_the_rounded_operands(dtype, scales, shape, k_is_ragged):
    k = 75 if k_is_ragged else 72
    layer = quantized_layer(dtype, k, scales=scales)
    x = torch.randn(*shape[:-1], k, dtype=torch.bfloat16)
    y = layer(x)
    assert (y.shape, y.dtype) == ((*shape[:-1], 48), torch.bfloat16)
    wanted = exact(layer, x)
    size = (x.double().abs().sum(-1, keepdim=True) * layer.dense_weight().double().abs().max()) if k else 0
    assert bool(((y.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + size * 2.0**-10).all())


@each_dtype
@pytest.mark.parametrize(("n", "m", "k"), [(0, 16, 16), (3, 0, 16), (3, 16, 0), (0, 0, 0)])
def test_empty_sides(dtype, n, m, k):
    y = quantized_layer(dtype, k, m, scales="tensor")(torch.randn(n, k))
    assert y.shape == (n, m)
    assert torch.isfinite(y).all()


@each_dtype
@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "swiglu"])
def test_close_to_the_pruned_layer(dtype, activation):
    linear = dense_layer(256, 96)
    pruned = Sparse24Linear.from_linear(linear, activation=activation)
    layer = Sparse24QuantizedLinear.from_linear(linear, dtype=dtype, activation=activation)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    wanted, y = pruned(x).double(), layer(x).double()
    assert y.shape == wanted.shape
    factors = 2 if activation == "swiglu" else 1
    assert float((y - wanted).norm() / wanted.norm()) < factors * OFF[dtype]
    weight = pruned.dense_weight().double()
    assert float((layer.dense_weight() - weight).norm() / weight.norm()) < OFF[dtype]
    assert not layer.dense_weight()[weight == 0].any(), "a pruned cell came back"


@each_dtype
def test_a_layer_holds_what_a_compressed_checkpoint_has(dtype):
    linear = dense_layer(64, 48)
    layer = Sparse24QuantizedLinear.from_linear(linear, dtype=dtype)
    pruned = Sparse24Linear.from_linear(linear).canonical()[0].detach().float().numpy()
    values, scale = quantized_rows(pruned, ElementKind.S8 if dtype == S8 else ElementKind.FP8_E4M3)
    assert (layer.canonical()[0].view(torch.uint8).numpy() == values.view("uint8")).all()
    assert (layer.weight_scale.numpy() == scale).all()


@each_dtype
@pytest.mark.parametrize("dtype_of_x", [torch.float32, torch.float16, torch.bfloat16])
def test_result_has_dtype_of_x_or_given_one(dtype, dtype_of_x):
    x = torch.randn(3, 72, dtype=dtype_of_x)
    assert quantized_layer(dtype)(x).dtype == dtype_of_x
    assert quantized_layer(dtype, out_dtype=torch.float32)(x).dtype == torch.float32


@each_dtype
def test_a_static_input_scale_clamps_what_is_beyond(dtype):
    layer = quantized_layer(dtype, input_scale=2.0 / LARGEST[dtype])
    x = torch.randn(4, 72, dtype=torch.float32)
    assert torch.equal(layer(x.clamp(-2, 2)), layer(x))
    assert x.abs().max() > 2


@each_dtype
def test_each_token_has_its_own_scale(dtype):
    """Tokens 2^40 apart don't disturb each other, and a token of NaN or Inf shows in its own row alone."""
    layer = quantized_layer(dtype)
    x = torch.randn(6, 72) * torch.tensor([1.0, 2.0**40, 2.0**-40, 0, 1, 1])[:, None]
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)
    hostile = x.clone()
    hostile[0, 3], hostile[4, 5] = torch.nan, torch.inf
    found = layer(hostile)
    assert not torch.isfinite(found[[0, 4]]).any()
    assert torch.equal(found[[1, 2, 3, 5]], alone[[1, 2, 3, 5]])


@each_dtype
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_pytorchs_default_dtype_changes_nothing(dtype, default):
    linear, x = dense_layer(dtype=torch.float32), torch.randn(3, 72)
    wanted = Sparse24QuantizedLinear.from_linear(linear, dtype=dtype, input_scale=0.02)
    torch.set_default_dtype(default)
    try:
        found = Sparse24QuantizedLinear.from_linear(linear, dtype=dtype, input_scale=0.02)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [one.dtype for one in found.buffers()] == [one.dtype for one in wanted.buffers()]
    assert torch.equal(found(x), wanted(x))


# What the layer holds -----------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("input_scale", [None, 0.5])
def test_a_state_dict_goes_round_bit_for_bit(dtype, scales, input_scale):
    layer = quantized_layer(dtype, scales=scales, input_scale=input_scale)
    state = layer.state_dict()
    more = {"input_scale"} if input_scale else set()
    assert set(state) == {"weight.values24", "weight.meta24", "weight_scale", "bias"} | more
    assert state["weight.values24"].dtype == dtype
    for device in ("cpu", "meta"):
        other = Sparse24QuantizedLinear(
            72, 48, dtype=dtype, scales=scales, static_input=bool(more), device=device
        )
        other.load_state_dict(state, assign=device == "meta")
        x = torch.randn(5, 72)
        assert torch.equal(other(x), layer(x))
        assert all(
            torch.equal(a.float(), b.float())
            for a, b in zip(state.values(), other.state_dict().values(), strict=True)
        )


@each_dtype
@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_a_models_dtype_leaves_the_layer_as_it_is(dtype, change):
    layer = quantized_layer(dtype, input_scale=0.25)
    before = {name: (one.dtype, one.clone()) for name, one in layer.state_dict().items()}
    change(torch.nn.Sequential(layer))
    for name, one in layer.state_dict().items():
        assert one.dtype == before[name][0]
        assert torch.equal(one.float(), before[name][1].float())


@each_dtype
def test_copies_and_empty_layers(dtype):
    layer, x = quantized_layer(dtype), torch.randn(3, 72)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    empty = Sparse24QuantizedLinear(72, 48, dtype=dtype, device="meta").to_empty(device="cpu")
    assert not empty(x).any()


@each_dtype
def test_a_recipe_quantizes_a_model(dtype):
    model = torch.nn.Sequential(dense_layer(64, 64), torch.nn.ReLU(), dense_layer(64, 32)).eval()
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    other = copy.deepcopy(model)
    to_sparse24(other)
    report = to_sparse24(model, recipe=Sparse24Recipe(weight_dtype=dtype))
    assert [type(model[at]) for at in (0, 2)] == [Sparse24QuantizedLinear] * 2
    assert all(layer.sparse_bytes < layer.dense_bytes / 2 for layer in report.layers)
    wanted = other(x).double()
    assert float((model(x).double() - wanted).norm() / wanted.norm()) < 2 * OFF[dtype]


@each_dtype
def test_the_plan_is_that_of_the_call(dtype):
    desc = quantized_layer(dtype, 80, activation="silu").plan(5).descriptor
    assert (desc.n, desc.m, desc.k, desc.element.value) == (5, 48, 80, "s8" if dtype == S8 else "fp8_e4m3")
    assert (desc.scale_x, desc.scale_w, desc.epilogue) == ("row", "row", "bias_silu")


# What is refused ----------------------------------------------------------------------------------


def test_what_is_refused():
    layer, x = quantized_layer(F8), torch.randn(3, 72)
    with pytest.raises(UnsupportedError, match="x: expected a tensor without gradients"):
        layer(x.requires_grad_())
    with pytest.raises(InvalidProblemError, match=r"x: expected \[..., 72\], got \[3, 64\]"):
        layer(torch.randn(3, 64))
    with pytest.raises(InvalidProblemError, match=r"x: expected one of .*, got torch.float64"):
        layer(x.detach().double())
    with pytest.raises(UnsupportedError, match=r"dtype: expected one of .*, got torch.bfloat16"):
        Sparse24QuantizedLinear(8, 8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="trainable: expected False"):
        Sparse24QuantizedLinear(8, 8, trainable=True)
    with pytest.raises(InvalidProblemError, match="scales: expected row or tensor, got 'group'"):
        Sparse24QuantizedLinear(8, 8, scales="group")
    with pytest.raises(InvalidProblemError, match="input_scale: expected a number above 0, got -1"):
        quantized_layer(F8, input_scale=-1)
    with pytest.raises(InvalidProblemError, match="weight_dtype: expected one of"):
        Sparse24Recipe(weight_dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"expected torch.float8_e4m3fn, got torch.int8"):
        layer.load_state_dict(quantized_layer(S8).state_dict())
    with pytest.raises(RuntimeError, match="weight_scale"):
        layer.load_state_dict({**layer.state_dict(), "weight_scale": torch.ones(3)})


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_the_bits_on_a_gpu_are_near_the_hosts(dtype, n):
    layer = quantized_layer(dtype, 1000, 512, activation="silu")
    x = torch.randn(n, 1000, dtype=torch.bfloat16)
    wanted = layer(x).double()
    with torch.no_grad():
        found = layer.cuda()(x.cuda())
    assert layer.packed is not None
    assert "wgmma_sp" in layer.plan(n).explain().chosen
    assert float((found.cpu().double() - wanted).norm() / wanted.norm()) < 0.01
