"""Products of kept blocks that are 2:4 inside: a part of ``python -m benchmarks.measure blocksparse``.

Microseconds of what select chooses, beside what it chooses for the same layout of whole blocks and dense
cuBLAS with the same sizes, each alone. Sparse operands rotate over copies beyond the L2 cache, and so does
the dense matrix in their place; the other operand is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse24_plans.bench.gemm import rounded
from sparse24_plans.bench.peers import on_torch_stream, torch
from sparse24_plans.bench.record import sources_of
from sparse24_plans.bench.steady import time_alone
from sparse24_plans.blocksparse.args import BlockSparseMatmulArgs
from sparse24_plans.blocksparse.descriptor import BlockSparseMatmulDescriptor
from sparse24_plans.blocksparse.layout import BlockSparseLayout
from sparse24_plans.blocksparse.pattern24 import metadata_of, positions
from sparse24_plans.blocksparse.plan import BlockSparseMatmulPlan
from sparse24_plans.tuning.timing import Contender, copies_beyond_l2
from sparse24_plans.vocab import BlockSparseOp, InnerPattern
from sparse24_plans.weights.codes import VALID_CODES

from .block_operands import ELEMENT, check, dense_of, random, timed_once, workspace_of

SHAPES = ((4096, 4096), (8192, 8192), (14336, 4096))
TOKENS = 4096
DENSITIES = (0.5, 0.2, 0.1, 0.05)
BLOCKS = (128, 64)
OPS = (BlockSparseOp.DSD, BlockSparseOp.DDS)
_DRAWN = 32
"""Number of blocks whose metadata are drawn; the other blocks repeat these."""


@dataclass(frozen=True)
class Cell:
    """A product that is measured; m, k: rows and columns of the sparse matrix."""

    op: BlockSparseOp
    m: int
    k: int
    n: int
    block: int
    density: float

    def bitmap(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Blocks drawn independently."""
        shape = self.m // self.block, self.k // self.block
        return np.random.default_rng(1).random(shape) < self.density


def cells() -> list[Cell]:
    """Every product of the record."""
    return [
        Cell(op, m, k, TOKENS, block, density)
        for m, k in SHAPES
        for block in BLOCKS
        for density in DENSITIES
        for op in OPS
    ]


def measured(cell: Cell, sources: set[str]) -> dict[str, Any]:
    """The cell's row of the record. Adds to ``sources`` what was timed.

    Raises UnsupportedError for a wrong result.
    """
    problem = _Problem(cell)
    plan = problem.plan(InnerPattern.SPARSE24)
    ours = problem.contender("ours", plan, problem.kept_copies())
    problem.check(ours)
    whole = problem.contender("blocks", problem.plan(InnerPattern.DENSE), problem.whole_copies())
    times = time_alone([whole, ours])
    key = cell.op, cell.m, cell.k, cell.n
    dense = timed_once(key, lambda: time_alone([problem.dense()])["dense"])
    sources.update(sources_of(plan))
    return {
        **{name: getattr(cell, name) for name in ("m", "k", "n", "block", "density")},
        "op": cell.op.value,
        "element": ELEMENT.value,
        "us": rounded(times["ours"].us),
        "blocks_us": rounded(times["blocks"].us),
        "dense_us": rounded(dense.us),
        "backend": plan.explain().chosen,
        **times["ours"].fields(),
        **dense.fields("dense_us"),
    }


class _Problem:
    """The operands of a cell, as PyTorch's tensors."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.layout = BlockSparseLayout(cell.bitmap()[None], cell.block)
        on_the_right = cell.op is BlockSparseOp.DDS
        self.sparse, self.other = ("b", "a") if on_the_right else ("a", "b")
        m, k, n = cell.m, cell.k, cell.n
        self.x = random((1, 1, n, m) if on_the_right else (1, 1, k, n))
        self.c = random((1, 1, n, k) if on_the_right else (1, 1, m, n))
        block, count = cell.block, self.layout.shape.blocks
        drawn = np.random.default_rng(2).choice(
            np.array(VALID_CODES, np.uint8), (1, _DRAWN, block, block // 4)
        )
        chosen = torch.arange(count, device="cuda") % _DRAWN
        metadata, at = (
            torch.from_numpy(one).cuda()[:, chosen] for one in (metadata_of(drawn), positions(drawn))
        )
        values = random((1, count, block, block // 2))
        self.kept = values, metadata
        whole = values.new_zeros(1, count, block, block).scatter_(3, at, values)
        self.whole = (whole.transpose(2, 3) if on_the_right else whole).contiguous()

    def plan(self, inner: InnerPattern) -> BlockSparseMatmulPlan:
        cell = self.cell
        return BlockSparseMatmulPlan.select(
            BlockSparseMatmulDescriptor(
                op=cell.op, layout=self.layout, n=cell.n, element=ELEMENT, inner=inner
            ),
            device=0,
        )

    def kept_copies(self) -> list[dict[str, Any]]:
        values, metadata = self.kept
        count = copies_beyond_l2(values.nbytes + metadata.nbytes)
        return [{self.sparse: values.clone(), "metadata": metadata.clone()} for _ in range(count)]

    def whole_copies(self) -> list[dict[str, Any]]:
        return [{self.sparse: self.whole.clone()} for _ in range(copies_beyond_l2(self.whole.nbytes))]

    def contender(self, name: str, plan: BlockSparseMatmulPlan, copies: list[dict[str, Any]]) -> Contender:
        shared = {"layout": plan.pack(self.layout), self.other: self.x, "c": self.c}
        space = workspace_of(plan)
        bound = [plan.bind(BlockSparseMatmulArgs(**shared, **one), workspace=space) for one in copies]
        return Contender(name, [one.launch for one in bound])

    def dense(self) -> Contender:
        """cuBLAS, of matrices without a zero."""
        shape = self.cell.m, self.cell.k
        count = copies_beyond_l2(shape[0] * shape[1] * ELEMENT.itemsize)
        return Contender("dense", [self._product(random(shape)) for _ in range(count)])

    def _product(self, matrix: Any) -> Callable[[int], None]:
        given = {self.sparse: matrix, self.other: self.x[0, 0]}
        return on_torch_stream(lambda: torch.mm(given["a"], given["b"], out=self.c[0, 0]))

    def check(self, ours: Contender) -> None:
        """Against a dense product in float32 of the same 16-bit operands."""
        self.c.fill_(float("nan"))
        ours.launches[0](torch.cuda.current_stream().cuda_stream)
        given = {self.sparse: dense_of(self.layout, self.whole[0]).float(), self.other: self.x[0, 0].float()}
        check(self.cell, self.c[0, 0].float(), given["a"] @ given["b"])
