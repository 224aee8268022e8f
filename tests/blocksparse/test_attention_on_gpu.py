"""The GPU's fused attention and its gradients: against float64, at the edges, with captured masks."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import BlockSparseLayout

from .attention_on_gpu import every_block, every_head_size, every_op, gpu, plan_of, random_check
from .problems import captured_launches_follow_the_mask, case_of, random_operands
from .sample_layouts import EDGES, random_layout
from .test_attention import check

# Results ------------------------------------------------------------------------------------------


@gpu
@every_op
@every_block
@every_head_size
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_against_float64(op, block, head_size, element, causal, lengths):
    fields = {"op": op, "head_size": head_size, "element": element, "causal": causal, "lengths": lengths}
    for seed in range(4 if lengths else 1):
        random_check(random_layout(seed, rows=5, cols=6, block=block), seed, **fields)


@gpu
@every_op
@every_block
@pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)
def test_layouts_at_their_edges(op, block, layout):
    layout = BlockSparseLayout(layout.bitmap, block)
    random_check(layout, op=op)
    random_check(layout, op=op, batch=0)
    random_check(layout, op=op, batch=1, causal=True, lengths=True)


@gpu
@every_op
@every_block
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_share_keys_and_values(op, block, kv_heads):
    layout = random_layout(heads=4, rows=2, cols=3, block=block)
    random_check(layout, op=op, kv_heads=kv_heads, lengths=True)
    random_check(layout, op=op, kv_heads=kv_heads, causal=True, head_size=128)


@gpu
@every_op
@every_block
@pytest.mark.parametrize("scale", [1.0, -0.3, 2.0**-20])
def test_scales(op, block, scale):
    random_check(random_layout(block=block), op=op, scale=scale, causal=True)


@gpu
@every_op
@every_block
def test_more_rows_than_run_at_once(op, block):
    layout = random_layout(5, heads=4, rows=80, cols=3, block=block)
    random_check(layout, op=op, lengths=True, batch=1, element="f16")
    random_check(layout.transposed(), op=op, lengths=True, batch=1, element="f16")


@gpu
@every_op
@every_block
@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
def test_more_columns_than_a_warp_has_lanes(op, block, density):
    layout = random_layout(6, heads=1, rows=4, cols=75, block=block, density=density)
    random_check(layout, op=op, lengths=True, batch=2, head_size=128)
    random_check(layout.transposed(), op=op, causal=True, batch=1)


@gpu
@every_block
def test_a_row_that_sees_nothing_is_zeros(block):
    layout = BlockSparseLayout([[[0, 1, 1], [0, 0, 0], [1, 0, 1]]], block)
    got = random_check(layout, op="backward", causal=True)
    assert (got["dq"][:, :, : 2 * block].astype(np.float32) == 0).all()
    got = random_check(layout, causal=True)
    assert (got["o"][:, :, : 2 * block].astype(np.float32) == 0).all()
    assert np.isneginf(got["lse"][:, :, : 2 * block]).all()
    assert np.isfinite(got["lse"][:, :, 2 * block :]).all()


@gpu
@every_op
@every_block
def test_nothing_beyond_the_lengths_is_read(op, block):
    layout = random_layout(rows=3, cols=3, density=1.0, block=block)
    plan = plan_of(layout, op=op, lengths=True, batch=3)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    ends = {"q": [block + 20, -3, 2 * block], "kv": [block + 9, 40, 2 * block]}
    operands = operands.with_(**{f"{name}_lengths": np.array(end, np.int32) for name, end in ends.items()})
    spoilt = {name: one.copy() for name, one in operands.arrays.items() if not name.endswith("lengths")}
    for name, array in spoilt.items():
        for batch, length in enumerate(ends["kv" if name in "kv" else "q"]):
            array[batch, :, max(length, 0) :] = np.nan
    want, got = (case_of(plan, one).run() for one in (operands, operands.with_(**spoilt)))
    for name, bits in want.items():
        assert np.array_equal(got[name], bits)
        beyond = bits[0, :, ends["kv" if name in ("dk", "dv") else "q"][0] :]
        nothing = np.float32(-np.inf).view(np.uint32) if name == "lse" else 0
        assert (beyond == nothing).all()
        assert (bits[1] == nothing).all()


@gpu
@every_block
def test_infinities_and_nans_stay_in_their_rows(block):
    layout = BlockSparseLayout([[[1, 1, 0], [0, 1, 1]]], block)
    plan = plan_of(layout, batch=1)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    want = case_of(plan, operands).run()["o"]
    for name, at in (("q", 3), ("k", block // 2), ("v", 2 * block + 5)):
        for value in (np.nan, np.inf):
            spoilt = operands[name].copy()
            spoilt[0, 0, at, 1] = value
            got = case_of(plan, operands.with_(**{name: spoilt})).run()["o"]
            wide = got[0, 0].view(plan.descriptor.element.dtype).astype(np.float32)
            finite = np.isfinite(wide).all(axis=-1)
            reached = {"q": [3], "k": range(block), "v": range(block, 2 * block)}[name]
            assert set(np.flatnonzero(~finite)) <= set(reached)
            if name != "k" or np.isnan(value):
                assert not finite[list(reached)].any()
            spared = np.setdiff1d(np.arange(2 * block), list(reached))
            assert np.array_equal(got[0, 0, spared], want[0, 0, spared])


@gpu
@every_block
def test_infinities_and_nans_stay_in_their_gradients(block):
    layout = BlockSparseLayout([[[1, 1, 0], [0, 1, 1]]], block)
    plan = plan_of(layout, batch=1, op="backward")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    want = {name: bits.copy() for name, bits in case_of(plan, operands).run().items()}
    rows, keys = 2 * block, 3 * block
    reached = {  # operand -> its row, and the rows of each gradient that may not be finite
        "do": (3, {"dq": [3], "dk": range(2 * block), "dv": range(2 * block)}),
        "q": (3, {"dq": [3], "dk": range(2 * block), "dv": range(2 * block)}),
        "k": (block // 2, {"dq": range(block), "dk": [block // 2], "dv": [block // 2]}),
        "v": (2 * block + 5, {"dq": range(block, rows), "dk": [2 * block + 5], "dv": []}),
    }
    for name, (at, lines) in reached.items():
        spoilt = operands[name].copy()
        spoilt[0, 0, at, 1] = np.nan
        got = case_of(plan, operands.with_(**{name: spoilt})).run()
        for result, those in lines.items():
            wide = got[result][0, 0].view(plan.descriptor.element.dtype).astype(np.float32)
            finite = np.isfinite(wide).all(axis=-1)
            assert not finite[list(those)].any(), (name, result)
            spared = np.setdiff1d(np.arange(rows if result == "dq" else keys), list(those))
            assert np.array_equal(got[result][0, 0, spared], want[result][0, 0, spared]), (name, result)


@gpu
@every_block
def test_scores_far_apart(block):
    """The largest of a row rises from tile to tile, or falls; what is far below it is nothing."""
    layout = random_layout(heads=1, rows=1, cols=6, density=1.0, block=block)
    plan = plan_of(layout, batch=1, scale=1.0, element="f16")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    steps = np.repeat(np.arange(6), block)[:, None].astype(np.float16)
    for sizes in (steps, steps[::-1], -steps, 0 * steps):
        check(plan, operands.with_(k=(operands["k"] * 4 * sizes).astype(np.float16)))


# Tables -------------------------------------------------------------------------------------------


@gpu
@every_op
@every_block
def test_another_mask_reaches_what_was_captured(op, block):
    first = random_layout(6, rows=6, cols=8, block=block)
    captured_launches_follow_the_mask(plan_of(first, op=op), first)


# Places -------------------------------------------------------------------------------------------


@gpu
def test_places_beyond_2_to_the_32_bytes():
    import cupy

    blocks = 2**17 + 3
    kept = np.zeros((1, blocks, 2), bool)
    kept[0, [0, -1], [0, 1]] = True
    layout = BlockSparseLayout(kept, 128)
    plan = plan_of(layout, head_size=128, batch=1, element="f16")
    rng = cupy.random.default_rng(0)
    q = cupy.zeros((1, 1, blocks * 128, 128), cupy.float16)
    q[:, :, -128:] = rng.standard_normal((128, 128), dtype=cupy.float32)
    k, v = (rng.standard_normal((1, 1, 256, 128), dtype=cupy.float32).astype(cupy.float16) for _ in range(2))
    o = cupy.full(q.shape, cupy.nan, cupy.float16)
    lse = cupy.full(q.shape[:3], cupy.nan, cupy.float32)
    args = plan.args_type(plan.descriptor)(layout=plan.pack(layout), q=q, k=k, v=v, o=o, lse=lse)
    plan.run(args, workspace=cupy.empty(plan.workspace_size(), cupy.uint8))
    scores = q[0, 0, -128:].astype(cupy.float64) @ k[0, 0, 128:].astype(cupy.float64).T * 128**-0.5
    powers = cupy.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = powers / powers.sum(axis=-1, keepdims=True) @ v[0, 0, 128:].astype(cupy.float64)
    assert cupy.abs(o[0, 0, -128:].astype(cupy.float64) - exact).max() < 5e-3
    assert not o[:, :, 128:-128].any()  # also no NaN is left
    assert cupy.isneginf(lse[:, :, 128:-128]).all()
