"""Times of select's choices for problems that nobody tuned for: ``python -m benchmarks.measure random``.

Matrices of published models that the record of the grid doesn't have, and ragged ones; n log-uniform, not
rounded. A fifth of bf16's matrices is measured with every schedule that a kernel may be given, and with every
algorithm of cuSPARSELt: ``best_us`` and ``cusparselt_us``, null elsewhere. These matrices come last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from sparse24_plans.bench.gemm import SELECTED, Cell, Row, matrix_of, rounded
from sparse24_plans.bench.record import Lists, Record, Step
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.errors import Sparse24Error
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.gemm.plan import GemmSparse24Plan
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.preference import PlanPreference
from sparse24_plans.tuning.timing import Contender, time_contenders
from sparse24_plans.vocab import ElementKind

from .models import MODELS

LISTS: Lists = {"gemm": ("shape", "m", "k", "n", "element", "weight_element", "group", "backend")}
MATRICES = {
    ElementKind.BF16: 63,
    ElementKind.F16: 18,
    ElementKind.S8: 18,
    ElementKind.FP8_E4M3: 18,
    ElementKind.F32: 9,
}
"""Number of random matrices of each element, in the order of the record. Dense float32 takes long."""
_TOKENS = 5
"""Values of n for a matrix."""
_MAX_TOKENS_LOG2 = 13.0
_RAGGED, _WITH_ALL = 4, 5
"""One matrix of this number is ragged, or measured with all schedules."""
_FASTEST = 3
"""Fastest schedules that are timed once more, in longer bursts beside what ``select`` chose."""
_RIGHT = 0.02
"""Relative error up to which an algorithm of cuSPARSELt counts: some are wrong for some sizes."""


@dataclass(frozen=True)
class Drawn:
    """A matrix, and the n that it is measured with; ``with_all``: beside all schedules."""

    shape: str
    m: int
    k: int
    element: ElementKind
    tokens: tuple[int, ...]
    with_all: bool


def drawn(seed: int, elements: Sequence[ElementKind] = tuple(MATRICES)) -> list[Drawn]:
    """The matrices of a seed; those of an element are the same whatever the others are."""
    found = [one for element in elements for one in _drawn_of(element, seed)]
    return sorted(found, key=lambda one: one.with_all)


def _drawn_of(element: ElementKind, seed: int) -> Iterator[Drawn]:
    rng = random.Random(f"{seed} {element.value}")
    layers = [(f"{model} {layer}", *shape) for model, its in MODELS.items() for layer, shape in its.items()]
    models = cycle(rng.sample(layers, len(layers)))
    for number in range(MATRICES[element]):
        ragged = number % _RAGGED == 0
        name, m, k = _ragged(rng) if ragged else next(models)
        tokens = tuple(sorted(int(2 ** rng.uniform(0, _MAX_TOKENS_LOG2)) for _ in range(_TOKENS)))
        with_all = element is ElementKind.BF16 and number % _WITH_ALL == 0
        yield Drawn(name, m, k, element, tokens, with_all)


def _ragged(rng: random.Random) -> tuple[str, int, int]:
    return "ragged", int(2 ** rng.uniform(9, 15.5)), 16 * int(2 ** rng.uniform(5, 10))


def steps(seed: int, elements: Sequence[ElementKind] = tuple(MATRICES)) -> list[Step]:
    """The measurements of a seed, one a matrix and n."""
    return [
        Step(
            "gemm",
            {"shape": one.shape, "m": one.m, "k": one.k, "n": n, "element": one.element.value},
            partial(_measured, one, n),
        )
        for one in drawn(seed, elements)
        for n in dict.fromkeys(one.tokens)
    ]


def _measured(one: Drawn, n: int, sources: set[str]) -> Record:
    cell = Cell(matrix_of(one.m, one.k, one.element), n)
    for name, preference in SELECTED.items():
        cell.enter(name, preference)
    if "auto" not in cell.contenders:
        return {"gemm": []}
    schedules = _fastest(_schedules(cell), _FASTEST) if one.with_all else []
    peers = _fastest(_algorithms(cell), 1) if one.with_all else []
    times = cell.times_alone(*peers)
    bursts = cell.times_in_bursts(schedules, times["auto"])
    best = min([*(times[name].us for name in cell.contenders), *bursts.values()])
    beside = cell.peer("dense_us", times.get("dense"))
    beside |= cell.peer("cusparselt_us", times[peers[0].name] if peers else None)
    beside["best_us"] = rounded(best) if one.with_all else None
    sources |= cell.sources
    rows: list[Row] = [
        {"shape": one.shape, **cell.row(name, times[name]), "row": cell.kernels[name], **beside}
        for name in cell.contenders
    ]
    return {"gemm": rows}


def _fastest(contenders: list[Contender], count: int) -> list[Contender]:
    times = time_contenders(contenders, rounds=5, round_ms=1.0) if contenders else {}
    return sorted(contenders, key=lambda one: times[one.name])[:count]


def _schedules(cell: Cell) -> list[Contender]:
    """Our kernel of the tensor cores with every configuration that it may be given."""
    return [
        cell.contender(f"{row} {configuration}", plan)
        for row, configuration, plan in _configured(cell, "wgmma_sp")
    ]


def _algorithms(cell: Cell) -> list[Contender]:
    """cuSPARSELt's algorithms that are right, without split-K."""
    found = []
    for _, configuration, plan in _configured(cell, "cusparselt"):
        if set(configuration) == {"algorithm"}:
            one = cell.contender(f"cusparselt {configuration['algorithm']}", plan)
            if cell.rel_error(one.launches[0]) <= _RIGHT:
                found.append(one)
    return found


def _configured(cell: Cell, backend: str) -> Iterator[tuple[str, dict[str, int], GemmSparse24Plan]]:
    device = cuda_properties(0)
    if cell.plan(PlanPreference(prefer_backend=backend)) is None:
        return
    for row in ENTRIES:
        if row.backend is not backend or cell.desc.element not in row.elements:
            continue
        for configuration in row.kernel.candidates(cell.desc, device):
            choice = Choice(cell.desc, device, row, PlanPreference(), configuration)
            with suppress(Sparse24Error):  # the kernel's promises rule it out, or the library refuses
                yield row.name, configuration, GemmSparse24Plan(choice)
