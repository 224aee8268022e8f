"""The process in which ``tune`` measures: JSON lines in, JSON lines out.

It is a process of its own because some algorithms of some libraries end the CUDA context (an illegal
instruction in cuSPARSELt 0.8.0, for one), and nothing brings a context back. What it is about to try it says
first, so the parent knows what killed it, and starts another one that leaves that out.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..device.devices import cuda_properties
from ..device.tensors import TensorView, import_cupy
from ..errors import Sparse24Error, UnsupportedError
from ..gemm.args import GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..gemm.table import GemmRow, find
from ..gemm.tuned import TunedKernel, TuningTable
from ..plan.preference import PlanPreference
from ..vocab import ElementKind, MatrixOrder, ScaleKind
from ..weights.weight import PackedWeight, Sparse24Weight
from .timing import Contender, capture, copies_beyond_l2, elapsed_us, time_contenders

Array = Any
Configuration = dict[str, int]
CONTEXT_DIED = 70
"""Exit code of a worker whose CUDA context an experiment ended."""
_FINALISTS, _PLANNERS = 4, 8
_LONG_US = 2000.0  # a graph that takes so long needn't run twice for a first impression
_SELF_TEST_RUNS = 24


# Data ---------------------------------------------------------------------------------------------


def random_bits(shape: tuple[int, int], element: ElementKind, seed: int) -> Array:
    """Normal random elements (s8: uniform ones) as raw bits on the current device."""
    cupy = import_cupy()
    rng = cupy.random.default_rng(seed)
    if element is ElementKind.S8:
        return rng.integers(-128, 128, shape, dtype=np.int8).view(np.uint8)
    values = rng.standard_normal(shape, dtype=cupy.float32)
    if element is ElementKind.F32:
        return values.view(np.uint32)
    if element is ElementKind.F16:
        return values.astype(np.float16).view(np.uint16)
    if element is ElementKind.FP8_E4M3:
        codes = np.arange(127, dtype=np.uint8).view(element.dtype).astype(np.float32)
        between = cupy.asarray((codes[1:] + codes[:-1]) / 2)
        found = cupy.searchsorted(between, cupy.abs(values).ravel()).reshape(shape).astype(np.uint8)
        return found | (values < 0).astype(np.uint8) << 7
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)  # round to nearest even


def widened(bits: Array, element: ElementKind, dtype: type = np.float64) -> Array:
    """Raw bits as float64 (or float32) numbers."""
    cupy = import_cupy()
    if element is ElementKind.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
    if element.itemsize == 1:
        numbers: Array = np.arange(256, dtype=np.uint8).view(element.dtype).astype(dtype)
        return cupy.asarray(numbers)[bits]
    return bits.view(element.dtype).astype(dtype)


class _Matrix:
    """A random 2:4 weight in copies that leave the L2 cache, packed for a kernel once."""

    def __init__(self, m: int, k: int, element: ElementKind) -> None:
        bits = random_bits((m, k), element, seed=m + k)
        self.weight = Sparse24Weight.prune_compress(TensorView.of(bits, element=element))
        self._packed: dict[str, list[PackedWeight]] = {}

    @cached_property
    def dense(self) -> Array:
        element = self.weight.element
        return widened(TensorView.of(self.weight.decompress(), element=element).bits(), element)

    def packed(self, plan: GemmSparse24Plan) -> list[PackedWeight]:
        layout = plan.sku.layout
        if layout not in self._packed:
            first = plan.pack(self.weight)
            count = copies_beyond_l2(first.nbytes)
            self._packed[layout] = [first] + [_copied(first) for _ in range(count - 1)]
        return self._packed[layout]


def _copied(packed: PackedWeight) -> PackedWeight:
    buffers = tuple(TensorView.of(view.bits().copy(), element=view.element) for view in packed.buffers)
    return PackedWeight(packed.layout_id, packed.m, packed.k, packed.element, packed.device, buffers)


@lru_cache(maxsize=1)
def _matrix(m: int, k: int, element: ElementKind) -> _Matrix:
    return _Matrix(m, k, element)


class Problem:
    """One descriptor with its operands, and what a right result lies between."""

    def __init__(self, desc: GemmSparse24Descriptor, ordinal: int) -> None:
        cupy = import_cupy()
        if desc.epilogue.has_bias or ScaleKind.NONE not in (desc.scale_x, desc.scale_w):
            raise UnsupportedError("tuning: serves the epilogue identity without scales")
        self.desc, self._properties = desc, cuda_properties(ordinal)
        self._matrix = _matrix(desc.m, desc.k, desc.element)
        self._x = _ordered((desc.n, desc.k), desc.element, desc.x_order)
        self._x[...] = random_bits((desc.n, desc.k), desc.element, seed=desc.n)
        self._y = _ordered((desc.n, desc.m), desc.out_element, desc.y_order)
        self._space = cupy.empty(0, np.uint8)
        self._bounds: tuple[Array, Array] | None = None

    def plan(self, kernel: str, configuration: Configuration) -> GemmSparse24Plan:
        """The kernel in the configuration. Raises UnsupportedError where it refuses."""
        row, device = _row(kernel), self._properties
        entry = TunedKernel(
            kernel=kernel,
            version=row.kernel.tuning_version(device),
            problem=self.desc,
            configuration=configuration,
            microseconds=1,
            default_microseconds=1,
        )
        plan = GemmSparse24Plan.select(
            self.desc,
            device=device.ordinal,
            preference=PlanPreference(prefer_backend=row.backend),
            tuning=TuningTable(device.name, device.driver or "", [entry]),
        )
        if plan.explain().chosen != kernel:
            raise UnsupportedError(f"{kernel}: another row of {row.backend} is chosen")
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
        return _row(kernel).kernel.candidates(self.desc, self._properties)

    def launches(self, plan: GemmSparse24Plan) -> list[Any]:
        """A launcher a copy of the weight; not bound, since a bound plan may be a graph of its own."""
        self._reserve(plan)

        def launcher(packed: PackedWeight) -> Any:
            args = self._arguments(packed, self._y)
            return lambda stream: plan.run(args, workspace=self._space, stream=stream)

        return [launcher(packed) for packed in self._matrix.packed(plan)]

    def _reserve(self, plan: GemmSparse24Plan) -> None:
        if plan.workspace_size() > self._space.size:
            self._space = import_cupy().empty(plan.workspace_size(), np.uint8)

    def _arguments(self, packed: PackedWeight, y: Array) -> GemmSparse24Args:
        view = TensorView.of
        return GemmSparse24Args(
            packed, view(self._x, element=self.desc.element), view(y, element=self.desc.out_element)
        )

    def is_right(self, plan: GemmSparse24Plan) -> bool:
        """Whether every result lies inside the plan's guarantee; results and workspace start as poison."""
        self._reserve(plan)
        self._y.fill(np.iinfo(self._y.dtype).max)
        self._space.fill(0xFF)
        self.launches(plan)[0](0)
        import_cupy().cuda.Device().synchronize()
        low, high = self._between(plan)
        got = widened(self._y, self.desc.out_element, np.float32)
        return bool(((got >= low) & (got <= high)).all())

    def _between(self, plan: GemmSparse24Plan) -> tuple[Array, Array]:
        if self._bounds is None:
            desc, w = self.desc, self._matrix.dense
            x = widened(self._x, desc.element)
            exact = desc.alpha * (x @ w.T)
            allowed = plan.guarantee.tolerance(desc.k, exact, abs(x) @ abs(w).T, desc.out_element, desc.alpha)
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
        packed = self._matrix.packed(plan)[0]
        lanes = [
            (cupy.cuda.Stream(non_blocking=True), self._y.copy(), cupy.empty_like(self._space))
            for _ in range(2)
        ]
        same = True
        for _ in range(_SELF_TEST_RUNS // len(lanes)):
            for stream, y, space in lanes:
                y.fill(0)
                cupy.cuda.Device().synchronize()
                plan.run(self._arguments(packed, y), workspace=space, stream=stream)
            cupy.cuda.Device().synchronize()
            same = same and all(bool((y == first).all()) for _, y, _ in lanes)
        return same

    def bits(self, plan: GemmSparse24Plan) -> Array:
        """The result's bits."""
        self.launches(plan)[0](0)
        import_cupy().cuda.Device().synchronize()
        return self._y.copy()


def _row(name: str) -> GemmRow:
    row = find(name)
    assert row is not None
    return row


def _ordered(shape: tuple[int, int], element: ElementKind, order: MatrixOrder) -> Array:
    layout = "F" if order is MatrixOrder.COLUMN else "C"
    return import_cupy().empty(shape, element.bits_dtype, order=layout)


def digest(bits: Array) -> int:
    """A position-dependent checksum, made on the device."""
    flat = bits.ravel()
    cupy = import_cupy()
    total, step = 0, 1 << 26
    for start in range(0, flat.size, step):
        part = flat[start : start + step].astype(np.uint64)
        weights = (cupy.arange(part.size, dtype=np.uint64) + np.uint64(start)) * np.uint64(0x9E3779B97F4A7C15)
        total = (total + int(((part + np.uint64(1)) * (weights | np.uint64(1))).sum())) % 2**64
    return total


# Requests -----------------------------------------------------------------------------------------


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def search(request: dict[str, Any], ordinal: int) -> None:
    """Try every configuration, then time the best ones beside the default and self-test the winner."""
    kernel = request["kernel"]
    problem = Problem(GemmSparse24Descriptor(**request["problem"]), ordinal)
    known = {_key(item["configuration"]): item["us"] for item in request["known"]}
    fresh = [one for one in ({}, *problem.candidates(kernel)) if _key(one) not in known]
    for configuration, plan in zip(fresh, problem.plans(kernel, fresh), strict=True):
        say(event="trying", configuration=configuration)
        us = None if plan is None else _trial(problem, plan)
        known[_key(configuration)] = us
        say(event="tried", configuration=configuration, us=us)
    right = sorted((us, key) for key, us in known.items() if us is not None)
    finalists = [dict(key) for _, key in right[:_FINALISTS]]
    if known[()] is not None and {} not in finalists:
        finalists.append({})
    say(event="trying", configuration=None)  # all at once: no one of them is to blame
    plans = problem.plans(kernel, finalists)
    contenders = [Contender(str(i), problem.launches(plan)) for i, plan in enumerate(plans) if plan]
    times = time_contenders(contenders, rounds=7, round_ms=1.5)
    say(event="done", times=[[finalists[int(name)], us] for name, us in times.items()])


def _key(configuration: Configuration) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(configuration.items()))


def _trial(problem: Problem, plan: GemmSparse24Plan) -> float | None:
    """Microseconds, roughly; None where the launch is refused or the result is wrong."""
    try:
        if not problem.is_right(plan):
            return None
    except Sparse24Error:
        return None  # a dead context shows at the next step
    launches = problem.launches(plan)
    stream = import_cupy().cuda.Stream(non_blocking=True)
    graph = capture(launches, stream, 1)
    once = elapsed_us(graph, stream)
    return (once if once > _LONG_US else min(once, elapsed_us(graph, stream))) / len(launches)


def self_test(request: dict[str, Any], ordinal: int) -> None:
    """Whether the configuration is right and repeats its bits; and a checksum of them."""
    problem = Problem(GemmSparse24Descriptor(**request["problem"]), ordinal)
    configuration = request["configuration"]
    say(event="trying", configuration=configuration)
    plan = problem.plan(request["kernel"], configuration)
    sound = not request["repeat"] or (problem.is_right(plan) and problem.is_deterministic(plan))
    say(event="done", sound=sound, digest=digest(problem.bits(plan)))


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
