"""Times every schedule that wgmma_sp might try on random problems: what its model is fitted to.

``python benchmarks/schedules/measure.py OUT.jsonl SEED SECONDS ELEMENT...``, on an NVIDIA H200. A line a
problem: m, k, n, element, dense_us, and microseconds by schedule.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from sparse24_plans import ElementKind, GemmSparse24Descriptor, GemmSparse24Plan, PlanPreference
from sparse24_plans.bench import peers
from sparse24_plans.bench.gemm import Cell
from sparse24_plans.bench.scope import SHAPES
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.device.jit.cache import cubin
from sparse24_plans.gemm.backends import wgmma_sp as backend
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.gemm.schedules.wgmma_cost_model import predicted
from sparse24_plans.gemm.schedules.wgmma_heuristics import invariant_split_k
from sparse24_plans.gemm.schedules.wgmma_sp import (
    MAX_MEMORY_BOUND_N,
    OperandLayouts,
    Schedule,
    schedules_for,
    schedules_in,
    widths,
)
from sparse24_plans.gemm.wgmma import SOURCE, defines
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.tuning.data import Matrix, free_memory
from sparse24_plans.tuning.timing import time_contenders

# (M, K) of models: Qwen2.5, Gemma 2, Phi-3, Llama 2 and 3.2.
MODELS = """
4608,3584 3584,3584 37888,3584 3584,18944 3072,2048 2048,2048 16384,2048 2048,8192 7168,5120 5120,5120
27648,5120 5120,13824 3584,4096 28672,3584 3584,14336 9216,3072 3072,3072 16384,3072 3072,8192 55296,5120
5120,27648 15360,5120 12288,4096 4096,11008 22016,4096 1536,1536 2560,6912 13824,2560 5376,21504 768,3072
"""
# Tried here beside those of gemm/schedules: (warpgroups, row tiles of one, blocks that share X, slices,
# blocks per multiprocessor).
MORE_OF_FEW = (
    (1, 1, 1, 1, 2), (1, 1, 1, 1, 4), (1, 1, 1, 2, 4), (1, 1, 1, 3, 1), (1, 1, 1, 3, 2), (1, 1, 1, 3, 4),
    (1, 1, 1, 6, 1), (1, 1, 1, 6, 2), (2, 1, 1, 1, 2), (2, 1, 1, 2, 2), (2, 1, 1, 3, 1), (3, 1, 1, 3, 1),
    (2, 2, 1, 4, 1), (3, 2, 1, 1, 1), (3, 2, 1, 2, 1),
)  # fmt: skip
MORE_OF_MANY = ((2, 2, 1, 2, 1), (1, 1, 1, 3, 1), (2, 1, 1, 3, 1), (2, 2, 2, 1, 1))
PROBLEMS_OF_A_MATRIX = 3
HOPELESS = 1.5
"""Times the least predicted: such a schedule is not timed."""


def matrix(rng: random.Random) -> tuple[int, int]:
    """m, k: of the record, of another model, or ragged."""
    which = rng.random()
    if which < 0.4:
        return rng.choice(SHAPES)
    if which < 0.7:
        m, k = map(int, rng.choice(MODELS.split()).split(","))
        return m, k
    return int(2 ** rng.uniform(9, 15.5)), 16 * int(2 ** rng.uniform(5, 10))


def tokens(rng: random.Random) -> int:
    """Log-uniform, a power of two, or just past a width."""
    which = rng.random()
    if which < 0.3:
        return 2 ** rng.randrange(14)
    return rng.choice((17, 33, 65, 129, 257, 513, 1025)) if which < 0.4 else int(2 ** rng.uniform(0, 13))


def tried(desc: GemmSparse24Descriptor) -> list[Schedule]:
    more = MORE_OF_FEW if desc.n <= MAX_MEMORY_BOUND_N else MORE_OF_MANY if desc.n <= 2048 else ()
    wide = [Schedule(w, r, width, *rest) for width in widths(desc.n) for w, r, *rest in more]
    slices = invariant_split_k(desc.m, desc.k, desc.element)
    known = (*schedules_for(desc.n, desc.m), *schedules_in(slices, desc.n, desc.m))
    found = [one for one in dict.fromkeys((*known, *wide)) if one.fits()]
    guessed = predicted(found, desc)
    return [one for one, us in zip(found, guessed, strict=True) if us < HOPELESS * guessed.min()]


def compile_kernel(desc: GemmSparse24Descriptor, schedule: Schedule) -> None:
    cubin(SOURCE, "sm_90a", defines(desc, schedule, OperandLayouts.of(desc), False))


def times_of(matrix: Matrix, n: int) -> dict[str, float]:
    cell, device = Cell(matrix, n), cuda_properties(0)
    desc = cell.desc
    row = next(row for row in ENTRIES if row.backend == "wgmma_sp" and desc.element in row.elements)
    contenders = []
    for schedule in tried(desc):
        backend.allowed_schedules = lambda *_, one=schedule: (one,)
        plan = GemmSparse24Plan(Choice(desc, device, row, PlanPreference(), schedule._asdict()), ())
        contenders.append(cell.contender(",".join(map(str, schedule)), plan))
    dense = peers.dense(cell.x, cell.y, matrix.dense, matrix.element)
    return time_contenders([*([dense] if dense else []), *contenders], rounds=7, round_ms=1.0)


def main(out: str, seed: str, seconds: str, *elements: str) -> None:
    rng, end = random.Random(int(seed)), time.monotonic() + float(seconds)
    drawn = [
        (*matrix(rng), rng.choice(elements), [tokens(rng) for _ in range(PROBLEMS_OF_A_MATRIX)])
        for _ in range(int(seconds))
    ]
    described = [
        GemmSparse24Descriptor(n=n, m=m, k=k, element=element) for m, k, element, ns in drawn for n in ns
    ]
    kernels = {
        (desc.element, one._replace(k_chunks=min(one.k_chunks, 2))): (desc, one)
        for desc in described
        for one in tried(desc)
    }
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        list(pool.map(compile_kernel, *zip(*kernels.values(), strict=True), chunksize=8))
    print(f"{len(kernels)} kernels compiled, {end - time.monotonic():.0f} s left", flush=True)
    count = 0
    with open(out, "a") as file:
        for m, k, element, ns in drawn:
            weight = Matrix(m, k, ElementKind(element))
            for n in ns:
                if time.monotonic() > end:
                    print(f"{count} problems")
                    return
                times = {name: round(us, 2) for name, us in times_of(weight, n).items()}
                dense = times.pop("dense", None)
                row = {"m": m, "k": k, "n": n, "element": element, "dense_us": dense, "us": times}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                count += 1
            del weight
            free_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
