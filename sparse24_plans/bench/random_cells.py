"""What select chooses for problems that nobody tuned for: ``sparse24 bench --random SEED``.

Matrices of published models that the record doesn't have, and ragged ones; n log-uniform, not rounded. A
fifth of bf16's matrices is measured with every schedule that a kernel may be given, and with every algorithm
of cuSPARSELt: ``best_us`` and ``cusparselt_us``, null elsewhere. They come last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from ..device.devices import cuda_properties
from ..errors import Sparse24Error
from ..gemm.kernel_table import ENTRIES
from ..gemm.plan import GemmSparse24Plan
from ..plan.kernel import Choice
from ..plan.preference import PlanPreference
from ..tuning.data import Matrix, free_memory
from ..tuning.timing import Contender, time_contenders
from ..vocab import ElementKind
from . import record
from .gemm import SELECTED, Cell, Row, rounded
from .models import MODELS
from .record import Record

MATRICES = {ElementKind.BF16: 63, ElementKind.F16: 18, ElementKind.S8: 18, ElementKind.FP8_E4M3: 18}
"""By element, in the order of the record."""
_TOKENS = 5
"""n of a matrix."""
_MOST_TOKENS_LOG2 = 13.0
_RAGGED, _WITH_ALL = 4, 5
"""One of so many matrices."""
_FASTEST = 3
"""So many of all schedules are timed once more, beside what select chose."""
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
        tokens = tuple(sorted(int(2 ** rng.uniform(0, _MOST_TOKENS_LOG2)) for _ in range(_TOKENS)))
        with_all = element is ElementKind.BF16 and number % _WITH_ALL == 0
        yield Drawn(name, m, k, element, tokens, with_all)


def _ragged(rng: random.Random) -> tuple[str, int, int]:
    return "ragged", int(2 ** rng.uniform(9, 15.5)), 16 * int(2 ** rng.uniform(5, 10))


def measure(
    seed: int,
    elements: Sequence[ElementKind],
    on_step: Callable[[], None] = lambda: None,
    keep: Callable[[Record], None] = lambda _: None,
) -> Record:
    """A record of a seed. ``keep`` gets what there is after every matrix.

    Raises BackendUnavailableError without a GPU, UnsupportedError for a wrong result.
    """
    rows: list[Row] = []
    sources: set[str] = set()
    about = {"schema": record.SCHEMA, **record.machine(), "seed": seed}
    found: Record = {}
    for one in drawn(seed, elements):
        matrix = Matrix(one.m, one.k, one.element)
        for n in one.tokens:
            rows += _measured(one, matrix, n, sources)
        del matrix
        free_memory()
        found = {**about, **record.stamp(record.files_of(sources)), "gemm": rows}
        keep(found)
        on_step()
    return found


def _measured(one: Drawn, matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    cell = Cell(matrix, n)
    for name, preference in SELECTED.items():
        cell.enter(name, preference)
    schedules = _fastest(_schedules(cell), _FASTEST) if one.with_all else []
    peers = _fastest(_algorithms(cell), 1) if one.with_all else []
    ours = [*cell.contenders, *schedules]
    cell.contenders = [*ours, *peers]
    times = cell.times()
    sources |= cell.sources
    found = []
    for name, chosen in cell.names.items():
        row = cell.row(name, times)
        beside: dict[str, Any] = {
            "row": chosen,
            "dense_us": rounded(times.get("dense")),
            "best_us": rounded(min(times[each.name] for each in ours)) if one.with_all else None,
            "cusparselt_us": rounded(times[peers[0].name]) if peers else None,
        }
        found.append({"shape": one.shape, **row, **beside})
    return found


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
            with suppress(Sparse24Error):  # the row can't keep its promises with it, or the library refuses
                yield row.name, configuration, GemmSparse24Plan(choice, ())
