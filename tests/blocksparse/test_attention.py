"""Attention over kept cells and its gradients: against float64, at the edges, and to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    BlockSparseSoftmaxArgs,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    InvalidProblemError,
    explain,
)
from sparse24_plans.blocksparse.dropout import dropped, philox

from ..sample_devices import H200
from .problems import Operands, case_of, random_operands, reference
from .sample_layouts import EDGES, layouts, random_layout

STRICT = {"require": {"deterministic": True}}
ROWS = {"host_blas": None, "host_strict": STRICT}
every_row = pytest.mark.parametrize("row", ROWS)
every_op = pytest.mark.parametrize("op", ["forward", "backward"])


def plan_of(row: str, layout: BlockSparseLayout, **fields) -> BlockSparseAttentionPlan:
    desc = BlockSparseAttentionDescriptor(
        **{"layout": layout, "element": "f32", "head_size": 8, "batch": 2, **fields}
    )
    plan = BlockSparseAttentionPlan.select(desc, device="host", preference=ROWS[row])
    assert plan.explain().chosen == row
    return plan


def check(plan: BlockSparseAttentionPlan, operands: Operands) -> dict[str, np.ndarray]:
    case, elements = case_of(plan, operands), {one.name: one.element for one in plan.descriptor.operands()}
    got = {name: bits.view(elements[name].dtype) for name, bits in case.run().items()}
    for name, (exact, allowed) in reference(plan, operands).items():
        assert got[name].shape == exact.shape
        wide = got[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            assert ((np.abs(wide - exact) <= allowed) | (wide == exact)).all(), name
    return got


def random_check(row: str, layout: BlockSparseLayout, **fields) -> dict[str, np.ndarray]:
    plan = plan_of(row, layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(4)))


# Results ------------------------------------------------------------------------------------------


@every_row
@every_op
@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_every_element_causal_and_lengths(row, op, element, causal, lengths):
    random_check(row, random_layout(rows=3, cols=3), op=op, element=element, causal=causal, lengths=lengths)


@every_row
@every_op
@pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)
def test_layouts_at_their_edges(row, op, layout):
    random_check(row, layout, op=op)
    random_check(row, layout, op=op, batch=0)
    random_check(row, layout, op=op, head_size=1, batch=1)


@every_row
@every_op
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_share_keys_and_values(row, op, kv_heads):
    random_check(row, random_layout(heads=4, rows=2, cols=3), op=op, kv_heads=kv_heads)


@every_op
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_sizes_of_models(op, block, head_size):
    layout = random_layout(heads=2, rows=2, cols=3, block=block)
    random_check("host_blas", layout, op=op, head_size=head_size, batch=1, causal=True)


@settings(max_examples=15)
@given(
    layout=layouts(3),
    op=st.sampled_from(["forward", "backward"]),
    element=st.sampled_from(["f32", "bf16"]),
    head_size=st.integers(1, 20),
    scale=st.sampled_from([1.0, 0.0, -0.3, 0.125]),
)
def test_any_layout(layout, op, element, head_size, scale):
    random_check("host_blas", layout, op=op, element=element, head_size=head_size, scale=scale)


@every_row
def test_a_row_that_sees_nothing_is_zeros(row):
    layout = BlockSparseLayout([[[1, 1], [0, 0]]], 16)
    got = random_check(row, layout)
    assert (got["o"][:, :, 16:] == 0).all()
    assert np.isneginf(got["lse"][:, :, 16:]).all()
    assert np.isfinite(got["lse"][:, :, :16]).all()
    got = random_check(row, layout, op="backward")
    assert (got["dq"][:, :, 16:] == 0).all()


@every_row
@every_op
def test_nothing_beyond_the_lengths_is_read(row, op):
    layout = random_layout(rows=2, cols=2, density=1.0)
    plan = plan_of(row, layout, op=op, lengths=True)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    operands = operands.with_(q_lengths=np.array([20, -3], np.int32), kv_lengths=np.array([9, 40], np.int32))
    spoilt = {name: operands[name].copy() for name in operands.arrays}
    for name, array in spoilt.items():
        if not name.endswith("lengths"):
            length = 9 if name in "kv" else 20
            array[0, :, length:] = np.nan
    want, got = (case_of(plan, one).run() for one in (operands, operands.with_(**spoilt)))
    for name in want:
        assert np.array_equal(got[name], want[name])
    rows = {"o": 20, "lse": 20, "dq": 20, "dk": 9, "dv": 9}
    for name, bits in got.items():
        beyond = bits.view(np.float32)[0, :, rows[name] :]
        assert (np.isneginf(beyond) if name == "lse" else beyond == 0).all()


def test_the_gradients_are_those_of_the_function():
    """Gradients agree with differences of what ``forward`` computes, in each operand."""
    layout, step = random_layout(rows=2, cols=2, seed=3), 1e-2
    fields = {"kv_heads": 1, "causal": True, "batch": 1}
    plan, back = (plan_of("host_strict", layout, op=op, **fields) for op in ("forward", "backward"))
    rng = np.random.default_rng(0)
    operands, moved = (random_operands(plan.descriptor, layout, rng) for _ in range(2))
    do = rng.standard_normal(operands["q"].shape).astype(np.float32)

    def forward(given: Operands) -> dict[str, np.ndarray]:
        return {name: bits.view(np.float32) for name, bits in case_of(plan, given).run().items()}

    got = case_of(back, operands.with_(**forward(operands), do=do)).run()
    for name in "qkv":
        up, down = (
            forward(operands.with_(**{name: operands[name] + np.float32(sign * step) * moved[name]}))["o"]
            for sign in (1, -1)
        )
        want = ((up - down).astype(np.float64) / (2 * step) * do).sum()
        found = (got[f"d{name}"].view(np.float32) * moved[name]).sum()
        assert found == pytest.approx(want, rel=2e-3, abs=2e-3)


@every_row
def test_products_and_softmax_compose_to_the_same(row):
    """The way without a fused kernel, for any size of blocks."""
    layout = random_layout(rows=3, cols=3, block=32)
    fused = plan_of(row, layout, causal=True)
    operands = random_operands(fused.descriptor, layout, np.random.default_rng(1))
    want = case_of(fused, operands).run()["o"].view(np.float32)
    q, k, v = (operands[name] for name in "qkv")
    scores = np.empty((2, layout.shape.blocks, 32, 32), np.float32)
    probabilities, o = np.empty_like(scores), np.empty_like(q)
    sdd = BlockSparseMatmulDescriptor(op="sdd", layout=layout, n=8, batch=2, element="f32", trans_b=True)
    soft = BlockSparseSoftmaxDescriptor(
        layout=layout, batch=2, element="f32", scale=fused.descriptor.scale, causal=True
    )
    dsd = BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=8, batch=2, element="f32")
    plans = [
        BlockSparseMatmulPlan.select(sdd, device="host", preference=ROWS[row]),
        BlockSparseSoftmaxPlan.select(soft, device="host"),
        BlockSparseMatmulPlan.select(dsd, device="host", preference=ROWS[row]),
    ]
    tables = plans[0].pack(layout)
    plans[0].run(BlockSparseMatmulArgs(tables, q, k, scores))
    plans[1].run(BlockSparseSoftmaxArgs(tables, scores, probabilities))
    plans[2].run(BlockSparseMatmulArgs(tables, probabilities, v, o))
    if row == "host_strict":
        assert np.array_equal(o.view(np.uint32), want.view(np.uint32))
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)


# Dropout ------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    layout=layouts(3),
    op=st.sampled_from(["forward", "backward"]),
    causal=st.booleans(),
    p=st.sampled_from([0.001, 0.5, 1 - 2.0**-16]) | st.floats(0, 0.99),
)
def test_dropout_of_any_layout(layout, op, causal, p):
    random_check("host_blas", layout, op=op, causal=causal, dropout=p, head_size=5)


@every_row
@every_op
@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
def test_dropout_of_every_element(row, op, element):
    layout = random_layout(rows=3, cols=3)
    random_check(row, layout, op=op, element=element, lengths=True, dropout=0.3, kv_heads=1)


def words_of(seed: int, offset: int) -> np.ndarray:
    return np.array([seed, offset], np.uint64).view(np.int32).astype(np.int64)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox(counter, key, words):
    """The vectors are those of the generator's authors."""
    counter, key = (tuple(np.array([word]) for word in one) for one in (counter, key))
    assert tuple(int(word[0]) for word in philox(counter, key)) == words


@pytest.mark.parametrize("p", [2.0**-10, 0.1, 0.5, 0.9])
def test_cells_are_dropped_with_their_probability(p):
    """Within 5 standard deviations, overall and of neighbours together, in each direction."""
    matrices = np.arange(4)[:, None, None]
    out = dropped(words_of(1, 2), p, matrices, np.arange(256)[:, None], np.arange(384))
    pairs = (
        out[1:] & out[:-1],
        out[:, 1:] & out[:, :-1],
        out[..., 1:] & out[..., :-1],
        out[..., 8:] & out[..., :-8],
    )
    for found, wanted in ((out, p), *((pair, p * p) for pair in pairs)):
        assert abs(found.mean() - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / found.size) + 2.0**-17


def test_a_cell_depends_on_seed_offset_and_its_place_alone():
    matrices, rows, cols = np.arange(3)[:, None, None], np.arange(64)[:, None], np.arange(64)
    whole = dropped(words_of(5, 6), 0.5, matrices, rows, cols)
    for at in ((0, 0, 0), (2, 9, 63), (1, 40, 17)):
        one = dropped(words_of(5, 6), 0.5, *(np.array([place]) for place in at))
        assert one[0] == whole[at]
    others = [(6, 6), (5, 7), (5 + (1 << 40), 6), (5, 6 + (1 << 40)), (6, 5)]
    for seed, offset in others:
        share = (dropped(words_of(seed, offset), 0.5, matrices, rows, cols) == whole).mean()
        assert 0.45 < share < 0.55


@every_op
@pytest.mark.parametrize("device", ["host", H200], ids=["host", "h200"])
def test_dropout_is_not_batch_invariant(op, device):
    """Dropout drops other cells of another batch element."""
    one = BlockSparseShape(heads=1, rows=128, cols=128, block=64, blocks=1)
    fields = {"layout": one, "element": "bf16", "head_size": 64, "op": op}
    for p, count in ((0.0, 1), (0.1, 0)):
        desc = BlockSparseAttentionDescriptor(dropout=p, **fields)
        answer = explain(desc, device=device, preference={"require": {"batch_invariant": True}})
        assert len([name for name, _, reason in answer.rows if reason is None]) == count


def test_dropout_keeps_the_mean():
    """The mean is taken over many batches and offsets. The logarithm of sums counts dropped cells, too."""
    layout, batch = random_layout(rows=2, cols=2, density=1.0), 40
    plan, whole = (plan_of("host_blas", layout, dropout=p, batch=batch) for p in (0.25, 0.0))
    drawn = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    operands = drawn.with_(**{name: np.repeat(drawn[name][:1], batch, axis=0) for name in "qkv"})
    without = {name: one for name, one in operands.arrays.items() if name != "seed_offset"}
    wanted = case_of(whole, replace(operands, arrays=without)).run()
    total = np.zeros(operands["q"].shape[1:])
    for offset in range(5):
        got = case_of(plan, operands.with_(seed_offset=words_of(9, offset).astype(np.int32))).run()
        assert np.array_equal(got["lse"], wanted["lse"])
        total += got["o"].view(np.float32).sum(axis=0)
    assert np.abs(total / (5 * batch) - wanted["o"].view(np.float32)[0]).max() < 0.2


# Bits ---------------------------------------------------------------------------------------------


@every_op
def test_strict_results_are_same_again_and_of_batch_alone(op):
    layout = random_layout()
    plan = plan_of("host_strict", layout, op=op, element="bf16", batch=3, lengths=True)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    case = case_of(plan, operands)
    want = {name: bits.copy() for name, bits in case.run().items()}
    case.poison()
    again = case.run()
    alone = plan_of("host_strict", layout, op=op, element="bf16", batch=1, lengths=True)
    last = case_of(alone, operands.batch(plan.descriptor)).run()
    for name, bits in want.items():
        assert np.array_equal(again[name], bits)
        assert np.array_equal(last[name][0], bits[-1])


def test_another_mask_of_same_shape_takes_update_of_tables():
    layout = random_layout(rows=3, cols=3)
    other = BlockSparseLayout(layout.bitmap[:, ::-1], 16)
    plan = plan_of("host_strict", layout)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    case = case_of(plan, operands)
    bound = plan.bind(case.args)
    bound.launch()
    case.args.layout.update(other)
    bound.launch()
    got = {name: bits.copy() for name, bits in case.fetch().items()}
    want = case_of(plan, replace(operands, layout=other)).run()
    assert all(np.array_equal(got[name], want[name]) for name in want)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"element": "fp8_e4m3"}, "element: expected f32 or f16 or bf16, got fp8_e4m3"),
        ({"head_size": 0}, "head_size: "),
        ({"kv_heads": 3}, "kv_heads: expected a divisor of the layout's 2 heads, got 3"),
        ({"kv_heads": 0}, "kv_heads: expected a divisor of the layout's 2 heads, got 0"),
        ({"scale": float("nan")}, "scale: "),
        ({"scale": 1e39}, "scale: expected a value finite in float32"),
        ({"dropout": 1.0}, "dropout: expected a probability from 0 to 1 - 2"),
        ({"dropout": -0.1}, "dropout: expected a probability from 0 to 1 - 2"),
        ({"dropout": float("nan")}, "dropout: "),
        ({"head_size": 2**31 - 1, "batch": 2**31 - 1}, "expected operands of fewer than"),
    ],
)
def test_wrong_fields(change, words):
    good = {"layout": random_layout(), "element": "f32", "head_size": 8}
    made = BlockSparseAttentionDescriptor(**good)
    assert (made.kv_heads, made.scale, made.group) == (2, 8**-0.5, 1)
    assert BlockSparseAttentionDescriptor.model_validate_json(made.model_dump_json()) == made
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseAttentionDescriptor(**{**good, **change})
