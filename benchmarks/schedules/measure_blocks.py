"""Times every schedule that blocks_wgmma might take on random layouts: what its choice is fitted to.

``python benchmarks/schedules/measure_blocks.py OUT.jsonl SEED SECONDS``, on an NVIDIA H200. A line a problem:
op, m, k, n, block, density, pattern, dense_us, and microseconds by rows,tokens,share. Of dsd and dds blocks
of 16 and 32 alone.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks import blocks
from sparse24_plans import BlockSparseOp
from sparse24_plans.blocksparse.backends import blocks_wgmma
from sparse24_plans.blocksparse.plan import BlockSparseMatmulPlan
from sparse24_plans.blocksparse.schedules.blocks_wgmma import schedules_by_density
from sparse24_plans.tuning.data import free_memory
from sparse24_plans.tuning.timing import time_contenders


def problems(rng: random.Random) -> Iterator[blocks.Cell]:
    """Of the record's shapes at first, then of any."""
    yield from (cell for cell in blocks.cells() if cell.op is BlockSparseOp.SDD or cell.block < 64)
    while True:
        op = rng.choice(list(BlockSparseOp))
        block = rng.choice((16, 32, 64, 128) if op is BlockSparseOp.SDD else (16, 32))
        pattern = "random" if op is BlockSparseOp.SDD else rng.choice(blocks.PATTERNS)
        m, k = (128 * int(2 ** rng.uniform(2, 6.5)) for _ in range(2))
        yield blocks.Cell(op, m, k, 8 * int(2 ** rng.uniform(2, 10)), block, rng.uniform(0.02, 0.6), pattern)


def times_of(problem: blocks.Problem, spare: int) -> dict[str, float]:
    """``spare``: bytes of workspace that no other problem is allowed, since plans are cached."""
    contenders = [problem.dense()]
    for at, one in enumerate(schedules_by_density(problem.desc)):
        blocks_wgmma.best_schedule = lambda *_, one=one: one
        wanted = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": spare + at}
        ours = problem.ours(BlockSparseMatmulPlan.select(problem.desc, device=0, preference=wanted))
        problem.check(ours)
        ours.name = f"{one.rows},{one.tokens},{one.share}"
        contenders.append(ours)
    return time_contenders(contenders, rounds=5, round_ms=0.7)


def main(out: str, seed: str, seconds: str) -> None:
    end, spare = time.monotonic() + float(seconds), 1 << 30
    with open(out, "a") as file:
        for cell in problems(random.Random(int(seed))):
            if time.monotonic() > end:
                return
            times = {name: round(us, 1) for name, us in times_of(blocks.Problem(cell), spare).items()}
            spare += len(times)
            row = {**asdict(cell), "dense_us": times.pop("dense"), "us": times}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            free_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
