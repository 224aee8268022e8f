"""Prepare weights by plans, in the caller's memory: prune 4x4 tiles for training, mask, check, pack.

This example runs on a GPU where there is one, else on the host: the bits are the same.
"""

import numpy as np

from sparse24_plans import (
    CompressSparse24Args,
    CompressSparse24Descriptor,
    CompressSparse24Plan,
    FormatError,
    MaskSparse24Args,
    MaskSparse24Descriptor,
    MaskSparse24Plan,
    PackSparse24Args,
    PackSparse24Descriptor,
    PackSparse24Plan,
    TilePruneSparse24Args,
    TilePruneSparse24Descriptor,
    TilePruneSparse24Plan,
)

m, k = 256, 512
masking = MaskSparse24Plan.select(MaskSparse24Descriptor(m=m, k=k, element="f16", layout="tiles"))
if masking.device.kind == "cuda":
    import cupy as xp
else:
    xp = np

rng = np.random.default_rng(0)
dense = xp.asarray(rng.standard_normal((m, k), np.float32).astype(np.float16))

# One pass over W gives W and W^T compressed, and the mask.
for rule in ("causal_1122", "greedy_value", "greedy_magnitude", "optimal"):
    plan = TilePruneSparse24Plan.select(TilePruneSparse24Descriptor(m=m, k=k, element="f16", rule=rule))
    args = TilePruneSparse24Args(
        dense,
        values=xp.empty((m, k // 2), np.float16),
        metadata=xp.empty((m, k // 8), np.uint16),
        values_t=xp.empty((k, m // 2), np.float16),
        metadata_t=xp.empty((k, m // 8), np.uint16),
        mask=xp.empty((m // 8, k // 8, 8), np.uint8),
    )
    plan.run(args)
    weight, transposed = plan.weights(args)
    assert bool((weight.decompress() == transposed.decompress().T).all())
    kept = abs(weight.decompress().astype(np.float64)).sum() / abs(dense.astype(np.float64)).sum()
    print(f"{rule:16} keeps {float(kept):.1%} of sum|w|; {plan.device}")

# The mask is applied to the gradient in place.
gradient = xp.asarray(rng.standard_normal((m, k), np.float32).astype(np.float16))
masking.run(MaskSparse24Args(gradient, args.mask, gradient))
print(f"gradient: {float((gradient != 0).mean()):.1%} of its cells are left")

# Compression checks that the matrix is 2:4. The run does not wait for the answer.
compress = CompressSparse24Plan.select(CompressSparse24Descriptor(m=m, k=k, element="f16"))
out = {"values": xp.empty((m, k // 2), np.float16), "metadata": xp.empty((m, k // 8), np.uint16)}
status = xp.empty(1, np.uint64).view(np.uint8)
for name, matrix in (("pruned", weight.decompress()), ("dense", dense)):
    checked = CompressSparse24Args(matrix, **out, status=status)
    compress.run(checked)
    try:
        compress.check(checked)
        print(f"{name}: sound")
    except FormatError as error:
        print(f"{name}: {error}")

# Pack the weight in the layout of the sparse tensor-core kernels.
packing = PackSparse24Plan.select(PackSparse24Descriptor(m=m, k=k, element="f16"))
pack_args = PackSparse24Args(weight, xp.empty((-(-m // 64), -(-k // 128), 9216), np.uint8))
packing.run(pack_args)
packed = packing.weight(pack_args)
print(f"packed: {packed.layout_id}, {packed.nbytes} bytes of {m * k * 2} dense")
