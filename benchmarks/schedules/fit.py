"""Fits the model of wgmma_sp's time to measured schedules.

``python benchmarks/schedules/fit.py TIMES.jsonl``; needs SciPy. Prints the constants of
gemm/schedules/wgmma_time.py for each class of problems, and how far from the fastest schedule the choice
then is; a third of the problems is held out in turn.
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
from sparse24_plans.gemm.schedules.wgmma_time import Fit, fit_of, microseconds

LEAST = {
    "launch": 1.0,
    "lone": 1.0,
    "crowded": 1.0,
    "least_tokens": 1.0,
    "add": 1e-6,
    "idle": 1e-3,
    "again": 0.05,
}
MOST = {"stored": 1e6, "l2": 4e7, "least_tokens": 64.0, "lone": 2.5}
NAMES = [field.name for field in fields(Fit)]
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
    points = [(one, desc, us, min(times.values())) for desc, times in problems for one, us in times.items()]
    weights = np.array([1.0 if us < 1.1 * best else 0.5 for _, _, us, best in points])
    taken = np.log([us for _, _, us, _ in points])

    def residuals(logs: np.ndarray) -> np.ndarray:
        fit = Fit(**dict(zip(NAMES, np.exp(logs).tolist(), strict=True)))
        return weights * (np.log([microseconds(one, desc, fit) for one, desc, _, _ in points]) - taken)

    low, high = (
        np.log([bound.get(name, other) for name in NAMES]) for bound, other in ((LEAST, 1e-9), (MOST, 1e15))
    )
    begin = np.clip(np.log(astuple(start)), low + 1e-6, high - 1e-6)
    found = least_squares(residuals, begin, bounds=(low, high), loss="soft_l1", f_scale=0.05, max_nfev=60)
    return Fit(**{name: float(f"{value:.4g}") for name, value in zip(NAMES, np.exp(found.x), strict=True)})


def lost(problems: list[Problem], fit: Fit) -> list[float]:
    """What the model's choice took over the fastest of all."""
    found = []
    for desc, times in problems:
        tried = [one for one in schedules_for(desc.n) if one in times]
        found.append(times[min(tried, key=lambda one: microseconds(one, desc, fit))] / min(times.values()))
    return found


def report(title: str, ratios: list[float]) -> None:
    mean = np.exp(np.log(ratios).mean())
    print(f"  {title}: mean {mean:.3f}, 95% {np.quantile(ratios, 0.95):.3f}, worst {max(ratios):.3f}")


def main(path: str) -> None:
    problems = read(path)
    for few in (True, False):
        for itemsize in (2, 1):
            some = [one for one in problems if (one[0].n <= FEW, one[0].element.itemsize) == (few, itemsize)]
            start = fit_of(some[0][0])
            print(f"n {'<=' if few else '>'} {FEW}, {8 * itemsize} bits: {len(some)} problems")
            report("as it is", lost(some, start))
            held = [
                one
                for part in range(3)
                for one in lost(
                    some[part::3], fitted([other for at, other in enumerate(some) if at % 3 != part], start)
                )
            ]
            report("held out", held)
            print(" ", fitted(some, start))


if __name__ == "__main__":
    main(*sys.argv[1:])
