"""Which tensors of a dense checkpoint are compressed, which are copied, why, and what the report says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sparse24_plans import InvalidProblemError, load_weight, prune
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.selection import DEFAULT_EXCLUDE

from ..support import same_bits
from .models import (
    BITMASK_MODEL,
    dense_file,
    library_load,
    random_array,
)


def mixed_model() -> dict[str, np.ndarray]:
    return {
        "embed_tokens.weight": random_array((64, 16)),
        "wte.weight": random_array((64, 16)),
        "layer.0.weight": random_array((24, 16)),
        "layer.1.weight": random_array((24, 16), "bf16"),
        "lm_head.weight": random_array((64, 16)),
        "layer.0.gate.weight": random_array((8, 16)),
        "layer.0.lora_A.weight": random_array((8, 16)),
        "layer.0.dt_proj.weight": random_array((32, 8)),
        "norm": random_array((16,)),
        "experts": random_array((4, 8, 16)),
        "conv": random_array((4, 2, 2, 8)),
        "scale": random_array(()),
        "odd": random_array((4, 12)),
        "empty": random_array((0, 16)),
        "ids": np.arange(16, dtype=np.int64).reshape(2, 8),
        "double": np.zeros((8, 8)),
        "mask": np.zeros((8, 8), np.bool_),
        "int8": np.zeros((8, 8), np.int8),
    }


ALWAYS_COPIED = {
    "norm": "1-d",
    "experts": "3-d (stacked matrices, such as experts, or a convolution)",
    "conv": "4-d",
    "scale": "0-d",
    "odd": "K=12 is not a multiple of 8",
    "empty": "empty",
    "ids": "element i64",
    "double": "element f64",
    "mask": "element bool",
    "int8": "element i8",
}


LAYERS = {"layer.0.weight": None, "layer.1.weight": None}


BY_DEFAULT = {
    "embed_tokens.weight": "embedding table, excluded by default ('*embed*')",
    "wte.weight": "embedding table, excluded by default ('*wte.*')",
    "lm_head.weight": "output head, excluded by default ('*lm_head*')",
    "layer.0.gate.weight": "router, excluded by default ('*.gate.weight')",
    "layer.0.lora_A.weight": "adapter, excluded by default ('*lora_*')",
    "layer.0.dt_proj.weight": "projection of time steps, excluded by default ('*.dt_proj.weight')",
}


NAMED = dict.fromkeys(name for name in BY_DEFAULT if name.startswith(("lm_head", "layer.")))
NOT_INCLUDED = dict.fromkeys(LAYERS, "not included")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {**BY_DEFAULT, **LAYERS}),
        ((), ("lm_*",), {**BY_DEFAULT, **LAYERS, "lm_head.weight": "excluded by pattern 'lm_*'"}),
        (("layer.0.w*",), (), {**BY_DEFAULT, **LAYERS, "layer.1.weight": "not included"}),
        (("embed*",), (), {**BY_DEFAULT, **NOT_INCLUDED, "embed_tokens.weight": None}),
        (("lm_head*", "layer.*"), (), {**BY_DEFAULT, **LAYERS, **NAMED}),
        (("*",), (), dict.fromkeys((*BY_DEFAULT, *LAYERS, "experts"))),
        (
            ("*.weight",),
            ("layer.[1-9].*", "*embed*"),
            {
                **dict.fromkeys((*BY_DEFAULT, *LAYERS)),
                "embed_tokens.weight": "excluded by pattern '*embed*'",
                "layer.1.weight": "excluded by pattern 'layer.[1-9].*'",
            },
        ),
    ],
    ids=[
        "default",
        "exclude",
        "include",
        "include an embedding",
        "include a head",
        "include all",
        "exclude wins",
    ],
)
def test_which_tensors_are_compressed(files, include, exclude, expected):
    source, out = files
    arrays = dense_file(source, mixed_model())
    seen: list[Any] = []
    reports = compress_checkpoint(source, out, include=include, exclude=exclude, on_tensor=seen.append)
    assert reports == seen
    assert {report.name: report.reason for report in reports} == {**ALWAYS_COPIED, **expected}
    stored, _ = library_load(out)
    for report in reports:
        dense = arrays[report.name]
        assert (report.shape, report.bytes_before) == (dense.shape, dense.nbytes)
        parts = (f"{report.name}.values24", f"{report.name}.meta24")
        if report.reason is None:
            assert report.action == "compressed"
            assert 0.5 < report.kept_energy < 1
            assert report.bytes_after == sum(stored.pop(part).nbytes for part in parts)
        else:
            assert (report.action, report.kept_energy) == ("copied", None)
            assert report.bytes_after == report.bytes_before
            assert same_bits(stored.pop(report.name), dense)
    assert stored == {}


@pytest.mark.parametrize("pattern", DEFAULT_EXCLUDE)
def test_the_default_exclusion_can_be_overridden(files, pattern):
    source, out = files
    name = pattern.replace("*", "x")
    dense_file(source, {name: random_array((8, 8))})
    assert compress_checkpoint(source, out)[0].action == "copied"
    assert compress_checkpoint(source, out, include=[name])[0].action == "compressed"


STAY_DENSE = {
    "mlp.experts.gate_up_proj_bias": "table of biases",
    "experts.w1.bias": "table of biases",
    "layers.0.attn.rel_pos_h": "table of biases",
    "blocks.0.scale_shift_table": "table of biases",
    "blocks.0.attention.time_decay": "table of rates",
    "mixer.D": "state matrix",
    "transformer.w.weight": "embedding table",  # CTRL
    "decoder.pos_emb.weight": "embedding table",
    "mask_decoder.mask_tokens.weight": "embedding table",  # SAM
    "mask_decoder.iou_token.weight": "embedding table",
    "quantizer.quantizers.0.codebook.weight": "embedding table",  # DAC
    "encoder.positional_encoder.position_enc": "embedding table",
    "connector.perceiver_resampler.latents": "table of queries",  # Idefics2
    "spatial_perceiver.latents_1d": "table of queries",
    "image_to_text_projection.latent_query": "table of queries",  # Kosmos-2
    "multi_modal_projector.query": "table of queries",  # Aria
    "query_feat.weight": "table of queries",
    "transformer_module.queries_features.weight": "table of queries",  # Mask2Former
    "encoder.layers.0.self_attn.bias_u": "table of biases",  # Parakeet
    "encoder.layers.0.self_attn.pos_bias_v": "table of biases",
    "stages.0.attention_biases": "table of biases",  # LeViT
    "backbone.norm.scale.weight": "table of norms",
    "self_attn.q_proj.norm.scale": "table of norms",
    "model.layers.0.attn_hc.fn": "hyper-connection",  # DeepSeek-V4
    "model.hc_head.hc_fn": "hyper-connection",
    "multi_modal_projector.mm_input_projection_weight": "transposed projection",  # Gemma 3
    "encoder.layers.0.self_attn.in_proj_weight": "weight of an nn.MultiheadAttention",
    "encoder.layers.0.self_attn.out_proj.weight": "weight of an nn.MultiheadAttention",
    "cross_attn.k_proj_weight": "weight of an nn.MultiheadAttention",
    "cross_attn.q_proj_weight": "weight of an nn.MultiheadAttention",
    "cross_attn.out_proj.weight": "weight of an nn.MultiheadAttention",
    "rwkv.blocks.1.attention.output.weight": "rescaled projection",
    "blocks.0.feed_forward.value.weight": "rescaled projection",
    "lstm.weight_ih_l0_reverse": "weight of a recurrent layer",
    "lstm.weight_hh_l1": "weight of a recurrent layer",
}
MULTIPLIED = (
    "layer.weight",
    "mixer.in_proj.weight",
    "attention.self.query.weight",
    "encoder.layers.1.self_attn.out_proj.weight",
    "rwkv.blocks.1.attention.value.weight",
    "latent_proj.weight",
    "w.weight",
)


def test_what_no_layer_of_ours_multiplies_stays_dense(files):
    source, out = files
    dense_file(source, {name: random_array((8, 8)) for name in (*STAY_DENSE, *MULTIPLIED)})
    reports = {one.name: one for one in compress_checkpoint(source, out)}
    assert {reports.pop(name).action for name in MULTIPLIED} == {"compressed"}
    assert {name: one.reason.split(",")[0] for name, one in reports.items()} == STAY_DENSE


def test_a_pattern_includes_what_attention_reads(files):
    source, out = files
    dense_file(
        source, {f"attn.{name}": random_array((8, 8)) for name in ("in_proj_weight", "out_proj.weight")}
    )
    reports = {one.name: one.action for one in compress_checkpoint(source, out, include=["*out_proj.weight"])}
    assert reports == {"attn.in_proj_weight": "copied", "attn.out_proj.weight": "compressed"}


def test_a_type_that_nobody_knows_is_copied(files):
    source, out = files
    header = json.dumps({"new": {"dtype": "F3", "shape": [8, 8], "data_offsets": [0, 24]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(24)))
    [report] = compress_checkpoint(source, out)
    assert (report.action, report.reason) == ("copied", "element f3")
    assert out.read_bytes().endswith(bytes(range(24)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"include": ["typo*"]}, r"include: pattern 'typo\*' matches no tensor"),
        ({"exclude": ["typo"]}, "exclude: pattern 'typo' matches no tensor"),
        ({"include": "w"}, "include: expected a sequence of patterns, got 'w'"),
    ],
)
def test_patterns_that_cannot_be_meant(files, options, complaint):
    source, out = files
    dense_file(source, {"w": random_array((8, 8))})
    with pytest.raises(InvalidProblemError, match=complaint):
        compress_checkpoint(source, out, **options)
    assert not out.exists()


# The report ---------------------------------------------------------------------------------------


def test_report_says_share_and_names_every_matrix_left_dense(files):
    source, out = files
    arrays = dense_file(
        source,
        {
            **{f"layers.{i}.proj.weight": random_array((24, 16), seed=i) for i in range(3)},
            **{f"layers.{i}.gate.weight": random_array((8, 16), seed=i) for i in range(3)},
            "experts": random_array((2, 8, 16)),
            "norm": random_array((16,)),
        },
    )
    report = compress_checkpoint(source, out)
    sparse = sum(array.nbytes for name, array in arrays.items() if "proj" in name)
    assert report.sparse_share == pytest.approx(sparse / sum(array.nbytes for array in arrays.values()))
    assert {one.name for one in report.left_dense} == {name for name in arrays if "gate" in name} | {
        "experts"
    }
    text = str(report)
    assert "1536 bytes, router, excluded by default ('*.gate.weight'): layers.*.gate.weight (3)" in text
    assert "1024 bytes, 3-d (stacked matrices, such as experts, or a convolution): experts" in text
    assert (
        f"3 tensors compressed, 0 of them 2:4 already: {report.sparse_share:.1%} of the model's bytes" in text
    )


def test_a_2_4_weight_is_found_and_not_pruned(files):
    source, out = files
    dense = random_array((24, 16))
    sparse = prune(random_array((24, 16), seed=1))
    sparse[0, :4] = 0
    dense_file(source, {"dense.weight": dense, "sparse.weight": sparse})
    reports = {one.name: one for one in compress_checkpoint(source, out)}
    assert reports["dense.weight"].reason is None
    assert reports["dense.weight"].kept_energy < 1
    assert (reports["sparse.weight"].reason, reports["sparse.weight"].kept_energy) == ("2:4 already", 1.0)
    assert same_bits(load_weight(out, "sparse.weight").decompress(), sparse)


def test_a_checkpoint_of_compressed_tensors_is_refused(files):
    with pytest.raises(InvalidProblemError, match="convert --from compressed_tensors --to sparse24"):
        compress_checkpoint(BITMASK_MODEL, files[1])
    assert not files[1].exists()
