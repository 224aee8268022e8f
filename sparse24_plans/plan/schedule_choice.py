"""How families pick a schedule: fitted constants, the fastest candidate or the first that is enough, and the
split-K of invariant kernels.

A cost model is a formula in its family's ``schedules/``; its constants are data that ``python -m
benchmarks.fit`` writes from measured problems, one file a GPU in ``tuning/models``. All devices take the
H200's: a schedule's split-K fixes bits, which must not depend on the device at hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

FOLDER = Path(__file__).parent.parent / "tuning" / "models"
REFERENCE_GPU, REFERENCE_SMS = "nvidia_h200", 132
"""The GPU by which every device chooses what fixes bits, and its number of SMs."""
SHARED_BYTES = {1: 227 << 10, 2: 113 << 10, 3: 75 << 10, 4: 56 << 10}
"""Maximum shared memory of a CTA of compute capability 9.0, by how many CTAs share an SM."""

S = TypeVar("S")


@cache
def models(gpu: str) -> dict[str, Any]:
    """The models of a GPU's data file, by name."""
    found: dict[str, Any] = json.loads((FOLDER / f"{gpu}.json").read_text())["models"]
    return found


def constants(model: str) -> Any:
    """The fitted constants of one cost model, as its file names them."""
    return models(REFERENCE_GPU)[model]["constants"]


class CostModel(NamedTuple):
    """The time of a kernel: ``launch`` microseconds and the norm of its terms, each with a cost."""

    launch: float
    exponent: float
    costs: tuple[float, ...]

    @classmethod
    def of(cls, model: str, terms: Sequence[str]) -> CostModel:
        """The model of a name, with the costs of these terms."""
        found = constants(model)
        return cls(found["launch"], found["exponent"], tuple(found[term] for term in terms))

    def microseconds(self, work: Sequence[float]) -> float:
        """Predicted microseconds of these amounts of each kind of work."""
        norm = sum((cost * one) ** self.exponent for cost, one in zip(self.costs, work, strict=True))
        return self.launch + float(norm ** (1 / self.exponent))


def fastest(
    candidates: Sequence[S],
    predicted: Callable[[Sequence[S]], Sequence[float]],
    workspace: Callable[[S], int] | None = None,
    max_workspace: int | None = None,
) -> S:
    """The candidate of the least predicted time, the first of equals.

    ``max_workspace`` refuses candidates whose ``workspace`` asks for more bytes.
    """
    if workspace is not None and max_workspace is not None:
        candidates = [one for one in candidates if workspace(one) <= max_workspace]
    times = predicted(candidates)
    return candidates[min(range(len(candidates)), key=times.__getitem__)]


def first_enough(candidates: Sequence[S], is_enough: Callable[[S], bool]) -> S:
    """The first candidate that is enough, or else the last: for kernels whose candidates have an order."""
    return next((one for one in candidates if is_enough(one)), candidates[-1])


def invariant_split(
    splits: Sequence[int],
    times: Callable[[int], tuple[float, Sequence[float]]],
    *,
    judged: Mapping[str, float],
    power: float,
) -> int:
    """The split-K, one for all n, that loses least beside schedules that are free to differ.

    ``judged`` weighs each n that is looked at. ``times`` gives, for an n, the microseconds of the best free
    schedule and of the best with each of ``splits``. The logarithm of their ratio counts by ``power``, so
    that no n loses much; a split that is faster than every free schedule loses nothing.
    """
    lost = dict.fromkeys(splits, 0.0)
    for n, weight in judged.items():
        free, sliced = times(int(n))
        for split, us in zip(splits, sliced, strict=True):
            lost[split] += weight * max(0.0, math.log(us / free)) ** power
    return min(splits, key=lost.__getitem__)
