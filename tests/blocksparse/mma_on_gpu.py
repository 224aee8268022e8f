"""Plans of ``blocks_mma`` and ``sdd_mma``. Fields of the descriptor that aren't given have defaults."""

from __future__ import annotations

from typing import Any

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseMatmulPlan

OPS = ("dsd", "dds")
BLOCKS = (16, 32, 64, 128)
FORCED = {"prefer_backend": "blocks_mma"}


def plan_of(**fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 40, "batch": 2, "element": "bf16", **fields})
    return BlockSparseMatmulPlan.select(desc, device=0, preference=FORCED)
