"""The ``gemm`` rows of a record: every backend beside dense cuBLAS and cuSPARSELt, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..device.devices import cuda_properties
from ..device.tensors import import_cupy
from ..errors import Sparse24Error, UnsupportedError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import ENTRIES
from ..gemm.plan import GemmSparse24Plan
from ..gemm.tuned import shipped
from ..plan.guarantee import GuaranteeRequirement
from ..plan.preference import PlanPreference
from ..tuning.data import Matrix, Problem, widened
from ..tuning.timing import Contender, Launch, time_contenders
from . import peers
from .record import sources_of
from .scope import BACKENDS

Row = dict[str, Any]

_INVARIANT = GuaranteeRequirement(batch_invariant=True)
FORCED = {name: PlanPreference(prefer_backend=name) for name in BACKENDS}
_MEASURED = {
    **FORCED,
    "wgmma_sp_invariant": PlanPreference(prefer_backend="wgmma_sp", require=_INVARIANT),
}
SELECTED = {"auto": PlanPreference(), "invariant": PlanPreference(require=_INVARIANT)}
"""What selection chose, and what it chose where batch invariance was required."""
_MOST_TOKENS = {"inflate_strict": 256, "mma_sp": 256}
"""Past these they are nobody's choice, and take most of a record's time."""
_WORST_ERROR = {"f32": 1e-5, "f16": 1e-3, "bf16": 5e-3, "s8": 1e-6, "fp8_e4m3": 5e-3}
"""Relative error above which a time is not recorded: the result is wrong."""
_ROUNDS = 11
_SAMPLED = (64, 256)
"""Rows and columns of a result that are compared with float64."""


class Cell(Problem):
    """One (matrix, n): operands, and the contenders that are timed interleaved.

    Names that ask for the same kernel share one contender.
    """

    def __init__(self, matrix: Matrix, n: int) -> None:
        super().__init__(GemmSparse24Descriptor(n=n, m=matrix.m, k=matrix.k, element=matrix.element), matrix)
        self.contenders: list[Contender] = []
        self.sources: set[str] = set()
        self._errors: dict[str, float] = {}
        self._names: dict[tuple[str | None, str], list[str]] = {}

    def plan(self, preference: PlanPreference) -> GemmSparse24Plan | None:
        """Our plan under ``preference``; None where no kernel can serve."""
        try:
            return GemmSparse24Plan.select(self.desc, device=0, preference=preference)
        except Sparse24Error:
            return None

    def enter(self, name: str, preference: PlanPreference, *, alone: bool = True) -> None:
        """Add a plan to what is timed, its result checked; ``alone``: also where no other has its kernel."""
        plan = self.plan(preference)
        if plan is None:
            return
        about = plan.explain()
        names = self._names.get((about.chosen, about.details))
        if names is not None:
            names.append(name)
        elif alone:
            made = self.contender(name, plan)
            self._errors[name] = error = self.rel_error(made.launches[0])
            if not error <= _WORST_ERROR[self.desc.element]:
                raise UnsupportedError(f"{name} {self.desc}: relative error {error:.3g}, not recorded")
            self._names[about.chosen, about.details] = [name]
            self.contenders.append(made)
            self.sources.update(sources_of(plan))

    def contender(self, name: str, plan: GemmSparse24Plan) -> Contender:
        """The plan's launches, one for each copy of the weight."""
        space = self.workspace(plan)
        copies = self.matrix.packed(plan)
        return Contender(name, [plan.bind(self.arguments(one), workspace=space).launch for one in copies])

    def rel_error(self, launch: Launch) -> float:
        """||y - exact|| / ||exact|| against float64, on sampled results."""
        cupy = import_cupy()
        self.poison()
        launch(cupy.cuda.Stream.null.ptr)
        cupy.cuda.Device().synchronize()
        rng = np.random.default_rng(0)
        rows, columns = (
            cupy.asarray(np.sort(rng.choice(size, min(size, most), replace=False)))
            for size, most in zip((self.desc.n, self.desc.m), _SAMPLED, strict=True)
        )
        element = self.desc.element
        x, w = widened(self.x[rows], element), widened(self.matrix.dense[0][columns], element)
        got, exact = widened(self.y[rows][:, columns], self.desc.out_element), x @ w.T
        return float(cupy.linalg.norm(got - exact) / cupy.linalg.norm(exact))

    def rows(self) -> list[Row]:
        """Time what has entered; one row a name."""
        times = self.times()
        cusparselt_us = times.get("cusparselt") if self._peer_is_tuned() else None
        beside = {"dense_us": rounded(times.get("dense")), "cusparselt_us": rounded(cusparselt_us)}
        return [self.row(name, times) | beside for name in self.names]

    @property
    def names(self) -> dict[str, str | None]:
        """What has entered, and the row of the table that is its kernel's."""
        return {name: row for (row, _), names in self._names.items() for name in names}

    def times(self) -> dict[str, float]:
        """Microseconds by contender: dense, and the first of the names that ask for a kernel."""
        if not self.contenders:
            return {}
        dense = peers.dense(self.x, self.y, self.matrix.dense, self.desc.element)
        return time_contenders([*([dense] if dense else []), *self.contenders], rounds=_ROUNDS)

    def row(self, name: str, times: Mapping[str, float]) -> Row:
        """What the record says of a name, but for its peers."""
        first = next(names[0] for names in self._names.values() if name in names)
        return {
            "m": self.desc.m,
            "k": self.desc.k,
            "n": self.desc.n,
            "element": self.desc.element.value,
            "backend": name,
            "us": rounded(times[first]),
            "rel_error": float(f"{self._errors[first]:.3g}"),
        }

    def _peer_is_tuned(self) -> bool:
        """Whether cuSPARSELt runs the best algorithm of a search, and not the one that it takes by itself."""
        properties = cuda_properties(0)
        row = next(row for row in ENTRIES if row.name == "cusparselt")
        table, version = shipped(properties.name), row.kernel.tuning_version(properties)
        return any(
            name.startswith("cusparselt") and table.mismatch(entry, properties, version) is None
            for name, entry in table.find(self.desc).items()
        )


def rounded(us: float | None) -> float | None:
    """As records have it."""
    return None if us is None else round(us, 2)


def measured(matrix: Matrix, n: int, backends: Sequence[str], sources: set[str]) -> list[Row]:
    """The rows of one shape and n, of the named backends if any. Adds to ``sources`` what was timed."""
    cell = Cell(matrix, n)
    for name, preference in _MEASURED.items():
        if n <= _MOST_TOKENS.get(name, n) and (not backends or preference.prefer_backend in backends):
            cell.enter(name, preference)
    for name, preference in SELECTED.items():
        cell.enter(name, preference, alone=not backends)
    sources |= cell.sources
    return cell.rows()
