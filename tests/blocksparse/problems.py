"""What block-sparse plans compute by its definition, in float64 on dense matrices, and its allowed error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparse24_plans import (
    AttentionMask,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    ElementKind,
)
from sparse24_plans.plan.operands import Role

from ..plan.cases import PlanCase
from ..support import activate, random_values, saturated

Array = np.ndarray
Expected = dict[str, tuple[Array, Array]]
"""Of each result its exact values and their allowed error, float64."""
F32 = ElementKind.F32


@dataclass(frozen=True)
class Operands:
    """What a plan reads, by name; sparse matrices as their values."""

    layout: BlockSparseLayout
    arrays: dict[str, Array]

    def inputs(self) -> dict[str, Any]:
        """What a PlanCase takes: bits."""
        bits = {name: one.view(f"u{one.itemsize}") for name, one in self.arrays.items()}
        return {"layout": self.layout, **bits}

    def with_(self, **arrays: Array) -> Operands:
        return replace(self, arrays={**self.arrays, **arrays})

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def wide(self, name: str) -> Array:
        return self.arrays[name].astype(np.float64)

    def batch(self, desc: Any) -> Operands:
        """The last batch alone; ``desc`` has more than one."""
        shared = ("bias", "rpe", "attn_mask")
        return replace(
            self,
            arrays={name: one if name in shared else one[-1:].copy() for name, one in self.arrays.items()},
        )


def random_operands(desc: Any, layout: BlockSparseLayout, rng: np.random.Generator) -> Operands:
    made = {
        one.name: random_values(rng, one.shape, one.element) for one in desc.operands() if one.role is Role.IN
    }
    for name in ("key_padding_mask", "attn_mask"):
        if name in made:
            made[name] = _mask(getattr(desc, name), made[name], rng)
    return Operands(layout, made)


def _mask(kind: AttentionMask, values: Array, rng: np.random.Generator) -> Array:
    kept = rng.random(values.shape) < 0.7
    if kind == "mul":
        return kept.astype(values.dtype)
    return np.where(kept, values.astype(np.float32), -np.inf).astype(values.dtype)


def case_of(plan: Any, operands: Operands) -> PlanCase:
    return PlanCase(plan, operands.inputs())


def reference(plan: Any, operands: Operands) -> Expected:
    """Of any plan of the family."""
    desc = plan.descriptor
    if isinstance(desc, BlockSparseMatmulDescriptor):
        return _matmul(plan, operands)
    assert isinstance(desc, BlockSparseSoftmaxDescriptor)
    with np.errstate(all="ignore"):
        return (_softmax if desc.op == "forward" else _softmax_backward)(plan, operands)


# Products -----------------------------------------------------------------------------------------


def dense_of(layout: BlockSparseLayout, values: Array) -> Array:
    return layout.to_dense(values.astype(np.float32)).astype(np.float64)


def kept_of(layout: BlockSparseLayout, dense: Array) -> Array:
    """The kept blocks of a dense matrix [Z, H, rows, cols], whatever the others hold."""
    one = layout.shape
    tiles = dense.reshape(dense.shape[0], one.heads, one.block_rows, one.block, one.block_cols, one.block)
    return tiles.transpose(0, 1, 2, 4, 3, 5)[:, layout.bitmap]


def kept_cells(layout: BlockSparseLayout) -> Array:
    """Bool [H, rows, cols]."""
    block = layout.shape.block
    return layout.bitmap.repeat(block, axis=1).repeat(block, axis=2)


def _matmul(plan: BlockSparseMatmulPlan, operands: Operands) -> Expected:
    desc, layout = plan.descriptor, operands.layout
    a, b = operands.wide("a"), operands.wide("b")
    if desc.op == "dsd":
        a = dense_of(layout, a)
    if desc.op == "dds":
        b = dense_of(layout, b)
    a, b = (one.swapaxes(-1, -2) if turn else one for one, turn in ((a, desc.trans_a), (b, desc.trans_b)))
    exact, abs_sum = desc.alpha * (a @ b), np.abs(a) @ np.abs(b)
    if desc.op == "sdd":
        exact, abs_sum = kept_of(layout, exact), kept_of(layout, abs_sum)
    out, k = desc.out_element, desc.reduction
    if "bias" not in operands.arrays:
        return {"c": (saturated(exact, out), plan.guarantee.tolerance(k, exact, abs_sum, out, desc.alpha))}
    bias = operands.wide("bias")
    v = exact + (bias[:, :, None] if desc.op == "dsd" else bias[:, None, :])
    before = plan.guarantee.tolerance(k, exact, abs_sum, F32, desc.alpha) + np.abs(v) * F32.unit_roundoff
    value = activate(v, desc.epilogue)
    # Activations have slopes below 1.13, and add a few units in float32's last place.
    after = 1.13 * before + (np.abs(value) + before) * (8 * F32.unit_roundoff)
    return {"c": (saturated(value, out), after + _rounding(value, after, out))}


def _rounding(value: Array, error: Array, out: ElementKind) -> Array:
    relative = (np.abs(value) + error) * 1.01 * out.unit_roundoff
    return relative + 0.5 * out.is_integer + out.smallest_subnormal + F32.smallest_subnormal


# Softmax ------------------------------------------------------------------------------------------


def scores(desc: BlockSparseSoftmaxDescriptor, operands: Operands, x: Array) -> tuple[Array, Array]:
    """What is exponentiated, dense, -Inf where nothing is kept; and a sum of magnitudes that bounds it."""
    v = desc.scale * x
    size = np.abs(v)
    for name, shape in (
        ("rpe", (1, *x.shape[1:])),
        ("key_padding_mask", (x.shape[0], 1, 1, x.shape[3])),
        ("attn_mask", (1, 1, *x.shape[2:])),
    ):
        if name not in operands.arrays:
            continue
        mask = operands.wide(name).reshape(shape)
        if name != "rpe" and getattr(desc, name) == "mul":
            mask = np.where(mask == 0, -np.inf, 0.0)
        v = v + mask
        size = size + np.abs(mask)
    hidden = ~kept_cells(operands.layout)
    if desc.causal:
        hidden = hidden | (np.arange(x.shape[3]) > np.arange(x.shape[2])[:, None])
    return np.where(hidden, -np.inf, v), size


def softmax64(v: Array) -> tuple[Array, Array]:
    """Over the last axis, and the largest of each row; a row of -Inf alone is zeros."""
    top = v.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    powers = np.exp(v - top)
    total = powers.sum(axis=-1, keepdims=True)
    return np.where(total == 0, 0.0, powers / np.where(total == 0, 1.0, total)), top


def _softmax(plan: BlockSparseSoftmaxPlan, operands: Operands) -> Expected:
    desc, layout, u = plan.descriptor, operands.layout, F32.unit_roundoff
    v, size = scores(desc, operands, dense_of(layout, operands.wide("x")))
    exact, top = softmax64(v)
    live = np.isfinite(v)
    moved = np.where(live, 6 * u * size + u * np.abs(v - top), 0.0)  # of the exponents, by rounding
    moved = moved + moved.max(axis=-1, keepdims=True, initial=0.0)
    relative = np.expm1(2 * moved) + plan.guarantee.error_bound(desc.reduction) + 6 * u
    allowed = exact * relative + F32.smallest_subnormal
    allowed = allowed + _rounding(exact, allowed, desc.element)
    return {"y": (kept_of(layout, exact), kept_of(layout, allowed))}


def _softmax_backward(plan: BlockSparseSoftmaxPlan, operands: Operands) -> Expected:
    desc, layout, u = plan.descriptor, operands.layout, F32.unit_roundoff
    y, dy = (dense_of(layout, operands.wide(name)) for name in ("y", "dy"))
    total = (y * dy).sum(axis=-1, keepdims=True)
    exact = desc.scale * y * (dy - total)
    bound, k = plan.guarantee.error_bound(desc.reduction), desc.reduction
    of_sum = (bound + 2 * u) * np.abs(y * dy).sum(axis=-1, keepdims=True) + k * F32.smallest_subnormal
    inner = of_sum + 2 * u * (np.abs(dy) + np.abs(total))
    allowed = abs(desc.scale) * (np.abs(y) * inner + F32.smallest_subnormal) + 4 * u * np.abs(exact)
    allowed = allowed + _rounding(exact, allowed, desc.element)
    return {"dx": (kept_of(layout, exact), kept_of(layout, allowed))}
