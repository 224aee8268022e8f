"""The ``host`` figures of a record: what calls cost the host, and the import."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

from ..device.install import import_cupy
from ..errors import Sparse24Error
from ..gemm.args import GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..plan.preference import PlanPreference
from ..tuning.data import Matrix
from ..tuning.process import python_command
from ..vocab import ElementKind
from . import peers
from .gemm import FORCED
from .record import sources_of

_BLOCK_S, _BLOCKS = 0.2, 3
_FEWEST_ROUNDS = 10
_IMPORT = "import time; t = time.perf_counter(); import sparse24_plans; {}; print(time.perf_counter() - t)"


def measured(sources: set[str]) -> dict[str, float]:
    """Host microseconds a call, CuPy arrays in, on a small problem; by backend, then the selected one's.

    Adds to ``sources`` what was launched.
    """
    desc = _descriptor()
    matrix = Matrix(desc.m, desc.k, desc.element)
    figures: dict[str, float] = {}
    for name, preference in {"auto": PlanPreference(), **FORCED}.items():
        try:
            plan = GemmSparse24Plan.select(desc, device=0, preference=preference)
        except Sparse24Error:
            continue
        sources.update(sources_of(plan))
        figures |= _of_plan(plan, matrix, "" if name == "auto" else f"{name}_")
    if (torch_call := peers.cusparselt_call(matrix, desc.n)) is not None:
        figures["torch_cusparselt_us"] = _host_us(torch_call, calls=20)
    figures["select_cached_us"] = _host_us(lambda: GemmSparse24Plan.select(_descriptor(), device=0))
    figures["import_s"] = _import_s("pass")
    figures["import_all_s"] = _import_s("[getattr(sparse24_plans, n) for n in sparse24_plans.__all__]")
    return figures


def _descriptor() -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(n=16, m=256, k=256, element=ElementKind.BF16)


def _of_plan(plan: GemmSparse24Plan, matrix: Matrix, prefix: str) -> dict[str, float]:
    """``run`` with the same arguments every time, ``launch``, ``run`` with new ones, which are checked."""
    cupy, desc = import_cupy(), plan.descriptor
    x, y = cupy.zeros((desc.n, desc.k), "u2"), cupy.zeros((desc.n, desc.outputs), "u2")
    space = cupy.empty(max(plan.workspace_size(), 1), "u1")
    own_stream = cupy.cuda.Stream(non_blocking=True)
    stream, packed = own_stream.ptr, plan.pack(matrix.weight)
    args = GemmSparse24Args(packed, x, y)
    bound = plan.bind(args, workspace=space)
    calls: dict[str, Callable[[], object]] = {
        "run_us": lambda: plan.run(args, workspace=space, stream=stream),
        "launch_us": lambda: bound.launch(stream),
    }
    if not prefix:
        calls["run_new_args_us"] = lambda: plan.run(
            GemmSparse24Args(packed, x, y), workspace=space, stream=stream
        )
    return {prefix + name: _host_us(call) for name, call in calls.items()}


def _host_us(call: Callable[[], object], *, calls: int = 200) -> float:
    """Microseconds of a call: the least of the medians of several blocks.

    Only the second half of a block counts, because the core's clock has risen by then. Another process may
    disturb some blocks, but hardly all of them.
    """
    return round(min(_block_us(call, calls) for _ in range(_BLOCKS)), 2)


def _block_us(call: Callable[[], object], calls: int) -> float:
    synchronize = import_cupy().cuda.Device().synchronize
    times: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < _BLOCK_S or len(times) < _FEWEST_ROUNDS:
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times[len(times) // 2 :])


def _import_s(then: str) -> float:
    command = python_command(_IMPORT.format(then))
    runs = [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5)]
    return round(statistics.median(runs), 4)
