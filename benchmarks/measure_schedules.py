"""Times every schedule that a kernel might take on random problems, for ``benchmarks.fit`` to fit models to.

``python -m benchmarks.measure_schedules FAMILY --seconds S --seed R``, on the GPU to be measured; an hour a
family is plenty. Then ``python -m benchmarks.fit --gpu NAME``. Families, and the files of
``benchmarks/schedules/`` that they append to, a line a problem:

- ``gemm``: wgmma_sp with elements of 16 and 8 bits, in ``<gpu>-times.jsonl``;
- ``quantized``: wgmma_sp with bf16 X and weights of s4, s8 and fp8_e4m3, in
  ``<gpu>-quantized-times.jsonl``, whose lines also name ``weight_element`` and ``weight_group``;
- ``f32``: float32 in bf16 terms, in ``<gpu>-f32-times.jsonl``, whose lines also name the ``terms``;
- ``blocks``: blocks_wgmma, in ``<gpu>-block-times.jsonl``;
- ``large-blocks``: blocks_wgmma for dsd and dds with blocks of 64 and 128, in
  ``<gpu>-large-block-times.jsonl``, whose lines also name the ``longest_panel``;
- ``packed``: packed operands of block-sparse products as kept blocks, in ``<gpu>-packed-times.jsonl``;
- ``dense``: cuBLAS's product of bf16, in ``<gpu>-dense-times.jsonl``, alone in a steady state: a power limit
  slows large ones by a quarter, and kept blocks less.

A line has the problem, ``dense_us`` of the dense product, and ``us``: microseconds by the schedule's fields.
Lines of ``blocks`` also have ``inflate_us``, the product of the inflated matrix. Lines of few tokens also
have ``mma_us``, of the kernel for few tokens: for ``packed`` by its warps, strips and tiles of tokens. Lines
of ``large-blocks`` and ``packed`` have times by the name of a ``Cut``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

from sparse24_plans import (
    BlockSparseOp,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Error,
)
from sparse24_plans.bench.gemm import Cell
from sparse24_plans.bench.scope import SHAPES
from sparse24_plans.bench.steady import time_alone
from sparse24_plans.blocksparse.descriptor import BlockSparseMatmulDescriptor
from sparse24_plans.blocksparse.kernel_problem import COUNTER_BYTES, KernelProblem, slice_bytes
from sparse24_plans.blocksparse.plan import BlockSparseMatmulPlan
from sparse24_plans.blocksparse.schedules import blocks_wgmma
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma import schedules_by_density, tiles_of_large_blocks
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import APART, LONG_FIRST, Cut, others
from sparse24_plans.blocksparse.schedules.predicted_times import FEW_TOKENS
from sparse24_plans.blocksparse.schedules.sdd_mma import MOST_TERMS
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.gemm.kernel_table import ENTRIES, GemmEntry
from sparse24_plans.gemm.schedules import f32_split_heuristics
from sparse24_plans.gemm.schedules.wgmma_cost_model import predicted
from sparse24_plans.gemm.schedules.wgmma_heuristics import invariant_split_k
from sparse24_plans.gemm.schedules.wgmma_sp import (
    MAX_MEMORY_BOUND_N,
    WgmmaSpSchedule,
    schedules_for,
    schedules_in,
    widths,
)
from sparse24_plans.plan.kernel import Choice, align_up
from sparse24_plans.plan.schedule_choice import REFERENCE_SMS
from sparse24_plans.tuning.data import Matrix, free_memory
from sparse24_plans.tuning.timing import Contender, time_contenders
from sparse24_plans.vocab import DeviceProperties, ElementKind

from . import blocks, random_blocks
from .descent import SCHEDULES, file_of

Row = dict[str, Any]
# (M, K) of models: Qwen2.5, Gemma 2, Phi-3, Llama 2 and 3.2.
MODELS = """
4608,3584 3584,3584 37888,3584 3584,18944 3072,2048 2048,2048 16384,2048 2048,8192 7168,5120 5120,5120
27648,5120 5120,13824 3584,4096 28672,3584 3584,14336 9216,3072 3072,3072 16384,3072 3072,8192 55296,5120
5120,27648 15360,5120 12288,4096 4096,11008 22016,4096 1536,1536 2560,6912 13824,2560 5376,21504 768,3072
"""
# Shapes that are tried here beside those of the kernel's schedules: (warpgroups, m64 tiles of a warpgroup,
# CTAs along M, split-K, CTAs per SM).
MORE_OF_FEW = (
    (1, 1, 1, 1, 2), (1, 1, 1, 1, 4), (1, 1, 1, 2, 4), (1, 1, 1, 3, 1), (1, 1, 1, 3, 2), (1, 1, 1, 3, 4),
    (1, 1, 1, 6, 1), (1, 1, 1, 6, 2), (2, 1, 1, 1, 2), (2, 1, 1, 2, 2), (2, 1, 1, 3, 1), (3, 1, 1, 3, 1),
    (2, 2, 1, 4, 1), (3, 2, 1, 1, 1), (3, 2, 1, 2, 1),
)  # fmt: skip
MORE_OF_MANY = ((2, 2, 1, 2, 1), (1, 1, 1, 3, 1), (2, 1, 1, 3, 1), (2, 2, 2, 1, 1))
PROBLEMS_OF_A_MATRIX, MATRICES_OF_A_ROUND, CELLS_OF_A_ROUND = 3, 12, 48
HOPELESS = 1.5
"""A schedule whose predicted time is more than this multiple of the least is not timed."""


class Drawn(NamedTuple):
    """A random matrix, and the n that it is measured with."""

    m: int
    k: int
    kind: Mapping[str, Any]
    """The fields of a descriptor that name the matrix's types."""
    ns: list[int]

    def problems(self) -> list[GemmSparse24Descriptor]:
        return [GemmSparse24Descriptor(n=n, m=self.m, k=self.k, **self.kind) for n in self.ns]

    def matrix(self) -> Matrix:
        problem = self.problems()[0]
        return Matrix(self.m, self.k, problem.element, problem.quantization)


def drawn(rng: random.Random, kinds: Sequence[Mapping[str, Any]]) -> Drawn:
    """A shape of the record, of another model, or ragged."""
    which = rng.random()
    if which < 0.4:
        m, k = rng.choice(SHAPES)
    elif which < 0.7:
        m, k = map(int, rng.choice(MODELS.split()).split(","))
    else:
        m, k = int(2 ** rng.uniform(9, 15.5)), 16 * int(2 ** rng.uniform(5, 10))
    return Drawn(m, k, rng.choice(kinds), [tokens(rng) for _ in range(PROBLEMS_OF_A_MATRIX)])


def tokens(rng: random.Random) -> int:
    """Log-uniform, a power of two, or just past a tile width."""
    which = rng.random()
    if which < 0.3:
        return 1 << rng.randrange(14)
    return rng.choice((17, 33, 65, 129, 257, 513, 1025)) if which < 0.4 else int(2 ** rng.uniform(0, 13))


def tried(desc: GemmSparse24Descriptor) -> list[WgmmaSpSchedule]:
    """Schedules of wgmma_sp that are timed. Stream-K is timed wherever it has work for all clusters."""
    more = MORE_OF_FEW if desc.n <= MAX_MEMORY_BOUND_N else MORE_OF_MANY if desc.n <= 2048 else ()
    wide = [WgmmaSpSchedule(w, r, width, *rest) for width in widths(desc.n) for w, r, *rest in more]
    split = invariant_split_k(desc.m, desc.k, desc.element)
    quantized = desc.quantization is not None
    known = (
        *schedules_for(desc.n, desc.m, 0.0, quantized),
        *schedules_in(split, desc.n, desc.m, 0.0, quantized),
    )
    found = [one for one in dict.fromkeys((*known, *wide)) if one.fits()]
    guessed = predicted(found, desc)
    return [one for one, us in zip(found, guessed, strict=True) if us < HOPELESS * guessed.min()]


def entries_of(family: str, element: ElementKind) -> list[GemmEntry]:
    """The kernel entries whose schedules are timed."""
    if family == "f32":
        return [one for one in ENTRIES if one.split_terms and not one.name.endswith("_invariant")]
    return [next(one for one in ENTRIES if one.backend == "wgmma_sp" and element in one.elements)]


def schedules_of(desc: GemmSparse24Descriptor, entry: GemmEntry) -> Sequence[WgmmaSpSchedule]:
    """The schedules of an entry that are timed."""
    if entry.split_terms:
        return f32_split_heuristics.tried_schedules(desc.n, desc.m, desc.k, entry.split_terms)
    return tried(desc)


def compile_kernel(
    device: DeviceProperties, name: str, desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule
) -> None:
    """Compile into the cache what an entry's plan launches with the schedule."""
    entry = next(one for one in ENTRIES if one.name == name)
    with choosing(entry, schedule):
        entry.kernel.compile(Choice(desc, device, entry, PlanPreference(), {}))


def compile_all(family: str, matrices: Sequence[Drawn]) -> None:
    """Compile the kernels that will be timed in parallel."""
    kernels = {
        (entry.name, desc.quantization or desc.element, one._replace(k_chunks=min(one.k_chunks, 2))): (
            entry.name,
            desc,
            one,
        )
        for matrix in matrices
        for desc in matrix.problems()
        for entry in entries_of(family, desc.element)
        for one in schedules_of(desc, entry)
    }
    compile_one = partial(compile_kernel, cuda_properties(0))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*kernels.values(), strict=True), chunksize=8))
    print(f"{len(kernels)} kernels compiled", flush=True)


def timed(cell: Cell, plans: dict[str, GemmSparse24Plan]) -> Row:
    """A line of the file: times of the plans, by name, beside the dense product."""
    desc = cell.desc
    contenders = [cell.contender(name, plan) for name, plan in plans.items()]
    times = time_contenders([*cell.dense(), *contenders], rounds=7, round_ms=1.0)
    us = {name: round(one, 2) for name, one in times.items()}
    about: Row = {"m": desc.m, "k": desc.k, "n": desc.n, "element": desc.element.value}
    if desc.quantization is not None:
        about |= {"weight_element": desc.weight_element.value, "weight_group": desc.weight_group}
    return {**about, "dense_us": us.pop("dense", None), "us": us}


def plan_of(cell: Cell, entry: GemmEntry) -> GemmSparse24Plan:
    choice = Choice(cell.desc, cuda_properties(0), entry, PlanPreference(), {})
    return GemmSparse24Plan(choice)


def choosing(entry: GemmEntry, schedule: WgmmaSpSchedule) -> AbstractContextManager[object]:
    """The entry's kernels that are made meanwhile take this schedule."""
    if not entry.split_terms:
        return mock.patch("sparse24_plans.gemm.backends.wgmma_sp.best_schedule", return_value=schedule)

    def chunking(desc: GemmSparse24Descriptor, *_: object) -> f32_split_heuristics.Chunking:
        return f32_split_heuristics.Chunking.of(schedule, desc, entry.split_terms)

    return mock.patch("sparse24_plans.gemm.backends.f32_split.best_chunking", chunking)


def rows_of(family: str, cell: Cell) -> Iterator[Row]:
    """A line for each entry that serves the family."""
    for entry in entries_of(family, cell.desc.element):
        plans = {}
        for schedule in schedules_of(cell.desc, entry):
            with choosing(entry, schedule):
                plans[",".join(map(str, schedule))] = plan_of(cell, entry)
        terms = {"terms": entry.split_terms} if entry.split_terms else {}
        yield {**terms, **timed(cell, plans)}


def measure_gemm(family: str, rng: random.Random, end: float) -> Iterator[Row]:
    while True:
        matrices = [drawn(rng, KINDS[family]) for _ in range(MATRICES_OF_A_ROUND)]
        compile_all(family, matrices)
        for one in matrices:
            matrix = one.matrix()
            for n in one.ns:
                if time.monotonic() > end:
                    return
                yield from rows_of(family, Cell(matrix, n))
            del matrix
            free_memory()


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


def measure_blocks(rng: random.Random, end: float) -> Iterator[Row]:
    spare = 1 << 30  # bytes of workspace that no other problem is allowed, since plans are cached
    for cell in block_cells(rng):
        if time.monotonic() > end:
            return
        problem = blocks.Problem(cell)
        contenders = [problem.dense()]
        backends = {"inflate": "inflate_cublas"}
        if cell.op is BlockSparseOp.SDD and cell.n <= MOST_TERMS:
            backends["mma"] = "blocks_mma"
        contenders += [forced(problem, name, backend) for name, backend in backends.items()]
        for schedule in schedules_by_density(problem.desc):
            spare += 1
            name = f"{schedule.rows},{schedule.tokens},{schedule.cluster_n}"
            with mock.patch.object(blocks_wgmma, "best_schedule", return_value=schedule):
                contenders.append(forced(problem, name, "blocks_wgmma", max_workspace_bytes=spare))
        times = time_contenders(contenders, rounds=5, round_ms=0.7)
        us = {name: round(one, 1) for name, one in times.items()}
        others = {f"{name}_us": us.pop(name) for name in ("dense", "inflate", "mma") if name in us}
        yield {**asdict(cell), **others, "us": us}
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
        if m * k <= MOST_CELLS and cell.bitmap().any():
            yield cell


def cuts_of(desc: BlockSparseMatmulDescriptor) -> dict[str, Cut]:
    """Each tile of large blocks that may be chosen: whole, with long panels first, and cut if it may be."""
    problem, found = KernelProblem(desc), dict[str, Cut]()
    for one in tiles_of_large_blocks(desc):
        if one.tokens > 64 and one.tokens >= 2 * desc.n:
            continue  # half of the tile would have no tokens
        ways = [Cut(one), Cut(one, LONG_FIRST, align_up(COUNTER_BYTES))]
        if problem.slicing is not None:
            ways.append(Cut(one, APART, *slice_bytes(problem)))
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


def measure_large_blocks(rng: random.Random, end: float) -> Iterator[Row]:
    spare, drawing = 1 << 40, large_block_cells(rng)  # as in measure_blocks
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
    """The cells of a seed and of those that follow."""
    for one in itertools.count(seed):
        for cell in random_blocks.drawn(one):
            if cell.op is not BlockSparseOp.SDD and cell.m * cell.k <= MOST_CELLS:
                yield cell


def packed_times(problem: blocks.Problem) -> dict[str, Any]:
    """Microseconds of a packed product by its kept blocks: by the name of each cut, and by the kernel for few
    tokens."""
    desc, contenders = problem.desc, []
    cut = Cut.of(desc, REFERENCE_SMS).narrowed(desc)
    cuts = {one.name: one for one in (cut, *others(desc, cut))}
    for number, (name, one) in enumerate(cuts.items()):
        with running(one):  # plans are cached
            spare = (1 << 35) + number
            contenders.append(forced(problem, name, "blocks_wgmma", max_workspace_bytes=spare))
    tried = BlocksMmaSchedule.candidates(desc) if desc.n <= FEW_TOKENS[desc.layout.block] else []
    for number, schedule in enumerate(tried):
        with mock.patch.object(BlocksMmaSchedule, "of", return_value=schedule):
            spare = (1 << 30) + number
            contenders.append(forced(problem, schedule.name, "blocks_mma", max_workspace_bytes=spare))
    times = {name: round(us, 2) for name, us in time_contenders(contenders, rounds=5, round_ms=0.7).items()}
    us = {name: times.pop(name) for name in cuts}
    return {"us": us, "mma_us": times} if times else {"us": us}


def measure_packed(seed: int, end: float) -> Iterator[Row]:
    """Random cells of dsd and dds, even and uneven, of matrices that are made quickly."""
    random_blocks.compile_all(seed)
    for cell in packed_cells(seed):
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


def measure_dense(rng: random.Random, end: float) -> Iterator[Row]:
    while time.monotonic() < end:
        m, k = (128 * int(2 ** rng.uniform(2, 8.5)) for _ in range(2))
        n = 8 * int(2 ** rng.uniform(0, 10))
        cell = random_blocks.Cell(
            op=BlockSparseOp.DSD, m=m, k=k, n=n, block=128, density=0.01, pattern="random"
        )
        if m * k <= MOST_CELLS:
            us = time_alone([blocks.Problem(cell).dense()])["dense"].us
            yield {"m": m, "k": k, "n": n, "element": "bf16", "us": round(us, 2)}
            free_memory()


FILES = {
    "dense": "dense-times",
    "packed": "packed-times",
    "gemm": "times",
    "quantized": "quantized-times",
    "f32": "f32-times",
    "blocks": "block-times",
    "large-blocks": "large-block-times",
}
MOST_CELLS = 1 << 27
"""Cells of a matrix for packed operands, whose tables the host makes quickly."""
KINDS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gemm": [{"element": element} for element in ("bf16", "s8", "fp8_e4m3")],
    "quantized": [
        {"element": "bf16", "weight_element": stored, "weight_group": 128}
        for stored in ("s4", "s8", "fp8_e4m3")
    ],
    "f32": [{"element": "f32"}],
}
"""The fields of the problems of each family of gemm."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Times every schedule of a family on random problems.")
    parser.add_argument("family", choices=list(FILES))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other problems")
    wish = parser.parse_args()
    gpu = (cuda_properties(0).name or "gpu").lower().removeprefix("nvidia ").replace(" ", "_")
    rng, end = random.Random(wish.seed), time.monotonic() + wish.seconds
    if wish.family == "blocks":
        rows = measure_blocks(rng, end)
    elif wish.family == "large-blocks":
        rows = measure_large_blocks(rng, end)
    elif wish.family == "dense":
        rows = measure_dense(rng, end)
    elif wish.family == "packed":
        rows = measure_packed(wish.seed, end)
    else:
        rows = measure_gemm(wish.family, rng, end)
    with (SCHEDULES / file_of(gpu, FILES[wish.family])).open("a") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
