"""The ``gemm`` rows of a record: what selection chooses beside dense cuBLAS, cuSPARSELt and every backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..device.devices import cuda_properties
from ..device.install import import_cupy
from ..errors import Sparse24Error, UnsupportedError
from ..gemm.kernel_table import ENTRIES
from ..gemm.plan import GemmSparse24Plan
from ..gemm.tuned import shipped
from ..plan.guarantee import GuaranteeRequirement
from ..plan.preference import PlanPreference
from ..tuning.data import Matrix, Problem, free_memory, widened
from ..tuning.timing import Contender, Launch, time_contenders
from ..vocab import ElementKind
from ..weights.packed_layouts import Quantization
from . import peers
from .record import sources_of
from .scope import BACKENDS
from .steady import MANY_TOKENS, Steady, time_alone

Row = dict[str, Any]

_INVARIANT = GuaranteeRequirement(batch_invariant=True)
FORCED = {name: PlanPreference(prefer_backend=name) for name in BACKENDS}
SELECTED = {"auto": PlanPreference(), "invariant": PlanPreference(require=_INVARIANT)}
"""Selection's choice, and its choice where batch invariance is required."""
_ALONE = SELECTED | {name: FORCED[name] for name in ("cusparselt", "f32_split6", "f32_split3")}
"""Contenders that are timed alone, as dense cuBLAS is. float32 has two kernels that users pick by name."""
_IN_BURSTS = {
    **{name: preference for name, preference in FORCED.items() if name not in _ALONE},
    "wgmma_sp_invariant": PlanPreference(prefer_backend="wgmma_sp", require=_INVARIANT),
}
"""Contenders that are timed in bursts beside ``auto``."""
_MAX_TOKENS = {"inflate_strict": 256, "mma_sp": 256}
"""Past these tokens selection never chooses the backend, and it would take most of a record's time."""
_WORST_ERROR = {"f32": 1e-5, "f16": 1e-3, "bf16": 5e-3, "s8": 1e-6, "fp8_e4m3": 5e-3, "fp8_e5m2": 5e-3}
"""Relative error above which a time is not recorded: the result is wrong."""
_ROUNDS, _ROUND_MS = 7, 2.0
_SAMPLED = (64, 256)
"""Rows and columns of a result that are compared with float64."""


@lru_cache(maxsize=1)
def matrix_of(m: int, k: int, element: ElementKind, by: Quantization | None = None) -> Matrix:
    """The random weight of one shape. It is kept for the next measurement of that shape."""
    free_memory()
    return Matrix(m, k, element, by)


class Cell(Problem):
    """One (matrix, n): operands, and contenders by name. Names that ask for the same kernel share one."""

    def __init__(self, matrix: Matrix, n: int) -> None:
        super().__init__(matrix.descriptor(n), matrix)
        self.contenders: dict[str, Contender] = {}
        self.kernels: dict[str, str | None] = {}
        """Name -> the kernel entry that was chosen."""
        self.sources: set[str] = set()
        self._errors: dict[str, float] = {}
        self._first: dict[tuple[str | None, str], str] = {}

    def plan(self, preference: PlanPreference) -> GemmSparse24Plan | None:
        """Our plan under ``preference``; None where no kernel can serve."""
        try:
            return GemmSparse24Plan.select(self.desc, device=0, preference=preference)
        except Sparse24Error:
            return None

    def enter(self, name: str, preference: PlanPreference) -> None:
        """Add a plan to what is timed. Raises UnsupportedError where its result is wrong."""
        plan = self.plan(preference)
        if plan is None:
            return
        about = plan.explain()
        first = self._first.setdefault((about.chosen, about.details), name)
        if first == name:
            made = self.contender(name, plan)
            self._errors[name] = error = self.rel_error(made.launches[0])
            if not error <= _WORST_ERROR[self.desc.element]:
                raise UnsupportedError(f"{name} {self.desc}: relative error {error:.3g}, not recorded")
            self.contenders[name] = made
            self.sources.update(sources_of(plan))
        else:
            self.contenders[name] = self.contenders[first]
            self._errors[name] = self._errors[first]
        self.kernels[name] = about.chosen

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

    def dense(self) -> list[Contender]:
        """Dense cuBLAS; nothing where PyTorch is missing or refuses the product."""
        found = peers.dense(self.x, self.y, self.matrix.dense, self.desc.element)
        return [found] if found else []

    def times_alone(self, *others: Contender) -> dict[str, Steady]:
        """Time of each name alone; ``dense`` and ``others`` appear under their own names."""
        distinct = {one.name: one for one in (*self.dense(), *self.contenders.values(), *others)}
        times = time_alone(list(distinct.values()))
        return times | {name: times[one.name] for name, one in self.contenders.items()}

    def times_in_bursts(self, others: Sequence[Contender], auto: Steady) -> dict[str, float]:
        """Microseconds by contender, from bursts beside ``auto``: its steady time times their ratio."""
        beside = self.contenders["auto"]
        found = time_contenders([beside, *others], rounds=_ROUNDS, round_ms=_ROUND_MS) if others else {}
        return {one.name: auto.us * found[one.name] / found[beside.name] for one in others}

    def row(self, name: str, time: Steady) -> Row:
        """A contender's row of the record, without the fields of its peers."""
        about = {
            "m": self.desc.m,
            "k": self.desc.k,
            "n": self.desc.n,
            "element": self.desc.element.value,
            **self._stored,
            "backend": name,
            "us": rounded(time.us),
            "rel_error": float(f"{self._errors[name]:.3g}"),
        }
        return about | (time.fields() if self.desc.n >= MANY_TOKENS else {})

    @property
    def _stored(self) -> Row:
        """The fields that say what a quantized weight stores."""
        by = self.desc.quantization
        return {} if by is None else {"weight_element": by.element.value, "group": by.group}

    def peer(self, name: str, time: Steady | None) -> Row:
        """The fields of a peer: its time and, for many tokens, its clock and power; None without one."""
        found: Row = {name: rounded(time.us if time else None)}
        if self.desc.n >= MANY_TOKENS:
            found |= (time or Steady(0.0)).fields(name)
        return found

    def peer_is_tuned(self) -> bool:
        """Whether cuSPARSELt runs the best algorithm of a search, and not the one that it takes by itself."""
        properties = cuda_properties(0)
        peer = next(one for one in ENTRIES if one.name == "cusparselt")
        table, version = shipped(properties.name), peer.kernel.tuning_version(properties)
        return any(
            name.startswith("cusparselt") and table.mismatch(entry, properties, version) is None
            for name, entry in table.find(self.desc).items()
        )


def rounded(us: float | None) -> float | None:
    """A time, rounded as it is in records."""
    return None if us is None else round(us, 2)


def measured(matrix: Matrix, n: int, backends: Sequence[str], sources: set[str]) -> list[Row]:
    """The rows of one shape and n; forced backends are the named ones, or all if none is named.

    Adds to ``sources`` what was timed.
    """
    cell = Cell(matrix, n)
    for name, preference in _ALONE.items():
        cell.enter(name, preference)
    if "auto" not in cell.contenders:
        return []
    alone = cell.times_alone()
    beside = cell.peer("dense_us", alone.get("dense"))
    beside |= cell.peer("cusparselt_us", alone.get("cusparselt") if cell.peer_is_tuned() else None)
    for name, preference in _IN_BURSTS.items():
        if n <= _MAX_TOKENS.get(name, n) and (not backends or preference.prefer_backend in backends):
            cell.enter(name, preference)
    times = {name: alone[one.name] for name, one in cell.contenders.items() if one.name in alone}
    others = [one for name, one in cell.contenders.items() if name not in times]
    distinct = list({one.name: one for one in others}.values())
    bursts = cell.times_in_bursts(distinct, alone["auto"])
    times |= {name: Steady(bursts[one.name]) for name, one in cell.contenders.items() if one.name in bursts}
    sources |= cell.sources
    return [cell.row(name, time) | beside for name, time in times.items()]


def measured_quantized(matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    """The rows of a quantized weight and n: selection's choices beside dense cuBLAS and PyTorch's int4."""
    cell = Cell(matrix, n)
    for name, preference in SELECTED.items():
        cell.enter(name, preference)
    alone = cell.times_alone(*peers.int4(cell.x, matrix.m, matrix.k))
    beside = cell.peer("dense_us", alone.get("dense")) | cell.peer("int4_us", alone.get("int4"))
    sources |= cell.sources
    return [cell.row(name, alone[name]) | beside for name in cell.contenders]
