"""Times schedules and ways of block-sparse products on random problems, for ``measure_schedules``."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

from sparse24_plans import BlockSparseOp, Sparse24Error
from sparse24_plans.bench.steady import time_alone
from sparse24_plans.blocksparse.descriptor import BlockSparseMatmulDescriptor
from sparse24_plans.blocksparse.kernel_problem import COUNTER_BYTES, KernelProblem, slice_bytes
from sparse24_plans.blocksparse.plan import BlockSparseMatmulPlan
from sparse24_plans.blocksparse.schedules import blocks_wgmma
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma import schedules_by_density, tiles_of_large_blocks
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import APART, LONG_FIRST, Cut, others
from sparse24_plans.blocksparse.schedules.predicted_times import both_us, few_tokens
from sparse24_plans.blocksparse.schedules.sdd_mma import MAX_TERMS
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.plan.kernel import align_up
from sparse24_plans.plan.schedule_choice import REFERENCE_SMS
from sparse24_plans.tuning.data import free_memory
from sparse24_plans.tuning.timing import Contender, time_contenders
from sparse24_plans.vocab import DeviceProperties

from . import blocks, random_blocks

Row = dict[str, Any]
NEAR = 1.5
"""Two ways are compared where neither is predicted to take more than this multiple of the other's time."""
CELLS_OF_A_ROUND = 48
MAX_CELLS = 1 << 27
"""Cells of a matrix for packed operands, whose tables the host makes quickly."""


def block_cells(rng: random.Random) -> Iterator[random_blocks.Cell]:
    """Any cells, half of them sdd. For dsd and dds the density decides below blocks of 64 alone."""
    while True:
        op = rng.choice((BlockSparseOp.SDD, rng.choice(list(BlockSparseOp))))
        sampled = op is BlockSparseOp.SDD
        few = sampled and rng.random() < 0.25
        yield random_blocks.Cell(
            op=op,
            m=128 * int(2 ** rng.uniform(2, 6.5)),
            k=128 * int(2 ** rng.uniform(2, 6.5)),
            n=int(2 ** rng.uniform(0, 6)) if few else int(2 ** rng.uniform(6, 13)),
            block=rng.choice((16, 32, 64, 128) if sampled else (16, 32)),
            density=rng.uniform(0.02, 0.6),
            pattern=rng.choice(("random", "uneven")) if sampled else rng.choice(blocks.PATTERNS),
            trans_a=rng.random() < 0.5,
            trans_b=rng.random() < 0.5,
            seed=rng.randrange(2**31),
        )


def forced(problem: blocks.Problem, name: str, backend: str, **wishes: Any) -> Contender:
    """A backend's plan for the problem, checked. Raises UnsupportedError for a wrong result."""
    wanted = {"prefer_backend": backend, **wishes}
    ours = problem.ours(BlockSparseMatmulPlan.select(problem.desc, device=0, preference=wanted))
    problem.check(ours)
    ours.name = name
    return ours


def measure_blocks(seed: int, end: float) -> Iterator[Row]:
    spare = 1 << 30  # bytes of workspace that no other problem is allowed, since plans are cached
    for cell in block_cells(random.Random(seed)):
        if time.monotonic() > end:
            return
        problem = blocks.Problem(cell)
        contenders = [problem.dense()]
        backends = {"inflate": "inflate_cublas"}
        if cell.op is BlockSparseOp.SDD and cell.n <= MAX_TERMS:
            backends["mma"] = "blocks_mma"
        contenders += [forced(problem, name, backend) for name, backend in backends.items()]
        for schedule in schedules_by_density(problem.desc):
            spare += 1
            name = f"{schedule.rows},{schedule.tokens},{schedule.cluster_n}"
            with mock.patch.object(blocks_wgmma.BlocksWgmmaSchedule, "of", return_value=schedule):
                contenders.append(forced(problem, name, "blocks_wgmma", max_workspace_bytes=spare))
        times = time_contenders(contenders, rounds=5, round_ms=0.7)
        us = {name: round(one, 1) for name, one in times.items()}
        others = {f"{name}_us": us.pop(name) for name in ("dense", "inflate", "mma") if name in us}
        yield {**asdict(cell), **others, "us": us}
        free_memory()


def inflated_cells(rng: random.Random) -> Iterator[random_blocks.Cell]:
    """Random cells whose kept blocks and inflated product are predicted to take nearly the same time.

    ``sdd`` has no bands, since its descriptor doesn't tell them from blocks that are kept at random.
    """
    while True:
        op = rng.choice(list(BlockSparseOp))
        sampled, n = op is BlockSparseOp.SDD, int(2 ** rng.uniform(6, 13))
        cell = random_blocks.Cell(
            op=op,
            m=128 * int(2 ** rng.uniform(2, 6.5)),
            k=128 * int(2 ** rng.uniform(2, 6.5)),
            n=rng.choice((n, n // 8 * 8)),
            block=rng.choice((16, 32) if sampled else (16, 16, 32, 32, 64, 128)),
            density=rng.uniform(0.02, 0.9),
            pattern=rng.choice(("random", "uneven") if sampled else (*blocks.PATTERNS, "uneven")),
            trans_a=rng.random() < 0.5,
            trans_b=rng.random() < 0.5,
            seed=rng.randrange(2**31),
        )
        kept, inflated = both_us(cell.descriptor(cell.layout()))
        if 1 / NEAR < kept / inflated < NEAR:
            yield cell


def measure_inflated(seed: int, end: float) -> Iterator[Row]:
    for cell in inflated_cells(random.Random(seed)):
        if time.monotonic() > end:
            return
        problem = blocks.Problem(cell)
        ways = {"us": "blocks_wgmma", "inflate_us": "inflate_cublas"}
        times = time_alone([forced(problem, name, backend) for name, backend in ways.items()])
        yield {**asdict(cell), **{name: round(times[name].us, 2) for name in ways}}
        free_memory()


def large_block_cells(rng: random.Random) -> Iterator[random_blocks.Cell]:
    """Random cells of dsd and dds with blocks of 64 and 128, of matrices that are made quickly."""
    while True:
        m, k = (128 * int(2 ** rng.uniform(2, 7.5)) for _ in range(2))
        cell = random_blocks.Cell(
            op=rng.choice((BlockSparseOp.DSD, BlockSparseOp.DDS)),
            m=m,
            k=k,
            n=int(2 ** rng.uniform(5, 13)),
            block=rng.choice((64, 128)),
            density=2 ** rng.uniform(-6, -1),
            pattern=rng.choice(("random", "random", "uneven", "banded")),
            trans_a=rng.random() < 0.3,
            trans_b=rng.random() < 0.3,
            seed=rng.randrange(2**31),
        )
        if m * k <= MAX_CELLS and cell.bitmap().any():
            yield cell


def cuts_of(desc: BlockSparseMatmulDescriptor) -> dict[str, Cut]:
    """Each tile of large blocks that may be chosen: whole, with long panels first, and cut if it may be."""
    problem, found = KernelProblem(desc), dict[str, Cut]()
    for one in tiles_of_large_blocks(desc):
        if one.tokens > 64 and one.tokens >= 2 * desc.n:
            continue  # half of the tile would have no tokens
        ways = [Cut(one), Cut(one, LONG_FIRST, align_up(COUNTER_BYTES))]
        if problem.slicing() is not None:
            ways.append(Cut(one, APART, *slice_bytes(problem, one.rows)))
        found |= {cut.name: cut for cut in ways}
    return found


def running(cut: Cut) -> Any:
    """A context in which ``blocks_wgmma`` runs this cut."""
    return mock.patch("sparse24_plans.blocksparse.backends.blocks_wgmma.as_run", return_value=cut)


def compile_cut(device: DeviceProperties, cell: random_blocks.Cell, name: str) -> None:
    """Compile into the cache what the plan of one of the cell's cuts launches."""
    desc = cell.descriptor(cell.layout())
    with running(cuts_of(desc)[name]):
        BlockSparseMatmulPlan.compile(desc, preference={"prefer_backend": "blocks_wgmma"}, device=device)


def compile_cuts(cells: Sequence[random_blocks.Cell]) -> None:
    """Compile the kernels that the cells' cuts launch, in parallel and each once."""
    kernels = {
        (cell.op, cell.block, cell.trans_a, cell.trans_b, cell.n % 8 == 0, name): (cell, name)
        for cell in cells
        for name in cuts_of(cell.descriptor(cell.layout()))
    }
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        list(pool.map(partial(compile_cut, cuda_properties(0)), *zip(*kernels.values(), strict=True)))


def measure_large_blocks(seed: int, end: float) -> Iterator[Row]:
    spare, drawing = 1 << 40, large_block_cells(random.Random(seed))  # as in measure_blocks
    while True:
        cells = list(itertools.islice(drawing, CELLS_OF_A_ROUND))
        compile_cuts(cells)
        for cell in cells:
            if time.monotonic() > end:
                return
            problem = blocks.Problem(cell)
            contenders = [problem.dense()]
            for name, cut in cuts_of(problem.desc).items():
                spare += 1
                with running(cut):
                    contenders.append(forced(problem, name, "blocks_wgmma", max_workspace_bytes=spare))
            try:
                times = time_contenders(contenders, rounds=5, round_ms=0.7)
            except Exception:  # of the driver, which names no problem
                print(f"failed: {cell}", file=sys.stderr, flush=True)
                raise
            us = {name: round(one, 2) for name, one in times.items()}
            about = {**asdict(cell), "longest_panel": problem.desc.longest_panel}
            yield {**about, "dense_us": us.pop("dense"), "us": us}
            free_memory()


def packed_cells(seed: int) -> Iterator[random_blocks.Cell]:
    """The cells of a seed and of those that follow, every third with its blocks round the diagonal."""
    for one in itertools.count(seed):
        for number, cell in enumerate(random_blocks.drawn(one)):
            if cell.op is not BlockSparseOp.SDD and cell.m * cell.k <= MAX_CELLS:
                yield replace(cell, pattern="banded") if number % 3 == 0 else cell


def packed_times(problem: blocks.Problem) -> Row:
    """Microseconds of a packed product by its kept blocks: by the name of each cut, and by the kernel for few
    tokens."""
    desc, contenders = problem.desc, []
    cut = Cut.of(desc, REFERENCE_SMS).narrowed(desc)
    cuts = {one.name: one for one in (cut, *others(desc, cut))}
    for number, (name, one) in enumerate(cuts.items()):
        with running(one):  # plans are cached
            spare = (1 << 35) + number
            contenders.append(forced(problem, name, "blocks_wgmma", max_workspace_bytes=spare))
    tried = BlocksMmaSchedule.candidates(desc) if desc.n <= few_tokens(desc.layout.block) else []
    for number, schedule in enumerate(tried):
        with mock.patch.object(BlocksMmaSchedule, "of", return_value=schedule):
            spare = (1 << 30) + number
            contenders.append(forced(problem, schedule.name, "blocks_mma", max_workspace_bytes=spare))
    times = {name: round(us, 2) for name, us in time_contenders(contenders, rounds=5, round_ms=0.7).items()}
    us = {name: times.pop(name) for name in cuts}
    return {"us": us, "mma_us": times} if times else {"us": us}


def uneven_cells(rng: random.Random) -> Iterator[random_blocks.Cell]:
    """Rows whose numbers of blocks follow 1 / rank, two thirds of them with few tokens."""
    while True:
        m, k = (128 * int(2 ** rng.uniform(2.5, 8)) for _ in range(2))
        unit, low, high = rng.choice(((1, 0, 6), (8, 0, 5), (8, 5, 8)))
        cell = random_blocks.Cell(
            op=rng.choice((BlockSparseOp.DSD, BlockSparseOp.DDS)),
            m=m,
            k=k,
            n=unit * int(2 ** rng.uniform(low, high)),
            block=rng.choice((16, 32, 64, 128)),
            density=2 ** rng.uniform(-5.5, -1.2),
            pattern="uneven",
            trans_b=rng.random() < 0.5,
            packed=True,
            seed=rng.randrange(2**31),
        )
        if m * k <= MAX_CELLS and cell.bitmap().any():
            yield cell


def measure_cuts(cells: Iterator[random_blocks.Cell], end: float) -> Iterator[Row]:
    """Lines of packed operands, until the monotonic clock says ``end``."""
    for cell in cells:
        if time.monotonic() > end:
            return
        problem = blocks.Problem(replace(cell, packed=True))
        try:
            times = packed_times(problem)
        except Sparse24Error as error:  # a wrong result
            print(f"{cell}: {error}", file=sys.stderr, flush=True)
            continue
        about = {"blocks": problem.layout.shape.blocks, "longest_panel": problem.desc.longest_panel}
        yield {**cell.fields, **about, **times}
        free_memory()


def measure_packed(seed: int, end: float) -> Iterator[Row]:
    """Random cells of dsd and dds, even, uneven and banded, of matrices that are made quickly."""
    random_blocks.compile_all(seed)
    yield from measure_cuts(packed_cells(seed), end)


def measure_uneven(seed: int, end: float) -> Iterator[Row]:
    yield from measure_cuts(uneven_cells(random.Random(seed)), end)


def measure_dense(seed: int, end: float) -> Iterator[Row]:
    rng = random.Random(seed)
    while time.monotonic() < end:
        m, k = (128 * int(2 ** rng.uniform(2, 8.5)) for _ in range(2))
        n = 8 * int(2 ** rng.uniform(0, 10))
        cell = random_blocks.Cell(
            op=BlockSparseOp.DSD, m=m, k=k, n=n, block=128, density=0.01, pattern="random"
        )
        if m * k <= MAX_CELLS:
            us = time_alone([blocks.Problem(cell).dense()])["dense"].us
            yield {"m": m, "k": k, "n": n, "element": "bf16", "us": round(us, 2)}
            free_memory()


MEASURE: Mapping[str, Callable[[int, float], Iterator[Row]]] = {
    "blocks": measure_blocks,
    "large-blocks": measure_large_blocks,
    "inflated": measure_inflated,
    "packed": measure_packed,
    "uneven": measure_uneven,
    "dense": measure_dense,
}
"""Family -> what measures its problems of a seed, until the monotonic clock says the given seconds."""
