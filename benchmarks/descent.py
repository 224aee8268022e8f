"""A fit of a model to measured problems, and the descent that finds its constants."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

Array = Any
Constants = dict[str, Any]
Number = TypeVar("Number", int, float)
SCHEDULES = Path(__file__).parent / "schedules"
FOLDS = 4
NEAR, FAR, OFF, WORST = 0.01, 0.05, 0.1, 0.2
"""Relative times told apart in a softened choice; relative errors of a predicted time that count in full; the
weight of these errors; and that of the choices that lose most."""
HELD_NEAR = 0.05
"""The weight of the mean squared distance from the start, in logarithms. wgmma_sp's models start at the given
constants of invariant split-K: fitted freely, they lost 1.5% on 242 fresh problems where choices differed."""


class Fit(NamedTuple):
    """How one model is fitted: its problems, and the descent."""

    problems: Sequence[Any]
    matrix: Callable[[Any], tuple[int, int]]
    """M and K of a problem, which is held out with all others of its matrix."""
    choices: Callable[[Sequence[Any]], Choices]
    bounds: Mapping[str, tuple[float, float]]
    steps: int
    descents: int
    start: Array | None = None
    """Constants that a descent starts at and is held near; None: the middle of the bounds."""

    def parts(self) -> tuple[list[Any], list[Any]]:
        """The problems that ``held_out`` is fitted to, and those that it holds out: every fourth matrix."""
        order = {one: place for place, one in enumerate(dict.fromkeys(map(self.matrix, self.problems)))}
        inside: list[Any] = []
        outside: list[Any] = []
        for one in self.problems:
            (inside if order[self.matrix(one)] % FOLDS else outside).append(one)
        return inside, outside


class Choices(NamedTuple):
    """Measured candidates of all choices, one after the other."""

    predict: Callable[[Array], Array]
    """Predicted times of all candidates by constants, in the order of the bounds."""
    taken: Array
    """Measured times."""
    begins: Array
    """The place where each choice's candidates begin."""
    best: Array
    """The least measured time of each choice's problem."""
    weights: Array
    """How much each choice counts."""
    in_microseconds: bool
    """Whether predicted times are microseconds; else they compare a problem's schedules alone."""
    off: float = OFF
    """The weight of errors of predicted times."""

    def lost(self, constants: Array) -> Array:
        """The time of each chosen candidate over that of its problem's best."""
        guessed, ends = self.predict(constants), [*self.begins[1:], len(self.taken)]
        chosen = [
            begin + int(np.argmin(guessed[begin:end])) for begin, end in zip(self.begins, ends, strict=True)
        ]
        return self.taken[chosen] / self.best

    def free(self, constants: Array) -> Array:
        """The losses of the choices that count in full."""
        return self.lost(constants)[self.weights == 1]

    def loss(self) -> Callable[[Array], float]:
        """The function that a descent makes small."""
        counts = np.diff([*self.begins, len(self.taken)])
        choice = np.repeat(np.arange(len(counts)), counts)
        taken = np.log(self.taken)
        gap = taken - np.log(self.best)[choice]
        near = np.where(gap < np.log(1.1), 1.0, np.where(gap < np.log(2), 0.5, 0.25))
        total = self.weights.sum()

        def loss(constants: Array) -> float:
            guessed = np.log(self.predict(constants))
            share = np.exp((np.minimum.reduceat(guessed, self.begins)[choice] - guessed) / NEAR)
            each = np.add.reduceat(share * gap, self.begins) / np.add.reduceat(share, self.begins)
            error = guessed - taken
            if not self.in_microseconds:
                error -= (np.add.reduceat(error, self.begins) / counts)[choice]
            off = near * error / FAR
            wrong = 2 * FAR**2 * (np.sqrt(1 + off**2) - 1).mean()
            worst = ((self.weights * each**8).sum() / total) ** 0.125
            return float((self.weights * each).sum() / total + WORST * worst + self.off * wrong)

        return loss


def descend(fit: Fit, problems: Sequence[Any]) -> Array:
    """Constants of little loss: of several random descents, those whose choices lose least."""
    choices = fit.choices(problems)

    def hard_loss(constants: Array) -> float:
        lost = np.log(choices.lost(constants))
        return float(np.average(lost, weights=choices.weights) + WORST * lost.max())

    found = [descent(choices.loss(), fit, seed) for seed in range(fit.descents)]
    return min(found, key=hard_loss)


def descent(loss: Callable[[Array], float], fit: Fit, seed: int) -> Array:
    """One random descent in the constants' logarithms."""
    rng = random.Random(seed)
    low, high = np.log(np.array(list(fit.bounds.values()), dtype=np.float64)).T
    free = [place for place in range(len(low)) if low[place] < high[place]]
    start = (low + high) / 2 if fit.start is None else np.clip(np.log(fit.start), low, high)
    weight = 0.0 if fit.start is None else HELD_NEAR

    def total(at: Array) -> float:
        found = loss(np.exp(at))
        return found + weight * float(((at - start) ** 2).mean()) if weight else found

    at, least = start, total(start)
    for _ in range(fit.steps):
        trial, size = at.copy(), rng.choice((0.05, 0.12, 0.25, 0.5, 1.2))
        for place in rng.sample(free, rng.randint(1, min(3, len(free)))):
            trial[place] = min(max(at[place] + size * rng.uniform(-1, 1), low[place]), high[place])
        if (found := total(trial)) < least:
            at, least = trial, found
    return np.array([float(f"{value:.4g}") for value in np.exp(at)])


# Limits -----------------------------------------------------------------------------------------


def best_limit(pairs: Sequence[tuple[float, float]], tried: Iterable[Number]) -> tuple[Number, list[float]]:
    """The limit that loses least (the greatest of equal ones), and each problem's loss by it, as a factor.

    ``pairs`` has of each problem what is limited, and the logarithm of what is gained within the limit.
    """
    limited, gain = np.array(pairs).T

    def lost(most: Number) -> Array:
        return np.where(limited > most, np.maximum(0, gain), np.maximum(0, -gain))

    most = max(tried, key=lambda most: (-lost(most).mean(), most))
    return most, np.exp(lost(most)).tolist()


def limits_entry(constants: Constants, losses: Sequence[float], file: str) -> Constants:
    """The data file's entry of limits, with what the problems lose by them."""
    loss = {"problems": len(losses), "loss": summary(np.array(losses))}
    return {"constants": constants, "measured": {"file": file, **loss}}


# Files of measured problems and given constants -----------------------------------------------------


@cache
def lines_of(gpu: str, family: str) -> list[dict[str, Any]]:
    """The measured problems of a family, as ``benchmarks.measure_schedules`` writes them."""
    path = SCHEDULES / file_of(gpu, family)
    return [json.loads(line) for line in path.read_text().splitlines()]


def file_of(gpu: str, family: str) -> str:
    return f"{gpu.removeprefix('nvidia_')}-{family}.jsonl"


def files_of(gpu: str, families: Iterable[str]) -> str:
    return ", ".join(file_of(gpu, family) for family in families)


def given_models() -> dict[str, Constants]:
    """The constants that no measurement decides, with the reasons."""
    found: dict[str, Constants] = json.loads((SCHEDULES / "given.json").read_text())
    return found


def summary(ratios: Array) -> dict[str, float]:
    """Loss of the choices: the geometric mean and the worst, as fractions of the best measured time."""
    return {
        "mean": round(float(np.exp(np.log(ratios).mean()) - 1), 4),
        "worst": round(float(ratios.max() - 1), 3),
    }


def plain(value: float) -> float:
    return int(value) if value == int(value) else value
