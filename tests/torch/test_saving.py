"""A saved model is loaded as it was by every loader: its weights, its names, and what its layers require."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparse24_plans import (
    InvalidProblemError,
    UnsupportedError,
    compress_checkpoint,
    load_weight,
    verify_checkpoint,
)
from sparse24_plans.torch import (
    Sparse24GatedMLP,
    Sparse24Linear,
    Sparse24Recipe,
    from_pretrained,
    fuse_gated,
    load_sparse24,
    save_sparse24,
    to_sparse24,
)

from .llamas import config, llama, saved_llama, swapped
from .saved_models import INVARIANT, changed, logits, same_state

transformers = pytest.importorskip("transformers", minversion="5.8")
AutoModelForCausalLM = transformers.AutoModelForCausalLM

folder = pytest.fixture(saved_llama, scope="module")


def test_saving_leaves_the_model_and_its_configuration_as_they_were(tmp_path):
    """Other models may share the configuration."""
    model = swapped()
    other = transformers.LlamaForCausalLM(model.config)
    model.save_pretrained(tmp_path / "sparse")
    other.save_pretrained(tmp_path / "dense")
    assert not hasattr(model, "hf_quantizer")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "dense").lm_head) is nn.Linear


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_what_layers_require_is_kept(tmp_path, loader):
    model = llama()
    fuse_gated(model, Sparse24Recipe(require={"deterministic": True}))
    to_sparse24(
        model, recipe={"*q_proj": Sparse24Recipe(require=INVARIANT, out_dtype=torch.float32), "*": "prune"}
    )
    model = model.to(torch.bfloat16)
    save_sparse24(model, tmp_path / "saved")
    loaded = loader(tmp_path / "saved", dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, Sparse24Linear):
            own = loaded.get_submodule(name)
            assert (own.preference, own.activation) == (module.preference, module.activation)
            assert own.out_dtype in (module.out_dtype, None)
            assert own.plan().descriptor == module.plan().descriptor
    assert same_state(loaded, model)


def test_what_a_caller_requires_wins(folder):
    model = from_pretrained(folder, require=INVARIANT)
    assert all(
        one.preference.require.batch_invariant for one in model.modules() if isinstance(one, Sparse24Linear)
    )


def test_a_dtype_can_be_asked_for_and_changed(folder):
    """transformers refuses half() and float() of models with quantized weights; these layers take them."""
    want = from_pretrained(folder, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert same_state(model, want)
    assert torch.equal(logits(model), logits(want))
    assert model.half().dtype == torch.float16
    assert model.float().lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_float32_that_are_saved_in_16_bits_verify(tmp_path, dtype):
    model = llama().to(dtype)
    norms = [one for one in model.modules() if type(one).__name__ == "LlamaRMSNorm"]
    for one in norms:
        one.float().weight.data.normal_()
    model.save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "sparse")
    from_pretrained(tmp_path / "sparse", dtype=dtype).save_pretrained(tmp_path / "again")
    found = verify_checkpoint(tmp_path / "again", tmp_path / "dense", device="host")
    assert found.passed, found.problems
    assert found.rounded == len(norms) == 5


def test_a_base_model_takes_the_folder_of_a_whole_one(folder):
    whole = from_pretrained(folder)
    for inner in (
        transformers.AutoModel.from_pretrained(folder),
        from_pretrained(folder, model_class=transformers.AutoModel),
    ):
        assert type(inner.layers[1].mlp) is Sparse24GatedMLP
        assert same_state(inner, whole.model)


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_fused_model_is_filled_in_order_of_its_rows(tmp_path, file):
    """Phi-3 has one matrix for gate and up projection, which has other rows once it is fused."""
    torch.manual_seed(0)
    options = {**config().to_dict(), "model_type": "phi3", "pad_token_id": 0}
    saved, other = (transformers.Phi3ForCausalLM(transformers.Phi3Config(**options)) for _ in range(2))
    for model in (saved, other):
        fuse_gated(model)
        to_sparse24(model)
    save_sparse24(saved.eval(), tmp_path / "saved")
    load_sparse24(other.eval(), tmp_path / "saved" / file)
    assert type(other.model.layers[0].mlp) is Sparse24GatedMLP
    assert same_state(other, saved)
    assert torch.equal(logits(other), logits(saved))


def gpt2() -> Any:
    torch.manual_seed(0)
    options = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2Model(transformers.GPT2Config(**options)).eval()


@pytest.mark.parametrize(("build", "fuse"), [(llama, False), (llama, True), (gpt2, False)])
def test_a_state_dict_in_a_file_is_a_checkpoint(tmp_path, build, fuse):
    """A file without our metadata is known by the names of its tensors. Rows have the layers' order."""
    model, loaded = build(), build()
    for one in (model, loaded) if fuse else (model,):
        fuse_gated(one, "prune") if fuse else None
        to_sparse24(one)
    with torch.no_grad():
        for tensor in loaded.parameters():
            tensor.zero_()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    report = load_sparse24(loaded, tmp_path / "model.safetensors")
    assert same_state(loaded, model)
    assert load_weight(tmp_path / "model.safetensors", f"{report.sparse[0]}.weight").k == 32
    with pytest.raises(InvalidProblemError, match="is compressed already"):
        compress_checkpoint(tmp_path / "model.safetensors", tmp_path / "again.safetensors", device="host")


@pytest.mark.parametrize("recipe", [{}, {"weight_dtype": torch.int8}, {"stored": "s4", "group": 32}], ids=str)
@pytest.mark.parametrize("name", ["first", "last"])
def test_state_dict_may_have_one_name_of_shared_layer(tmp_path, recipe, name):
    def shared() -> nn.Module:
        one = nn.Linear(64, 32, dtype=torch.bfloat16)
        model = nn.Module()
        model.first = model.last = one
        to_sparse24(model, recipe=Sparse24Recipe(**recipe))
        return model

    model, loaded = shared(), shared()
    state = {key: one.clone() for key, one in model.state_dict().items() if key.startswith(name)}
    save_file(state, tmp_path / "model.safetensors")
    load_sparse24(loaded, tmp_path / "model.safetensors")
    assert loaded.last is loaded.first
    assert torch.equal(loaded.first.dense_weight(), model.first.dense_weight())
    assert torch.equal(loaded.last.bias, model.first.bias)


def test_layers_that_transformers_would_compute_keep_their_saved_names(tmp_path):
    """In checkpoints of this model, query, key and value projections are one matrix."""
    torch.manual_seed(0)
    kind = transformers.JinaEmbeddingsV3Config
    model = transformers.AutoModel.from_config(kind(**{**config().to_dict(), "model_type": kind.model_type}))
    model.eval().save_pretrained(tmp_path / "unpruned")
    to_sparse24(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = [
        from_pretrained(tmp_path / "saved"),
        transformers.AutoModel.from_pretrained(tmp_path / "saved"),
        transformers.AutoModel.from_config(model.config).eval(),
    ]
    load_sparse24(loaded[2], tmp_path / "saved")
    for one in loaded:
        assert same_state(one, model)
    compress_checkpoint(tmp_path / "unpruned", tmp_path / "ours", device="host")
    split = from_pretrained(tmp_path / "ours")
    for name, module in model.named_modules():
        if isinstance(module, Sparse24Linear):
            own = split.get_submodule(name)
            weight = own.dense_weight() if isinstance(own, Sparse24Linear) else own.weight
            assert torch.equal(weight, module.dense_weight())
    with pytest.raises(UnsupportedError, match="use from_pretrained of sparse24_plans"):
        transformers.AutoModel.from_pretrained(tmp_path / "ours")


def test_names_may_be_mapped_by_the_caller(folder, tmp_path):
    """The argument is transformers' ``key_mapping``. Parts can't follow a change of a name's end."""
    copy = changed(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    save_file(
        {name.replace("model.", "net."): one for name, one in tensors.items()}, copy / "model.safetensors"
    )
    mapped = AutoModelForCausalLM.from_pretrained(copy, key_mapping={r"^net\.": "model."})
    assert same_state(mapped, from_pretrained(folder))
    with pytest.raises(UnsupportedError, match="expected a name whose end transformers keeps"):
        AutoModelForCausalLM.from_pretrained(folder, key_mapping={r"q_proj\.weight$": "k_proj.weight"})
