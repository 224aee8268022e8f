"""Sparse24QuantizedLinear and files: checkpoints with 8 bits a value load into it, others are refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    UnsupportedError,
    compress_checkpoint,
    convert_checkpoint,
)
from sparse24_plans.torch import (
    Sparse24QuantizedLinear,
    Sparse24Recipe,
    load_sparse24,
    to_sparse24,
)
from sparse24_plans.torch.quantized_linear import quantize, scale_of

from .test_quantized_linear import F8, S8, each_dtype, quantized_layer


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
    """Scales are [M, 1] or [1], in the model's dtype. An input_scale makes the input's scale static."""
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
    "scales of integers": (
        {"down.weight_scale": torch.ones(40, 1, dtype=torch.int32)},
        r"down\.weight: expected scales of F32, F16, BF16, got I32",
    ),
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
    """The scales of a matrix stored [in, out] would belong to inputs."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    _, file, tensors = quantized_file
    transposed = {key: one.T.contiguous() if key == "down.weight" else one for key, one in tensors.items()}
    save_file({**transposed, "down.bias": torch.zeros(40), "down.weight_scale": torch.ones(64)}, file)
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
    convert_checkpoint(
        tmp_path / "model", tmp_path / "ours", from_format="compressed_tensors", to_format="sparse24"
    )
    for folder in ("model", "ours"):
        with pytest.raises(UnsupportedError, match=message):
            load_sparse24(_Block(), tmp_path / folder)


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


@pytest.mark.parametrize(
    ("scales", "refusal", "message"),
    [
        (None, UnsupportedError, r"down\.weight: expected .* of 8 bits with weight_scale"),
        (torch.int32, FormatError, r"down\.weight_scale: expected one of F32, F16, BF16, got I32"),
    ],
)
def test_8_bits_without_their_scales_are_refused(dense_file, tmp_path, scales, refusal, message):
    _, path = dense_file
    out, bare = tmp_path / "out.safetensors", tmp_path / "bare.safetensors"
    compress_checkpoint(path, out, element="fp8_e4m3")
    tensors = load_file(out)
    given = tensors.pop("down.weight_scale")
    if scales is not None:
        tensors["down.weight_scale"] = given.to(scales)
    with safe_open(out, "pt") as opened:
        save_file(tensors, bare, opened.metadata())
    block = _Block()
    with pytest.raises(refusal, match=message):
        load_sparse24(block, bare)
    assert type(block.up) is torch.nn.Linear
