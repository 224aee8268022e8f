"""Products with block-sparse matrices by their definition, in float64 on dense matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparse24_plans import BlockSparseLayout, BlockSparseMatmulDescriptor, BlockSparseMatmulPlan, ElementKind

from ..plan.cases import PlanCase
from ..support import activate, random_values, saturated


class Operands(NamedTuple):
    """Of a product; the sparse one as its values."""

    layout: BlockSparseLayout
    a: np.ndarray | None
    b: np.ndarray | None
    bias: np.ndarray | None

    def inputs(self) -> dict[str, Any]:
        """What a PlanCase takes: bits."""
        arrays = {name: getattr(self, name) for name in ("a", "b", "bias")}
        bits = {name: one.view(f"u{one.itemsize}") for name, one in arrays.items() if one is not None}
        return {"layout": self.layout, **bits}

    def batch(self, desc: BlockSparseMatmulDescriptor) -> Operands:
        """The last batch alone."""
        return self._replace(a=self.a[-1:].copy(), b=self.b[-1:].copy())


def random_operands(
    desc: BlockSparseMatmulDescriptor, layout: BlockSparseLayout, rng: np.random.Generator
) -> Operands:
    shapes = {one.name: one for one in desc.operands()}
    made = {
        name: random_values(rng, shapes[name].shape, shapes[name].element)
        for name in ("a", "b", "bias")
        if name in shapes
    }
    return Operands(layout, made["a"], made["b"], made.get("bias"))


def case_of(plan: BlockSparseMatmulPlan, operands: Operands) -> PlanCase:
    return PlanCase(plan, operands.inputs())


def reference(plan: BlockSparseMatmulPlan, operands: Operands) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The exact C and its allowed error, float64, of the shape of C."""
    desc, layout = plan.descriptor, operands.layout
    a, b = operands.a.astype(np.float64), operands.b.astype(np.float64)
    if desc.op == "dsd":
        a = layout.to_dense(a.astype(np.float32)).astype(np.float64)
    if desc.op == "dds":
        b = layout.to_dense(b.astype(np.float32)).astype(np.float64)
    a, b = (one.swapaxes(-1, -2) if turn else one for one, turn in ((a, desc.trans_a), (b, desc.trans_b)))
    exact, abs_sum = desc.alpha * (a @ b), np.abs(a) @ np.abs(b)
    if desc.op == "sdd":
        exact, abs_sum = _kept(layout, exact), _kept(layout, abs_sum)
    out, f32, k = desc.out_element, ElementKind.F32, desc.reduction
    if operands.bias is None:
        return {"c": (saturated(exact, out), plan.guarantee.tolerance(k, exact, abs_sum, out, desc.alpha))}
    bias = operands.bias.astype(np.float64)
    v = exact + (bias[:, :, None] if desc.op == "dsd" else bias[:, None, :])
    before = plan.guarantee.tolerance(k, exact, abs_sum, f32, desc.alpha) + np.abs(v) * f32.unit_roundoff
    value = activate(v, desc.epilogue)
    # Activations have slopes below 1.13, and add a few units in float32's last place.
    after = 1.13 * before + (np.abs(value) + before) * (8 * f32.unit_roundoff)
    rounding = (np.abs(value) + after) * 1.01 * out.unit_roundoff + 0.5 * out.is_integer
    allowed = after + rounding + out.smallest_subnormal + f32.smallest_subnormal
    return {"c": (saturated(value, out), allowed)}


def _kept(layout: BlockSparseLayout, dense: np.ndarray) -> np.ndarray:
    """The kept blocks of a dense matrix [Z, H, rows, cols], whatever the others hold."""
    one = layout.shape
    tiles = dense.reshape(dense.shape[0], one.heads, one.block_rows, one.block, one.block_cols, one.block)
    return tiles.transpose(0, 1, 2, 4, 3, 5)[:, layout.bitmap]
