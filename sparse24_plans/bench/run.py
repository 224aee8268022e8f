"""Measures a record, or parts of one: ``sparse24 bench -o benchmarks/results/h200.json``.

The figures: ``gemm`` microseconds of a launch beside dense cuBLAS (null where PyTorch doesn't serve it) and
cuSPARSELt (null where it can't serve; the tuned plan of the backend ``cusparselt``); ``prepare`` beside a
device copy of the same bytes, with ``prepare_peers``; ``host`` microseconds of host time a call, of the plan
that select chooses and, with a prefix, of each backend forced, and of PyTorch's call of cuSPARSELt.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ..tuning.data import Matrix, free_memory
from . import gemm, host, prepare, record
from .record import Record
from .scope import Scope


def measure(
    scope: Scope, on_step: Callable[[], None] = lambda: None, keep: Callable[[Record], None] = lambda _: None
) -> Record:
    """A record of the scope. ``keep`` gets what there is after every matrix: an interrupted run leaves that.

    Raises BackendUnavailableError without a GPU, UnsupportedError for a wrong result.
    """
    found, sources = record.empty(record.machine()), set[str]()

    def add(**parts: object) -> None:
        for name, figures in parts.items():
            found[name] += figures
        found.update(record.stamp(record.files_of(sources)))
        keep(found)

    for element, (m, k) in product(scope.elements, scope.shapes if "gemm" in scope.parts else ()):
        matrix = Matrix(m, k, element)
        rows = []
        for n in scope.tokens:
            rows += gemm.measured(matrix, n, scope.backends, sources)
            on_step()
        add(gemm=rows)
        del matrix
        free_memory()
    for element, shape in product(scope.elements, scope.prepare_shapes if "prepare" in scope.parts else ()):
        add(
            prepare=prepare.measured(shape, element, on_step, sources),
            prepare_peers=prepare.peer_rows(shape, element),
        )
    if "host" in scope.parts:
        found["host"] = host.measured(sources)
        add()
    return found
