"""Products that can be exported."""

from __future__ import annotations

import random
from typing import Any

from sparse24_plans import GemmSparse24Descriptor

TYPES: dict[str, dict[str, Any]] = {
    "bf16": {"element": "bf16"},
    "f16 with a bias": {"element": "f16", "epilogue": "bias_silu"},
    "f16 gated": {"element": "f16", "epilogue": "bias_swiglu"},
    "bf16 in columns": {"element": "bf16", "x_order": "column", "y_order": "column"},
    "bf16 from columns": {"element": "bf16", "x_order": "column"},
    "f32": {"element": "f32"},
    "f32 in steps": {"element": "f32", "epilogue": "bias_relu"},
    "s8": {"element": "s8", "out_element": "bf16", "scale_x": "row", "scale_w": "tensor"},
    "s8 sums": {"element": "s8", "out_element": "i32"},
    "fp8": {"element": "fp8_e4m3", "out_element": "bf16", "scale_x": "row", "scale_w": "row", "alpha": 0.25},
    "both fp8 types": {"element": "fp8_e5m2", "x_element": "fp8_e4m3", "out_element": "f32"},
    "fp8 results": {"element": "fp8_e4m3", "out_element": "fp8_e5m2", "scale_y": "tensor", "amax": True},
    "gated fp8 results": {"element": "bf16", "epilogue": "swiglu", "out_element": "fp8_e4m3", "amax": True},
    "bf16 backward": {"element": "bf16", "op": "dgrad"},
    "bf16 and C": {"element": "bf16", "epilogue": "bias_gelu_tanh", "beta": 0.5},
    "f16 and C in columns": {"element": "f16", "y_order": "column", "beta": -1.0, "c_element": "f32"},
    "f32 and C": {"element": "f32", "beta": 1.0},
    "s4 weights": {"element": "bf16", "weight_element": "s4", "weight_group": 128, "beta": 0.5},
    "s8 weights": {"element": "f16", "weight_element": "s8", "weight_scale_element": "f32"},
    "gated fp8 weights": {
        "element": "bf16",
        "epilogue": "bias_swiglu",
        "weight_element": "fp8_e4m3",
        "weight_group": 32,
    },
}
_SCALES = {"scale_x": "row", "scale_w": "row"}
GROUPED: dict[str, dict[str, Any]] = {
    "groups backward": {"element": "f16", "op": "dgrad", "groups": 7},
    "groups of f32": {"element": "f32", "epilogue": "bias_relu", "groups": 3, "group_tokens": "counts"},
    "groups": {"element": "bf16", "groups": 8},
    "gated groups": {"element": "f16", "epilogue": "bias_swiglu", "groups": 5},
    "groups by counts": {"element": "bf16", "epilogue": "bias_silu", "groups": 3, "group_tokens": "counts"},
    "groups of s4 weights": {"element": "bf16", "weight_element": "s4", "weight_group": 64, "groups": 4},
    "groups of s8": {"element": "s8", "out_element": "bf16", "groups": 4, **_SCALES},
    "groups of s8 sums": {"element": "s8", "out_element": "i32", "groups": 2},
    "groups of fp8": {
        "element": "fp8_e4m3",
        "epilogue": "geglu",
        "out_element": "bf16",
        "groups": 6,
        **_SCALES,
    },
    "groups of fp8 results": {
        "element": "fp8_e4m3",
        "out_element": "fp8_e4m3",
        "scale_y": "tensor",
        "amax": True,
        "groups": 3,
    },
    "groups of fp8 by counts": {
        "element": "fp8_e4m3",
        "out_element": "f32",
        "scale_w": "tensor",
        "groups": 4,
        "group_tokens": "counts",
    },
    "routed rows": {"element": "bf16", "groups": 5, "x_rows": 77, "y_rows": 31, "top_k": 3},
    "gathered rows and scales": {"element": "s8", "out_element": "bf16", "groups": 4, "x_rows": 9, **_SCALES},
    "rows of experts": {"element": "bf16", "groups": 6, "group_tokens": "experts", "top_k": 2},
    "rows added up by counts": {
        "element": "f16",
        "out_element": "f32",
        "groups": 3,
        "group_tokens": "counts",
        "y_rows": 20,
        "top_k": 2,
    },
}
BATCHED: dict[str, dict[str, Any]] = {
    "batches": {"element": "bf16", "epilogue": "bias_gelu_tanh", "beta": 0.5, "batches": 5},
    "batches to columns": {"element": "f16", "y_order": "column", "beta": -1.0, "batches": 3},
    "batches of one weight": {"element": "f16", "epilogue": "swiglu", "batches": 4, "shared_weight": True},
    "batches of f32": {"element": "f32", "epilogue": "bias_relu", "beta": 0.5, "batches": 3},
    "batches of s8": {"element": "s8", "out_element": "bf16", "batches": 2, **_SCALES},
    "batches of fp8": {"element": "fp8_e4m3", "out_element": "fp8_e4m3", "amax": True, "batches": 3},
    "batches of s4 weights": {"element": "bf16", "weight_element": "s4", "weight_group": 64, "batches": 2},
    "batches backward": {"element": "f16", "op": "dgrad", "batches": 3},
}
TYPES |= GROUPED | BATCHED
REQUIRED: dict[str, dict[str, Any]] = {
    "any": {},
    "invariant": {"require": {"batch_invariant": True}},
    "strict": {"require": {"bit_stable_across_hardware": True}},
    "mma_sp": {"prefer_backend": "mma_sp"},
}
_ROWS_OF_HALVES = "bf16", "f16 with a bias", "f16 gated", "bf16 and C", "batches"
_STRICT = *_ROWS_OF_HALVES, "f32", "f32 in steps", "s8", "s8 sums", "bf16 backward", "groups of s8 sums"
SERVED = [
    *((kind, required) for kind in TYPES for required in ("any", "invariant")),
    *((kind, "strict") for kind in _STRICT),
    *((kind, "mma_sp") for kind in _ROWS_OF_HALVES),
]


def random_problem(kind: str, seed: random.Random, most: int) -> GemmSparse24Descriptor:
    """A product of a kind with random sizes, for as many tokens, or a few fewer with counts of groups."""
    options = TYPES[kind]
    rows = 64 if "groups" in options or "batches" in options else 16
    sizes = {"m": rows * seed.randrange(1, 1280 // rows), "k": 16 * seed.randrange(1, 120)}
    step = {"counts": options.get("groups"), "experts": options.get("top_k")}.get(
        options.get("group_tokens"), 1
    )
    n = most - most % step
    rows = {"x_rows": n // step, "y_rows": n // step} if options.get("group_tokens") == "experts" else {}
    return GemmSparse24Descriptor(n=n, **sizes, **options, **rows)
