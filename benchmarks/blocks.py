"""Products of block-sparse matrices: ``python -m benchmarks.measure blocksparse``.

Microseconds of what select chooses, beside dense cuBLAS with the same sizes and, for random blocks of dsd,
PyTorch's own product of a BSR matrix. Values and dense matrices rotate over copies beyond the L2 cache; the
other operand is one. m and k are rows and columns of the sparse matrix. All operands are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparse24_plans.bench.gemm import rounded
from sparse24_plans.bench.peers import on_torch_stream, torch
from sparse24_plans.bench.record import Lists, Record, Step, sources_of
from sparse24_plans.bench.steady import MANY_TOKENS, time_alone
from sparse24_plans.blocksparse.args import BlockSparseMatmulArgs
from sparse24_plans.blocksparse.descriptor import BlockSparseMatmulDescriptor
from sparse24_plans.blocksparse.layout import BlockSparseLayout
from sparse24_plans.blocksparse.plan import BlockSparseMatmulPlan
from sparse24_plans.tuning.data import free_memory
from sparse24_plans.tuning.timing import Contender, copies_beyond_l2
from sparse24_plans.vocab import BlockSparseOp

from . import block_attention, block_tables, blocks24
from .block_operands import ELEMENT, check, dense_of, graph_us, random, timed_once, workspace_of

SHAPES = ((4096, 4096), (8192, 8192), (14336, 4096))
TOKENS = (256, 4096)
DENSITIES = (0.5, 0.2, 0.1, 0.05)
BLOCKS = (128, 64, 32, 16)
PATTERNS = ("random", "banded")


@dataclass(frozen=True)
class Cell:
    """A product that is measured."""

    op: BlockSparseOp
    m: int
    k: int
    n: int
    block: int
    density: float
    pattern: str
    trans_a: bool = False
    trans_b: bool = False
    packed: bool = False

    def bitmap(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """``random``: blocks drawn independently; ``banded``: as many of each row, round the diagonal."""
        rows, columns = self.m // self.block, self.k // self.block
        if self.pattern == "random":
            return np.random.default_rng(1).random((rows, columns)) < self.density
        width = max(1, round(self.density * columns))
        first = np.clip(np.arange(rows) * columns // rows - width // 2, 0, columns - width)
        at = np.arange(columns)
        return (at >= first[:, None]) & (at < first[:, None] + width)

    def layout(self) -> BlockSparseLayout:
        """The bitmap's layout, of one head."""
        return BlockSparseLayout(self.bitmap()[None], self.block)

    def descriptor(self, layout: BlockSparseLayout) -> BlockSparseMatmulDescriptor:
        """The problem with that layout."""
        return BlockSparseMatmulDescriptor(
            op=self.op,
            layout=layout,
            n=self.n,
            element=ELEMENT,
            trans_a=self.trans_a,
            trans_b=self.trans_b,
            packed=self.packed,
        )


def cells() -> list[Cell]:
    """Every product of the record. sdd is judged beside large products of random blocks alone."""
    return [
        Cell(op, m, k, n, block, density, pattern)
        for m, k in SHAPES
        for n in TOKENS
        for block in BLOCKS
        for pattern in PATTERNS
        for density in DENSITIES
        for op in BlockSparseOp
        if op is not BlockSparseOp.SDD or (n == max(TOKENS) and pattern == "random")
    ]


LISTS: Lists = {
    "products": ("op", "m", "k", "n", "block", "density", "pattern", "element"),
    "sparse24": ("op", "m", "k", "n", "block", "density", "element"),
    "attention": ("tokens", "heads", "head_size", "block", "density", "direction"),
    "tables": ("tokens", "heads", "block", "density"),
}


def steps() -> list[Step]:
    """The measurements of the whole record."""
    parts = (
        ("products", cells(), measured),
        ("sparse24", blocks24.cells(), blocks24.measured),
        ("attention", block_attention.cells(), block_attention.measured),
        ("tables", block_tables.cells(), block_tables.measured),
    )
    return [
        Step(name, _named(name, cell), partial(_rows, name, measure, cell))
        for name, chosen, measure in parts
        for cell in chosen
    ]


def _named(name: str, cell: Any) -> Record:
    """The cell's own fields that name its row in a list of the record."""
    return {key: value for key, value in vars(cell).items() if key in LISTS[name]}


def _rows(name: str, measure: Callable[[Any, set[str]], Record], cell: Any, sources: set[str]) -> Record:
    free_memory()
    return {name: [measure(cell, sources)]}


def measured(cell: Cell, sources: set[str]) -> Record:
    """The cell's row of the record. Adds to ``sources`` what was timed."""
    return Problem(cell).measured(sources)


class Problem:
    """The operands of a cell, as PyTorch's tensors."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.layout = cell.layout()
        self.desc = cell.descriptor(self.layout)
        shapes = {one.name: one.shape for one in self.desc.operands()}
        self.sparse = self.desc.sparse
        self.made = {name: random(shapes[name]) for name in ("a", "b", "c") if name != self.sparse}
        nbytes = self.layout.shape.blocks * cell.block**2 * ELEMENT.itemsize
        self.values = [random(shapes[self.sparse]) for _ in range(copies_beyond_l2(nbytes))]

    def measured(self, sources: set[str]) -> dict[str, Any]:
        """The row of the record. Adds to ``sources`` what was timed."""
        plan = BlockSparseMatmulPlan.select(self.desc, device=0)
        ours = self.ours(plan)
        self.check(ours)
        time, cell = time_alone([ours])[ours.name], self.cell
        key = cell.op, cell.m, cell.k, cell.n, cell.trans_a, cell.trans_b
        dense = timed_once(key, lambda: time_alone([self.dense()])["dense"])
        sources.update(sources_of(plan))
        return {
            **{name: getattr(cell, name) for name in ("m", "k", "n", "block", "density", "pattern")},
            "op": cell.op.value,
            "element": ELEMENT.value,
            "us": rounded(time.us),
            "dense_us": rounded(dense.us),
            "torch_bsr_us": rounded(self._bsr_us()),
            "backend": plan.explain().chosen,
            **(time.fields() | dense.fields("dense_us") if cell.n >= MANY_TOKENS else {}),
        }

    def measured_alone(self, sources: set[str]) -> dict[str, Any]:
        """Time and kernel of what select chooses, without a peer."""
        plan = BlockSparseMatmulPlan.select(self.desc, device=0)
        ours = self.ours(plan)
        self.check(ours)
        sources.update(sources_of(plan))
        return {"us": rounded(time_alone([ours])["ours"].us), "backend": plan.explain().chosen}

    def ours(self, plan: BlockSparseMatmulPlan) -> Contender:
        """The plan's launches, one for each copy of the values."""
        space = workspace_of(plan)
        bound = [plan.bind(args, workspace=space) for args in self._arguments(plan)]
        return Contender("ours", [one.launch for one in bound])

    def _arguments(self, plan: BlockSparseMatmulPlan) -> list[BlockSparseMatmulArgs]:
        """The operands, with each copy of the values; packed ones rotate over copies beyond L2, too."""
        if not self.desc.packed:
            tables = plan.pack(self.layout)
            return [
                BlockSparseMatmulArgs(layout=tables, **self.made, **{self.sparse: values})
                for values in self.values
            ]
        packed = [plan.pack(self.layout, values) for values in self.values[:1]]
        packed += [
            plan.pack(self.layout, self.values[at % len(self.values)])
            for at in range(1, copies_beyond_l2(packed[0].nbytes))
        ]
        return [
            BlockSparseMatmulArgs(layout=None, **self.made, **{self.sparse: operand}) for operand in packed
        ]

    def check(self, ours: Contender) -> None:
        """Against a dense product in float32 of the same 16-bit operands."""
        result = self.values[0] if self.sparse == "c" else self.made["c"]
        result.fill_(float("nan"))
        ours.launches[0](torch.cuda.current_stream().cuda_stream)
        layout, values = self.layout, self.values[0][0]
        a, b = (dense_of(layout, values) if name == self.sparse else self.made[name][0, 0] for name in "ab")
        a, b = self._as_multiplied(a, b)
        exact = a.float() @ b.float()
        got = result[0, 0].float()
        if self.sparse == "c":
            exact, got = exact * dense_of(layout, torch.ones_like(values)), dense_of(layout, values).float()
        check(self.cell, got, exact)

    def dense(self) -> Contender:
        """cuBLAS, of matrices without a zero block."""
        cell = self.cell
        if self.sparse == "c":
            a, b = self._as_multiplied(self.made["a"][0, 0], self.made["b"][0, 0])
            out = random((cell.m, cell.k))
            return Contender("dense", [on_torch_stream(lambda: torch.mm(a, b, out=out))])
        copies = copies_beyond_l2(cell.m * cell.k * ELEMENT.itemsize)
        return Contender("dense", [self._product(random((cell.m, cell.k))) for _ in range(copies)])

    def _product(self, matrix: Any) -> Callable[[int], None]:
        given = {name: one[0, 0] for name, one in self.made.items()} | {self.sparse: matrix}
        a, b = self._as_multiplied(given["a"], given["b"])
        return on_torch_stream(lambda: torch.mm(a, b, out=given["c"]))

    def _as_multiplied(self, a: Any, b: Any) -> tuple[Any, Any]:
        """The stored matrices as they enter the product."""
        return a.t() if self.cell.trans_a else a, b.t() if self.cell.trans_b else b

    def _bsr_us(self) -> float | None:
        """PyTorch's BSR in Triton, in a CUDA graph of its own; None if it isn't wanted, or doesn't serve."""
        cell = self.cell
        if cell.op is not BlockSparseOp.DSD or cell.pattern == "banded" or cell.trans_a or cell.trans_b:
            return None
        one = self.layout.shape
        crow, col = (torch.from_numpy(np.asarray(part)).cuda().reshape(-1) for part in self.layout.to_bsr())
        x = self.made["b"][0, 0]
        matrices = [
            torch.sparse_bsr_tensor(crow, col, values[0], (one.rows, one.cols)) for values in self.values
        ]
        try:
            return graph_us([partial(torch.mm, matrix, x) for matrix in matrices])
        except RuntimeError:  # some sizes of blocks and some results are beyond it
            return None
