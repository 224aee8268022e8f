"""A small model of vLLM's own layers, and checkpoints for it, with the plugin loaded as vLLM loads it."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from sparse24_plans import compress_checkpoint, convert_checkpoint

next(iter(entry_points(group="vllm.general_plugins", name="sparse24"))).load()()
from sparse24_plans.integrations.vllm import Sparse24VllmConfig  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 64, 4, 2, 32, 384
BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
SIZES = {
    "qkv_proj": {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD},
    "gate_up_proj": {"gate_proj": INNER, "up_proj": INNER},
}
STACKED = {
    f".{part}.": (f".{merged}.", part[0] if merged == "qkv_proj" else at)
    for merged, parts in SIZES.items()
    for at, part in enumerate(parts)
}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    },
}


def tensors_of_a_model(dtype=BF16) -> dict[str, torch.Tensor]:
    """A dense model by the names of a checkpoint: merged layers apart."""
    shapes = {part: (rows, HIDDEN) for parts in SIZES.values() for part, rows in parts.items()}
    shapes |= {"o_proj": (HIDDEN, HEADS * HEAD), "down_proj": (HIDDEN, INNER)}
    found = {f"block.{name}.weight": torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return found | {
        f"block.{name}.bias": torch.randn(shape[0], dtype=dtype) for name, shape in shapes.items()
    }


def saved(
    folder: Path, tensors: dict[str, torch.Tensor], form: str, element: str | None = None, **by
) -> Path:
    """A compressed checkpoint of the tensors in a form, by the package's own command."""
    dense, ours, theirs = (folder / name for name in ("dense", "sparse24", "theirs"))
    dense.mkdir()
    save_file(tensors, dense / "model.safetensors")
    (dense / "config.json").write_text("{}")
    compress_checkpoint(dense, ours, element=element, **by)
    if form == "sparse24":
        return ours
    if form == "zeros":
        return with_zeros(ours, theirs)
    convert_checkpoint(ours, theirs, from_format="sparse24", to_format=form)
    return theirs


def with_zeros(ours: Path, folder: Path) -> Path:
    """Our checkpoint as compressed-tensors writes it with stored zeros: dense, or ``float-quantized``."""
    from safetensors.torch import load_file

    tensors = load_file(ours / "model.safetensors")
    for name in [name.removesuffix(".values24") for name in tensors if name.endswith(".values24")]:
        parts = tensors.pop(f"{name}.values24"), tensors.pop(f"{name}.meta24").view(torch.int16)
        tensors[name] = torch.ops.sparse24.decompress(*parts)
    sparsity = {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}
    section = {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return folder


def dense_of(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices of a checkpoint as the package itself decompresses them, scaled, in float64."""
    from sparse24_plans.checkpoints.folder import ModelReader
    from sparse24_plans.torch.checkpoint_source import Source

    with ModelReader(folder) as reader:
        source = Source(reader, None)
        found = {name: source.tensor(name).double() for name in source.others}
        for name in source.weights:  # not by Source.tensor, which rounds what it has scaled
            dense = torch.ops.sparse24.decompress(*source.canonical(name)).double()
            found[name] = dense * found.get(f"{name}_scale", torch.ones(()))
    return found


class Block(nn.Module):
    """The linear layers of a transformer's block, as vLLM's models make them."""

    def __init__(self, config, dtype=BF16) -> None:
        super().__init__()
        more = {"bias": True, "params_dtype": dtype, "quant_config": config, "return_bias": False}
        self.qkv_proj = vllm_linear.QKVParallelLinear(
            HIDDEN, HEAD, HEADS, KV_HEADS, prefix="block.qkv_proj", **more
        )
        self.gate_up_proj = vllm_linear.MergedColumnParallelLinear(
            HIDDEN, [INNER, INNER], prefix="block.gate_up_proj", **more
        )
        self.o_proj = vllm_linear.RowParallelLinear(HEADS * HEAD, HIDDEN, prefix="block.o_proj", **more)
        self.down_proj = vllm_linear.RowParallelLinear(INNER, HIDDEN, prefix="block.down_proj", **more)


class Model(nn.Module):
    def __init__(self, config, dtype=BF16) -> None:
        super().__init__()
        self.quant_config = config
        self.block = Block(config, dtype)


def config_for(folder: Path) -> Sparse24VllmConfig:
    """The configuration as vLLM makes it of a checkpoint's ``config.json``."""
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "sparse24" or Sparse24VllmConfig.override_quantization_method(entry, None)
    config = Sparse24VllmConfig.from_config(entry)
    config.maybe_update_config(str(folder))
    config.packed_modules_mapping = {merged: list(parts) for merged, parts in SIZES.items()}
    return config


def load(folder: Path, dtype=BF16, process: bool = True) -> Model:
    """The model by vLLM's own loader, processed as vLLM does after loading."""
    from safetensors.torch import load_file

    model = Model(config_for(folder), dtype)
    mapper = WeightsMapper(orig_to_new_stacked=STACKED)
    weights = [one for file in sorted(folder.glob("*.safetensors")) for one in load_file(file).items()]
    loaded = AutoWeightsLoader(model).load_weights(iter(weights), mapper=mapper)
    assert loaded == set(dict(model.named_parameters()))
    for layer in model.block.children() if process else ():
        layer.quant_method.process_weights_after_loading(layer)
    return model


def own_part(dense, name: str, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's weight and bias of a layer, cut as tensor parallelism is defined."""
    if name in SIZES:
        parts = [
            torch.cat([dense[f"block.{part}.{kind}"].chunk(size)[rank] for part in SIZES[name]])
            for kind in ("weight", "bias")
        ]
        return parts[0], parts[1]
    return dense[f"block.{name}.weight"].chunk(size, 1)[rank], dense[f"block.{name}.bias"]
