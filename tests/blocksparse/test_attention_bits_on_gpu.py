"""The bits of the GPU's fused attention do not depend on other rows, columns, batches or the workspace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import BlockSparseLayout
from sparse24_plans.blocksparse import limits

from .attention_on_gpu import every_block, every_head_size, every_op, gpu, plan_of
from .problems import case_of, random_operands
from .sample_layouts import random_layout
from .test_attention import check


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
