"""Measures the record: ``sparse24 bench -o benchmarks/results/h200.json``.

The figures: ``gemm`` microseconds of a launch beside dense cuBLAS (null where PyTorch doesn't serve it) and
cuSPARSELt (null where it can't serve; the tuned plan of the backend ``cusparselt``); ``prepare`` beside a
device copy of the same bytes, with ``prepare_peers``; ``host`` microseconds of host time a call, of the plan
that select chooses and, with a prefix, of each backend forced, and of PyTorch's call of cuSPARSELt:
``run_us`` with the same arguments every time, ``run_new_args_us`` with new ones, which are checked.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import cupy

from .. import (
    BackendKind,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
)
from ..tuning.timing import time_contenders
from . import prepare
from .harness import environment
from .problems import PREPARE_SHAPES, Cell, Matrix, host_call_of_torch

_FORCED = {
    kind.value: PlanPreference(prefer_backend=kind) for kind in BackendKind if kind is not BackendKind.HOST
}
_INVARIANT = PlanPreference(prefer_backend=BackendKind.WGMMA_SP, require={"batch_invariant": True})
_MEASURED = {**_FORCED, "wgmma_sp_invariant": _INVARIANT}
"""What asking for batch invariance costs is a row of its own."""
_MOST_TOKENS = {"inflate_strict": 256, "mma_sp": 256}
"""Past these they are nobody's choice, and take most of a record's time."""
_WORST_ERROR = {"f32": 1e-5, "f16": 1e-3, "bf16": 5e-3, "s8": 1e-6, "fp8_e4m3": 5e-3}
"""Relative error above which a time is not recorded: the result is wrong."""


def gemm_rows(matrix: Matrix, n: int, backends: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row a backend for one shape and n, all timed interleaved; of the named ones alone, if any."""
    cell = Cell(matrix, n)
    dense = cell.dense()
    contenders, errors = [dense] if dense else [], {}
    kernels: dict[tuple[str | None, str], list[str]] = {}
    """Names that ask for the same kernel, which is timed once."""
    for name, preference in _MEASURED.items():
        wanted = not backends or any(name.startswith(backend) for backend in backends)
        plan = cell.plan(preference) if wanted and n <= _MOST_TOKENS.get(name, n) else None
        if plan is None:
            continue
        names = kernels.setdefault(_kernel_of(plan), [])
        names.append(name)
        if len(names) > 1:
            continue
        made = cell.ours(name, plan)
        errors[name] = cell.rel_error(made.launches[0])
        if not errors[name] <= _WORST_ERROR[matrix.element]:
            raise SystemExit(f"{name} {matrix} n={n}: relative error {errors[name]:.3g}, not timed")
        contenders.append(made)
    if not errors:
        return []
    times = time_contenders(contenders, rounds=11)
    chosen = kernels.get(_kernel_of(GemmSparse24Plan.select(cell.desc, device=0)))
    if chosen is not None:
        chosen.append("auto")
    for first, *others in kernels.values():
        times.update(dict.fromkeys(others, times[first]))
        errors.update(dict.fromkeys(others, errors[first]))
    dense_us, peer_us = times.get("dense"), times.get("cusparselt") if cell.peer_is_tuned() else None
    peers = {
        "dense_us": None if dense_us is None else round(dense_us, 2),
        "cusparselt_us": None if peer_us is None else round(peer_us, 2),
    }
    shared = {"m": matrix.m, "k": matrix.k, "n": n, "element": matrix.element.value}
    return [
        {
            **shared,
            "backend": name,
            "us": round(times[name], 2),
            **peers,
            "rel_error": float(f"{error:.3g}"),
        }
        for name, error in errors.items()
    ]


def _kernel_of(plan: GemmSparse24Plan) -> tuple[str | None, str]:
    """What two plans that launch the same kernel have in common."""
    explanation = plan.explain()
    return explanation.chosen, explanation.details


def _host_us(call: Callable[[], object], *, calls: int = 200, rounds: int = 25) -> float:
    times = []
    for _ in range(rounds):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return round(statistics.median(times), 2)


_IMPORT = "import time; t = time.perf_counter(); import sparse24_plans; {}; print(time.perf_counter() - t)"


def _import_s(then: str) -> float:
    command = [sys.executable, "-c", _IMPORT.format(then)]
    runs = [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5)]
    return round(statistics.median(runs), 4)


def host_figures() -> dict[str, float]:
    """Host microseconds a call, CuPy arrays in, on a small problem; by backend, then the selected one's."""
    figures: dict[str, float] = {}
    desc = GemmSparse24Descriptor(n=16, m=256, k=256, element="bf16")
    matrix = Matrix(desc.m, desc.k, desc.element)
    x, y = (cupy.zeros((16, 256), cupy.uint16) for _ in range(2))
    own_stream = cupy.cuda.Stream(non_blocking=True)
    stream = own_stream.ptr
    for name, preference in {"auto": PlanPreference(), **_FORCED}.items():
        try:
            plan = GemmSparse24Plan.select(desc, device=0, preference=preference)
        except NotImplementedError:
            continue
        args = GemmSparse24Args(plan.pack(matrix.weights[0]), x, y)
        space = cupy.empty(max(plan.workspace_size(), 1), cupy.uint8)
        bound = plan.bind(args, workspace=space)
        prefix = "" if name == "auto" else f"{name}_"
        figures[f"{prefix}run_us"] = _host_us(lambda: plan.run(args, workspace=space, stream=stream))  # noqa: B023
        figures[f"{prefix}launch_us"] = _host_us(lambda: bound.launch(stream))  # noqa: B023
        if name == "auto":
            figures["run_new_args_us"] = _host_us(
                lambda: plan.run(GemmSparse24Args(args.weight, x, y), workspace=space, stream=stream)  # noqa: B023
            )
    if (torch_call := host_call_of_torch(matrix, 16)) is not None:
        figures["torch_cusparselt_us"] = _host_us(torch_call, calls=20)
    figures["select_cached_us"] = _host_us(
        lambda: GemmSparse24Plan.select(GemmSparse24Descriptor(n=16, m=256, k=256, element="bf16"), device=0)
    )
    figures["import_s"] = _import_s("pass")
    figures["import_all_s"] = _import_s("[getattr(sparse24_plans, n) for n in sparse24_plans.__all__]")
    return figures


PARTS = ("gemm", "prepare", "host")
"""The parts of the record."""


def measure(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    elements: Sequence[ElementKind],
    on_rows: Callable[[], None],
    backends: Sequence[str] = (),
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """The record (schema 1), or some parts of it. ``on_rows`` is called after each (shape, n) and each op."""
    record: dict[str, Any] = {"schema": 1, **environment(), "gemm": [], "prepare": [], "prepare_peers": []}
    record["host"] = host_figures() if "host" in parts else {}
    for element, (m, k) in product(elements, shapes if "gemm" in parts else ()):
        matrix = Matrix(m, k, element)
        for n in tokens:
            record["gemm"] += gemm_rows(matrix, n, backends)
            on_rows()
        del matrix
        cupy.get_default_memory_pool().free_all_blocks()
    if "prepare" in parts:
        chosen = [shape for shape in PREPARE_SHAPES if shape in shapes]
        record["prepare"], record["prepare_peers"] = prepare.measure(chosen, elements, on_rows)
    return record
