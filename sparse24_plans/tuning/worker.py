"""The process in which ``tune`` measures: JSON lines in, JSON lines out.

It is a process of its own because some algorithms of some libraries end the CUDA context (an illegal
instruction in cuSPARSELt 0.8.0, for one), and nothing brings a context back. A worker announces each
experiment before it begins it. The parent thus knows which one killed the worker, and starts another worker
without that experiment.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from ..device.devices import cuda_properties
from ..device.install import import_cupy
from ..errors import Sparse24Error, UnsupportedError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import GemmEntry, find
from ..gemm.plan import GemmSparse24Plan
from ..gemm.tuned import TunedKernel, TuningTable
from ..plan.preference import PlanPreference
from ..vocab import ElementKind, EpilogueKind, ScaleKind
from ..weights.weight import PackedWeight
from .data import Array, Matrix, Problem, digest, widened
from .timing import Contender, capture, elapsed_us, time_contenders

Configuration = dict[str, int]
CONTEXT_DIED = 70
"""Exit code of a worker whose CUDA context an experiment ended."""
_FINALISTS, _PLANNERS = 4, 8
_LONG_US = 2000.0  # a graph that takes so long needn't run twice for a first impression
_SELF_TEST_RUNS = 24


class Experiment(Problem):
    """One problem, the plans that are tried on it, and what a right result lies between."""

    def __init__(self, desc: GemmSparse24Descriptor, ordinal: int) -> None:
        none = ScaleKind.NONE
        if (desc.epilogue, desc.scale_x, desc.scale_w) != (EpilogueKind.IDENTITY, none, none):
            raise UnsupportedError("tuning: serves the epilogue identity without scales")
        super().__init__(desc, _matrix(desc.m, desc.k, desc.element))
        self._properties = cuda_properties(ordinal)
        self._bounds: tuple[Array, Array] | None = None

    def plan(self, kernel: str, configuration: Configuration) -> GemmSparse24Plan:
        """The kernel with the configuration. Raises UnsupportedError if the kernel refuses it."""
        kernel_entry, device = _kernel_entry(kernel), self._properties
        entry = TunedKernel(
            kernel=kernel,
            version=kernel_entry.kernel.tuning_version(device),
            problem=self.desc,
            configuration=configuration,
            microseconds=1,
            default_microseconds=1,
        )
        plan = GemmSparse24Plan.select(
            self.desc,
            device=device.ordinal,
            preference=PlanPreference(prefer_backend=kernel_entry.backend),
            tuning=TuningTable(device.name, device.driver or "", [entry]),
        )
        if plan.explain().chosen != kernel:
            raise UnsupportedError(f"{kernel}: another kernel of {kernel_entry.backend} is chosen")
        return plan

    def plans(self, kernel: str, configurations: list[Configuration]) -> list[GemmSparse24Plan | None]:
        """Plans made side by side, None where one refuses: cuSPARSELt takes 0.14 s for one of f16."""

        def made(configuration: Configuration) -> GemmSparse24Plan | None:
            try:
                return self.plan(kernel, configuration)
            except Sparse24Error:
                return None

        with ThreadPoolExecutor(_PLANNERS) as pool:
            return list(pool.map(made, configurations))

    def candidates(self, kernel: str) -> list[Configuration]:
        return _kernel_entry(kernel).kernel.candidates(self.desc, self._properties)

    def launches(self, plan: GemmSparse24Plan) -> list[Any]:
        """A launcher a copy of the weight; not bound, since a bound plan may be a graph of its own."""
        space = self.workspace(plan)

        def launcher(packed: PackedWeight) -> Any:
            args = self.arguments(packed)
            return lambda stream: plan.run(args, workspace=space, stream=stream)

        return [launcher(packed) for packed in self.matrix.packed(plan)]

    def is_right(self, plan: GemmSparse24Plan) -> bool:
        """Whether every result lies inside the plan's guarantee; results and workspace start as poison."""
        launch = self.launches(plan)[0]
        self.poison()
        launch(0)
        import_cupy().cuda.Device().synchronize()
        low, high = self._between(plan)
        got = widened(self.y, self.desc.out_element, np.float32)
        return bool(((got >= low) & (got <= high)).all())

    def _between(self, plan: GemmSparse24Plan) -> tuple[Array, Array]:
        if self._bounds is None:
            desc, w = self.desc, _wide(self.matrix)
            x = widened(self.x, desc.element)
            exact, promise = desc.alpha * (x @ w.T), plan.guarantee
            abs_sum = promise.magnitudes(x, desc.element) @ promise.magnitudes(w, desc.element).T
            allowed = promise.tolerance(desc.k, exact, abs_sum, desc.out_element, desc.alpha)
            low, high = exact - allowed, exact + allowed
            if desc.out_element.is_integer:
                limits = np.iinfo(desc.out_element.dtype)
                low, high = low.clip(limits.min, limits.max), high.clip(limits.min, limits.max)
            self._bounds = low.astype(np.float32), high.astype(np.float32)
        return self._bounds

    def is_deterministic(self, plan: GemmSparse24Plan) -> bool:
        """Whether many runs, on two streams at once, all give the bits of the first."""
        cupy = import_cupy()
        first = self.bits(plan)
        packed = self.matrix.packed(plan)[0]
        lanes = [
            (cupy.cuda.Stream(non_blocking=True), self.y.copy(), cupy.empty_like(self.workspace(plan)))
            for _ in range(2)
        ]
        same = True
        for _ in range(_SELF_TEST_RUNS // len(lanes)):
            for stream, y, space in lanes:
                y.fill(0)
                cupy.cuda.Device().synchronize()
                plan.run(self.arguments(packed, y), workspace=space, stream=stream)
            cupy.cuda.Device().synchronize()
            same = same and all(bool((y == first).all()) for _, y, _ in lanes)
        return same

    def bits(self, plan: GemmSparse24Plan) -> Array:
        """The result's bits."""
        self.launches(plan)[0](0)
        import_cupy().cuda.Device().synchronize()
        return self.y.copy()


def _kernel_entry(name: str) -> GemmEntry:
    kernel_entry = find(name)
    assert kernel_entry is not None
    return kernel_entry


@lru_cache(maxsize=1)
def _matrix(m: int, k: int, element: ElementKind) -> Matrix:
    return Matrix(m, k, element)


@lru_cache(maxsize=1)
def _wide(matrix: Matrix) -> Array:
    """The dense weight as float64."""
    return widened(matrix.dense[0], matrix.element)


# Requests -----------------------------------------------------------------------------------------


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def search(request: dict[str, Any], ordinal: int) -> None:
    """Try every configuration, then time the best ones beside the default and self-test the winner."""
    kernel = request["kernel"]
    experiment = Experiment(GemmSparse24Descriptor(**request["problem"]), ordinal)
    known = {_key(item["configuration"]): item["us"] for item in request["known"]}
    fresh = [one for one in ({}, *experiment.candidates(kernel)) if _key(one) not in known]
    for configuration, plan in zip(fresh, experiment.plans(kernel, fresh), strict=True):
        say(event="trying", configuration=configuration)
        us = None if plan is None else _trial(experiment, plan)
        known[_key(configuration)] = us
        say(event="tried", configuration=configuration, us=us)
    right = sorted((us, key) for key, us in known.items() if us is not None)
    finalists = [dict(key) for _, key in right[:_FINALISTS]]
    if known[()] is not None and {} not in finalists:
        finalists.append({})
    say(event="trying", configuration=None)  # all at once: no one of them is to blame
    plans = experiment.plans(kernel, finalists)
    contenders = [Contender(str(i), experiment.launches(plan)) for i, plan in enumerate(plans) if plan]
    times = time_contenders(contenders, rounds=7, round_ms=1.5)
    say(event="done", times=[[finalists[int(name)], us] for name, us in times.items()])


def _key(configuration: Configuration) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(configuration.items()))


def _trial(experiment: Experiment, plan: GemmSparse24Plan) -> float | None:
    """Microseconds, roughly; None where the launch is refused or the result is wrong."""
    try:
        if not experiment.is_right(plan):
            return None
    except Sparse24Error:
        return None  # a dead context shows at the next step
    launches = experiment.launches(plan)
    stream = import_cupy().cuda.Stream(non_blocking=True)
    graph = capture(launches, stream, 1)
    once = elapsed_us(graph, stream)
    return (once if once > _LONG_US else min(once, elapsed_us(graph, stream))) / len(launches)


def self_test(request: dict[str, Any], ordinal: int) -> None:
    """Whether the configuration is right and repeats its bits; and a checksum of them."""
    experiment = Experiment(GemmSparse24Descriptor(**request["problem"]), ordinal)
    configuration = request["configuration"]
    say(event="trying", configuration=configuration)
    plan = experiment.plan(request["kernel"], configuration)
    sound = not request["repeat"] or (experiment.is_right(plan) and experiment.is_deterministic(plan))
    say(event="done", sound=sound, digest=digest(experiment.bits(plan)))


def main(ordinal: int) -> None:
    cupy = import_cupy()
    requests = {"search": search, "self_test": self_test}
    with cupy.cuda.Device(ordinal):
        for line in sys.stdin:
            request = json.loads(line)
            try:
                requests[request["do"]](request, ordinal)
                cupy.cuda.Device().synchronize()
            except Exception as error:  # noqa: BLE001 - the parent gets it, and decides
                try:
                    cupy.cuda.Device().synchronize()
                except Exception:  # noqa: BLE001 - the context is gone
                    os._exit(CONTEXT_DIED)
                say(event="failed", error=f"{type(error).__name__}: {error}")
