"""Multiply by a 2:4 weight on the host: descriptor, select, pack, workspace, run.

This example needs no GPU. The same five steps drive a GPU plan; examples 04 and 05 show what changes there.
"""

import ml_dtypes
import numpy as np

from sparse24_plans import GemmSparse24Args, GemmSparse24Descriptor, GemmSparse24Plan, Sparse24Weight

n, m, k = 16, 512, 256  # tokens, out features, in features
rng = np.random.default_rng(0)
dense = rng.standard_normal((m, k), np.float32).astype(ml_dtypes.bfloat16)
x = rng.standard_normal((n, k), np.float32).astype(ml_dtypes.bfloat16)
bias = rng.standard_normal(m, np.float32).astype(ml_dtypes.bfloat16)
y = np.empty((n, m), ml_dtypes.bfloat16)

# 1. The descriptor states the problem. It is frozen and hashable, and converts from and to JSON.
desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", epilogue="bias_silu")
assert GemmSparse24Descriptor.model_validate_json(desc.model_dump_json()) == desc

# 2. `select` chooses the kernel. It times nothing, so the answer is the same every time.
plan = GemmSparse24Plan.select(desc, device="host")
print(plan.explain())

# 3. The weight keeps the two largest of every group of four, and is packed for the plan's kernel.
weight = Sparse24Weight.prune_compress(dense)
packed = plan.pack(weight)
print(f"\n{weight}: {weight.nbytes} bytes, dense {dense.nbytes}")

# 4. The operands and the workspace are the caller's memory.
args = GemmSparse24Args(weight=packed, x=x, y=y, bias=bias)
workspace = np.empty(plan.workspace_size(), np.uint8)
assert plan.can_implement(args)

# 5. Run. `bind` checks once for many launches.
plan.run(args, workspace=workspace)
first = y.copy()
bound = plan.bind(args, workspace=workspace)
bound.launch()

v = x.astype(np.float64) @ weight.decompress().astype(np.float64).T + bias.astype(np.float64)
exact = v / (1 + np.exp(-v))
error = np.abs(first.astype(np.float64) - exact).max()
print(f"largest error against float64: {error:.2e} (values up to {np.abs(exact).max():.1f}, bf16)")
assert np.allclose(first.astype(np.float64), exact, rtol=2**-8, atol=1e-3)
