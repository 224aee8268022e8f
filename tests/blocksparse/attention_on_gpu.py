"""Plans of the GPU's fused attention, and a check of one with random operands.

Fields of the descriptor that aren't given have defaults.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparse24_plans import BlockSparseAttentionDescriptor, BlockSparseAttentionPlan, BlockSparseLayout

from .problems import random_operands
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
