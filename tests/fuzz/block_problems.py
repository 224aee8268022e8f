"""Random problems with a block-sparse matrix: products, softmax, attention and convolutions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparse24_plans import (
    AttentionMask,
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseConvOp,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseOp,
    BlockSparsePass,
    BlockSparseSoftmaxDescriptor,
    PlanPreference,
)
from sparse24_plans.arithmetic.epilogue import UNGATED
from sparse24_plans.blocksparse.dropout import MAX_DROPOUT

from .draws import RESULTS, alpha_of, default_bias, pick, preference_of, size_of


@dataclass(frozen=True)
class BlockProblem:
    """Something computed with a block-sparse matrix."""

    desc: Any
    layout: BlockSparseLayout
    preference: PlanPreference
    data_seed: tuple[int, ...] = field(repr=False)


def _layout(rng: np.random.Generator, cells: int) -> BlockSparseLayout:
    """Return a layout of at most so many cells, but at least one block."""
    block = int(pick(rng, (16, 16, 32, 64, 128)))
    heads = int(rng.integers(1, 4)) if rng.random() < 0.95 else 0
    most = max(1, cells // (max(heads, 1) * block * block))
    rows = size_of(rng, min(most, 8))
    cols = size_of(rng, max(1, min(most // max(rows, 1), 8)))
    kept = rng.random((heads, rows, cols)) < pick(rng, (0.0, 0.1, 0.3, 0.6, 1.0))
    return BlockSparseLayout(kept, block)


def block_problem_of_host(rng: np.random.Generator, data_seed: tuple[int, ...]) -> BlockProblem:
    layout, preference = _layout(rng, 1 << 15), preference_of(rng, host=True)
    batch = int(pick(rng, (1, 1, 2, 3, 0)))
    kind = rng.random()
    if kind > 0.8:
        desc, layout = _convolution(rng, batch, ("f32", "f16", "bf16"), (16, 16, 32))
        return BlockProblem(desc, layout, preference, data_seed)
    if kind < 0.5:
        make = _softmax if kind < 0.25 else _attention
        return BlockProblem(make(rng, layout, batch), layout, preference, data_seed)
    element = pick(rng, RESULTS)
    fields: dict[str, Any] = {"element": element, "out_element": pick(rng, RESULTS[element])}
    fields |= {"op": pick(rng, BlockSparseOp), "alpha": alpha_of(rng), "n": size_of(rng, 40)}
    fields |= {name: rng.random() < 0.5 for name in ("trans_a", "trans_b")}
    if fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.5:
        fields |= {"epilogue": pick(rng, UNGATED), "bias_element": default_bias(fields)}
    if _may_be_2_4(layout, fields) and rng.random() < 0.5:
        fields["inner"] = "sparse24"
    elif fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.3:
        fields["packed"] = True
    desc = BlockSparseMatmulDescriptor(layout=layout, batch=batch, **fields)
    return BlockProblem(desc, layout, preference, data_seed)


def block_problem_of_gpu(rng: np.random.Generator, data_seed: tuple[int, ...]) -> BlockProblem:
    """Draw a problem that some kernel of the GPU serves without a preference."""
    layout, preference = _layout(rng, 1 << 19), preference_of(rng, host=False)
    if rng.random() < 0.25:
        desc, layout = _convolution(rng, int(pick(rng, (1, 2, 9, 0))), ("f16", "bf16"), (16, 32, 64, 128))
        return BlockProblem(desc, layout, preference, data_seed)
    if layout.shape.block >= 64 and rng.random() < 0.7:
        return BlockProblem(_attention_of_gpu(rng, layout), layout, preference, data_seed)
    element = pick(rng, ("f32", "f16", "bf16", "bf16", "s8", "fp8_e4m3"))
    of_8_bits = element in ("s8", "fp8_e4m3")
    fields: dict[str, Any] = {"element": element, "out_element": pick(rng, RESULTS[element])}
    fields |= {"op": pick(rng, BlockSparseOp), "alpha": alpha_of(rng)}
    fields["n"] = size_of(rng, 600, 1 if rng.random() < 0.5 else 16 if of_8_bits else 8)
    fields |= {name: rng.random() < 0.5 for name in ("trans_a", "trans_b")}
    if of_8_bits and rng.random() < 0.7:
        fields |= {"trans_a": False, "trans_b": True}  # what the tensor cores take
    if fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.5:
        fields |= {"epilogue": pick(rng, UNGATED), "bias_element": default_bias(fields)}
    batch = int(pick(rng, (1, 1, 2, 3, 0)))
    if _may_be_2_4(layout, fields) and rng.random() < 0.6:
        fields["inner"] = "sparse24"
    elif fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.4:
        fields["packed"] = True
    if element in ("f16", "bf16") and rng.random() < 0.3:
        # The kernels for few tokens serve also where another one would be chosen.
        fields["n"] = size_of(rng, 64 if fields["op"] is BlockSparseOp.SDD else 80)
        preference = preference.model_copy(update={"prefer_backend": "blocks_mma"})
    desc = BlockSparseMatmulDescriptor(layout=layout, batch=batch, **fields)
    return BlockProblem(desc, layout, preference, data_seed)


def _may_be_2_4(layout: BlockSparseLayout, fields: dict[str, Any]) -> bool:
    half = layout.shape.block >= 64 and fields["element"] in ("f16", "bf16")
    return half and fields["op"] is not BlockSparseOp.SDD


def block_softmax_of_gpu(rng: np.random.Generator, data_seed: tuple[int, ...]) -> BlockProblem:
    layout, preference = _layout(rng, 1 << 19), preference_of(rng, host=False)
    desc = _softmax(rng, layout, int(pick(rng, (1, 1, 2, 3, 0))))
    return BlockProblem(desc, layout, preference, data_seed)


def _softmax(rng: np.random.Generator, layout: BlockSparseLayout, batch: int) -> BlockSparseSoftmaxDescriptor:
    fields: dict[str, Any] = {
        "element": pick(rng, ("f32", "f16", "bf16")),
        "op": pick(rng, BlockSparsePass),
    }
    fields["scale"] = float(pick(rng, (1.0, 0.125, 0.0, -3.0, rng.standard_normal())))
    if fields["op"] is BlockSparsePass.FORWARD:
        fields |= {name: rng.random() < 0.5 for name in ("rpe", "causal")}
        fields |= {name: pick(rng, AttentionMask) for name in ("key_padding_mask", "attn_mask")}
    return BlockSparseSoftmaxDescriptor(layout=layout, batch=batch, **fields)


def _attention(
    rng: np.random.Generator, layout: BlockSparseLayout, batch: int
) -> BlockSparseAttentionDescriptor:
    heads = layout.shape.heads
    fields: dict[str, Any] = {
        "element": pick(rng, ("f32", "f16", "bf16")),
        "op": pick(rng, BlockSparsePass),
    }
    fields["kv_heads"] = int(pick(rng, [count for count in range(1, heads + 1) if heads % count == 0] or [0]))
    if rng.random() < 0.5:
        fields["scale"] = float(pick(rng, (1.0, 0.0, -0.5)))
    fields |= {name: rng.random() < 0.5 for name in ("causal", "lengths")}
    fields["dropout"] = float(pick(rng, (0.0, 0.0, 0.1, 0.5, rng.random() * MAX_DROPOUT, MAX_DROPOUT)))
    size = max(1, size_of(rng, 40))
    return BlockSparseAttentionDescriptor(layout=layout, batch=batch, head_size=size, **fields)


def _convolution(
    rng: np.random.Generator, batch: int, elements: tuple[str, ...], blocks: tuple[int, ...]
) -> tuple[BlockSparseConv2dDescriptor, BlockSparseLayout]:
    """A convolution that the GPU's kernel serves, with a layout of its own, as its taps need."""
    kernel, stride, dilation, padding = (
        (int(rng.integers(least, most)), int(rng.integers(least, most)))
        for least, most in ((1, 5), (1, 4), (1, 4), (0, 4))
    )
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    op, block, element = pick(rng, BlockSparseConvOp), int(pick(rng, blocks)), pick(rng, elements)
    if op is BlockSparseConvOp.WGRAD and "f32" not in elements:
        block = max(block, 64)
    rows, channels = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    kept = rng.random((1, rows, channels * kernel[0] * kernel[1])) < pick(rng, (0.0, 0.2, 0.5, 1.0))
    layout = BlockSparseLayout(kept, block)
    fields: dict[str, Any] = {"op": op, "element": element, "out_element": pick(rng, RESULTS[element])}
    fields["alpha"] = alpha_of(rng)
    if op is BlockSparseConvOp.FORWARD and rng.random() < 0.5:
        fields |= {"epilogue": pick(rng, UNGATED), "bias_element": default_bias(fields)}
    height, width = (one + int(rng.integers(0, 9)) for one in least)
    walk = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    size = {"height": height, "width": width, "batch": batch}
    return BlockSparseConv2dDescriptor(layout=layout, **size, **walk, **fields), layout


def _attention_of_gpu(rng: np.random.Generator, layout: BlockSparseLayout) -> BlockSparseAttentionDescriptor:
    desc = _attention(rng, layout, int(pick(rng, (1, 1, 2, 3, 0))))
    scale = desc.scale or 0.125
    size = int(pick(rng, (64, 128, 8 * rng.integers(1, 33))))
    fields = {"head_size": size, "element": pick(rng, ("f16", "bf16")), "scale": scale}
    return BlockSparseAttentionDescriptor(**{**desc.model_dump(exclude_unset=True), **fields})
