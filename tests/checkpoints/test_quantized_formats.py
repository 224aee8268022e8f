"""Checkpoints of other libraries' quantized 2:4 weights become ours, value by value, and load as they are."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    convert_checkpoint,
    from_foreign,
    load_weight,
    to_foreign,
)

from ..formats.test_quantized import Matrix

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
READ = ("pack_quantized", "gptq", "awq")
EVERY = ("marlin_24", *READ)
SECTIONS = {
    "marlin_24": {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
    },
    "pack_quantized": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 64}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64},
}


def parts_of(format: str, seed: int) -> dict[str, np.ndarray]:
    if format != "marlin_24":
        return Matrix(64, 128, group=64, seed=seed).parts(format)[0]
    dense = np.random.default_rng(seed).standard_normal((64, 384)).astype(np.float16)
    weight = Sparse24Weight.prune_compress(dense)
    return to_foreign("marlin_24", Sparse24QuantizedWeight.quantize(weight, stored="s4", group=128))


def a_folder(path: Path, format: str, dtype: str = "float16", **section: object) -> Path:
    path.mkdir()
    tensors = {"model.embed_tokens.weight": np.ones((8, 64), np.float16)}
    for seed, name in enumerate(NAMES):
        tensors |= {f"{name}.{part}": array for part, array in parts_of(format, seed).items()}
    save_file(tensors, path / "model.safetensors")
    config = {
        "model_type": "llama",
        "torch_dtype": dtype,
        "quantization_config": {**SECTIONS[format], **section},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", EVERY)
def test_weights_stay_quantized_in_our_format(tmp_path, format, dtype):
    source = a_folder(tmp_path / "theirs", format, dtype)
    report = convert_checkpoint(source, tmp_path / "ours", from_format=format, to_format="sparse24")
    assert {one.name for one in report if one.action == "converted"} == {f"{name}.weight" for name in NAMES}
    element = "f16" if dtype == "float16" else "bf16"
    for seed, name in enumerate(NAMES):
        found = load_weight(tmp_path / "ours", f"{name}.weight")
        wanted = from_foreign(format, parts_of(format, seed), element=element)
        assert isinstance(found, Sparse24QuantizedWeight)
        assert (found.element, found.quantization) == (element, wanted.quantization)
        for one, other in zip(found.views, wanted.views, strict=True):
            assert np.array_equal(one.bits(), other.bits())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "sparse24"}
    copied = load_file(tmp_path / "ours" / "model.safetensors")
    assert (copied["model.embed_tokens.weight"] == 1).all()
    assert not any(key.endswith(("packed", "qweight", "scales", "qzeros", "g_idx")) for key in copied)


@pytest.mark.parametrize("format", EVERY)
def test_other_formats_get_dequantized_values(tmp_path, format):
    source = a_folder(tmp_path / "theirs", format)
    convert_checkpoint(source, tmp_path / "dense", from_format=format, to_format="dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    for seed, name in enumerate(NAMES):
        wanted = from_foreign(format, parts_of(format, seed)).decompress()
        assert np.array_equal(found[f"{name}.weight"], wanted)
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_ours_stay_quantized_through_a_file_of_ours(tmp_path):
    """Converted twice, by way of what they stand for, weights are those of 16 bits."""
    source = a_folder(tmp_path / "theirs", "gptq")
    convert_checkpoint(source, tmp_path / "ours", from_format="gptq", to_format="sparse24")
    convert_checkpoint(tmp_path / "ours", tmp_path / "dense", from_format="sparse24", to_format="dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")[f"{NAMES[0]}.weight"]
    assert np.array_equal(found, load_weight(tmp_path / "ours", f"{NAMES[0]}.weight").decompress())


def test_bits_and_version_come_from_the_configuration(tmp_path):
    path = a_folder(tmp_path / "theirs", "gptq", checkpoint_format="gptq_v2", bits=8)
    tensors = {"model.embed_tokens.weight": np.ones((8, 64), np.float16)}
    for seed, name in enumerate(NAMES):
        matrix = Matrix(64, 128, 8, 64, shifted=True, seed=seed)
        tensors |= {f"{name}.{part}": array for part, array in matrix.parts("gptq", version=2)[0].items()}
    save_file(tensors, path / "model.safetensors")
    convert_checkpoint(path, tmp_path / "ours", from_format="gptq", to_format="sparse24")
    for seed, name in enumerate(NAMES):
        parts = Matrix(64, 128, 8, 64, shifted=True, seed=seed).parts("gptq", version=2)[0]
        wanted = from_foreign("gptq", parts, bits=8, version=2)
        assert np.array_equal(load_weight(tmp_path / "ours", f"{name}.weight").values, wanted.values)


@pytest.mark.parametrize("format", EVERY)
def test_they_are_read_alone(tmp_path, format):
    dense = np.zeros((64, 128), ml_dtypes.bfloat16).view(np.uint16)
    save_file({"a.weight": dense.view(np.float16)}, tmp_path / "dense.safetensors")
    with pytest.raises(InvalidProblemError, match="to_format: expected one of dense, sparse24"):
        convert_checkpoint(
            tmp_path / "dense.safetensors", tmp_path / "out", from_format="dense", to_format=format
        )
    assert not (tmp_path / "out").exists()


def test_missing_parts_and_those_not_2_4_are_named(tmp_path):
    tensors = {f"{NAMES[0]}.{part}": array for part, array in parts_of("gptq", 0).items()}
    lost = {name: array for name, array in tensors.items() if not name.endswith("scales")}
    save_file(lost, tmp_path / "lost.safetensors")
    with pytest.raises(FormatError, match=r"up_proj\.scales is missing"):
        convert_checkpoint(
            tmp_path / "lost.safetensors", tmp_path / "a", from_format="gptq", to_format="sparse24"
        )
    full = {**tensors, f"{NAMES[0]}.qweight": np.full_like(tensors[f"{NAMES[0]}.qweight"], 0x11111111)}
    save_file(full, tmp_path / "full.safetensors")
    with pytest.raises(FormatError, match=r"up_proj.*at most 2 values other than 0") as caught:
        convert_checkpoint(
            tmp_path / "full.safetensors", tmp_path / "b", from_format="gptq", to_format="sparse24"
        )
    assert (caught.value.row, caught.value.group) == (0, 0)
    assert not list(tmp_path.glob("[ab]"))


@pytest.mark.parametrize("format", EVERY)
def test_pytorch_loads_them_as_they_are(tmp_path, format):
    torch = pytest.importorskip("torch")
    from sparse24_plans.torch import Sparse24WeightOnlyLinear, load_sparse24

    k = 384 if format == "marlin_24" else 128
    nn = torch.nn
    mlp = nn.ModuleDict({name.rpartition(".")[2]: nn.Linear(k, 64, False) for name in NAMES})
    inner = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp})])})
    inner["embed_tokens"] = nn.Embedding(8, 64)
    model = nn.ModuleDict({"model": inner})
    model.to(torch.float16)
    load_sparse24(model, a_folder(tmp_path / "theirs", format), format=format)
    for seed, name in enumerate(NAMES):
        layer = model.get_submodule(name)
        assert type(layer) is Sparse24WeightOnlyLinear
        wanted = from_foreign(format, parts_of(format, seed)).decompress()
        assert np.array_equal(layer.dense_weight().numpy(), wanted)


def test_unknown_formats_are_named_with_all_that_are_read(tmp_path):
    with pytest.raises(
        InvalidProblemError, match=r"expected one of dense, .*, marlin_24, pack_quantized, gptq, awq,"
    ):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", from_format="exl2", to_format="sparse24")
