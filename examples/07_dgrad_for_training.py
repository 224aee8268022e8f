"""Compute the gradient of the activations, dX = alpha * dY @ W, by a plan with op="dgrad".

This example needs no GPU. The forward plan's weight is used as it is: nothing is transposed or packed anew.
The gradient is checked with float64.
"""

import numpy as np

from sparse24_plans import (
    DgradSparse24Args,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    PlanPreference,
    Sparse24Weight,
)

n, m, k, alpha = 8, 96, 64, 0.5
rng = np.random.default_rng(0)
weight = Sparse24Weight.prune_compress(rng.standard_normal((m, k), np.float32))
x = rng.standard_normal((n, k), np.float32)

# Strict kernels give the same bits in every batch and on every device, forward and backward.
strict = PlanPreference(require=GuaranteeRequirement(bit_stable_across_hardware=True))
problem = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32", alpha=alpha)
gradient = problem.model_copy(update={"op": "dgrad"})
forward = GemmSparse24Plan.select(problem, preference=strict, device="host")
backward = GemmSparse24Plan.select(gradient, preference=strict, device="host")
packed = forward.pack(weight)  # both plans read the canonical layout, so one packed weight serves both

y = np.empty((n, m), np.float32)
forward.run(GemmSparse24Args(packed, x, y))

# The loss is sum(y^2) / 2, so dY = y.
dx = np.empty((n, k), np.float32)
backward.run(DgradSparse24Args(packed, dy=y, dx=dx))

# The product meets the plan's guarantee. The reduction length of dgrad is M.
w64 = weight.decompress().astype(np.float64)
y64 = y.astype(np.float64)
exact = alpha * (y64 @ w64)
allowed = backward.guarantee.tolerance(
    m, exact, np.abs(y64) @ np.abs(w64), backward.descriptor.out_element, alpha
)
ratio = (np.abs(dx - exact) / allowed).max()
print(f"{backward.explain().chosen}: error_bound({m}) = {backward.guarantee.error_bound(m):.2e}")
print(f"worst error of dX: {ratio:.1%} of what the guarantee allows")
assert ratio <= 1


def loss(at: np.ndarray) -> float:
    return float(((alpha * (at @ w64.T)) ** 2).sum() / 2)


# Central differences of the float64 loss in random directions check the gradient.
x64, step = x.astype(np.float64), 1e-4
for _ in range(3):
    direction = rng.standard_normal((n, k))
    difference = (loss(x64 + step * direction) - loss(x64 - step * direction)) / (2 * step)
    slope = float((dx.astype(np.float64) * direction).sum())
    print(f"directional derivative: dgrad {slope:+.6f}, central difference {difference:+.6f}")
    assert abs(slope - difference) <= 1e-5 * max(float(np.linalg.norm(dx)), 1.0) * np.linalg.norm(direction)
