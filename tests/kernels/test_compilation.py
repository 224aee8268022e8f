"""Every kernel compiles without spills, as plans ask for it, for the GPUs that ``covering`` names.

NVRTC needs no GPU.
"""

from __future__ import annotations

import re
import struct

import pytest

from sparse24_plans import ElementKind
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.weights.packed_layouts import layout_of

from .covering import REQUESTS, compiled, every_kind, every_pair, everything

LIMITS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
"""KiB of shared memory that a block can have (CUDA programming guide, technical specifications)."""
PROPERTIES = re.compile(
    r"Function properties for (\S+)\s+ptxas\s+\.\s+"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STATIC_SHARED = re.compile(r"(\d+) bytes smem")
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor of compute capability 9.0, and what each block takes beside its own."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "request_" in metafunc.fixturenames:
        wish = metafunc.config.getoption("--compile")
        sets = {
            "kinds": every_kind,
            "values": lambda: REQUESTS,
            "pairs": every_pair,
            "everything": everything,
        }
        metafunc.parametrize("request_", sets[wish](), ids=str)


def test_compiles_without_spills_into_shared_memory_that_exists(request_):
    _, log = compiled(request_.source, request_.arch, request_.defines)
    entries = ENTRY.findall(log)
    assert request_.function in {name for name, _ in entries}
    assert {arch for _, arch in entries} == {request_.arch}
    functions = {
        name: (int(stack), int(stores), int(loads)) for name, stack, stores, loads in PROPERTIES.findall(log)
    }
    assert {name for name, _ in entries} <= set(functions)
    assert {name: used for name, used in functions.items() if any(used)} == {}
    assert "warning" not in log.lower()
    assert "Performance Loss" not in log  # ptxas had to wait for wgmma where the source doesn't
    static = max((int(size) for size in STATIC_SHARED.findall(log)), default=0)
    assert static + request_.shared_bytes <= LIMITS[request_.arch] * 1024


@pytest.mark.parametrize("element", ["bf16", "s8"])
@pytest.mark.parametrize("out_bytes", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 16, 32, 64, 200, 1024])
@pytest.mark.parametrize("columns", [False, True])
def test_as_many_blocks_share_a_multiprocessor_as_the_schedule_says(element, out_bytes, n, columns):
    """Nor more: the next launch's would crowd where the first room is."""
    lines = schedules.OperandLayouts(layout_of(ElementKind(element)), out_bytes, columns, columns)
    for schedule in (*schedules.schedules_for(n), *schedules.schedules_in(4, n)):
        taken = schedule.shared_bytes(lines) + RESERVED_BYTES
        assert MULTIPROCESSOR_BYTES // taken == schedule.ctas_per_sm


def test_a_cubin_is_a_whole_elf_file():
    """CuPy hands cubins over one byte short; what is compiled here ends where its tables end."""
    for request in REQUESTS[:2]:
        cubin, _ = compiled(request.source, request.arch, request.defines)
        assert cubin[:5] == b"\x7fELF\x02"
        program_at, sections_at = struct.unpack_from("<QQ", cubin, 32)
        program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
        ends = (program_at + programs * program_size, sections_at + sections * section_size)
        assert len(cubin) == max(ends)
