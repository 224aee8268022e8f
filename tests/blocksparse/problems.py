"""Block-sparse results by their definition, in float64 on dense matrices, and their allowed errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparse24_plans import (
    AttentionMask,
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseConv2dDescriptor,
    BlockSparseConv2dPlan,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    ElementKind,
    decompress_blocks,
)
from sparse24_plans.blocksparse.dropout import dropped
from sparse24_plans.blocksparse.pattern24 import metadata_of
from sparse24_plans.device.jit.launcher import recording
from sparse24_plans.device.tensors import Device, TensorView
from sparse24_plans.export.recording import buffers_of
from sparse24_plans.plan.operands import Role
from sparse24_plans.weights.codes import VALID_CODES

from ..float64 import activated, saturated
from ..plan.cases import PlanCase
from ..support import random_values

Array = np.ndarray
Expected = dict[str, tuple[Array, Array]]
"""Exact values and allowed errors of each result, in float64."""
F32 = ElementKind.F32


@dataclass(frozen=True)
class Operands:
    """Operands of a plan, by name; sparse matrices as their values."""

    layout: BlockSparseLayout
    arrays: dict[str, Array]

    def inputs(self) -> dict[str, Any]:
        """Return the operands as bits, which a PlanCase takes."""
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


def recorded_launches(plan: Any) -> list[Any]:
    """The launches of a plan for an absent GPU, with operands at made-up addresses."""
    buffers, choice = buffers_of(plan.parts.operands, plan.sku.layout), plan.parts.choice
    views = {
        one.view: TensorView(at << 40, one.shape, one.element, Device("cuda", 0))
        for at, one in enumerate(buffers, 1)
    }
    launches: list[Any] = []
    with recording():
        choice.entry.kernel(choice).launcher(views, 1 << 52)(launches)
    return launches


def random_operands(desc: Any, layout: BlockSparseLayout, rng: np.random.Generator) -> Operands:
    made = {
        one.name: random_values(rng, one.shape, one.element)
        for one in desc.operands()
        if one.role in (Role.IN, Role.PACKED)
    }
    for name in ("key_padding_mask", "attn_mask"):
        if name in made:
            made[name] = _mask(getattr(desc, name), made[name], rng)
    if "metadata" in made:
        made["metadata"] = random_metadata(made["metadata"].shape, rng)
    one = desc.layout
    for name, most in (("q_lengths", one.rows), ("kv_lengths", one.cols)):
        if name in made:
            made[name] = rng.integers(-1, most + 2, made[name].shape).astype(np.int32)
    operands = Operands(layout, made)
    if "lse" not in made:
        return operands
    o, lse = forward64(desc, operands)[:2]  # what a forward pass would have given
    return operands.with_(o=o.astype(np.float32).astype(made["o"].dtype), lse=lse.astype(np.float32))


def random_metadata(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Valid ones, of uint8 [Z, blocks, block, block/8]."""
    codes = rng.choice(np.array(VALID_CODES, np.uint8), (*shape[:3], shape[2] // 4))
    return metadata_of(codes)


def along_of(desc: BlockSparseMatmulDescriptor) -> str:
    """Return the axis of the stored sparse matrix over which the product sums."""
    return "columns" if (desc.op == "dsd") != desc.trans_sparse else "rows"


def _mask(kind: AttentionMask, values: Array, rng: np.random.Generator) -> Array:
    kept = rng.random(values.shape) < 0.7
    if kind == "mul":
        return kept.astype(values.dtype)
    return np.where(kept, values.astype(np.float32), -np.inf).astype(values.dtype)


def case_of(plan: Any, operands: Operands) -> PlanCase:
    return PlanCase(plan, operands.inputs())


def captured_launches_follow_the_mask(plan: Any, first: BlockSparseLayout) -> None:
    """Results are the mask's that the tables hold when a graph is launched, not when it was captured."""
    import cupy

    other = BlockSparseLayout(first.bitmap[::-1, ::-1, ::-1], first.shape.block)
    operands = random_operands(plan.descriptor, other, np.random.default_rng(2))
    wanted = {name: bits.copy() for name, bits in case_of(plan, operands).run().items()}
    case = case_of(plan, Operands(first, operands.arrays))
    bound = plan.bind(case.args, workspace=case.space)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    bound.launch(stream=stream)
    graph = stream.end_capture()

    def gives_what_is_wanted() -> bool:
        for _ in range(2):  # counters that deal work tiles start at 0 each time
            graph.launch(stream)
        stream.synchronize()
        got = case.fetch()
        return all(np.array_equal(got[name], bits) for name, bits in wanted.items())

    assert not gives_what_is_wanted()
    for layout in (first, other):
        case.args.layout.update(layout, stream=stream)
        assert gives_what_is_wanted() == (layout is other)


def reference(plan: Any, operands: Operands) -> Expected:
    """Return the exact results of any plan of the family."""
    desc = plan.descriptor
    if isinstance(desc, BlockSparseMatmulDescriptor):
        return _matmul(plan, operands)
    if isinstance(desc, BlockSparseConv2dDescriptor):
        return _convolution(plan, operands)
    with np.errstate(all="ignore"):
        if isinstance(desc, BlockSparseAttentionDescriptor):
            return (_attention if desc.op == "forward" else _attention_backward)(plan, operands)
        assert isinstance(desc, BlockSparseSoftmaxDescriptor)
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
    if "metadata" in operands.arrays:
        name = "a" if desc.op == "dsd" else "b"
        whole = decompress_blocks(layout, operands[name], operands["metadata"], along=along_of(desc))
        operands = operands.with_(**{name: whole})
    a, b = operands.wide("a"), operands.wide("b")
    if desc.op == "dsd":
        a = dense_of(layout, a)
    if desc.op == "dds":
        b = dense_of(layout, b)
    a, b = (
        one.swapaxes(-1, -2) if is_transposed else one
        for one, is_transposed in ((a, desc.trans_a), (b, desc.trans_b))
    )
    exact, abs_sum = desc.alpha * (a @ b), np.abs(a) @ np.abs(b)
    if desc.op == "sdd":
        exact, abs_sum = kept_of(layout, exact), kept_of(layout, abs_sum)
    out, k = desc.out_element, desc.reduction
    if desc.epilogue == "identity":
        return {"c": (saturated(exact, out), plan.guarantee.tolerance(k, exact, abs_sum, out, desc.alpha))}
    v = exact
    if desc.epilogue.has_bias:
        bias = operands.wide("bias")
        v = exact + (bias[:, :, None] if desc.op == "dsd" else bias[:, None, :])
    before = plan.guarantee.tolerance(k, exact, abs_sum, F32, desc.alpha) + np.abs(v) * F32.unit_roundoff
    return {"c": _activated(v, before, desc)}


def _activated(v: Array, before: Array, desc: Any) -> tuple[Array, Array]:
    """Apply an activation to values and to their errors."""
    value, after = activated(v, before, desc.epilogue)
    return saturated(value, desc.out_element), after + _rounding(value, after, desc.out_element)


def _rounding(value: Array, error: Array, out: ElementKind) -> Array:
    relative = (np.abs(value) + error) * 1.01 * out.unit_roundoff
    return relative + 0.5 * out.is_integer + out.smallest_subnormal + F32.smallest_subnormal


# Softmax ------------------------------------------------------------------------------------------


def scores(desc: BlockSparseSoftmaxDescriptor, operands: Operands, x: Array) -> tuple[Array, Array]:
    """Return the dense exponents, -Inf where nothing is kept, and a sum of magnitudes that bounds them."""
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
    """The softmax along the last axis, and the largest score of each row. A row of -Inf alone gives zeros."""
    top = v.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    powers = np.exp(v - top)
    total = powers.sum(axis=-1, keepdims=True)
    return np.where(total == 0, 0.0, powers / np.where(total == 0, 1.0, total)), top


def _softmax(plan: BlockSparseSoftmaxPlan, operands: Operands) -> Expected:
    desc, layout = plan.descriptor, operands.layout
    v, size = scores(desc, operands, dense_of(layout, operands.wide("x")))
    exact, _ = softmax64(v)
    allowed = plan.guarantee.softmax_tolerance(desc.reduction, v, size, desc.element)
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


# Attention ----------------------------------------------------------------------------------------


def heads_of(desc: BlockSparseAttentionDescriptor) -> Array:
    """Return the head of K and V that each head of Q reads."""
    return np.arange(desc.layout.heads) // max(desc.group, 1)


def within(desc: BlockSparseAttentionDescriptor, operands: Operands, name: str) -> Array:
    """An operand by head of Q, with zeros where it doesn't count."""
    found, lengths = operands.wide(name), "kv_lengths" if name in "kv" else "q_lengths"
    if name in "kv":
        found = found[:, heads_of(desc)]
    if not desc.lengths:
        return found
    beyond = np.arange(found.shape[2]) >= operands[lengths][:, None]
    return np.where(beyond[:, None, :, None], 0.0, found)


def attention_scores(desc: BlockSparseAttentionDescriptor, operands: Operands) -> tuple[Array, Array]:
    """Scores [Z, H, rows, cols], -Inf where nothing is kept; and |scale| * |Q| @ |K|^T."""
    q, k = (within(desc, operands, name) for name in "qk")
    k = k.swapaxes(-1, -2)
    hidden = np.broadcast_to(~kept_cells(operands.layout), (desc.batch, *kept_cells(operands.layout).shape))
    rows, cols = np.arange(hidden.shape[2])[:, None], np.arange(hidden.shape[3])
    if desc.causal:
        hidden = hidden | (cols > rows)
    if desc.lengths:
        ends = (operands[name][:, None, None, None] for name in ("q_lengths", "kv_lengths"))
        hidden = hidden | (rows >= next(ends)) | (cols >= next(ends))
    return np.where(hidden, -np.inf, desc.scale * (q @ k)), abs(desc.scale) * (np.abs(q) @ np.abs(k))


def dropout_factors(desc: BlockSparseAttentionDescriptor, operands: Operands) -> Array:
    """Factors of the softmax's cells [Z, H, rows, cols]: 0 where one is dropped, else 1 / (1 - p)."""
    one = desc.layout
    if not desc.dropout:
        return np.ones((1, 1, 1, 1))
    matrices = np.arange(desc.batch * one.heads).reshape(desc.batch, one.heads, 1, 1)
    places = matrices, np.arange(one.rows)[:, None], np.arange(one.cols)
    out = dropped(operands["seed_offset"].astype(np.int64), desc.dropout, *places)
    return np.where(out, 0.0, 1 / (1 - desc.dropout))


def forward64(desc: BlockSparseAttentionDescriptor, operands: Operands) -> tuple[Array, Array, Array]:
    """O, logsumexp, probabilities before dropout."""
    v, _ = attention_scores(desc, operands)
    p, top = softmax64(v)
    with np.errstate(divide="ignore"):
        lse = top[..., 0] + np.log(np.exp(v - top).sum(axis=-1))
    return (p * dropout_factors(desc, operands)) @ within(desc, operands, "v"), lse, p


def _moved(plan: BlockSparseAttentionPlan, v: Array, size: Array, base: Array) -> Array:
    """Bounds of how far rounding moves the exponents v - base; 0 where nothing is kept."""
    u, depth = F32.unit_roundoff, plan.descriptor.head_size
    of_scores = (plan.guarantee.error_bound(depth) + 3 * u) * size + depth * F32.smallest_subnormal
    return np.where(np.isfinite(v), of_scores + u * np.abs(v - base), 0.0)


def _attention(plan: BlockSparseAttentionPlan, operands: Operands) -> Expected:
    desc = plan.descriptor
    v, size = attention_scores(desc, operands)
    o, lse, _ = forward64(desc, operands)
    allowed, of_lse = plan.guarantee.attention_tolerance(
        desc.reduction,
        v,
        size,
        within(desc, operands, "v"),
        desc.element,
        head_size=desc.head_size,
        dropout=dropout_factors(desc, operands),
    )
    return {"o": (o, allowed), "lse": (lse, of_lse)}


def _attention_backward(plan: BlockSparseAttentionPlan, operands: Operands) -> Expected:
    desc, u, tiny = plan.descriptor, F32.unit_roundoff, F32.smallest_subnormal
    q, k, v, o, do = (within(desc, operands, name) for name in ("q", "k", "v", "o", "do"))
    s, size = attention_scores(desc, operands)
    lse = operands.wide("lse")[..., None]
    base = np.where(np.isneginf(lse), 0.0, lse)
    p = np.exp(s - base)
    gamma = plan.guarantee.error_bound
    depth, rows, cols = desc.head_size, desc.layout.rows, desc.layout.cols
    # exp is cut at 1, which lse's own rounding may exceed.
    of_p = p * (np.expm1(2 * (_moved(plan, s, size, base) + u * np.abs(base))) + 2 * u) + tiny
    of_p = of_p + np.maximum(p - 1, 0)
    kept = dropout_factors(desc, operands)
    dp, delta = kept * (do @ v.swapaxes(-1, -2)), (do * o).sum(axis=-1, keepdims=True)
    of_dp = kept * (gamma(depth) * (np.abs(do) @ np.abs(v).swapaxes(-1, -2)) + depth * tiny)
    of_dp = of_dp + (2 * u * np.abs(dp) if desc.dropout else 0)
    of_delta = (gamma(depth) + u) * np.abs(do * o).sum(axis=-1, keepdims=True) + depth * tiny
    ds, inner = p * (dp - delta), np.abs(dp - delta)
    of_inner = of_dp + of_delta + u * inner
    # P, and then dS, are what the kernel multiplies.
    weights = ElementKind(plan.guarantee.math_precision.value)

    def rounded(exact: Array, lost: Array) -> Array:
        return lost + weights.unit_roundoff * (np.abs(exact) + lost) + weights.smallest_subnormal

    of_p = rounded(p, of_p)
    of_kept = kept * (of_p + (2 * u * (p + of_p) if desc.dropout else 0))
    of_ds = rounded(ds, of_p * (inner + of_inner) + p * of_inner + u * np.abs(ds) + tiny)

    def product(left: Array, lost: Array, right: Array, terms: int) -> tuple[Array, Array]:
        sums = (np.abs(left) + lost) @ np.abs(right)
        return left @ right, lost @ np.abs(right) + gamma(terms) * sums + terms * tiny

    def grouped(exact: Array, lost: Array) -> tuple[Array, Array]:
        batch, _, *rest = exact.shape
        shape = (batch, desc.kv_heads, desc.group, *rest)
        steps = desc.group * u
        exact, lost = exact.reshape(shape), lost.reshape(shape)
        return exact.sum(axis=2), lost.sum(axis=2) + steps * (np.abs(exact) + lost).sum(axis=2)

    transposed, of_transposed = ds.swapaxes(-1, -2), of_ds.swapaxes(-1, -2)
    found = {
        "dq": (desc.scale, product(ds, of_ds, k, cols)),
        "dk": (desc.scale, grouped(*product(transposed, of_transposed, q, rows))),
        "dv": (1.0, grouped(*product((kept * p).swapaxes(-1, -2), of_kept.swapaxes(-1, -2), do, rows))),
    }
    expected: Expected = {}
    for name, (scale, (exact, lost)) in found.items():
        exact, lost = scale * exact, abs(scale) * lost
        allowed = lost + 2 * u * (np.abs(exact) + lost)
        expected[name] = (exact, allowed + _rounding(exact, allowed, desc.element))
    return expected


# Convolution --------------------------------------------------------------------------------------


def filter_of(desc: BlockSparseConv2dDescriptor, layout: BlockSparseLayout, values: Array) -> Array:
    """[K, R, S, C], zero where no block is kept."""
    taps, block = desc.kernel, desc.layout.block
    tiles = dense_of(layout, values)[0, 0].reshape(desc.layout.rows, desc.channels // block, *taps, block)
    return tiles.transpose(0, 2, 3, 1, 4).reshape(desc.layout.rows, *taps, desc.channels)


def _each_tap(desc: BlockSparseConv2dDescriptor, images: Array) -> Any:
    """Yield each tap (r, s) with its view [N, P, Q, C] of zero-padded ``images`` [N, H, W, C]."""
    top, left = desc.padding
    (rows, columns), (down, across) = desc.stride, desc.dilation
    high = (desc.height + 2 * top - down * (desc.kernel[0] - 1) - 1) // rows + 1
    wide = (desc.width + 2 * left - across * (desc.kernel[1] - 1) - 1) // columns + 1
    for r, s in np.ndindex(*desc.kernel):
        y, x = r * down, s * across
        yield (
            (r, s),
            images[:, y : y + rows * (high - 1) + 1 : rows, x : x + columns * (wide - 1) + 1 : columns],
        )


def _convolved(desc: BlockSparseConv2dDescriptor, layout: BlockSparseLayout, read: dict[str, Array]) -> Array:
    """In float64, a tap at a time, by the definition."""
    top, left = desc.padding
    sides = ((0, 0), (top, top), (left, left), (0, 0))
    if desc.op == "dgrad":
        dx = np.zeros((desc.batch, desc.height + 2 * top, desc.width + 2 * left, desc.channels))
        filter = filter_of(desc, layout, read["filter"])
        for (r, s), met in _each_tap(desc, dx):
            met += read["dy"] @ filter[:, r, s]
        return dx[:, top : top + desc.height, left : left + desc.width]
    taps = _each_tap(desc, np.pad(read["x"], sides))
    if desc.op == "forward":
        filter = filter_of(desc, layout, read["filter"])
        return sum(met @ filter[:, r, s].T for (r, s), met in taps)
    block, one = desc.layout.block, desc.layout
    found = np.zeros((one.rows, desc.channels // block, *desc.kernel, block))
    for (r, s), met in taps:
        of_tap = np.einsum("npqk,npqc->kc", read["dy"], met, optimize=True)
        found[:, :, r, s] = of_tap.reshape(one.rows, desc.channels // block, block)
    return kept_of(layout, found.reshape(1, 1, one.rows, one.cols))


def _convolution(plan: BlockSparseConv2dPlan, operands: Operands) -> Expected:
    desc, layout = plan.descriptor, operands.layout
    read = {name: operands.wide(name) for name in operands.arrays if name != "bias"}
    exact = desc.alpha * _convolved(desc, layout, read)
    abs_sum = _convolved(desc, layout, {name: np.abs(one) for name, one in read.items()})
    out, k = desc.out_element, desc.reduction
    name = {"forward": "y", "dgrad": "dx", "wgrad": "dfilter"}[desc.op]
    if desc.epilogue == "identity":
        return {name: (saturated(exact, out), plan.guarantee.tolerance(k, exact, abs_sum, out, desc.alpha))}
    v = exact + operands.wide("bias") if desc.epilogue.has_bias else exact
    before = plan.guarantee.tolerance(k, exact, abs_sum, F32, desc.alpha) + np.abs(v) * F32.unit_roundoff
    return {name: _activated(v, before, desc)}
