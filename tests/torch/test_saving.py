"""Saved models: what they keep, what a folder may hold, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from sparse24_plans import (
    BackendUnavailableError,
    FormatError,
    InvalidProblemError,
    UnsupportedError,
    compress_checkpoint,
    convert_checkpoint,
    load_weight,
    verify_checkpoint,
)
from sparse24_plans.torch import (
    Sparse24GatedMLP,
    Sparse24Linear,
    Sparse24Recipe,
    Sparse24Tensor,
    from_pretrained,
    fuse_gated,
    load_sparse24,
    save_sparse24,
    to_sparse24,
)

from .cases import DEVICE
from .saved_models import INVARIANT, changed, logits, same_state

transformers = pytest.importorskip("transformers", minversion="5.8")
AutoModelForCausalLM = transformers.AutoModelForCausalLM


def config(**changes: Any) -> Any:
    options = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**{**options, **changes})


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(**changes)).eval()


def swapped(**changes: Any) -> Any:
    model = llama(**changes)
    fuse_gated(model)
    to_sparse24(model)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A fused and swapped Llama."""
    path = tmp_path_factory.mktemp("saved") / "llama"
    save_sparse24(swapped(), path)
    return path


# The order of imports ------------------------------------------------------------------------------

FIRST_OURS = """
import sparse24_plans.torch
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
"""
FIRST_THEIRS = """
from transformers import AutoModelForCausalLM
import sparse24_plans.torch
"""
IN_FORKS = """
import os, sys, torch, torch._dynamo, torch.distributed.tensor, huggingface_hub, safetensors, tokenizers
for imports in sys.argv[2:]:
    if os.fork() == 0:
        exec(imports)
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        print(type(model.model.layers[0].mlp).__name__, flush=True)
        os._exit(0)
    os.wait()
"""
"""Modules whose order of import doesn't matter are imported once, because that takes seconds."""


def test_importing_the_package_before_or_after_transformers_registers_it(folder):
    command = [sys.executable, "-c", IN_FORKS, str(folder), FIRST_OURS, FIRST_THEIRS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["Sparse24GatedMLP"] * 2, found.stderr


def test_host_that_lacks_what_is_needed_is_logged_and_works(tmp_path, monkeypatch, caplog):
    from sparse24_plans.torch.late_import import after_import

    (tmp_path / "some_host.py").write_text("name = 'host'")
    (tmp_path / "some_integration.py").write_text("raise ImportError('some_host is too old')")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    after_import("some_host", "some_integration")
    import some_host

    assert some_host.name == "host"
    assert "some_host is too old" in caplog.text
    assert sys.meta_path == before


# What is kept --------------------------------------------------------------------------------------


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
    """transformers refuses half() and float() of models with quantised weights; these layers take them."""
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


# Modules that aren't transformers' -----------------------------------------------------------------


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 96), nn.ReLU(), nn.Linear(96, 32, bias=False), nn.LayerNorm(32))


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(10**9, 1), (5000, 3)])
def test_any_module_is_saved_and_loaded(tmp_path, max_shard_bytes, files):
    """In-features that aren't multiples of 8 are padded; a gate halves the first layer's results."""
    recipes = {"0": Sparse24Recipe(activation="swiglu", require=INVARIANT), "*": "prune"}
    model = small()
    model[2] = nn.Linear(48, 32, bias=False)
    save_file(model.state_dict(), tmp_path / "unpruned.safetensors")
    to_sparse24(model, recipe=recipes)
    save_sparse24(model.to(DEVICE), tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == files
    with torch.device("meta"):
        loaded = small()
        loaded[2] = nn.Linear(48, 32, bias=False)
    report = load_sparse24(loaded, tmp_path / "saved")
    assert report.sparse == ("0", "2")
    assert same_state(loaded, model)
    assert (loaded[0].activation, loaded[0].preference) == ("swiglu", model[0].preference)
    x = torch.randn(3, 60)
    assert torch.equal(loaded.to(DEVICE)(x.to(DEVICE)), model(x.to(DEVICE)))
    convert_checkpoint(tmp_path / "saved", tmp_path / "dense", from_format="sparse24", to_format="dense")
    stored = {
        name: one for file in (tmp_path / "dense").glob("*.s*s") for name, one in load_file(file).items()
    }
    assert torch.equal(stored["0.weight"], model[0].dense_weight().cpu())
    found = verify_checkpoint(tmp_path / "saved", tmp_path / "unpruned.safetensors", device="host")
    assert found.passed, found


OTHERS = {
    "a scalar": torch.tensor(3.0),
    "no rows": torch.zeros(0, 4),
    "no columns": torch.zeros(4, 0, dtype=torch.bfloat16),
    "one value": torch.ones(1).expand(4, 3),
    "every other column": torch.arange(32.0).view(4, 8)[:, ::2],
    "a view of negatives": torch._neg_view(torch.arange(3.0)),
    "bools": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_beside_layers_have_any_shape_and_strides(tmp_path, name):
    model, loaded = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
    model.register_buffer("other", OTHERS[name])
    loaded.register_buffer("other", torch.zeros_like(OTHERS[name]))
    to_sparse24(model)
    save_sparse24(model, tmp_path / "saved")
    load_sparse24(loaded, tmp_path / "saved")
    assert torch.equal(loaded.other, model.other)


PADDED = [
    {},
    {"weight_dtype": torch.int8},
    {"weight_dtype": torch.float8_e4m3fn},
    {"stored": "s4", "group": 32},
]


@pytest.mark.parametrize("recipe", PADDED, ids=str)
@pytest.mark.parametrize("k", [58, 60, 63, 64])
def test_files_say_which_columns_are_padding(tmp_path, recipe, k):
    """The model's own K is that of dense tensors, in every direction."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(k, 16), nn.Linear(16, 8)).to(torch.bfloat16)

    model = build()
    save_file(model.state_dict(), tmp_path / "unpruned.safetensors")
    to_sparse24(model, recipe=Sparse24Recipe(**recipe))
    save_sparse24(model, tmp_path / "saved")
    found = verify_checkpoint(tmp_path / "saved", tmp_path / "unpruned.safetensors", device="host")
    assert found.passed, found
    assert [layer.shape for layer in found.layers] == [(16, k), (8, 16)]
    convert_checkpoint(tmp_path / "saved", tmp_path / "dense", from_format="sparse24", to_format="dense")
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    wide = stored["0.weight"].float() * stored.get("0.weight_scale", 1.0)
    assert torch.equal(wide, model[0].dense_weight().float())
    loaded, narrow = build(), nn.Sequential(nn.Linear(57, 16), nn.Linear(16, 8)).to(torch.bfloat16)
    load_sparse24(loaded, tmp_path / "saved")
    assert same_state(loaded, model)
    if k != 64:
        with pytest.raises(
            InvalidProblemError, match=rf"0.weight: expected shape \[16, 57\], got \[16, {k}\]"
        ):
            load_sparse24(narrow, tmp_path / "saved")
        with pytest.raises(UnsupportedError, match=f"0.weight.*got one of K={k}, which is padded to 64"):
            convert_checkpoint(
                tmp_path / "saved", tmp_path / "other", from_format="sparse24", to_format="compressed_tensors"
            )


def odd() -> Any:
    torch.manual_seed(0)
    model = llama(intermediate_size=44, tie_word_embeddings=True)
    model.model.layers[1].mlp.up_proj.weight.data[:, 3] = 0
    return model


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
@pytest.mark.parametrize("subclass", [False, True])
def test_padded_layers_of_a_transformer_make_the_whole_trip(tmp_path, monkeypatch, loader, subclass):
    """The model's down projections have K = 44. A subclass of nn.Linear takes them dense."""
    model = odd()
    model.save_pretrained(tmp_path / "unpruned")
    to_sparse24(model)
    model.save_pretrained(tmp_path / "saved")
    assert verify_checkpoint(tmp_path / "saved", tmp_path / "unpruned", device="host").passed
    if subclass:
        mlp = sys.modules["transformers.models.llama.modeling_llama"].LlamaMLP
        build = mlp.__init__

        def with_subclass(self: Any, *args: Any) -> None:
            build(self, *args)
            self.down_proj = type("Other", (nn.Linear,), {})(44, 32, bias=False)

        monkeypatch.setattr(mlp, "__init__", with_subclass)
    loaded = loader(tmp_path / "saved")
    assert isinstance(loaded.model.layers[0].mlp.down_proj, nn.Linear) is subclass
    torch.testing.assert_close(logits(loaded), logits(model))
    monkeypatch.undo()
    convert_checkpoint(tmp_path / "saved", tmp_path / "dense", from_format="sparse24", to_format="dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(dense), logits(model))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: save_sparse24(small(), path), "model: expected a module with 2:4 layers"),
        (lambda path: save_sparse24(3, path), "model: expected a module with 2:4 layers"),
        (lambda path: save_sparse24(swapped(), path.parent), "a new or an empty folder"),
        (lambda path: save_sparse24(swapped(), 3), "destination: expected"),
        (lambda path: save_sparse24(swapped(), path, max_shard_bytes=0), "max_shard_bytes: expected"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, call, message):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    with pytest.raises(InvalidProblemError, match=message):
        call(tmp_path / "here" / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "file"]


def test_transformers_without_a_quantizer_of_ours_is_told(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "sparse24_plans.integrations.transformers", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"transformers 5\.8"):
        save_sparse24(swapped(), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_semi_structured_tensor_is_not_saved(tmp_path):
    model = small()
    to_sparse24(model, include=["0"])
    model[2].weight = nn.Parameter(
        Sparse24Tensor.from_dense(torch.ops.sparse24.prune(model[2].weight.detach()))
    )
    with pytest.raises(UnsupportedError, match=r"2\.weight: expected a plain tensor, got a Sparse24Tensor"):
        save_sparse24(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    model = swapped()
    monkeypatch.setattr(type(model.config), "save_pretrained", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_sparse24(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    assert not hasattr(model.config, "quantization_config")


# Devices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_is_followed(folder, device_map):
    pytest.importorskip("accelerate")
    assert same_state(AutoModelForCausalLM.from_pretrained(folder, device_map=device_map).cpu(), swapped())


def test_hooks_that_bring_inputs_to_a_layer_move_along(folder, monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[Any] = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module))
            return args, kwargs

    def dispatch(model: Any, *_: Any) -> None:
        hooks.add_hook_to_module(model.model.layers[0].self_attn.q_proj, Hook())

    monkeypatch.setattr(transformers.modeling_utils, "accelerate_dispatch", dispatch)
    devices = {"model": "cpu", "lm_head": torch.device("cpu")}
    logits(AutoModelForCausalLM.from_pretrained(folder, device_map=devices))
    assert seen == [Sparse24Linear]


def test_weights_on_a_disk_are_refused(folder, tmp_path):
    pytest.importorskip("accelerate")
    with pytest.raises(UnsupportedError, match="device_map: expected devices that hold 2:4 weights"):
        AutoModelForCausalLM.from_pretrained(
            folder, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path
        )


# Folders that are broken or hostile ----------------------------------------------------------------


BLOCK = "model.layers.0.mlp"
ENTRIES = {
    "another field": ({"bogus": 1}, "SavedForm: expected fields"),
    "no layers": ({"layers": 5}, "SavedForm: layers"),
    "an unknown activation": (
        {"layers": {f"{BLOCK}.down_proj": {"activation": "tan"}}},
        "activation: expected",
    ),
    "an unknown backend": ({"layers": {"x": {"preference": {"prefer_backend": "x"}}}}, "prefer_backend"),
    "another module": ({"gated_blocks": {"model": {"activation": "swiglu"}}}, "gated_blocks: expected"),
    "no gate": ({"gated_blocks": {BLOCK: {"activation": "relu"}}}, "gated_blocks: expected a gated"),
}


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_entry_is_refused_by_both_loaders(folder, tmp_path, loader, name):
    entry, message = ENTRIES[name]
    copy = changed(folder, tmp_path, quantization_config={"quant_method": "sparse24", **entry})
    with pytest.raises(InvalidProblemError, match=message):
        loader(copy)


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_bad_metadata_is_found_by_both_loaders(folder, tmp_path, loader):
    copy = changed(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight.meta24"
    tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(FormatError, match="row 0"):
        loader(copy)


def test_a_dense_checkpoint_is_not_pruned_by_loading_it(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="sparse24 does require the model to be pre-quantized"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "dense", quantization_config={"quant_method": "sparse24"}
        )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = (
    *("architectures", "dtype", "hidden_act", "hidden_size", "id2label", "intermediate_size", "model_type"),
    *("num_attention_heads", "num_hidden_layers", "pad_token_id", "quantization_config", "rope_parameters"),
    *("self", "transformers_version", "vocab_size", "attn_implementation", "bos_token_id", "is_decoder"),
)


@settings(max_examples=50)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_a_hostile_configuration_is_refused_by_a_typed_error(folder, tmp_path_factory, key, value):
    if key == "num_hidden_layers" and isinstance(value, int) and value > 100:
        value = -value  # building a million layers is slow, not wrong
    copy = changed(folder, tmp_path_factory.mktemp("hostile"), **{key: value})
    try:
        model = from_pretrained(copy)
    except (InvalidProblemError, FormatError):
        return
    assert isinstance(model, transformers.PreTrainedModel)
