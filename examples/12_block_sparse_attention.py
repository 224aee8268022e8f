"""Compute attention over the blocks that a mask keeps on the host: by one plan, and by three."""

import numpy as np

from sparse24_plans import (
    BlockSparseAttentionArgs,
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseSoftmaxArgs,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
)

batch, heads, tokens, head_size, block = 2, 4, 512, 64, 64
side = tokens // block
places = np.arange(side)
window = (places[:, None] >= places) & (places[:, None] - places < 2)  # this block and the one before
window[:, 0] = True  # and the first, for all
layout = BlockSparseLayout(np.broadcast_to(window, (heads, side, side)), block)
print(layout)

rng = np.random.default_rng(0)
shape = (batch, heads, tokens, head_size)
q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
o, lse = np.empty(shape, np.float32), np.empty(shape[:3], np.float32)

# One plan computes the attention.
desc = BlockSparseAttentionDescriptor(
    layout=layout, batch=batch, head_size=head_size, element="f32", causal=True
)
plan = BlockSparseAttentionPlan.select(desc, device="host")
tables = plan.pack(layout)
plan.run(BlockSparseAttentionArgs(layout=tables, q=q, k=k, v=v, o=o, lse=lse))

# Three plans serve every block size and every mask of a softmax, with the same tables.
scores = np.empty((batch, layout.shape.blocks, block, block), np.float32)
sdd = BlockSparseMatmulPlan.select(
    BlockSparseMatmulDescriptor(
        op="sdd", layout=layout, n=head_size, batch=batch, element="f32", trans_b=True
    ),
    device="host",
)
sdd.run(BlockSparseMatmulArgs(layout=tables, a=q, b=k, c=scores))
softmax = BlockSparseSoftmaxPlan.select(
    BlockSparseSoftmaxDescriptor(
        layout=layout, batch=batch, element="f32", scale=head_size**-0.5, causal=True
    ),
    device="host",
)
softmax.run(BlockSparseSoftmaxArgs(layout=tables, x=scores, y=scores))
dsd = BlockSparseMatmulPlan.select(
    BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=head_size, batch=batch, element="f32"),
    device="host",
)
composed = np.empty(shape, np.float32)
dsd.run(BlockSparseMatmulArgs(layout=tables, a=scores, b=v, c=composed))
assert np.abs(o - composed).max() < 1e-5

# Dense attention with the same mask is the reference.
seen = np.kron(window, np.ones((block, block), bool)) & np.tri(tokens, dtype=bool)
exact = np.where(seen, q.astype(np.float64) @ k.swapaxes(2, 3) * head_size**-0.5, -np.inf)
exact = np.exp(exact - exact.max(axis=-1, keepdims=True))
exact = exact / exact.sum(axis=-1, keepdims=True) @ v
print(f"{plan.explain().chosen}: largest error {np.abs(o - exact).max():.1e}")
assert np.abs(o - exact).max() < 1e-5
