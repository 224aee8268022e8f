"""Swapped models of many architectures, saved and loaded again by every loader: the same bits."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    UnsupportedError,
    compress_checkpoint,
    convert_checkpoint,
    verify_checkpoint,
)
from sparse24_plans.checkpoints.compress import CalibratedWeights
from sparse24_plans.checkpoints.folder import ELEMENTS, ModelReader
from sparse24_plans.torch import (
    Sparse24GatedMLP,
    Sparse24Linear,
    from_pretrained,
    fuse_gated,
    load_sparse24,
    to_sparse24,
)
from sparse24_plans.torch.elements import element_of

from .cases import DEVICE
from .saved_models import changed, metadata_of

transformers = pytest.importorskip("transformers", minversion="5.8")
from .architectures import (  # noqa: E402
    CASES,
    EXPERTS,
    NARROW,
    PAGE,
    SMALL,
    TIED,
    UNTIED,
    Case,
    bits,
    dense_model,
    dense_weights,
    result,
    sparse_of,
    table,
)

FP8 = {"weight_dtype": torch.float8_e4m3fn}
QUANTIZED = {
    "Llama, fp8": Case("LlamaConfig", {**NARROW, **TIED}, 12, 2, dtype=torch.bfloat16, **FP8),
    "Phi-3, int8": Case("Phi3Config", UNTIED, 8, 2, weight_dtype=torch.int8),
    "GPT-2, fp8": Case("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, 8, 0, **FP8),
    "ViT, int8": Case(**CASES["ViT"]._asdict() | {"weight_dtype": torch.int8}),
    "Mixtral, s4": CASES["Mixtral"]._replace(stored="s4"),
    "Qwen3-MoE, s8": CASES["Qwen3-MoE"]._replace(stored="s8", group=0),
    "DeepSeek-V3, fp8": CASES["DeepSeek-V3"]._replace(stored="fp8_e4m3", group=128),
    "Granite-MoE, s4": CASES["Granite-MoE"]._replace(stored="s4"),
}
"""Models whose 2:4 weights have 4 or 8 bits. The first one's weights have a K that is padded to 16."""
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TRANSPOSED = {
    "Qwen3-VL-MoE": Case(
        "Qwen3VLMoeConfig",
        {
            "text_config": {**SMALL, **EXPERTS, "head_dim": 16, "rope_parameters": ROPE},
            "vision_config": VISION,
        },
        layers=20,
        fused=0,
        auto=transformers.AutoModelForImageTextToText,
        dtype=torch.bfloat16,
    )
}
"""Models whose dense checkpoints hold stacks as [E, in, out]; 2:4 ones are saved as the model holds them."""
READ = {
    "Wav2Vec2": Case(
        "Wav2Vec2Config",
        {
            "conv_dim": (16,),
            "conv_stride": (4,),
            "conv_kernel": (8,),
            "num_feat_extract_layers": 1,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
        layers=13,
        fused=0,
        auto=transformers.AutoModelForCTC,
        inputs="input_values",
    )
}
"""Models whose initialisation reads the sizes of their layers."""
OTHERWISE = {
    "DINOv2": Case(  # transformers parts a matrix of the checkpoint
        "Dinov2Config",
        {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 3, "use_swiglu_ffn": True},
        layers=10,
        fused=0,
        auto=transformers.AutoModelForImageClassification,
        inputs="pixel_values",
    ),
    "Zamba2": Case(  # layers share a block's weights, which transformers ties after loading
        "Zamba2Config",
        {
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_hidden_layers": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
            "hybrid_layer_ids": [1, 3],
            "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        },
        layers=10,
        fused=0,
    ),
}
"""Models that transformers builds otherwise than their checkpoints are."""


class Saved(NamedTuple):
    """A folder with the dense model, and one with its 2:4 form, which is in memory too."""

    case: Case
    model: nn.Module
    unpruned: Path
    folder: Path
    result: torch.Tensor


def assert_same(model: Any, saved: Saved) -> None:
    """The model has the modules, the state and the results of the one that was saved."""
    # By their names, since a parametrised module has a class of its own.
    assert [(n, str(type(m))) for n, m in model.named_modules()] == [
        (n, str(type(m))) for n, m in saved.model.named_modules()
    ]
    state, wanted = model.state_dict(), saved.model.state_dict()
    assert state.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(bits(state[key]), bits(tensor)), key
    assert torch.equal(result(model, saved.case), saved.result)
    assert not model.training


def contents(folder: Path) -> dict[str, Any]:
    """The configuration, the files' common metadata, and the tensors' bytes."""
    found: dict[str, Any] = {"": json.loads((folder / "config.json").read_text())}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert found.setdefault("metadata", file.metadata()) == file.metadata()
            found |= {name: bits(file.get_tensor(name)).tolist() for name in file.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory) -> Saved:
    """A fused and swapped model, saved in shards by its own ``save_pretrained``."""
    case = {**CASES, **QUANTIZED, **TRANSPOSED, **READ}[request.param]
    folder = tmp_path_factory.mktemp("models")
    model = dense_model(case)
    model.save_pretrained(folder / "unpruned")
    fused = fuse_gated(model, case.recipe)
    assert sum(block.fused for block in fused.values()) == case.fused
    to_sparse24(model, recipe=case.recipe)
    assert len(sparse_of(model)) == case.layers
    model.to(DEVICE).save_pretrained(folder / "saved", max_shard_size="12KB")
    assert len(list((folder / "saved").glob("*.safetensors"))) > 1
    return Saved(case, model, folder / "unpruned", folder / "saved", result(model, case))


EVERY = pytest.mark.parametrize("saved", [*CASES, *QUANTIZED], indirect=True)
LOADED = pytest.mark.parametrize("saved", [*CASES, *QUANTIZED, *TRANSPOSED, *READ], indirect=True)


def by_transformers(saved: Saved, **options: Any) -> Any:
    model, report = saved.case.auto.from_pretrained(
        saved.folder, dtype="auto", output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model.to(DEVICE)


def by_load_sparse24(saved: Saved) -> Any:
    model = dense_model(saved.case)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    report = load_sparse24(model, saved.folder)
    assert len(report.sparse) == saved.case.layers
    assert report.unexpected == ()
    return model.to(DEVICE)


def into_24_layers(saved: Saved) -> Any:
    model = dense_model(saved.case)
    to_sparse24(model, recipe=saved.case.recipe)
    load_sparse24(model, saved.folder)
    return model.to(DEVICE)


LOADERS = {
    "load_sparse24 into 2:4 layers": into_24_layers,
    "transformers": by_transformers,
    "from_pretrained": lambda saved: from_pretrained(saved.folder, device=DEVICE),
    "load_sparse24": by_load_sparse24,
}


@LOADED
@pytest.mark.parametrize("loader", LOADERS)
def test_a_saved_model_is_loaded_bit_for_bit(saved, loader):
    assert_same(LOADERS[loader](saved), saved)


@LOADED
def test_a_loaded_model_is_saved_again_as_it_was(saved, tmp_path):
    by_transformers(saved).save_pretrained(tmp_path / "again", max_shard_size="12KB")
    assert contents(tmp_path / "again") == contents(saved.folder)


@EVERY
def test_the_command_line_knows_a_saved_model(saved, tmp_path):
    """The folder is that of the dense model, compressed: verified against it, and converted back."""
    found = verify_checkpoint(saved.folder, saved.unpruned, device="host")
    assert len(found.layers) >= saved.case.layers
    assert found.passed, found
    convert_checkpoint(saved.folder, tmp_path / "dense", from_format="sparse24", to_format="dense")
    if saved.case.weight_dtype is not None:
        check_stored_zeros(tmp_path / "dense", saved)
        return
    dense = type(saved.model).from_pretrained(tmp_path / "dense", dtype="auto")
    assert sparse_of(dense) == []
    assert not hasattr(dense.config, "quantization_config")
    state = dense.state_dict()
    for name, weight in dense_weights(saved.model).items():
        assert torch.equal(state[name], weight.cpu()), name
    torch.testing.assert_close(result(dense, saved.case), saved.result.cpu(), rtol=2e-2, atol=2e-2)


def check_stored_zeros(folder: Path, saved: Saved) -> None:
    """Quantized matrices whose zeros are stored become the same layers, unless they are [in, out].

    config.json has compressed-tensors' entry for them, so that no loader takes them without their scales.
    """
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "compressed-tensors"
    assert entry["format"] == ("int" if saved.case.weight_dtype == torch.int8 else "float") + "-quantized"
    named = [f"{one}.weight_scale" for group in entry["config_groups"].values() for one in group["targets"]]
    assert sorted(named) == sorted(name for name in contents(folder) if name.endswith("weight_scale"))
    if saved.case.config == "GPT2Config":
        with pytest.raises(InvalidProblemError, match="expected a checkpoint with 2:4 weights"):
            from_pretrained(folder)
        return
    loaded = from_pretrained(folder)
    for name in sparse_of(saved.model):
        if "gate_up_proj" not in name:
            own, wanted = (model.get_submodule(name).state_dict() for model in (loaded, saved.model))
            assert own.keys() == wanted.keys()
            assert all(torch.equal(bits(own[key]), bits(wanted[key])) for key in own)
    torch.testing.assert_close(result(loaded, saved.case), saved.result.cpu(), rtol=5e-2, atol=5e-2)


def notes_of(folder: Path) -> dict[str, Any]:
    """The notes about compressed weights in the files of a folder."""
    metadata = [metadata_of(path) for path in folder.glob("*.safetensors")]
    return {key: json.loads(one) for file in metadata for key, one in file.items() if key[:9] == "sparse24."}


def calibrated_weights(folder: Path, include: tuple[str, ...], stored: str | None) -> CalibratedWeights:
    """The folder's matrices without their first two of every four columns, as some method left them."""

    def read(name: str) -> Any:
        with ModelReader(folder) as reader:
            info = reader.tensors[name]
            dense = reader.read(name).view(ELEMENTS[info.dtype].dtype).reshape(-1, info.shape[-1])
        pruned = np.where(np.arange(dense.shape[1]) % 4 > 1, dense, np.zeros((), dense.dtype))
        if stored is None:
            return pruned
        return Sparse24QuantizedWeight.quantize(Sparse24Weight.compress(pruned), stored=stored, group=32)

    reports = compress_checkpoint(folder, folder.parent / "none", include=include, dry_run=True)
    names = [one.name for one in reports if one.action == "compressed"]
    return CalibratedWeights("sparsegpt", {name: partial(read, name) for name in names})


@pytest.mark.parametrize("loader", ["transformers", "from_pretrained"])
@pytest.mark.parametrize(
    ("calibrated", "stored"), [(True, None), (True, "s4"), (False, "s4")], ids=["16 bits", "s4", "by a rule"]
)
@pytest.mark.parametrize(
    ("name", "fused"),
    [("Llama, tied", False), ("Llama, tied", True), ("Mixtral", False), ("Granite-MoE", False)],
)
def test_a_loaded_model_says_again_how_its_weights_were_made(
    tmp_path, name, fused, calibrated, stored, loader
):
    case, dense, ours = CASES[name], tmp_path / "dense", tmp_path / "ours"
    dense_model(case).save_pretrained(dense)
    how: dict[str, Any] = {"include": case.include, "device": "host"}
    if stored is not None:
        how |= {"weights": stored, "group": 32}
    if calibrated:
        how["calibrated"] = calibrated_weights(dense, case.include, stored)
    elif stored is not None:
        how["scale_rule"] = "largest"
    compress_checkpoint(dense, ours, **how)
    notes = notes_of(ours)
    kept = {key: {"calibrated", "scale_rule"} & note.keys() for key, note in notes.items()}
    assert all(kept.values())
    if fused:
        blocks = {f"model.layers.{i}.mlp": {"activation": "swiglu"} for i in range(case.fused)}
        entry = {"quant_method": "sparse24", "gated_blocks": blocks}
        ours = changed(ours, tmp_path, quantization_config=entry)
    load = from_pretrained if loader == "from_pretrained" else case.auto.from_pretrained
    model = load(ours)
    assert sum(type(one) is Sparse24GatedMLP for one in model.modules()) == fused * case.fused
    model.save_pretrained(tmp_path / "again")
    assert notes_of(tmp_path / "again") == notes
    found = verify_checkpoint(tmp_path / "again", dense, device="host")
    assert found.passed, found
    assert all(layer.calibrated is calibrated for layer in found.layers)


def test_values_of_state_dict_are_not_said_to_be_calibrated(tmp_path):
    layer = Sparse24Linear(32, 16)
    layer.origin = {"calibrated": "wanda"}
    layer.load_state_dict({"bias": torch.ones(16)}, strict=False)
    assert layer.origin
    layer.load_state_dict(Sparse24Linear(32, 16).state_dict())
    assert not layer.origin


@EVERY
def test_compress_checkpoint_makes_a_folder_that_every_loader_takes(saved, tmp_path):
    """The folder has no word on fused blocks, nor on experts, which become what ``to_sparse24`` makes."""
    dtype = saved.case.weight_dtype
    element = None if dtype is None else element_of(dtype, "weight_dtype")
    how = {"element": element, "weights": saved.case.stored, "include": saved.case.include}
    if saved.case.stored is not None:
        how["group"] = saved.case.group
    compress_checkpoint(saved.unpruned, tmp_path / "ours", device="host", **how)
    other = saved._replace(folder=tmp_path / "ours")
    ours, theirs = from_pretrained(other.folder), by_transformers(other).cpu()
    assert type(ours) is type(saved.model)
    assert sparse_of(ours) == sparse_of(theirs)
    assert len(sparse_of(ours)) == saved.case.layers + saved.case.fused * (saved.case.config != "Phi3Config")
    loaded = dense_model(saved.case)
    assert load_sparse24(loaded, other.folder).unexpected == ()
    state, wanted = ours.state_dict(), result(ours, saved.case)
    for model in (theirs, loaded):
        found = model.state_dict()
        assert state.keys() == found.keys()
        for key, tensor in state.items():
            assert torch.equal(bits(found[key]), bits(tensor)), key
        assert torch.equal(result(model, saved.case), wanted)
    if dtype is not None:
        return
    convert_checkpoint(other.folder, tmp_path / "dense", from_format="sparse24", to_format="dense")
    dense = type(ours).from_pretrained(tmp_path / "dense", dtype="auto")
    sparse = set(sparse_of(ours))
    for key, tensor in dense.state_dict().items():
        if key.removesuffix(".weight") not in sparse:
            assert torch.equal(bits(state[key]), bits(tensor)), key


@pytest.mark.parametrize("name", OTHERWISE)
def test_models_that_transformers_builds_otherwise_are_loaded_alike(name, tmp_path):
    case = OTHERWISE[name]
    dense_model(case).save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours", device="host")
    ours = from_pretrained(tmp_path / "ours")
    theirs = case.auto.from_pretrained(tmp_path / "ours", dtype="auto")
    assert len(sparse_of(ours)) == case.layers
    assert sparse_of(ours) == sparse_of(theirs)
    state, wanted = theirs.state_dict(), ours.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(bits(state[key]), bits(tensor)) for key, tensor in wanted.items())
    assert torch.equal(result(theirs, case), result(ours, case))
    assert not hasattr(theirs.config, "_is_quantized")  # FalconMamba computes otherwise with it


@pytest.mark.parametrize("loader", [transformers.AutoModelForCausalLM.from_pretrained, from_pretrained])
@pytest.mark.parametrize("twice", [False, True])
def test_a_weight_without_a_note_or_stored_twice_is_refused(loader, twice, tmp_path):
    dense_model(CASES["Llama"]).save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours", device="host")
    path, name = tmp_path / "ours" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors, metadata = load_file(path), metadata_of(path)
    if twice:
        tensors[name] = load_file(tmp_path / "dense" / "model.safetensors")[name]
    else:
        del metadata[f"sparse24.{name}"]
    save_file(tensors, path, metadata)
    with pytest.raises(FormatError, match=name):
        loader(tmp_path / "ours")


@pytest.mark.parametrize("name", ["Mixtral", "Granite-MoE"])
def test_experts_without_a_2_4_module_are_decompressed(name, tmp_path):
    case = CASES[name]
    case = case._replace(options={**case.options, "hidden_act": "relu"})
    model = dense_model(case)
    model.save_pretrained(tmp_path / "dense")
    include = case.include or ["*_proj.weight", "*.w?.weight"]
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours", include=include, device="host")
    loaded = [from_pretrained(tmp_path / "ours"), case.auto.from_pretrained(tmp_path / "ours", dtype="auto")]
    assert len(sparse_of(loaded[0])) == case.layers - 4
    stacks = {name: one for name, one in model.named_parameters() if one.dim() == 3}
    assert len(stacks) == 4
    for one in loaded:
        state = one.state_dict()
        for key, stack in stacks.items():
            wanted = torch.ops.sparse24.prune(stack.detach().flatten(0, 1)).view(stack.shape)
            assert torch.equal(state[key], wanted)


def test_model_whose_layers_are_all_dense_is_saved_dense(tmp_path, monkeypatch):
    """The model's layers are of an unknown subclass of nn.Linear, so their weights are decompressed."""
    home = transformers.models.falcon.modeling_falcon
    monkeypatch.setattr(home, "FalconLinear", type("UnknownLinear", (nn.Linear,), {}))
    config = transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = transformers.FalconForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours", device="host")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert sparse_of(loaded) == []
    loaded.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert loaded.config.quantization_config.quant_method == "sparse24"  # saving changes nothing
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, loaded(tokens).logits)


def test_stacked_8_bit_experts_are_loaded_dequantized(tmp_path, caplog):
    """transformers' loader would stack the stored values without their scales, so it is refused."""
    case = CASES["Mixtral"]
    dense_model(case).save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours", element="fp8_e4m3", device="host")
    loaded = from_pretrained(tmp_path / "ours")
    assert "quantized, but loaded dense: model.layers.*.mlp.experts" in caplog.text
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    values, meta = (stored[f"{name}.{part}"] for part in ("values24", "meta24"))
    dense = torch.ops.sparse24.decompress(values, meta).float() * stored[f"{name}_scale"]
    assert torch.equal(loaded.model.layers[1].mlp.experts.down_proj[3], dense.to(case.dtype))
    with pytest.raises(
        UnsupportedError, match=r"experts\..*: expected a linear layer for a weight of fp8_e4m3"
    ):
        case.auto.from_pretrained(tmp_path / "ours", dtype="auto")


def test_the_document_has_the_table_of_these_models():
    page = PAGE.read_text()
    assert table(page) == page, "run python -m tests.torch.architectures"
