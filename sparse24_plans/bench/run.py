"""Measures a record, or parts of one: ``sparse24 bench -o benchmarks/results/h200.json``.

The figures: ``gemm`` microseconds of a launch beside dense cuBLAS (null where PyTorch doesn't serve it) and
cuSPARSELt (null where it can't serve; the tuned plan of the backend ``cusparselt``); ``epilogues`` and
``variants`` beside the plain product; ``prepare`` beside a device copy of the same bytes, with
``prepare_peers``; ``host`` microseconds of host time a call, of the plan that select chooses and, with a
prefix, of each backend forced, and of PyTorch's call of cuSPARSELt.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from ..vocab import ElementKind
from . import additions, gemm, host, prepare
from .gemm import matrix_of
from .record import Record, Step
from .scope import Scope


def steps(scope: Scope) -> list[Step]:
    """The measurements of the scope."""
    found = []
    for element, (m, k), n in product(scope.elements, scope.shapes, scope.tokens):
        about: dict[str, Any] = {"m": m, "k": k, "n": n, "element": element.value}
        name = scope.backends[0] if scope.backends else "auto"
        measure = partial(_products, scope, m, k, n, element)
        found.append(Step("gemm", {**about, "backend": name}, measure))
        if (m, k) in additions.SHAPES and n in additions.TOKENS and element in additions.ELEMENTS:
            for part in additions.ADDITIONS:
                found.append(Step(part, about, partial(_additions, part, m, k, n, element)))
    for element, (m, k) in product(scope.elements, scope.prepare_shapes):
        about = {"m": m, "k": k, "element": element.value}
        found.append(Step("prepare", about, partial(_preparation, m, k, element)))
    found.append(Step("host", {}, lambda sources: {"host": host.measured(sources)}))
    return [step for step in found if step.part in scope.parts]


def _products(scope: Scope, m: int, k: int, n: int, element: ElementKind, sources: set[str]) -> Record:
    return {"gemm": gemm.measured(matrix_of(m, k, element), n, scope.backends, sources)}


def _additions(part: str, m: int, k: int, n: int, element: ElementKind, sources: set[str]) -> Record:
    return {part: additions.measured(part, matrix_of(m, k, element), n, sources)}


def _preparation(m: int, k: int, element: ElementKind, sources: set[str]) -> Record:
    matrix_of.cache_clear()
    return {
        "prepare": prepare.measured((m, k), element, sources),
        "prepare_peers": prepare.peer_rows((m, k), element),
    }
