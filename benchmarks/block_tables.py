"""Look-up tables made on the GPU from a bitmap there: a part of ``python -m benchmarks.measure blocksparse``.

Sparse attention changes its mask in each layer and step. Microseconds of one update in a CUDA graph, for a
random mask of each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse24_plans.bench.gemm import rounded
from sparse24_plans.bench.peers import torch
from sparse24_plans.blocksparse.descriptor import BlockSparseAttentionDescriptor
from sparse24_plans.blocksparse.device_tables import SOURCE
from sparse24_plans.blocksparse.layout import BlockSparseLayout
from sparse24_plans.blocksparse.lookup_tables import BlockSparseTables
from sparse24_plans.blocksparse.plan import BlockSparseAttentionPlan
from sparse24_plans.errors import UnsupportedError

from . import block_attention
from .block_operands import ELEMENT, graph_us

_HEAD_SIZE, _UPDATES = 128, 20


@dataclass(frozen=True)
class Cell:
    """An update that is measured."""

    tokens: int
    heads: int
    block: int
    density: float


def cells() -> list[Cell]:
    """The masks of the record's attention."""
    return [
        Cell(block_attention.TOKENS, block_attention.HEADS, block, density)
        for block in block_attention.BLOCKS
        for density in block_attention.DENSITIES
    ]


def measured(cell: Cell, sources: set[str]) -> dict[str, Any]:
    """The cell's row of the record. Adds to ``sources`` what was timed.

    Raises UnsupportedError for wrong tables.
    """
    mask = block_attention.Cell(**vars(cell), head_size=_HEAD_SIZE, direction="forward").bitmap()
    before, after = (BlockSparseLayout(one, cell.block) for one in (mask, np.ascontiguousarray(mask[::-1])))
    desc = BlockSparseAttentionDescriptor(layout=before, head_size=_HEAD_SIZE, element=ELEMENT, op="forward")
    plan = BlockSparseAttentionPlan.select(desc, device=0)
    tables, bitmap = plan.pack(before), torch.from_numpy(after.bitmap.view(np.uint8).copy()).cuda()

    def update() -> None:
        plan.update(tables, bitmap, stream=torch.cuda.current_stream())

    us = graph_us([update] * _UPDATES)
    for made, wanted in zip(tables.lookup, BlockSparseTables(after).lookup, strict=True):
        if not np.array_equal(made, wanted):
            raise UnsupportedError(f"{cell}: wrong tables, not recorded")
    sources.add(SOURCE)
    return {**vars(cell), "us": rounded(us)}
