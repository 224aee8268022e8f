"""Models whose 2:4 weights are stored in 4 or 8 bits are saved and loaded bit for bit, by every loader."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

from sparse24_plans import InvalidProblemError, compress_checkpoint, load_weight  # noqa: E402
from sparse24_plans.torch import (  # noqa: E402
    Sparse24Linear,
    Sparse24Recipe,
    Sparse24WeightOnlyLinear,
    from_pretrained,
    fuse_gated,
    load_sparse24,
    save_sparse24,
    to_sparse24,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 48,
}
IDS = torch.arange(14).reshape(2, 7) * 3
RECIPES = pytest.mark.parametrize(
    "recipe",
    [
        Sparse24Recipe(stored="s4", group=64),
        Sparse24Recipe(stored="s8", group=0, require={"batch_invariant": True}),
        Sparse24Recipe(stored="fp8_e4m3", group=128),
    ],
    ids=lambda one: one.stored,
)


def llama(tied: bool = False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b""


def assert_alike(model, other) -> None:
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(bits(tensor) == bits(theirs[key]) for key, tensor in mine.items())
    kinds = [type(one) for one in other.modules() if isinstance(one, Sparse24Linear)]
    assert kinds == [type(one) for one in model.modules() if isinstance(one, Sparse24Linear)]
    assert Sparse24WeightOnlyLinear in kinds
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, other(IDS).logits)


LOADERS = {
    "transformers": transformers.AutoModelForCausalLM.from_pretrained,
    "from_pretrained": from_pretrained,
    "load_sparse24": lambda folder: load_into(llama(), folder),
}


def load_into(model, folder: Path):
    load_sparse24(model, folder)
    return model


@RECIPES
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_model_comes_back_bit_for_bit(tmp_path, recipe, fused, loader):
    model = llama()
    if fused:
        assert all(block.fused for block in fuse_gated(model, recipe).values())
    to_sparse24(model, recipe=recipe)
    save_sparse24(model, tmp_path / "saved")
    found = LOADERS[loader](tmp_path / "saved")
    assert_alike(model, found)
    layer = found.model.layers[0].self_attn.q_proj
    assert (layer.weight_element, layer.group) == (recipe.stored, recipe.group)
    assert layer.plan().guarantee.batch_invariant >= bool(recipe.require)
    save_sparse24(found, tmp_path / "again")
    assert_alike(model, from_pretrained(tmp_path / "again"))


def test_a_plain_module_comes_back_bit_for_bit(tmp_path):
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(60, 96), nn.ReLU(), nn.Linear(96, 8)).to(torch.bfloat16)

    model, other = make(), make()
    to_sparse24(model, recipe=Sparse24Recipe(stored="s4", group=32))
    save_sparse24(model, tmp_path / "saved")
    assert load_sparse24(other, tmp_path / "saved").sparse == ("0", "2")
    x = torch.randn(5, 60, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    again = make()
    to_sparse24(again, recipe=Sparse24Recipe(stored="s4", group=32))
    load_sparse24(again, tmp_path / "saved")  # into layers that store their values already
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("loader", LOADERS)
def test_what_compress_stores_is_loaded_as_it_is(tmp_path, loader):
    llama().save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "new", weights="s4", group=32)
    model = LOADERS[loader](tmp_path / "new")
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        layer = model.get_submodule(f"model.layers.0.{name}")
        assert type(layer) is Sparse24WeightOnlyLinear
        stored = load_weight(tmp_path / "new", f"model.layers.0.{name}.weight")
        assert bits(layer.scales) == stored.views[2].bits().tobytes()
        dense = layer.dense_weight()
        assert bits(dense) == stored.dequantize().decompress().tobytes()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_stored_values_are_refused_in_a_model_of_another_dtype(tmp_path, loader, kind):
    """Weights of float32 are quantized as bfloat16, in which x has to be, too."""
    dense = (llama() if kind == "llama" else mixtral()).float()
    dense.save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "new", weights="s4", group=32)
    load = partial(load_into, dense) if loader == "load_sparse24" else LOADERS[loader]
    words = r"weight: dtype: expected a model of torch\.bfloat16.*, got torch\.float32; pass dtype=torch\.bf"
    with pytest.raises(InvalidProblemError, match=words):
        load(tmp_path / "new")
    assert not any(isinstance(one, Sparse24Linear) for one in dense.modules())
    if loader == "load_sparse24":
        load = partial(load_into, dense.bfloat16())
    else:
        load = partial(load, dtype=torch.bfloat16)
    with torch.no_grad():
        assert load(tmp_path / "new")(IDS).logits.isfinite().all()


@pytest.mark.parametrize("how", ["from_pretrained", "load_sparse24", "trainable"])
@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_dequantized_weights_have_the_dtype_of_their_model(tmp_path, how, kind):
    dense = (llama() if kind == "llama" else mixtral()).float()
    dense.save_pretrained(tmp_path / "dense")
    compress_checkpoint(tmp_path / "dense", tmp_path / "new", weights="s4", group=32)
    if how == "from_pretrained":
        dense = from_pretrained(tmp_path / "new", dequantize=True)
    else:
        load_sparse24(dense, tmp_path / "new", **{"dequantize" if how == "load_sparse24" else how: True})
    assert {one.weight.dtype for one in dense.modules() if isinstance(one, Sparse24Linear)} == {torch.float32}
    with torch.no_grad():
        assert dense(IDS).logits.isfinite().all()


@pytest.mark.parametrize("how", ["dequantize", "trainable", "16-bit layers"])
def test_weights_become_16_bits_on_request_and_are_named(tmp_path, how, caplog):
    model = llama()
    to_sparse24(model, recipe=Sparse24Recipe(stored="s4", group=64))
    save_sparse24(model, tmp_path / "saved")
    other, options = llama(), {}
    if how == "16-bit layers":
        to_sparse24(other)
    else:
        options = {how: True}
    with caplog.at_level(logging.WARNING, "sparse24_plans.load"):
        load_sparse24(other, tmp_path / "saved", **options)
    assert "quantized, but loaded as 2:4 weights of 16 bits: model.layers.0" in caplog.text
    for (_, one), (_, wide) in zip(
        *(
            (pair for pair in m.named_modules() if isinstance(pair[1], Sparse24Linear))
            for m in (model, other)
        ),
        strict=True,
    ):
        assert type(wide) is Sparse24Linear
        assert torch.equal(one.dense_weight(), wide.dense_weight())


def test_other_quantization_than_the_layers_is_refused_before_anything_changes(tmp_path):
    model = llama()
    to_sparse24(model, recipe=Sparse24Recipe(stored="s4", group=64))
    save_sparse24(model, tmp_path / "saved")
    for recipe, words in (
        (Sparse24Recipe(stored="s8", group=64), "expected s8 with bf16 scales of groups of 64"),
        (Sparse24Recipe(stored="s4", group=32), "expected s4 with bf16 scales of groups of 32"),
    ):
        other = llama()
        to_sparse24(other, recipe=recipe)
        before = {key: bits(tensor) for key, tensor in other.state_dict().items()}
        with pytest.raises(InvalidProblemError, match=words):
            load_sparse24(other, tmp_path / "saved")
        assert before == {key: bits(tensor) for key, tensor in other.state_dict().items()}
    plain = llama()
    to_sparse24(plain)
    save_sparse24(plain, tmp_path / "plain")
    with pytest.raises(InvalidProblemError, match="got values that are not quantized"):
        load_sparse24(model, tmp_path / "plain")


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["s4", "s8", "fp8_e4m3"])
def test_a_gpu_multiplies_the_values_that_a_folder_stores(tmp_path, stored):
    """A captured graph gives the same bits, and the GPU's model can be saved again."""
    model = llama()
    to_sparse24(model, recipe=Sparse24Recipe(stored=stored, group=32))
    save_sparse24(model, tmp_path / "saved")
    there = from_pretrained(tmp_path / "saved", device="cuda")
    layers = [one for one in there.modules() if isinstance(one, Sparse24Linear)]
    assert {type(one) for one in layers} == {Sparse24WeightOnlyLinear}
    assert {one.plan(7).kernel for one in layers} == {"wgmma_sp"}
    mine, x = model.model.layers[0].mlp.down_proj, torch.randn(7, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        found, wanted = there.model.layers[0].mlp.down_proj(x.cuda()), mine(x)
        assert torch.allclose(found.cpu().float(), wanted.float(), rtol=2e-2, atol=2e-2)
        graph, given = torch.cuda.CUDAGraph(), x.cuda()
        with torch.cuda.graph(graph):
            captured = there.model.layers[0].mlp.down_proj(given)
        graph.replay()
        assert torch.equal(captured, found)
    save_sparse24(there, tmp_path / "again")
    assert_alike(model, load_into(llama(), tmp_path / "again"))


def test_weights_without_a_kernel_on_their_gpu_become_16_bits(monkeypatch, tmp_path):
    """The GPUs are assumed ones, because selection needs none."""
    from sparse24_plans.torch.experts import kernel_obstacle

    layer = Sparse24WeightOnlyLinear(128, 64, stored="s4", group=64, dtype=torch.bfloat16)
    assert layer.plan_on("h200").kernel == "wgmma_sp"
    for name, served in (("h200", True), ("a100", False)):
        monkeypatch.setattr(type(layer), "plan_on", lambda self, _, name=name: _plan_on(self, name))
        assert (kernel_obstacle(layer, torch.device("cuda:0")) is None) is served
    assert kernel_obstacle(layer, torch.device("cpu")) is None


_plan_on = Sparse24WeightOnlyLinear.plan_on
