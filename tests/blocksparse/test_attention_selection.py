"""Which attention the GPU's kernels serve and refuse, and the workspace that they ask for, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseShape,
    DeviceProperties,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse import limits

from ..sample_devices import A100, H200
from .attention_on_gpu import ROWS, every_block, every_op, plan_of
from .sample_layouts import random_layout

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
