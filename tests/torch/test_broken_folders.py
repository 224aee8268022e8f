"""Saved folders that are broken or hostile are refused by typed errors, by every loader."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sparse24_plans import FormatError, InvalidProblemError
from sparse24_plans.torch import from_pretrained

from .llamas import llama, saved_llama
from .saved_models import changed

transformers = pytest.importorskip("transformers", minversion="5.8")
AutoModelForCausalLM = transformers.AutoModelForCausalLM

folder = pytest.fixture(saved_llama, scope="module")


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
