"""Times every schedule that wgmma_sp tries on random problems: what its model is fitted to.

``python benchmarks/schedules/measure.py OUT.jsonl SEED SECONDS ELEMENT``, on an NVIDIA H200. A line a
problem: m, k, n, element, dense_us, and microseconds by schedule.
"""

from __future__ import annotations

import json
import random
import sys
import time

from sparse24_plans import ElementKind, GemmSparse24Descriptor, GemmSparse24Plan, PlanPreference
from sparse24_plans.bench import peers
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.gemm.schedules.wgmma_sp import invariant_slices, schedules_for, schedules_in
from sparse24_plans.gemm.table import ROWS
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.tuning.data import Matrix, Problem, free_memory
from sparse24_plans.tuning.timing import Contender, time_contenders

# (M, K) of models that the record of the benchmarks doesn't have: Qwen2.5, Gemma 2, Phi-3, Llama 2 and 3.2.
SHAPES = """
4608,3584 3584,3584 37888,3584 3584,18944 3072,2048 2048,2048 16384,2048 2048,8192 7168,5120 5120,5120
27648,5120 5120,13824 3584,4096 28672,3584 3584,14336 9216,3072 3072,3072 16384,3072 3072,8192 55296,5120
5120,27648 15360,5120 12288,4096 4096,11008 22016,4096 1536,1536 2560,6912 13824,2560 5376,21504 768,3072
"""


def problem(rng: random.Random) -> tuple[int, int, int]:
    """m, k, n: of a model, or ragged; n log-uniform, or just past a width."""
    if rng.random() < 0.8:
        m, k = map(int, rng.choice(SHAPES.split()).split(","))
    else:
        m, k = int(2 ** rng.uniform(9, 15.5)), 16 * int(2 ** rng.uniform(5, 10))
    n = int(2 ** rng.uniform(0, 13))
    return m, k, rng.choice((17, 33, 65, 129, 257, 513, 1025)) if rng.random() < 0.2 else n


def times_of(matrix: Matrix, n: int) -> dict[str, float]:
    desc = GemmSparse24Descriptor(n=n, m=matrix.m, k=matrix.k, element=matrix.element)
    cell, device = Problem(desc, matrix), cuda_properties(0)
    rows = [row for row in ROWS if row.backend == "wgmma_sp" and desc.element in row.elements]
    contenders = []
    for schedule in dict.fromkeys(schedules_for(n) + schedules_in(invariant_slices(desc.m), n)):
        for row in rows:
            try:
                plan = GemmSparse24Plan(Choice(desc, device, row, PlanPreference(), schedule._asdict()), ())
            except NotImplementedError:  # a promise of the row's
                continue
            launches = [plan.bind(cell.arguments(packed)).launch for packed in matrix.packed(plan)]
            contenders.append(Contender(",".join(map(str, schedule)), launches))
            break
    dense = peers.dense(cell.x, cell.y, matrix.dense, matrix.element)
    return time_contenders([*([dense] if dense else []), *contenders], rounds=5, round_ms=1.0)


def main(out: str, seed: str, seconds: str, element: str) -> None:
    rng, end = random.Random(int(seed)), time.monotonic() + float(seconds)
    with open(out, "a") as file:
        while time.monotonic() < end:
            m, k, n = problem(rng)
            times = {
                name: round(us, 2) for name, us in times_of(Matrix(m, k, ElementKind(element)), n).items()
            }
            row = {
                "m": m,
                "k": k,
                "n": n,
                "element": element,
                "dense_us": times.pop("dense", None),
                "us": times,
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            free_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
