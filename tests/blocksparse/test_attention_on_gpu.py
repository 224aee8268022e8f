"""The GPU's fused attention and its gradients: against float64, at the edges, their bits, what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseLayout,
    BlockSparseShape,
    DeviceProperties,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse import limits

from ..sample_devices import A100, H200
from .problems import (
    attention_scores,
    captured_launches_follow_the_mask,
    case_of,
    dropout_factors,
    forward64,
    random_operands,
)
from .sample_layouts import EDGES, random_layout
from .test_attention import check

gpu = pytest.mark.gpu
ROWS = {"forward": "attention_wgmma", "backward": "attention_backward_wgmma"}
every_op = pytest.mark.parametrize("op", ROWS)
every_block = pytest.mark.parametrize("block", [64, 128])
every_head_size = pytest.mark.parametrize("head_size", [32, 64, 72, 96, 128, 160, 192, 224, 256])
every_large_head = pytest.mark.parametrize("head_size", [64, 128, 192, 256])


def plan_of(
    layout: BlockSparseLayout, *, device: Any = 0, most: int | None = None, **fields: Any
) -> BlockSparseAttentionPlan:
    """A plan that may ask for ``most`` bytes of workspace."""
    desc = BlockSparseAttentionDescriptor(
        **{"layout": layout, "element": "bf16", "head_size": 64, "batch": 2, **fields}
    )
    plan = BlockSparseAttentionPlan.select(desc, device=device, preference={"max_workspace_bytes": most})
    assert plan.explain().chosen == ROWS[desc.op]
    return plan


def random_check(layout: BlockSparseLayout, seed: int = 4, **fields: Any) -> dict[str, np.ndarray]:
    plan = plan_of(layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(seed)))


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=4, rows=1024, cols=1024, block=64, blocks=100)


def explained(device: DeviceProperties = H200, **fields: Any) -> Any:
    desc = BlockSparseAttentionDescriptor(
        **{"layout": SHAPE, "head_size": 128, "element": "bf16", "kv_heads": 2, **fields}
    )
    return explain(desc, device=device)


@every_op
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_what_is_served(op, causal, lengths):
    for element in ("f16", "bf16"):
        for head_size in (8, 32, 64, 96, 128, 136, 192, 256):
            for block, dropout in itertools.product((64, 128), (0.0, 0.2)):
                answer = explained(
                    op=op,
                    element=element,
                    head_size=head_size,
                    layout=SHAPE.model_copy(update={"block": block}),
                    causal=causal,
                    lengths=lengths,
                    dropout=dropout,
                    scale=-0.5,
                )
                assert answer.chosen == ROWS[op]


@every_op
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_size": 100}, "serves head_size up to 256 in multiples of 8, not 100"),
        ({"head_size": 264}, "serves head_size up to 256 in multiples of 8, not 264"),
        ({"layout": SHAPE.model_copy(update={"block": 32})}, "serves blocks of 64 and 128, not 32"),
        ({"scale": 0.0}, "serves scales from 2^-120 to 2^120, got 0.0"),
        ({"scale": 1e37}, "serves scales from 2^-120 to 2^120, got 1e+37"),
        ({"batch": 2**29}, "block rows exceed the kernel's limit"),
        ({"element": "f32"}, "f32"),
        ({"device": A100}, "compute capability"),
    ],
)
def test_what_is_refused(op, change, words):
    answer = explained(op=op, **change)
    assert answer.chosen is None
    reasons = {name: reason for name, _, reason in answer.rows}
    assert words in reasons[ROWS[op]]


@every_op
def test_each_kernel_serves_its_op_alone(op):
    (other,) = set(ROWS) - {op}
    reasons = {name: reason for name, _, reason in explained(op=op).rows}
    assert reasons[ROWS[op]] is None
    assert reasons[ROWS[other]] == f"serves op {other}, not {op}"


def test_the_other_side_is_limited_too():
    """Columns of blocks are what dK and dV are dealt by."""
    shape = BlockSparseShape(heads=4, rows=64, cols=2**24, block=64, blocks=100)
    reasons = {name: reason for name, _, reason in explained(op="backward", layout=shape, batch=2**11).rows}
    assert "2147483648 block columns exceed the kernel's limit" in reasons[ROWS["backward"]]
    shape = BlockSparseShape(heads=1, rows=2**21, cols=2**21, block=64, blocks=2**30)
    reasons = {name: reason for name, _, reason in explained(op="backward", layout=shape, kv_heads=1).rows}
    assert "2147483648 tiles of kept blocks exceed the kernel's limit" in reasons[ROWS["backward"]]


@every_block
def test_gradients_of_scores_are_stored_where_the_workspace_has_room(block):
    layout = random_layout(heads=4, rows=3, cols=5, block=block)
    size = 2 * 3 * layout.shape.blocks * block * block  # 2 bytes for each score of three batch elements
    fields = {"layout": layout, "op": "backward", "batch": 3, "device": H200}
    plan, least = (
        plan_of(**fields),
        plan_of(**fields, most=limits.backward_workspace(plan_of(**fields).descriptor)),
    )
    assert f"gradients of scores in {size} bytes" in str(plan.explain())
    assert f"gradients of scores computed twice instead of in {size} bytes" in str(least.explain())
    assert 0 <= plan.workspace_size() - least.workspace_size() - size < 256
    assert plan_of(**fields, most=plan.workspace_size()).workspace_size() == plan.workspace_size()
    assert plan_of(**fields, most=plan.workspace_size() - 1).workspace_size() == least.workspace_size()
    with pytest.raises(UnsupportedError, match="max_workspace_bytes"):
        plan_of(**fields, most=least.workspace_size() - 1)


def test_gradients_of_scores_take_4_gib_unless_more_is_allowed():
    blocks = (4 << 30) // (2 * 128 * 128)
    for count, stored in ((blocks, True), (blocks + 1, False)):
        shape = BlockSparseShape(heads=1, rows=1 << 16, cols=1 << 16, block=128, blocks=count)
        fields = {"layout": shape, "op": "backward", "batch": 1, "device": H200}
        assert (plan_of(**fields).workspace_size() > 4 << 30) == stored
        assert plan_of(**fields, most=5 << 30).workspace_size() > 4 << 30


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


# Dropout ------------------------------------------------------------------------------------------


@gpu
@every_op
@every_block
@every_large_head
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_dropout_against_float64(op, block, head_size, causal, lengths):
    fields = {"op": op, "head_size": head_size, "causal": causal, "lengths": lengths, "kv_heads": 1}
    for seed, p in enumerate((0.1, 0.75)):
        random_check(random_layout(seed, rows=3, cols=5, block=block), seed, dropout=p, **fields)


@gpu
@every_block
@every_large_head
@pytest.mark.parametrize("lengths", [False, True])
def test_dropped_cells_are_the_hosts(block, head_size, lengths):
    """Scores are 0, so each result of a unit matrix is not 0 exactly where a cell is kept, in every pass."""
    layout = random_layout(7, heads=2, rows=3, cols=3, block=block, density=0.7)
    rng, fields = np.random.default_rng(5), {"head_size": head_size, "dropout": 0.4, "lengths": lengths}
    plan, back = (plan_of(layout, op=op, **fields) for op in ROWS)
    operands = random_operands(plan.descriptor, layout, rng)
    if lengths:
        ends = np.array([3 * block - 5, block + 9], np.int32)
        operands = operands.with_(q_lengths=ends, kv_lengths=ends)
    zeros = np.zeros_like(operands["q"])
    operands = operands.with_(q=zeros, k=zeros)
    scores, _ = attention_scores(plan.descriptor, operands)
    kept = np.isfinite(scores) & (dropout_factors(plan.descriptor, operands) != 0)
    lse = forward64(plan.descriptor, operands)[1].astype(np.float32)
    made = {"lse": lse, "o": zeros}

    def found(one: BlockSparseAttentionPlan, given: Any, name: str) -> np.ndarray:
        bits = case_of(one, given).run()[name]
        return bits.view(one.descriptor.element.dtype).astype(np.float32) != 0

    for start in range(0, 3 * block, head_size):
        unit = np.zeros_like(zeros)
        count = min(head_size, 3 * block - start)
        unit[:, :, np.arange(start, start + count), np.arange(count)] = 1
        of_keys, of_queries = (
            kept[..., start : start + count],
            kept[:, :, start : start + count].swapaxes(2, 3),
        )
        assert np.array_equal(found(plan, operands.with_(v=unit), "o")[..., :count], of_keys)
        ones = made | {"v": zeros + 1, "do": zeros + 1}
        assert np.array_equal(found(back, operands.with_(**{**ones, "k": unit}), "dq")[..., :count], of_keys)
        assert np.array_equal(
            found(back, operands.with_(**{**ones, "q": unit}), "dk")[..., :count], of_queries
        )
        assert np.array_equal(
            found(back, operands.with_(**{**made, "do": unit}), "dv")[..., :count], of_queries
        )


@gpu
@every_op
@every_block
def test_a_replay_reads_seed_and_offset_again(op, block):
    import cupy

    layout = random_layout(heads=2, rows=3, cols=4, block=block)
    plan = plan_of(layout, op=op, dropout=0.3)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    case, stream = case_of(plan, operands), cupy.cuda.Stream(non_blocking=True)
    bound = plan.bind(case.args, workspace=case.space)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    bound.launch(stream=stream)
    graph = stream.end_capture()
    seen = []
    for offset in (0, 1, 1 << 40):
        words = np.array([3, 4, offset & 0xFFFFFFFF, offset >> 32], np.int32)
        case.guarded["seed_offset"].fill(words.view(np.uint32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        seen.append({name: bits.copy() for name, bits in case.fetch().items()})
        alone = case_of(plan, operands.with_(seed_offset=words)).run()
        assert all(np.array_equal(seen[-1][name], bits) for name, bits in alone.items())
    first = "o" if op == "forward" else "dv"
    assert not any(np.array_equal(one[first], two[first]) for one, two in itertools.combinations(seen, 2))


@gpu
@every_block
def test_the_logarithm_of_sums_does_not_depend_on_dropout(block):
    layout = random_layout(block=block)
    plan, whole = plan_of(layout, dropout=0.5), plan_of(layout)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    lse = case_of(plan, operands).run()["lse"]
    without = {name: one for name, one in operands.arrays.items() if name != "seed_offset"}
    assert np.array_equal(lse, case_of(whole, replace(operands, arrays=without)).run()["lse"])


# Bits ---------------------------------------------------------------------------------------------


@gpu
@every_op
@every_block
def test_bits_of_another_run_and_of_a_batch_alone(op, block):
    layout = random_layout(heads=4, rows=24, cols=12, block=block, density=0.3)
    fields = {"op": op, "head_size": 128, "causal": True, "lengths": True, "kv_heads": 2}
    plan = plan_of(layout, batch=3, **fields)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    case = case_of(plan, operands)
    want = {name: bits.copy() for name, bits in case.run().items()}
    for _ in range(5):
        case.poison()
        assert all(np.array_equal(bits, want[name]) for name, bits in case.run().items())
    last = case_of(plan_of(layout, batch=1, **fields), operands.batch(plan.descriptor)).run()
    assert all(np.array_equal(last[name][0], bits[-1]) for name, bits in want.items())


@gpu
@every_block
@every_head_size
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bits_of_gradients_do_not_depend_on_the_workspace(block, head_size, causal, lengths, dropout):
    """Gradients of scores are stored, or computed twice."""
    layout = random_layout(head_size, heads=4, rows=5, cols=7, block=block)
    fields = {"op": "backward", "head_size": head_size, "causal": causal, "lengths": lengths}
    plan = plan_of(layout, dropout=dropout, kv_heads=2, **fields)
    least = plan_of(
        layout, dropout=dropout, kv_heads=2, **fields, most=limits.backward_workspace(plan.descriptor)
    )
    assert least.workspace_size() < plan.workspace_size()
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    want = check(plan, operands)
    got = case_of(least, operands).run()
    assert all(np.array_equal(got[name], bits.view(got[name].dtype)) for name, bits in want.items())


@gpu
@every_block
def test_bits_of_a_column_do_not_depend_on_other_columns(block):
    layout = random_layout(rows=20, cols=9, block=block)
    kept = layout.bitmap.copy()
    kept[:, :, 1:] = np.random.default_rng(9).random(kept[:, :, 1:].shape) < 0.2
    other = BlockSparseLayout(kept, block)
    plan = plan_of(layout, op="backward")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    want = case_of(plan, operands).run()
    got = case_of(plan_of(other, op="backward"), replace(operands, layout=other)).run()
    assert all(np.array_equal(got[name][:, :, :block], want[name][:, :, :block]) for name in ("dk", "dv"))


@gpu
@every_block
def test_bits_of_a_row_do_not_depend_on_other_rows(block):
    layout = random_layout(rows=20, cols=9, block=block)
    kept = layout.bitmap.copy()
    kept[:, 1:] = np.random.default_rng(9).random(kept[:, 1:].shape) < 0.2
    other = BlockSparseLayout(kept, block)
    plan = plan_of(layout)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    want = case_of(plan, operands).run()
    got = case_of(plan_of(other), replace(operands, layout=other)).run()
    assert all(np.array_equal(got[name][:, :, :block], want[name][:, :, :block]) for name in want)


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
