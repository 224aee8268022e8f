"""Dropout of the GPU's fused attention: against float64, the host's cells, seeds read at each replay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparse24_plans import BlockSparseAttentionPlan

from .attention_on_gpu import ROWS, every_block, every_large_head, every_op, gpu, plan_of, random_check
from .problems import attention_scores, case_of, dropout_factors, forward64, random_operands
from .sample_layouts import random_layout


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
