"""Fits the model of wgmma_sp's time to measured schedules.

``python benchmarks/schedules/fit.py TIMES.jsonl``. Prints the constants of
gemm/schedules/wgmma_time.py for each class of problems, and how far from the fastest schedule the choice
then is: for the problems fitted, and for matrices that were held out, a quarter of them in turn.

What is made small is what the choice loses, in random steps: the model's times would do as well doubled.
A problem's schedules are all chosen a little, the less the more they are predicted to take. Times that are
far from the measured ones count too, by less.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, astuple, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_cost_model import (
    TOKENS,
    CostConstants,
    CostInputs,
    fit_of,
    microseconds,
)
from sparse24_plans.gemm.schedules.wgmma_sp import Schedule, schedules_for

NAMES = [field.name for field in fields(CostConstants)]
BOUNDS = {
    "launch": (1, 4), "cluster": (0.001, 1.5), "met": (0.001, 1), "stall": (1, 150), "step": (0.1, 50),
    "step_token": (0.01, 2), "beside": (0.001, 1), "beside_token": (1e-5, 0.1), "pair": (1, 1.5),
    "pair_in_ranges": (1, 1.5), "of_widest": (0.001, 1), "three_in_ranges": (1, 1.5),
    "alone": (50000, 200000), "apart": (30000, 120000), "together": (20000, 80000), "memory": (3e6, 7e6),
    "l2": (5e6, 4e7), "copied": (50000, 500000),
    "unaligned": (0.001, 2), "fold": (1e-6, 0.01), "add": (1e-6, 0.001), "park": (1e-6, 0.001),
    "stored": (1000, 1e6), "ragged": (500, 100000), "crowded": (1, 4), "join": (0.01, 10),
    "handed": (1e-7, 1e-3), "loose": (1e-4, 0.2), "again": (0.05, 5), "refill": (0.1, 6), "even": (1.5, 12),
    "sharp": (1.5, 8),
}  # fmt: skip
"""Of each constant: the least and the most."""
APART = ("join", "handed", "loose", "park", "of_widest", "three_in_ranges")
"""Found apart: the times tell too little of them. Those of 8 bits tell nothing of pairs in ranges either:
they take what others do."""
FOLDS = 4
NEAR, FAR, OFF, STEPS = 0.02, 0.05, 0.3, 5000
"""Relative times that are told apart in a choice; that are far from the measured ones, and what these count;
random steps."""
Problem = tuple[GemmSparse24Descriptor, dict[Schedule, float]]


def read(path: str) -> list[Problem]:
    found = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        desc = GemmSparse24Descriptor(**{name: row[name] for name in ("n", "m", "k", "element")})
        times = {Schedule(*map(int, name.split(","))): us for name, us in row["us"].items()}
        found.append((desc, times))
    return found


def fitted(problems: list[Problem], start: CostConstants) -> CostConstants:
    work = CostInputs([(one, desc) for desc, times in problems for one in times])
    counts = np.array([len(times) for _, times in problems])
    begins = np.cumsum(counts) - counts
    taken = np.log([us for _, times in problems for us in times.values()])
    gap = taken - np.repeat(np.minimum.reduceat(taken, begins), counts)
    weights = np.where(gap < np.log(1.1), 1.0, np.where(gap < np.log(2), 0.5, 0.25))
    paired = all(desc.element.itemsize == 1 for desc, _ in problems)
    kept = (*APART, "pair_in_ranges") if paired else APART
    free = [place for place, name in enumerate(NAMES) if name not in kept]

    def fit_at(logs: np.ndarray) -> CostConstants:
        fit = replace(start, **{NAMES[place]: float(np.exp(logs[place])) for place in free})
        return replace(fit, pair_in_ranges=fit.pair) if paired else fit

    def loss(logs: np.ndarray) -> float:
        guessed = np.log(microseconds(work, fit_at(logs)))
        share = np.exp((np.repeat(np.minimum.reduceat(guessed, begins), counts) - guessed) / NEAR)
        share /= np.repeat(np.add.reduceat(share, begins), counts)
        off = weights * (guessed - taken) / FAR
        return float(
            (share * gap).sum() / len(problems) + OFF * FAR**2 * 2 * (np.sqrt(1 + off**2) - 1).mean()
        )

    limits = np.log([BOUNDS[name] for name in NAMES])
    at = np.clip(np.log(np.maximum(astuple(start), 1e-9)), limits[:, 0], limits[:, 1])
    least, rng = loss(at), np.random.default_rng(0)
    for _ in range(STEPS):  # there are no slopes to follow where two of the model's terms change places
        step, some = at.copy(), rng.choice(free, rng.integers(1, 4), replace=False)
        step[some] += rng.normal(0, rng.choice([0.03, 0.08, 0.15, 0.3]), len(some))
        step = np.clip(step, limits[:, 0], limits[:, 1])
        if (found := loss(step)) < least:
            at, least = step, found
    return CostConstants(**{name: float(f"{value:.4g}") for name, value in asdict(fit_at(at)).items()})


def lost(problems: list[Problem], fit: CostConstants) -> list[float]:
    """What the model's choice took over the fastest of those that are tried."""
    found = []
    for desc, times in problems:
        tried = [one for one in schedules_for(desc.n, desc.m) if one in times]
        guessed = microseconds(CostInputs([(one, desc) for one in tried]), fit)
        found.append(times[tried[int(np.argmin(guessed))]] / min(times[one] for one in tried))
    return found


def held_out(problems: list[Problem], start: CostConstants) -> list[float]:
    """The same, each matrix's by constants that were fitted to others."""
    part = {}
    for desc, _ in problems:
        part.setdefault((desc.m, desc.k), len(part) % FOLDS)
    found = []
    for one in range(FOLDS):
        inside = [problem for problem in problems if part[problem[0].m, problem[0].k] != one]
        outside = [problem for problem in problems if part[problem[0].m, problem[0].k] == one]
        found += lost(outside, fitted(inside, start))
    return found


def report(title: str, ratios: list[float]) -> None:
    mean = np.exp(np.log(ratios).mean())
    print(f"  {title}: mean {mean:.4f}, 95% {np.quantile(ratios, 0.95):.3f}, worst {max(ratios):.3f}")


def main(path: str) -> None:
    problems = read(path)
    for least, most in pairwise((0, *TOKENS, 1 << 30)):
        for itemsize in (2, 1):
            some = [
                one for one in problems if least < one[0].n <= most and one[0].element.itemsize == itemsize
            ]
            start = fit_of(some[0][0])
            print(f"n from {least + 1} to {most}, {8 * itemsize} bits: {len(some)} problems")
            report("as it is", lost(some, start))
            report("held out", held_out(some, start))
            fit = fitted(some, start)
            report("fitted", lost(some, fit))
            print(" ", fit, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
