"""Fits the model of wgmma_sp's time to measured schedules.

``python benchmarks/schedules/fit.py TIMES.jsonl``; needs SciPy. Prints the constants of
gemm/schedules/wgmma_time.py for each class of problems, and how far from the fastest schedule the choice
then is: for the problems fitted, and for matrices that were held out, a quarter of them in turn.
"""

from __future__ import annotations

import json
import sys
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_sp import FEW, Schedule, schedules_for
from sparse24_plans.gemm.schedules.wgmma_time import Fit, Work, fit_of, microseconds

NAMES = [field.name for field in fields(Fit)]
BOUNDS = {
    "launch": (1, 4), "cluster": (0.001, 1.5), "stall": (1, 150), "step": (0.1, 50), "step_token": (0.01,
    2), "beside": (0.001, 1), "beside_token": (1e-5, 0.1), "pair": (1, 1.5), "alone": (50000, 200000),
    "apart": (30000, 120000), "together": (20000, 80000), "memory": (3e6, 7e6), "l2": (5e6, 4e7),
    "copied": (50000, 500000), "unaligned": (0.001, 2), "fold": (1e-6, 0.01), "add": (1e-6, 0.001),
    "stored": (1000, 1e6), "ragged": (500, 100000), "crowded": (1, 4), "again": (0.05, 5), "refill": (0.1,
    6), "even": (1.5, 12), "sharp": (1.5, 8),
}  # fmt: skip
"""Of each constant: the least and the most."""
FOLDS = 4
Problem = tuple[GemmSparse24Descriptor, dict[Schedule, float]]


def read(path: str) -> list[Problem]:
    found = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        desc = GemmSparse24Descriptor(**{name: row[name] for name in ("n", "m", "k", "element")})
        times = {Schedule(*map(int, name.split(","))): us for name, us in row["us"].items()}
        found.append((desc, times))
    return found


def fitted(problems: list[Problem], start: Fit) -> Fit:
    """Least squares of the logarithms; a problem's slow schedules count less."""
    work = Work([(one, desc) for desc, times in problems for one in times])
    taken = np.array([us for _, times in problems for us in times.values()])
    best = np.array([min(times.values()) for _, times in problems for _ in times])
    weights = np.where(taken < 1.1 * best, 1.0, np.where(taken < 2 * best, 0.5, 0.25))

    def residuals(logs: np.ndarray) -> np.ndarray:
        fit = Fit(**dict(zip(NAMES, np.exp(logs).tolist(), strict=True)))
        return weights * (np.log(microseconds(work, fit)) - np.log(taken))

    low, high = np.log([BOUNDS[name] for name in NAMES]).T
    begin = np.clip(np.log(astuple(start)), low + 1e-6, high - 1e-6)
    found = least_squares(residuals, begin, bounds=(low, high), loss="soft_l1", f_scale=0.05, max_nfev=60)
    return Fit(**{name: float(f"{value:.4g}") for name, value in zip(NAMES, np.exp(found.x), strict=True)})


def lost(problems: list[Problem], fit: Fit) -> list[float]:
    """What the model's choice took over the fastest of those that are tried."""
    found = []
    for desc, times in problems:
        tried = [one for one in schedules_for(desc.n) if one in times]
        guessed = microseconds(Work([(one, desc) for one in tried]), fit)
        found.append(times[tried[int(np.argmin(guessed))]] / min(times[one] for one in tried))
    return found


def held_out(problems: list[Problem], start: Fit) -> list[float]:
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
    for few in (True, False):
        for itemsize in (2, 1):
            some = [one for one in problems if (one[0].n <= FEW, one[0].element.itemsize) == (few, itemsize)]
            start = fit_of(some[0][0])
            print(f"n {'<=' if few else '>'} {FEW}, {8 * itemsize} bits: {len(some)} problems")
            report("as it is", lost(some, start))
            report("held out", held_out(some, start))
            fit = fitted(some, start)
            report("fitted", lost(some, fit))
            print(" ", fit)


if __name__ == "__main__":
    main(*sys.argv[1:])
