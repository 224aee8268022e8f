"""Sparse24QuantizedLinear: what it computes, what it holds, and what it refuses."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparse24_plans import (
    ElementKind,
    InvalidProblemError,
    UnsupportedError,
    compress_checkpoint,
    convert_checkpoint,
)
from sparse24_plans.torch import (
    Sparse24Linear,
    Sparse24QuantizedLinear,
    Sparse24Recipe,
    load_sparse24,
    to_sparse24,
)
from sparse24_plans.torch.quantized_linear import quantize, scale_of
from sparse24_plans.weights.quantize import quantized_rows

from .cases import DEVICE

F8, S8 = torch.float8_e4m3fn, torch.int8
LARGEST = {F8: 448, S8: 127}
OFF = {F8: 0.05, S8: 0.02}
"""Relative difference from the pruned layer that rounding to 8 bits may make, on normal data."""
each_dtype = pytest.mark.parametrize("dtype", [F8, S8], ids=["fp8", "int8"])


def dense_layer(k: int = 72, m: int = 48, *, bias: bool = True, dtype=torch.bfloat16, seed: int = 0):
    torch.manual_seed(seed)
    return torch.nn.Linear(k, m, bias).to(dtype)


def quantized_layer(dtype, k: int = 72, m: int = 48, seed: int = 0, **options):
    return Sparse24QuantizedLinear.from_linear(dense_layer(k, m, seed=seed), dtype=dtype, **options)


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
def test_the_result_has_the_dtype_of_x_or_the_given_one(dtype, dtype_of_x):
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


# Checkpoints --------------------------------------------------------------------------------------


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(40, 64)
        self.down = torch.nn.Linear(64, 40, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def dense_file(tmp_path):
    torch.manual_seed(3)
    block = _Block()
    save_file(block.state_dict(), tmp_path / "dense.safetensors")
    return block, tmp_path / "dense.safetensors"


@each_dtype
@pytest.mark.parametrize("meta", [False, True])
def test_a_compressed_checkpoint_loads_into_quantized_layers(dense_file, tmp_path, dtype, meta):
    block, path = dense_file
    out = tmp_path / "out.safetensors"
    compress_checkpoint(path, out, element="s8" if dtype == S8 else "fp8_e4m3")
    wanted = copy.deepcopy(block)
    to_sparse24(wanted, recipe=Sparse24Recipe(weight_dtype=dtype))
    with torch.device("meta" if meta else "cpu"):
        found = _Block()
    report = load_sparse24(found, out)
    assert (report.sparse, report.unexpected) == (("up", "down"), ())
    assert type(found.up) is type(found.down) is Sparse24QuantizedLinear
    x = torch.randn(5, 40)
    assert torch.equal(found(x), wanted(x))
    again = copy.deepcopy(wanted)
    again.up.weight_scale.zero_()
    assert load_sparse24(again, out).unexpected == ()
    assert torch.equal(again(x), wanted(x))


@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("static", [False, True])
def test_an_fp8_bitmask_checkpoint_of_compressed_tensors(dense_file, tmp_path, scale, static):
    """Its scales are [M, 1] or [1], in the model's dtype; an input_scale makes the input's static."""
    block, path = dense_file
    ours, theirs, file = (tmp_path / f"{name}.safetensors" for name in ("ours", "theirs", "file"))
    compress_checkpoint(path, ours, element="fp8_e4m3")
    convert_checkpoint(ours, theirs, from_format="sparse24", to_format="compressed_tensors")
    tensors = load_file(theirs)
    for name in ("up", "down"):
        one = tensors.pop(f"{name}.weight_scale")
        tensors[f"{name}.weight_scale"] = one.bfloat16() if scale == "row" else torch.tensor([0.5])
        if static:
            tensors[f"{name}.input_scale"] = torch.tensor([0.01])
    with safe_open(theirs, "pt") as opened:
        save_file(tensors, file, opened.metadata())
    found = _Block()
    report = load_sparse24(found, file)
    assert (report.sparse, report.unexpected) == (("up", "down"), ())
    assert torch.equal(found.up.weight_scale, tensors["up.weight_scale"].float())
    assert (found.up.input_scale is not None) == static
    values = Sparse24QuantizedLinear.from_linear(block.up).canonical()[0]
    assert torch.equal(found.up.canonical()[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.isfinite(found(torch.randn(3, 40))).all()


# Quantized checkpoints whose zeros are stored (float-quantized, int-quantized) --------------------


@pytest.fixture
def quantized_file(dense_file, tmp_path, dtype):
    """The matrix ``up`` is 2:4, ``down`` isn't."""
    block, path = dense_file
    ours, zeros, file = (tmp_path / f"{name}.safetensors" for name in ("ours", "zeros", "file"))
    compress_checkpoint(path, ours, include=["up.weight"], element="s8" if dtype == S8 else "fp8_e4m3")
    convert_checkpoint(ours, zeros, from_format="sparse24", to_format="dense")
    tensors = load_file(zeros)
    assert tensors["up.weight"].dtype == dtype
    tensors["down.weight_scale"] = scale_of(block.down.weight.detach(), dtype)
    tensors["down.weight"] = quantize(block.down.weight.detach(), dtype, tensors["down.weight_scale"])
    save_file(tensors, file)
    return block, file, tensors


@each_dtype
@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("static", [False, True])
def test_quantized_matrices_with_stored_zeros(quantized_file, dtype, scale, static, caplog):
    """2:4 ones become layers that quantize their input. Others are dense, as what they stand for, by name."""
    block, file, tensors = quantized_file
    if scale == "tensor":
        tensors |= {"up.weight_scale": torch.tensor([0.5]), "down.weight_scale": torch.tensor(0.25)}
    if static:
        tensors |= {f"{name}.input_scale": torch.tensor([0.01]) for name in ("up", "down")}
    tensors["up.weight_zero_point"] = torch.zeros(64, 1, dtype=torch.int8)
    save_file(tensors, file)
    found = _Block()
    report = load_sparse24(found, file)
    assert (report.sparse, report.unexpected, report.dequantized) == (("up",), (), ("down.weight",))
    assert "quantized, but loaded dense: down.weight" in caplog.text
    assert (type(found.up), type(found.down)) == (Sparse24QuantizedLinear, torch.nn.Linear)
    wanted = Sparse24QuantizedLinear.from_linear(block.up, dtype=dtype)
    values = [one.canonical()[0].view(torch.uint8) for one in (found.up, wanted)]
    assert torch.equal(*values)
    assert torch.equal(found.up.weight_scale, tensors["up.weight_scale"].float())
    assert (found.up.input_scale is not None) == static
    assert torch.equal(found.down.weight, tensors["down.weight"].float() * tensors["down.weight_scale"])
    with torch.device("meta"):
        empty = _Block()
    load_sparse24(empty, file, dtype=torch.bfloat16)
    assert torch.equal(empty.down.weight, found.down.weight.bfloat16())


CHANGES = {
    "too many scales": (
        {"down.weight_scale": torch.ones(40, 4)},
        r"down\.weight: expected one scale, .*got 160",
    ),
    "zero points": (
        {"down.weight_zero_point": torch.ones(40, 1)},
        r"down\.weight: expected zero points of 0",
    ),
    "nothing is 2:4": ({"up.weight": None}, "path: expected a checkpoint with 2:4 weights"),
}


@pytest.mark.parametrize("dtype", [F8])
@pytest.mark.parametrize("name", CHANGES)
def test_quantized_matrices_that_are_refused(quantized_file, name):
    _, file, tensors = quantized_file
    change, message = CHANGES[name]
    tensors |= change
    save_file({key: one for key, one in tensors.items() if one is not None}, file)
    block = _Block()
    with pytest.raises((UnsupportedError, InvalidProblemError), match=message):
        load_sparse24(block, file)
    assert type(block.up) is torch.nn.Linear


@pytest.mark.parametrize("dtype", [F8])
def test_quantized_matrices_of_in_by_out_are_refused(quantized_file):
    """Their scales would be those of the inputs."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    _, file, tensors = quantized_file
    turned = {key: one.T.contiguous() if key == "down.weight" else one for key, one in tensors.items()}
    save_file({**turned, "down.bias": torch.zeros(40), "down.weight_scale": torch.ones(64)}, file)
    block = _Block()
    block.down = conv1d(40, 64)
    with pytest.raises(UnsupportedError, match=r"down.weight: expected \[out, in\]"):
        load_sparse24(block, file)


GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


@pytest.mark.parametrize("dtype", [F8])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"input_activations": None}, "config_groups.g.input_activations: expected symmetric 8 bits"),
        ({"weights": {**GROUP["weights"], "strategy": "group"}}, "config_groups.g.weights: expected"),
        ({"output_activations": GROUP["weights"]}, "config_groups.g.output_activations: expected none"),
    ],
)
def test_quantization_that_layers_do_not_compute_is_refused(quantized_file, tmp_path, change, message):
    _, file, _ = quantized_file
    entry = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config = {"quantization_config": {**entry, "config_groups": {"g": {**GROUP, **change}}}}
    (tmp_path / "model").mkdir()
    file.rename(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    if message is None:
        assert load_sparse24(_Block(), tmp_path / "model").sparse == ("up",)
        return
    with pytest.raises(UnsupportedError, match=message):
        load_sparse24(_Block(), tmp_path / "model")


@pytest.mark.parametrize("dtype", [F8])
def test_a_conversion_says_why_a_quantized_matrix_is_copied(quantized_file, tmp_path):
    _, file, _ = quantized_file
    out = tmp_path / "out.safetensors"
    reports = convert_checkpoint(file, out, from_format="compressed_tensors", to_format="sparse24")
    told = {one.name: (one.action, one.reason) for one in reports}
    assert told["up.weight"] == ("converted", None)
    assert told["down.weight"] == ("copied", "not 2:4 in row 0, group 0")
    assert load_sparse24(_Block(), out).sparse == ("up",)


@each_dtype
def test_a_state_dict_with_padding_in_a_file_is_loaded(tmp_path, dtype):
    layer = quantized_layer(dtype, input_scale=0.5)
    save_file({f"0.{key}": one for key, one in layer.state_dict().items()}, tmp_path / "state.safetensors")
    found = torch.nn.Sequential(torch.nn.Linear(72, 48))
    assert load_sparse24(found, tmp_path / "state.safetensors").sparse == ("0",)
    assert torch.equal(found[0](x := torch.randn(3, 72)), layer(x))


def test_8_bits_without_scales_are_refused(dense_file, tmp_path):
    _, path = dense_file
    out, bare = tmp_path / "out.safetensors", tmp_path / "bare.safetensors"
    compress_checkpoint(path, out, element="fp8_e4m3")
    tensors = load_file(out)
    del tensors["down.weight_scale"]
    with safe_open(out, "pt") as opened:
        save_file(tensors, bare, opened.metadata())
    block = _Block()
    with pytest.raises(UnsupportedError, match=r"down\.weight: expected .* of 8 bits with weight_scale"):
        load_sparse24(block, bare)
    assert type(block.up) is torch.nn.Linear


# The op that quantizes ------------------------------------------------------------------------------

op = torch.ops.sparse24.quantize
SOURCES = {
    "matrix": lambda: torch.randn(5, 72),
    "leading dimensions, ragged": lambda: torch.randn(2, 3, 75).bfloat16(),
    "vector": lambda: torch.randn(72).half(),
    "no rows": lambda: torch.randn(0, 16),
    "no columns": lambda: torch.randn(3, 0),
    "columns": lambda: torch.randn(64, 9).t(),
    "rows apart": lambda: torch.randn(9, 100)[:, 3:67],
    "one row again and again": lambda: torch.randn(1, 16).expand(4, 16),
    "long": lambda: torch.randn(3, 5000).bfloat16(),
}


@each_dtype
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_the_op_gives_what_the_layers_expression_gives(dtype, static, name):
    """The definition is computed on the host, because CUDA divides by a number as it likes."""
    x = SOURCES[name]()
    scale = torch.tensor([0.02]) if static else None
    columns = -(-x.shape[-1] // 16) * 16
    place = [None if one is None else one.to(DEVICE) for one in (x, scale)]
    for found in (
        op(place[0], dtype, place[1], columns),
        torch.compile(op)(place[0], dtype, place[1], columns),
    ):
        rows, scales = (one.cpu() for one in found)
        by = scale_of(x, dtype) if scale is None else scale
        assert rows.shape == (*x.shape[:-1], columns)
        assert torch.equal(rows[..., : x.shape[-1]].float(), quantize(x, dtype, by).float())
        assert not rows[..., x.shape[-1] :].float().any()
        assert torch.equal(scales, by) if scale is None else scales.shape == (0,)


def test_what_the_op_refuses():
    x = torch.randn(3, 16)
    for args, message in (
        ((x, F8, torch.ones(3), 16), r"scale: expected one float32 on cpu, got torch.float32 \[3\]"),
        ((x, F8, None, 8), "columns: expected at least 16, got 8"),
        ((x, torch.float16, None, 16), "out_element: expected fp8_e4m3 or s8, got f16"),
        ((x.double(), F8, None, 16), "x: expected one of .*, got torch.float64"),
        ((x[0, 0], F8, None, 16), r"x: expected \[..., K\]"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            op(*args)
    with pytest.raises(UnsupportedError, match="quantize has no gradient"):
        op(x.requires_grad_(), F8, None, 16)


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("k", [72, 75, 4096])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_a_layer_on_a_gpu_quantizes_as_on_the_host(dtype, k, input_scale):
    """It is one kernel, and a graph of the layer replays it."""
    layer, x = quantized_layer(dtype, k, input_scale=input_scale), torch.randn(7, k)
    wanted, by = layer._quantized(x)
    result = layer(x).double()
    layer, on_gpu = layer.cuda(), x.cuda()
    with torch.no_grad():
        found, scale = layer._quantized(on_gpu)
        assert torch.equal(found.cpu().float(), wanted.float())
        assert torch.equal(scale.cpu(), by)
        y = layer(on_gpu)
        assert float((y.cpu().double() - result).norm() / result.norm()) < 1e-3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = layer(on_gpu)
        on_gpu.copy_(x.flip(0))
        graph.replay()
        assert torch.equal(again.flip(0), y)
