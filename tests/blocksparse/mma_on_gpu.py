"""Plans of ``blocks_mma`` and ``sdd_mma``. Fields of the descriptor that aren't given have defaults."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparse24_plans import BlockSparseLayout, BlockSparseMatmulDescriptor, BlockSparseMatmulPlan

OPS = ("dsd", "dds")
BLOCKS = (16, 32, 64, 128)
FORCED = {"prefer_backend": "blocks_mma"}


def plan_of(**fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 40, "batch": 2, "element": "bf16", **fields})
    return BlockSparseMatmulPlan.select(desc, device=0, preference=FORCED)


def with_a_long_row(block: int, heads: int = 1) -> BlockSparseLayout:
    """A hundredth of the blocks at random, and one row of each head whole."""
    kept = np.random.default_rng(block).random((heads, 64, 16384 // block)) < 0.01
    kept[:, 7] = True
    return BlockSparseLayout(kept, block)
