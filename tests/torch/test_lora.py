"""LoRA adapters of PEFT beside 2:4 layers: they train, are saved and loaded, and are not merged or pruned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Experts, Sparse24Linear, fuse_gated, lora_config, to_sparse24

peft = pytest.importorskip("peft", reason="PEFT isn't installed")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(8)[None]
LLAMA = transformers.LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GPT2 = transformers.GPT2Config(
    vocab_size=128,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=64,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
)


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(LLAMA)


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(GPT2)


def plain(**more: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **more)


def trained(model: Any, steps: int = 3) -> list[float]:
    """The losses of a few steps on one batch."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=1.0)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [module.dense_weight() for module in model.modules() if isinstance(module, Sparse24Linear)]


@pytest.mark.parametrize(
    ("build", "targets"), [(llama, ["q_proj", "down_proj"]), (gpt2, ["c_attn", "c_proj"])]
)
def test_adapters_train_and_the_2_4_weights_stay(build, targets):
    model = build()
    to_sparse24(model)
    before = weights(model)
    with torch.no_grad():
        alone = model(TOKENS).logits
    adapted = peft.get_peft_model(model, lora_config(peft.LoraConfig(r=4, target_modules=targets)))
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    with torch.no_grad():
        assert torch.equal(adapted(TOKENS).logits, alone)  # B starts at zero
    losses = trained(adapted)
    assert losses[-1] < losses[0]
    assert all(torch.equal(one, other) for one, other in zip(weights(adapted), before, strict=True))
    with adapted.disable_adapter(), torch.no_grad():
        assert torch.equal(adapted(TOKENS).logits, alone)


def test_an_adapter_equals_one_on_the_pruned_dense_layer():
    sparse = llama()
    to_sparse24(sparse)
    dense = llama()
    for name, module in sparse.named_modules():
        if isinstance(module, Sparse24Linear):
            dense.get_submodule(name).weight.data = module.dense_weight()
    adapted = peft.get_peft_model(sparse, lora_config(plain()))
    expected = peft.get_peft_model(dense, plain())
    state = {name: torch.randn_like(p) for name, p in expected.named_parameters() if "lora_" in name}
    for model in (adapted, expected):
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    torch.testing.assert_close(adapted(TOKENS).logits, expected(TOKENS).logits, rtol=1e-3, atol=1e-3)


def test_adapters_are_saved_and_loaded(tmp_path):
    model = llama()
    to_sparse24(model)
    again = copy.deepcopy(model)
    adapted = peft.get_peft_model(model, lora_config(plain()))
    trained(adapted)
    adapted.save_pretrained(tmp_path)
    config = lora_config(peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(again, tmp_path, config=config)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, adapted.eval()(TOKENS).logits)


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload"])
def test_merging_is_refused_and_changes_nothing(call):
    model = llama()
    to_sparse24(model)
    adapted = peft.get_peft_model(model, lora_config(plain()))
    trained(adapted)
    before = adapted(TOKENS).logits
    with pytest.raises(UnsupportedError, match="merge: expected the adapter to stay beside the 2:4 weight"):
        getattr(adapted, call)()
    assert torch.equal(adapted(TOKENS).logits, before)
    assert all(type(m) is Sparse24Linear for m in adapted.unload().modules() if hasattr(m, "canonical"))


def test_a_model_with_adapters_is_swapped_beside_them():
    adapted = peft.get_peft_model(llama(), plain())
    trained(adapted)
    adapters = {name: p.clone() for name, p in adapted.named_parameters() if p.requires_grad}
    report = to_sparse24(adapted)
    assert any(layer.name.endswith("q_proj.base_layer") for layer in report.layers)
    assert not any("lora_" in layer.name for layer in report.layers)
    after = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert after.keys() == adapters.keys()
    assert all(torch.equal(after[name], p) for name, p in adapters.items())
    assert {reason for name, reason in report.skipped.items() if "lora_" in name} == {
        "adapter, excluded by default ('*lora_*')"
    }
    losses = trained(adapted)
    assert losses[-1] < losses[0]
    with pytest.raises(UnsupportedError, match="a Sparse24Linear holds no dense weight"):
        adapted.merge_adapter()


def test_layer_beneath_merged_adapter_stays_dense_until_it_is_unmerged():
    adapted = peft.get_peft_model(llama(), plain())
    trained(adapted)
    adapted.merge_adapter()
    report = to_sparse24(adapted)
    beneath = {name: reason for name, reason in report.skipped.items() if "base_layer" in name}
    assert len(beneath) == 4
    assert {reason.partition(";")[0] for reason in beneath.values()} == {"an adapter is merged into it"}
    assert any(layer.name.endswith("k_proj") for layer in report.layers)
    with pytest.raises(
        InvalidProblemError, match=r"expected a layer that can be swapped: an adapter is merg"
    ):
        to_sparse24(adapted, include=["*q_proj.base_layer"])
    adapted.unmerge_adapter()
    assert {layer.name for layer in to_sparse24(adapted).layers} == set(beneath)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "Dora"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
    ],
)
def test_variants_that_need_the_dense_weight_are_refused(options, words):
    model = llama()
    to_sparse24(model)
    with pytest.raises(UnsupportedError, match=f"config: expected plain LoRA .*{words}"):
        peft.get_peft_model(model, lora_config(plain(**options)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_qalora": True}, "use_qalora: expected False"),
        (
            {"target_parameters": ["k_proj.values"]},
            "target_parameters: expected parameters of dense modules, got ",
        ),
        (
            {"target_modules": [], "target_parameters": ["k_proj.values"]},
            "target_parameters: .* of a Sparse24L",
        ),
    ],
    ids=str,
)
def test_options_without_a_meaning_for_24_layers_are_refused(options, words):
    model = llama()
    to_sparse24(model)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})
    with pytest.raises(UnsupportedError, match=words):
        peft.get_peft_model(model, lora_config(config))


def test_parameters_of_dense_modules_have_adapters_beside_24_layers():
    model = llama()
    to_sparse24(model, exclude=["*v_proj"])
    config = lora_config(plain(target_parameters=["v_proj.weight"]))
    adapted = peft.get_peft_model(model, config)
    assert {"q_proj", "v_proj"} <= {
        name.split(".")[6] for name, _ in adapted.named_parameters() if "lora_" in name
    }


def test_a_layer_with_an_activation_is_refused():
    model = llama()
    fuse_gated(model)
    config = lora_config(peft.LoraConfig(r=4, target_modules=["gate_up_proj"]))
    with pytest.raises(
        UnsupportedError, match=r"target_modules: expected layers without an activation, got .* swiglu"
    ):
        peft.get_peft_model(model, config)


def test_a_second_adapter_is_added_to_the_first():
    model = llama()
    to_sparse24(model)
    adapted = peft.get_peft_model(model, lora_config(plain()))
    adapted.add_adapter("other", lora_config(plain()))
    adapted.set_adapter("other")
    losses = trained(adapted)
    assert losses[-1] < losses[0]


def test_another_configuration_is_refused():
    with pytest.raises(InvalidProblemError, match=r"config: expected a peft\.LoraConfig, got IA3Config"):
        lora_config(peft.IA3Config())


def mixtral() -> Any:
    """A swapped Mixtral, whose experts are 2:4 too."""
    torch.manual_seed(0)
    sizes = {**LLAMA.to_dict(), "num_local_experts": 4, "model_type": "mixtral"}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    to_sparse24(model)
    return model


def test_adapters_train_beside_24_experts():
    model = mixtral()
    assert type(model.model.layers[0].mlp.experts) is Sparse24Experts
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    losses = trained(peft.get_peft_model(model, lora_config(config)))
    assert losses[-1] < losses[0]


def test_adapters_of_experts_are_refused():
    with pytest.raises(
        UnsupportedError, match="target_modules: expected linear layers, got a weight of Sparse24E"
    ):
        peft.get_peft_model(mixtral(), lora_config(plain()))
    adapted = peft.get_peft_model(mixtral(), lora_config(plain(exclude_modules=".*experts.*")))
    assert any("lora" in name for name, _ in adapted.named_parameters())
