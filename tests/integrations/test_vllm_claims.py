"""The plugin for vLLM: what it claims by a checkpoint's configuration, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from sparse24_plans import UnsupportedError

from .vllm_models import GROUP, Sparse24VllmConfig


@pytest.mark.parametrize("user", [None, "sparse24", "compressed-tensors"])
@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
@pytest.mark.parametrize("structure", ["2:4", "unstructured"])
@pytest.mark.parametrize("form", ["sparse-24-bitmask", "dense"])
def test_2_4_checkpoints_of_compressed_tensors_are_claimed(user, method, structure, form):
    sparsity = {"format": form, "sparsity_structure": structure, "targets": ["Linear"]}
    entry = {"quant_method": method, "sparsity_config": sparsity}
    claims = (method, structure) == ("compressed-tensors", "2:4") and user != "compressed-tensors"
    found = Sparse24VllmConfig.override_quantization_method(entry, user, hf_config=None)
    assert found == ("sparse24" if claims else None)


REFUSED = pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"a": 1}}, "transform_config"),
        (
            {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.format: expected sparse-24-bitmask or dense",
        ),
        ({"config_groups": {"g": GROUP | {"input_activations": None}}}, "config_groups.g.input_activations"),
        ({"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"num_bits": 4}}}}, "g.weights"),
        (
            {"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"strategy": "block"}}}},
            "g.weights",
        ),
        ({"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"type": "int"}}}}, "one type"),
    ],
)


@REFUSED
def test_what_cannot_be_served_is_refused_by_name(change, words):
    entry = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
    Sparse24VllmConfig.from_config(entry | {"config_groups": {"g": GROUP}})
    with pytest.raises(UnsupportedError, match=words):
        Sparse24VllmConfig.from_config(entry | change)


@REFUSED
@pytest.mark.parametrize("form", ["sparse-24-bitmask", "dense"])
def test_what_cannot_be_served_is_not_claimed(caplog, change, words, form):
    sparsity = {"format": form, "sparsity_structure": "2:4", "targets": ["Linear"]}
    entry = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, "sparsity_config": sparsity}
    assert Sparse24VllmConfig.override_quantization_method(entry, None) == "sparse24"
    entry |= {**change, "sparsity_config": sparsity | change.get("sparsity_config", {})}
    assert Sparse24VllmConfig.override_quantization_method(entry, None) is None
    assert words in caplog.text


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("form", "groups", "claims"),
    [("sparse-24-bitmask", {}, False), ("dense", {"g": GROUP}, False), ("dense", {}, True)],
)
def test_experts_are_claimed_only_where_vllm_serves_them_unchanged(name, nested, form, groups, claims):
    sparsity = {"format": form, "sparsity_structure": "2:4", "targets": ["Linear"]}
    entry = {"quant_method": "compressed-tensors", "config_groups": groups, "sparsity_config": sparsity}
    for count in (8, 0, None):
        hf_config = SimpleNamespace(**{name: count})
        hf_config = SimpleNamespace(text_config=hf_config) if nested else hf_config
        found = Sparse24VllmConfig.override_quantization_method(entry, None, hf_config)
        assert found == ("sparse24" if claims or not count else None)


@pytest.mark.parametrize("entry", [{"activation": "silu"}, {"out_dtype": "float32"}])
def test_layers_that_fuse_more_than_a_product_are_refused(entry):
    with pytest.raises(UnsupportedError, match=r"model\.a: expected a layer without"):
        Sparse24VllmConfig.from_config({"quant_method": "sparse24", "layers": {"model.a": entry}})
