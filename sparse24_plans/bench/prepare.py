"""The ``prepare`` rows of the record: every plan of prepare.py beside a device copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .. import (
    CompressSparse24Args,
    CompressSparse24Descriptor,
    CompressSparse24Plan,
    DecompressSparse24Args,
    DecompressSparse24Descriptor,
    DecompressSparse24Plan,
    ElementKind,
    PackSparse24Args,
    PackSparse24Descriptor,
    PackSparse24Plan,
    PruneCompressSparse24Args,
    PruneCompressSparse24Descriptor,
    PruneCompressSparse24Plan,
    PruneSparse24Args,
    PruneSparse24Descriptor,
    PruneSparse24Plan,
    Sparse24Weight,
    TensorView,
    TilePruneSparse24Args,
    TilePruneSparse24Descriptor,
    TilePruneSparse24Plan,
    TileRule,
)
from ..prepare.table import PACKED_ELEMENTS
from ..tuning.timing import Contender, Launch, copies_beyond_l2, time_contenders
from ..tuning.worker import random_bits
from ..weights.layouts import layout_of
from .problems import on_torch_stream, torch_tensor, typed

Row = dict[str, Any]
_SAMPLE = 64  # rows (of 4x4 tiles: whole ones) that are checked against the host


@dataclass
class Job:
    """One op on one shape. ``make`` gives fresh arguments in buffers of their own, and all those buffers."""

    op: str
    plan: Any
    host: Any
    make: Callable[[], tuple[Any, list[Any]]]

    def check(self, args: Any) -> None:
        """The same bits as the host's plan gives for the first rows; and sound, where the plan can say."""
        self.plan.run(args)
        cupy.cuda.Device().synchronize()
        if hasattr(self.plan, "check"):
            self.plan.check(args)
        wanted = _on_host(args, self.host)
        self.host.run(wanted)
        for name in args.__slots__:
            given, want = (_bits(getattr(some, name)) for some in (args, wanted))
            if not all(
                np.array_equal(cupy.asnumpy(a[tuple(map(slice, b.shape))]), b)
                for a, b in zip(given, want, strict=True)
            ):
                raise SystemExit(f"{self.op}: {name} is not what the host gives, not recorded")


def _bits(operand: Any) -> list[Any]:
    """The arrays behind an operand of the arguments."""
    if operand is None:
        return []
    if isinstance(operand, Sparse24Weight):
        return [operand.values_view.bits(), operand.metadata]
    return [operand.bits() if isinstance(operand, TensorView) else operand]


def _on_host(args: Any, plan: Any) -> Any:
    """The same arguments in host memory, cut down to what the host's plan is for."""
    cut = {}
    for operand in plan.descriptor.operands():
        given = getattr(args, operand.argument)
        if given is None or operand.argument in cut:
            continue
        shape = tuple(map(slice, operand.shape))
        if isinstance(given, Sparse24Weight):
            parts = [cupy.asnumpy(a[: plan.descriptor.m]) for a in _bits(given)]
            cut[operand.argument] = Sparse24Weight(*parts, element=operand.element)
        else:
            cut[operand.argument] = typed(
                np.ascontiguousarray(cupy.asnumpy(_bits(given)[0][shape])), operand.element
            )
    return type(args)(**cut)


def _pair(plan: type, descriptor: type, m: int, **fields: Any) -> tuple[Any, Any]:
    """The plan on the device, and the host's for the first rows."""
    return (
        plan.select(descriptor(m=m, **fields), device=0),  # type: ignore[attr-defined]
        plan.select(descriptor(m=min(m, _SAMPLE), **fields), device="host"),  # type: ignore[attr-defined]
    )


_OF_THE_ELEMENT = ("matrix", "values", "values_t")


def jobs(m: int, k: int, element: ElementKind) -> Iterator[Job]:
    """Every op of the record on one shape."""
    dense = random_bits((m, k), element, seed=m + k)
    weight = Sparse24Weight.prune_compress(typed(dense, element))
    pruned = typed(weight.decompress(), element).bits()
    fields = {"k": k, "element": element}
    empty = {
        "matrix": lambda: cupy.empty((m, k), dense.dtype),
        "values": lambda: cupy.empty((m, k // 2), dense.dtype),
        "metadata": lambda: cupy.empty((m, k // 8), np.uint16),
        "values_t": lambda: cupy.empty((k, m // 2), dense.dtype),
        "metadata_t": lambda: cupy.empty((k, m // 8), np.uint16),
        "tiles": lambda: cupy.empty((m // 8, k // 8, 8), np.uint8),
        "packed": lambda: cupy.empty(layout_of(element).packed_shape(m, k), np.uint8),
        "status": lambda: cupy.empty(8, np.uint8),
    }

    def make(kind: type, source: Any, *outs: str) -> Callable[[], tuple[Any, list[Any]]]:
        def fresh() -> tuple[Any, list[Any]]:
            mine = [part.copy() for part in _bits(source)]
            buffers = [empty[out]() for out in outs]
            given = (
                Sparse24Weight(typed(mine[0], element), mine[1], validate=False)
                if isinstance(source, Sparse24Weight)
                else typed(mine[0], element)
            )
            results = [
                typed(buffer, element) if out in _OF_THE_ELEMENT else buffer
                for out, buffer in zip(outs, buffers, strict=True)
            ]
            return kind(given, *results), mine + buffers

        return fresh

    yield Job(
        "prune",
        *_pair(PruneSparse24Plan, PruneSparse24Descriptor, m, **fields),
        make(PruneSparse24Args, dense, "matrix"),
    )
    yield Job(
        "compress",
        *_pair(CompressSparse24Plan, CompressSparse24Descriptor, m, **fields),
        make(CompressSparse24Args, pruned, "values", "metadata", "status"),
    )
    yield Job(
        "prune_compress",
        *_pair(PruneCompressSparse24Plan, PruneCompressSparse24Descriptor, m, **fields),
        make(PruneCompressSparse24Args, dense, "values", "metadata"),
    )
    yield Job(
        "decompress",
        *_pair(DecompressSparse24Plan, DecompressSparse24Descriptor, m, **fields),
        make(DecompressSparse24Args, weight, "matrix"),
    )
    if element in PACKED_ELEMENTS:
        yield Job(
            "pack",
            *_pair(PackSparse24Plan, PackSparse24Descriptor, m, **fields),
            make(PackSparse24Args, weight, "packed"),
        )
    yield Job(
        "tile_prune",
        *_pair(TilePruneSparse24Plan, TilePruneSparse24Descriptor, m, **fields),
        make(TilePruneSparse24Args, dense, "values", "metadata", "values_t", "metadata_t", "tiles"),
    )


def _copies(moved: int, count: int) -> Contender:
    """Device copies that read and write ``moved`` bytes together."""
    runtime = cupy.cuda.runtime
    size = moved // 2 // 256 * 256  # an odd size would be copied slowly
    pairs = [(cupy.zeros(size, "u1"), cupy.empty(size, "u1")) for _ in range(count)]

    def copy(source: Any, target: Any) -> Launch:
        pointers = target.data.ptr, source.data.ptr, source.nbytes
        return lambda stream: runtime.memcpyAsync(*pointers, runtime.memcpyDeviceToDevice, stream)

    return Contender("copy", [copy(*pair) for pair in pairs])


def row_of(job: Job, shape: tuple[int, int], element: ElementKind) -> Row:
    """Microseconds of the op and of the copy, interleaved, over buffers that exceed the L2 cache.

    For some milliseconds after copies an H200 runs kernels up to 8% slower than in a row of kernels. So the
    op runs twice a round, and the second time counts: peers are timed without copies between, too.
    """
    args, buffers = job.make()
    job.check(args)
    moved = sum(buffer.nbytes for buffer in buffers)
    count = copies_beyond_l2(moved)
    sets = [args] + [job.make()[0] for _ in range(count - 1)]
    launches = [job.plan.bind(one).launch for one in sets]
    contenders = [Contender("wakes up", launches), Contender("ours", launches), _copies(moved, count)]
    times = time_contenders(contenders)
    return {
        "op": job.op,
        "m": shape[0],
        "k": shape[1],
        "element": element.value,
        "us": round(times["ours"], 2),
        "copy_us": round(times["copy"], 2),
    }


_TORCH_RULES = {
    TileRule.GREEDY_MAGNITUDE: "largest_abs_values_greedy",
}


def torch_tile_row(shape: tuple[int, int], element: ElementKind) -> Row | None:
    """PyTorch's tile packer with the rule of our own row; None where there is no PyTorch, or it refuses."""
    try:
        import torch
    except ImportError:
        return None
    if element.itemsize != 2:
        return None
    rule = _TORCH_RULES[TilePruneSparse24Descriptor.model_fields["rule"].default]
    matrices = [
        torch_tensor(random_bits(shape, element, seed=i), element)
        for i in range(copies_beyond_l2(shape[0] * shape[1] * 2))
    ]

    def call(matrix: Any) -> Callable[[], Any]:
        return lambda: torch._sparse_semi_structured_tile(matrix, algorithm=rule, use_cutlass=True)

    try:
        call(matrices[0])()
    except (AttributeError, RuntimeError, TypeError):
        return None
    times = time_contenders([Contender("torch", [on_torch_stream(call(matrix)) for matrix in matrices])])
    return {
        "op": "tile_prune",
        "m": shape[0],
        "k": shape[1],
        "element": element.value,
        "peer": f"torch._sparse_semi_structured_tile({rule!r})",
        "us": round(times["torch"], 2),
    }


def measure(
    shapes: Sequence[tuple[int, int]], elements: Sequence[ElementKind], on_row: Callable[[], None]
) -> tuple[list[Row], list[Row]]:
    """The rows of the record, and those of the peers."""
    rows, peers = [], []
    for element in elements:
        for shape in shapes:
            for job in jobs(*shape, element):
                rows.append(row_of(job, shape, element))
                on_row()
                cupy.get_default_memory_pool().free_all_blocks()
            if (peer := torch_tile_row(shape, element)) is not None:
                peers.append(peer)
    return rows, peers
