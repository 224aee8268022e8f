"""Block-sparse products that nobody tuned for: ``python -m benchmarks.measure blocksparse-random``.

Matrices of published models, n log-uniform from 1 to 8192, any density from 2 to 60%, every size of blocks
and op, operands transposed or not. A quarter of the layouts are uneven: the blocks of a row follow 1 / rank.
Half of the sparse operands of dsd and dds are packed by their plans. ``sweep`` has a few problems with many
n, which show cliffs, ``pairs`` some problems with a random layout and with an uneven one, and ``attention``
fresh lengths and densities beside the fastest dense attention. Steps come in random order, so that a part of
a record is a fair sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, product
from multiprocessing import get_context
from typing import Any

import numpy as np

from sparse24_plans.bench.record import Lists, Record, Step
from sparse24_plans.blocksparse.plan import BlockSparseMatmulPlan
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.tuning.data import free_memory
from sparse24_plans.vocab import BlockSparseOp, BlockSparsePass, DeviceProperties

from . import block_attention, blocks
from .block_operands import ELEMENT
from .models import MODELS

_NAMES = ("shape", "op", "m", "k", "n", "block", "density", "pattern", "transposed", "packed", "element")
LISTS: Lists = {
    "products": _NAMES,
    "sweep": _NAMES,
    "pairs": _NAMES,
    "attention": ("tokens", "heads", "head_size", "block", "density", "direction"),
}
BLOCKS = (128, 64, 32, 16)
FEW, MANY = (1, 200), (201, 8192)
"""Ranges of n, each with as many cells."""
CELLS = 18
"""Cells of a size of blocks, an op and a range of n."""
IN_BAND = (0.05, 0.25)
"""Densities of two thirds of the cells, and of most uneven ones."""
OTHER_BANDS = ((0.02, 0.05), (0.25, 0.6))
SWEPT, SWEEP_TOKENS = 6, 40
PAIRS = 8
"""Problems of a size of blocks whose layout is once random and once uneven."""
ATTENTION_CELLS = 24


@dataclass(frozen=True)
class Cell(blocks.Cell):
    """A random product. ``pattern`` is ``random``, ``uneven`` or ``banded``; records have the first two."""

    shape: str = ""
    seed: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that name the cell in the record."""
        own = {name: one for name, one in asdict(self).items() if name in _NAMES}
        transposed = "a" * self.trans_a + "b" * self.trans_b
        return {**own, "op": self.op.value, "transposed": transposed, "element": ELEMENT.value}

    def bitmap(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Blocks drawn independently, or rows of blocks whose counts follow 1 / rank, in any order."""
        if self.pattern == "banded":
            return super().bitmap()
        rng = np.random.default_rng(self.seed)
        rows, columns = self.m // self.block, self.k // self.block
        if self.pattern == "random":
            return rng.random((rows, columns)) < self.density
        counts = rng.permutation(uneven_counts(rows, columns, self.density))
        ranks = np.argsort(np.argsort(rng.random((rows, columns)), axis=1), axis=1)
        return ranks < counts[:, None]


def uneven_counts(rows: int, columns: int, density: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Blocks of each row, by rank: as 1 / rank, at most all columns, in all as many as the density says."""
    shares, wanted = 1.0 / np.arange(1, rows + 1), density * rows * columns
    low, high = 0.0, float(rows * columns)
    for _ in range(60):
        scale = (low + high) / 2
        if np.minimum(scale * shares, columns).sum() < wanted:
            low = scale
        else:
            high = scale
    found: np.ndarray[Any, np.dtype[np.int64]] = np.rint(np.minimum(high * shares, columns)).astype(np.int64)
    return found


def drawn(seed: int) -> list[Cell]:
    """The products of a seed, in random order."""
    rng = random.Random(f"{seed} products")
    layers = [(f"{model} {layer}", *sides) for model, its in MODELS.items() for layer, sides in its.items()]
    shapes = cycle(rng.sample(layers, len(layers)))
    found = [
        _cell(rng, next(shapes), (block, op, span), number)
        for block, op, span in product(BLOCKS, BlockSparseOp, (FEW, MANY))
        for number in range(CELLS)
    ]
    return rng.sample(found, len(found))


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _cell(
    rng: random.Random,
    sides: tuple[str, int, int],
    about: tuple[int, BlockSparseOp, tuple[int, int]],
    number: int,
) -> Cell:
    """Every fourth cell is uneven, two of three are in the band of densities, and every other four packed."""
    (block, op, span), (shape, m, k) = about, sides
    n = min(int(_log_uniform(rng, span[0], span[1] + 1)), span[1])
    band = IN_BAND if number % 3 < 2 else rng.choice(OTHER_BANDS)
    return Cell(
        op=op,
        m=m // block * block,
        k=k // block * block,
        n=n,
        block=block,
        density=round(_log_uniform(rng, *band), 4),
        pattern="uneven" if number % 4 == 3 else "random",
        shape=shape,
        trans_a=rng.random() < 0.5,
        trans_b=rng.random() < 0.5,
        packed=op is not BlockSparseOp.SDD and number // 4 % 2 == 0,
        seed=rng.randrange(2**31),
    )


def swept(seed: int) -> list[Cell]:
    """A few problems, each with many n."""
    rng = random.Random(f"{seed} sweep")
    found = []
    for cell in rng.sample([one for one in drawn(seed) if one.op is not BlockSparseOp.SDD], SWEPT):
        tokens: set[int] = set()
        while len(tokens) < SWEEP_TOKENS:
            tokens.add(int(_log_uniform(rng, 1, MANY[1])))
        found += [replace(cell, n=n) for n in sorted(tokens)]
    return found


def paired(seed: int) -> list[Cell]:
    """Problems of dsd and dds, each with a random layout and with an uneven one of the same density."""
    rng, found = random.Random(f"{seed} pairs"), list[Cell]()
    for block in BLOCKS:
        products = [one for one in drawn(seed) if one.block == block and one.op is not BlockSparseOp.SDD]
        found += rng.sample(products, PAIRS)
    return [replace(one, pattern=pattern) for one in found for pattern in ("random", "uneven")]


def attentions(seed: int) -> Iterator[block_attention.Cell]:
    """Attention of the lengths and densities of a seed."""
    rng = random.Random(f"{seed} attention")
    for number in range(ATTENTION_CELLS):
        yield block_attention.Cell(
            tokens=128 * int(_log_uniform(rng, 8, 129)),
            heads=rng.choice((4, 8, 12, 16, 24, 32)),
            head_size=(64, 128)[number // 2 % 2],
            block=rng.choice((64, 128)),
            density=round(_log_uniform(rng, 0.05, 0.6), 4),
            direction=tuple(BlockSparsePass)[number % 2].value,
        )


def steps(seed: int) -> list[Step]:
    """The measurements of a seed."""
    found = [Step("products", one.fields, _freeing(partial(_product, one))) for one in drawn(seed)]
    found += [
        Step(name, one.fields, _freeing(partial(_alone, name, one)))
        for name, cells in (("sweep", swept(seed)), ("pairs", paired(seed)))
        for one in cells
    ]
    found += [
        Step("attention", vars(one), _freeing(partial(_attention, one)))
        for one in dict.fromkeys(attentions(seed))
    ]
    return random.Random(f"{seed} steps").sample(found, len(found))


def compile_all(seed: int) -> None:
    """Compile the kernels of a seed's products, some 230, in parallel."""
    found = [*drawn(seed), *swept(seed), *paired(seed)]
    cells = sorted(found, key=lambda one: (one.block, one.op, one.trans_a, one.trans_b))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        list(pool.map(partial(compile_product, cuda_properties(0)), cells, chunksize=8))


def compile_product(device: DeviceProperties, cell: Cell) -> None:
    """Compile into the cache what the cell's plan runs."""
    BlockSparseMatmulPlan.compile(cell.descriptor(cell.layout()), device=device)


def _freeing(measure: Callable[[set[str]], Record]) -> Callable[[set[str]], Record]:
    def measured(sources: set[str]) -> Record:
        free_memory()
        return measure(sources)

    return measured


def _product(cell: Cell, sources: set[str]) -> Record:
    return {"products": [{**blocks.Problem(cell).measured(sources), **cell.fields}]}


def _alone(name: str, cell: Cell, sources: set[str]) -> Record:
    return {name: [{**blocks.Problem(cell).measured_alone(sources), **cell.fields}]}


def _attention(cell: block_attention.Cell, sources: set[str]) -> Record:
    row = block_attention.measured(cell, sources)
    named = {name.replace("dense_", "sdpa_"): value for name, value in row.items()}
    return {"attention": [named]}
