"""The ``prepare`` rows of the record: every plan of the family beside a device copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import (
    CompressSparse24Args,
    CompressSparse24Plan,
    DecompressSparse24Args,
    DecompressSparse24Plan,
    ElementKind,
    PackSparse24Args,
    PackSparse24Plan,
    PruneCompressSparse24Args,
    PruneCompressSparse24Plan,
    PruneSparse24Args,
    PruneSparse24Plan,
    Sparse24Weight,
    TensorView,
    TilePruneSparse24Args,
    TilePruneSparse24Descriptor,
    TilePruneSparse24Plan,
)
from ..device.install import import_cupy
from ..errors import UnsupportedError
from ..plan.operands import fields_of
from ..prepare.kernel_table import PACKED_ELEMENTS
from ..tuning.data import free_memory, random_bits, typed
from ..tuning.timing import Contender, Launch, copies_beyond_l2
from ..weights.packed_layouts import layout_of
from . import peers
from .record import sources_of
from .steady import time_alone

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
        """Raise UnsupportedError unless the first rows have the bits of the host's plan."""
        cupy = import_cupy()
        self.plan.run(args)
        cupy.cuda.Device().synchronize()
        if hasattr(self.plan, "check"):
            self.plan.check(args)
        wanted = _on_host(args, self.host)
        self.host.run(wanted)
        for name in fields_of(type(args)):
            given, want = (_bits(getattr(some, name)) for some in (args, wanted))
            if not all(
                np.array_equal(cupy.asnumpy(a[tuple(map(slice, b.shape))]), b)
                for a, b in zip(given, want, strict=True)
            ):
                raise UnsupportedError(f"{self.op}: {name} is not what the host gives, not recorded")


def _bits(operand: Any) -> list[Any]:
    """The arrays behind an operand of the arguments."""
    if operand is None:
        return []
    if isinstance(operand, Sparse24Weight):
        return [operand.values_view.bits(), operand.metadata]
    return [operand.bits() if isinstance(operand, TensorView) else operand]


def _on_host(args: Any, plan: Any) -> Any:
    """Copies of the arguments in host memory, cut down to what the host's plan is for."""
    cut: dict[str, Any] = {}
    asnumpy = import_cupy().asnumpy
    for operand in plan.descriptor.operands():
        given = getattr(args, operand.argument)
        if given is None or operand.argument in cut:
            continue
        shape = tuple(map(slice, operand.shape))
        if isinstance(given, Sparse24Weight):
            parts = [asnumpy(a[: plan.descriptor.m]) for a in _bits(given)]
            cut[operand.argument] = Sparse24Weight(*parts, element=operand.element)
        else:
            cut[operand.argument] = typed(
                np.ascontiguousarray(asnumpy(_bits(given)[0][shape])), operand.element
            )
    return type(args)(**cut)


class _Operands:
    """Inputs of the jobs of one shape, and fresh buffers for their results."""

    def __init__(self, m: int, k: int, element: ElementKind) -> None:
        self.m, self.element = m, element
        self.fields = {"k": k, "element": element}
        self.dense = random_bits((m, k), element, seed=m + k)
        self.weight = Sparse24Weight.prune_compress(typed(self.dense, element))
        self.pruned = typed(self.weight.decompress(), element).bits()
        of_element = element.bits_dtype
        self._results = {
            "matrix": ((m, k), of_element),
            "values": ((m, k // 2), of_element),
            "metadata": ((m, k // 8), np.uint16),
            "values_t": ((k, m // 2), of_element),
            "metadata_t": ((k, m // 8), np.uint16),
            "tiles": ((m // 8, k // 8, 8), np.uint8),
            "status": ((8,), np.uint8),
        }
        if element in PACKED_ELEMENTS:
            self._results["packed"] = (layout_of(element).packed_shape(m, k), np.uint8)

    def _fresh(self, kind: type, source: Any, outs: tuple[str, ...]) -> tuple[Any, list[Any]]:
        """Arguments in buffers of their own, and all those buffers."""
        mine = [part.copy() for part in _bits(source)]
        given: Any = typed(mine[0], self.element)
        if isinstance(source, Sparse24Weight):
            given = Sparse24Weight(given, mine[1], validate=False)
        buffers = [import_cupy().empty(*self._results[out]) for out in outs]
        results = [
            typed(buffer, self.element) if out in ("matrix", "values", "values_t") else buffer
            for out, buffer in zip(outs, buffers, strict=True)
        ]
        return kind(given, *results), mine + buffers

    def job(self, op: str, plan: Any, kind: type, source: Any, *outs: str) -> Job:
        """The op on the device, and the host's for the first rows."""
        descriptor = plan.descriptor_type
        return Job(
            op,
            plan.select(descriptor(m=self.m, **self.fields), device=0),
            plan.select(descriptor(m=min(self.m, _SAMPLE), **self.fields), device="host"),
            lambda: self._fresh(kind, source, outs),
        )


def jobs(m: int, k: int, element: ElementKind) -> Iterator[Job]:
    """Every op of the record on one shape."""
    of = _Operands(m, k, element)
    compressed = ("values", "metadata")
    both_ways = (*compressed, "values_t", "metadata_t", "tiles")
    yield of.job("prune", PruneSparse24Plan, PruneSparse24Args, of.dense, "matrix")
    yield of.job("compress", CompressSparse24Plan, CompressSparse24Args, of.pruned, *compressed, "status")
    yield of.job(
        "prune_compress", PruneCompressSparse24Plan, PruneCompressSparse24Args, of.dense, *compressed
    )
    yield of.job("decompress", DecompressSparse24Plan, DecompressSparse24Args, of.weight, "matrix")
    if element in PACKED_ELEMENTS:
        yield of.job("pack", PackSparse24Plan, PackSparse24Args, of.weight, "packed")
    yield of.job("tile_prune", TilePruneSparse24Plan, TilePruneSparse24Args, of.dense, *both_ways)


def _copies(moved: int, count: int) -> Contender:
    """Device copies that read and write ``moved`` bytes together."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    size = moved // 2 // 256 * 256  # an odd size would be copied slowly
    pairs = [(cupy.zeros(size, "u1"), cupy.empty(size, "u1")) for _ in range(count)]

    def copy(source: Any, target: Any) -> Launch:
        pointers = target.data.ptr, source.data.ptr, source.nbytes
        return lambda stream: runtime.memcpyAsync(*pointers, runtime.memcpyDeviceToDevice, stream)

    return Contender("copy", [copy(*pair) for pair in pairs])


def row_of(job: Job, shape: tuple[int, int], element: ElementKind) -> Row:
    """Microseconds of the op and of a device copy, each alone, over buffers that exceed the L2 cache."""
    args, buffers = job.make()
    job.check(args)
    moved = sum(buffer.nbytes for buffer in buffers)
    count = copies_beyond_l2(moved)
    sets = [args] + [job.make()[0] for _ in range(count - 1)]
    ours = Contender("ours", [job.plan.bind(one).launch for one in sets])
    times = time_alone([ours, _copies(moved, count)])
    return {
        "op": job.op,
        "m": shape[0],
        "k": shape[1],
        "element": element.value,
        "us": round(times["ours"].us, 2),
        "copy_us": round(times["copy"].us, 2),
    }


def measured(shape: tuple[int, int], element: ElementKind, sources: set[str]) -> list[Row]:
    """The rows of one shape. Adds to ``sources`` what was timed."""
    rows = []
    for job in jobs(*shape, element):
        rows.append(row_of(job, shape, element))
        sources.update(sources_of(job.plan))
        free_memory()
    return rows


def peer_rows(shape: tuple[int, int], element: ElementKind) -> list[Row]:
    """PyTorch's tile packer with the rule of our own row, if PyTorch has one."""
    found = peers.tile_pruning(shape, element, TilePruneSparse24Descriptor.model_fields["rule"].default)
    if found is None:
        return []
    name, contender = found
    us = round(time_alone([contender])[contender.name].us, 2)
    return [
        {"op": "tile_prune", "m": shape[0], "k": shape[1], "element": element.value, "peer": name, "us": us}
    ]
