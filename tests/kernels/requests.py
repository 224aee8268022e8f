"""A compilation that a plan asks for, and what records it from a backend on invented devices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import NamedTuple
from unittest import mock

from sparse24_plans import DeviceProperties, PlanPreference
from sparse24_plans.device import pad_rows, transpose
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.kernel import Kernel
from sparse24_plans.plan.kernel_table import KernelEntry, consider
from sparse24_plans.weights import inflate

from ..sample_devices import gpu_of

CAPABILITIES = {(8, 0): 108, (8, 6): 72, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}
"""SMs of the invented devices, by compute capability."""
HOPPER = (9, 0)


class Request(NamedTuple):
    """One compilation, as a backend asks for it."""

    source: str
    function: str
    arch: str
    defines: tuple[tuple[str, int], ...]
    threads: int
    shared_bytes: int

    def __str__(self) -> str:
        return "-".join([self.source, self.arch, *(f"{name}{value}" for name, value in self.defines)])


def device_of(capability: tuple[int, int]) -> DeviceProperties:
    return gpu_of(*capability, multiprocessors=CAPABILITIES[capability], cusparselt=None)


def serves(row: KernelEntry, desc: Descriptor, preference: PlanPreference, device: DeviceProperties) -> bool:
    """Whether the row of the table can serve the problem."""
    if not row.min_compute_capability <= device.compute_capability < row.below_compute_capability:
        return False  # most of these are asked for GPUs that the row is not for, and ``consider`` is slow
    (considered,) = consider((row,), desc, preference, device)
    return considered.reason is None


def recorded_loads(kernel: type[Kernel]) -> AbstractContextManager[list[Request]]:
    """Record what the backend would compile and load in the block."""
    return recorded_loads_of(
        {sys.modules[base.__module__] for base in kernel.__mro__} | {inflate, pad_rows, transpose}
    )


@contextmanager
def recorded_loads_of(modules: Iterable[ModuleType]) -> Iterator[list[Request]]:
    """Record what the modules would compile and load in the block."""
    found: list[Request] = []

    def record(source, name, threads, device, defines, shared_bytes=0):
        macros = tuple(sorted(defines.items()))
        found.append(Request(source, name, device.cuda_arch, macros, threads, shared_bytes))

    with ExitStack() as patches:
        for module in modules:
            if hasattr(module, "load"):
                patches.enter_context(mock.patch.object(module, "load", record))
        yield found


def index_of(capability: tuple[int, int]) -> int:
    """Return an index of the architecture, by which each asks for something that the others don't."""
    return [one for one in CAPABILITIES if one != HOPPER].index(capability)
