"""Any module's 2:4 layers, padded ones too, come back from files; a save that fails leaves nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparse24_plans import (
    BackendUnavailableError,
    InvalidProblemError,
    UnsupportedError,
    convert_checkpoint,
    verify_checkpoint,
)
from sparse24_plans.torch import (
    Sparse24Recipe,
    Sparse24Tensor,
    from_pretrained,
    load_sparse24,
    save_sparse24,
    to_sparse24,
)

from .cases import DEVICE
from .llamas import llama, swapped
from .saved_models import INVARIANT, logits, same_state

transformers = pytest.importorskip("transformers", minversion="5.8")
AutoModelForCausalLM = transformers.AutoModelForCausalLM


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
