"""Block-sparse problems that can be exported."""

from __future__ import annotations

import random
from typing import Any

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
)
from sparse24_plans.plan.descriptor import Descriptor

_SDD, _DSD, _DDS = ({"op": op} for op in ("sdd", "dsd", "dds"))
PRODUCTS: dict[str, dict[str, Any]] = {
    "dsd of 128": {**_DSD, "element": "bf16", "block": 128},
    "dsd of 16, transposed": {**_DSD, "element": "f16", "block": 16, "trans_a": True},
    "dsd with a bias": {**_DSD, "element": "bf16", "block": 64, "epilogue": "bias_silu"},
    "dsd of 2:4 blocks": {**_DSD, "element": "bf16", "block": 64, "inner": "sparse24", "trans_b": True},
    "dsd of fp8": {**_DSD, "element": "fp8_e4m3", "block": 64, "out_element": "bf16"},
    "dsd of packed blocks": {**_DSD, "element": "bf16", "block": 64, "packed": True, "epilogue": "bias"},
    "dsd of packed s8": {**_DSD, "element": "s8", "block": 32, "packed": True, "trans_a": True},
    "dds of packed blocks": {**_DDS, "element": "f32", "block": 16, "packed": True, "batch": 2},
    "dds of 32": {**_DDS, "element": "f16", "block": 32, "batch": 2},
    "dds of 2:4 blocks": {**_DDS, "element": "f16", "block": 128, "inner": "sparse24", "trans_b": True},
    "dds of s8": {**_DDS, "element": "s8", "block": 128, "out_element": "i32"},
    "dds of f32": {**_DDS, "element": "f32", "block": 64, "alpha": 0.5},
    "sdd of 64": {**_SDD, "element": "bf16", "block": 64, "trans_b": True},
    "sdd of 16": {**_SDD, "element": "f16", "block": 16, "batch": 3},
    "sdd of f32": {**_SDD, "element": "f32", "block": 32, "trans_a": True},
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "softmax": {"element": "f16", "block": 32, "scale": 0.25, "causal": True},
    "softmax with masks": {
        "element": "bf16",
        "block": 64,
        "rpe": True,
        "key_padding_mask": "add",
        "attn_mask": "mul",
    },
    "softmax backward": {"element": "f32", "block": 16, "op": "backward"},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {"element": "bf16", "block": 64, "head_size": 64},
    "attention by lengths": {
        "element": "f16",
        "block": 128,
        "head_size": 128,
        "lengths": True,
        "causal": True,
    },
    "attention with dropout": {"element": "bf16", "block": 64, "head_size": 96, "dropout": 0.1},
    "attention backward of large heads": {
        "element": "f16",
        "block": 128,
        "head_size": 256,
        "op": "backward",
        "dropout": 0.5,
    },
    "attention backward": {"element": "bf16", "block": 64, "head_size": 64, "op": "backward", "causal": True},
}
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "conv": {"element": "bf16", "block": 64, "epilogue": "bias_relu", "padding": 1},
    "strided conv": {"element": "f16", "block": 32, "stride": 2, "dilation": (2, 1)},
    "conv dgrad": {"element": "bf16", "block": 64, "op": "dgrad", "stride": (1, 2), "padding": (0, 1)},
    "conv wgrad": {"element": "f16", "block": 64, "op": "wgrad", "padding": 1},
}
KINDS = (*PRODUCTS, *SOFTMAX, *ATTENTION, *CONVOLUTIONS)


def random_problem(kind: str, seed: random.Random, most: int) -> Descriptor:
    """A problem of a kind with a few random blocks, and for products of at most so many tokens."""
    options = dict({**PRODUCTS, **SOFTMAX, **ATTENTION, **CONVOLUTIONS}[kind])
    block = options.pop("block")
    rows, cols, heads = seed.randrange(1, 7), seed.randrange(1, 7), seed.randrange(1, 3)
    if kind in ATTENTION:
        cols = rows
    if kind in CONVOLUTIONS:
        options |= {"kernel": (3, 2), "height": seed.randrange(6, 20), "width": seed.randrange(6, 20)}
        options["batch"], heads, cols = seed.randrange(1, 4), 1, 6 * seed.randrange(1, 4)
    blocks = seed.randrange(1, heads * rows * cols + 1)
    layout = BlockSparseShape(heads=heads, rows=rows * block, cols=cols * block, block=block, blocks=blocks)
    if kind in PRODUCTS:
        return BlockSparseMatmulDescriptor(layout=layout, n=8 * seed.randrange(1, most // 8 + 1), **options)
    if kind in CONVOLUTIONS:
        return BlockSparseConv2dDescriptor(layout=layout, **options)
    if kind in SOFTMAX:
        return BlockSparseSoftmaxDescriptor(layout=layout, **options)
    return BlockSparseAttentionDescriptor(layout=layout, **options)
