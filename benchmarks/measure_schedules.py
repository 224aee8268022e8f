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
- ``inflated``: kept blocks as they are chosen and the product of the inflated matrix, where neither is
  predicted to be much faster, in ``<gpu>-inflated-times.jsonl``, each alone in a steady state, as ``dense``.
  Fit the other families first, because their models predict;
- ``packed``: packed operands of block-sparse products as kept blocks, in ``<gpu>-packed-times.jsonl``;
- ``uneven``: the same where some rows of blocks are long, in ``<gpu>-uneven-times.jsonl``;
- ``dense``: cuBLAS's product of bf16, in ``<gpu>-dense-times.jsonl``, alone in a steady state: a power limit
  slows large ones by a quarter, and kept blocks less.

A line has the problem, ``dense_us`` of the dense product, and ``us``: microseconds by the schedule's fields.
Lines of ``blocks`` also have ``inflate_us``, the product of the inflated matrix. Lines of few tokens also
have ``mma_us``, of the kernel for few tokens: for ``packed`` by its warps, m16 tiles, tiles of
tokens and, behind a slash, slices of long rows.
Lines of ``large-blocks``, ``packed`` and ``uneven`` have times by the name of a ``Cut``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

from sparse24_plans import (
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
)
from sparse24_plans.bench.gemm import Cell
from sparse24_plans.bench.scope import SHAPES
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.gemm.kernel_table import ENTRIES, GemmEntry
from sparse24_plans.gemm.schedules.f32_split_heuristics import Chunking, F32Split
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.schedules.wgmma_sp import (
    MAX_MEMORY_BOUND_N,
    WgmmaSpSchedule,
    schedules_for,
    schedules_in,
    widths,
)
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.tuning.data import Matrix, free_memory
from sparse24_plans.tuning.timing import time_contenders
from sparse24_plans.vocab import DeviceProperties, ElementKind

from . import measure_block_schedules
from .descent import SCHEDULES, file_of
from .measure_block_schedules import Row

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
PROBLEMS_OF_A_MATRIX, MATRICES_OF_A_ROUND = 3, 12
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
    split = WGMMA_SP.split_k(desc.m, desc.k, desc.element)
    quantized = desc.quantization is not None
    known = (
        *schedules_for(desc.n, desc.m, 0.0, quantized),
        *schedules_in(split, desc.n, desc.m, 0.0, quantized),
    )
    found = [one for one in dict.fromkeys((*known, *wide)) if one.fits()]
    guessed = WGMMA_SP.predicted(found, desc)
    return [one for one, us in zip(found, guessed, strict=True) if us < HOPELESS * guessed.min()]


def entries_of(family: str, element: ElementKind) -> list[GemmEntry]:
    """The kernel entries whose schedules are timed."""
    if family == "f32":
        return [one for one in ENTRIES if one.split_terms and not one.name.endswith("_invariant")]
    return [next(one for one in ENTRIES if one.backend == "wgmma_sp" and element in one.elements)]


def schedules_of(desc: GemmSparse24Descriptor, entry: GemmEntry) -> Sequence[WgmmaSpSchedule]:
    """The schedules of an entry that are timed."""
    if entry.split_terms:
        return F32Split(entry.split_terms).candidates(desc)
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
        return mock.patch.object(WGMMA_SP, "best", return_value=schedule)

    def chunking(desc: GemmSparse24Descriptor, *_: object) -> Chunking:
        return Chunking.cut(schedule, desc, entry.split_terms)

    return mock.patch.object(Chunking, "of", chunking)


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


FILES = {
    "dense": "dense-times",
    "packed": "packed-times",
    "uneven": "uneven-times",
    "inflated": "inflated-times",
    "gemm": "times",
    "quantized": "quantized-times",
    "f32": "f32-times",
    "blocks": "block-times",
    "large-blocks": "large-block-times",
}
KINDS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gemm": [{"element": element} for element in ("bf16", "s8", "fp8_e4m3")],
    "quantized": [
        {"element": "bf16", "weight_element": stored, "weight_group": 128}
        for stored in ("s4", "s8", "fp8_e4m3")
    ],
    "f32": [{"element": "f32"}],
}
"""The fields of the problems of each family of gemm."""


def measure(family: str, seed: int, end: float) -> Iterator[Row]:
    """Lines of a family, as they are measured, until the monotonic clock says ``end``."""
    if family in KINDS:
        return measure_gemm(family, random.Random(seed), end)
    return measure_block_schedules.MEASURE[family](seed, end)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times every schedule of a family on random problems.")
    parser.add_argument("family", choices=list(FILES))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other problems")
    wish = parser.parse_args()
    gpu = (cuda_properties(0).name or "gpu").lower().removeprefix("nvidia ").replace(" ", "_")
    rows = measure(wish.family, wish.seed, time.monotonic() + wish.seconds)
    with (SCHEDULES / file_of(gpu, FILES[wish.family])).open("a") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
