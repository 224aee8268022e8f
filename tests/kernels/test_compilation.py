"""Every kernel compiles without spills, as plans ask for it, for the GPUs that ``covering`` names.

NVRTC needs no GPU.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import pytest

from sparse24_plans import ElementKind
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import NARROW
from sparse24_plans.gemm.schedules import wgmma_sp as schedules
from sparse24_plans.weights.packed_layouts import layout_of

from .covering import SOURCES, compiled, every_kind, every_pair, every_value, everything
from .requests import Request

LIMITS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
"""KiB of shared memory that a block can have (CUDA programming guide, technical specifications)."""
PROPERTIES = re.compile(
    r"Function properties for (\S+)\s+ptxas\s+\.\s+"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
REGISTERS = re.compile(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", re.DOTALL)
REALLOCATING = {f"{one}wgmma" for one in ("blocks_", "conv_", "attention_", "attention_backward_")}
REALLOCATING |= {"blocks_wgmma_sp"}
"""Functions whose producers give registers to the consumers in every variant."""
STATIC_SHARED = re.compile(r"(\d+) bytes smem")
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor of compute capability 9.0, and what each block takes beside its own."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of a source finds its requests as it runs: collecting them takes seconds in every process.

    Sets that take hours have a test for each request, so that all cores compile the largest source.
    """
    if "requests" in metafunc.fixturenames:
        wish = metafunc.config.getoption("--compile")
        if wish in ("kinds", "values"):
            every = every_kind if wish == "kinds" else every_value
            functions = [partial(_of_source, every, source) for source in SOURCES]
            metafunc.parametrize("requests", functions, ids=SOURCES)
        else:
            found = every_pair() if wish == "pairs" else everything()
            metafunc.parametrize("requests", [partial(list, (one,)) for one in found], ids=map(str, found))


def _of_source(every: Callable[[], list[Request]], source: str) -> list[Request]:
    return [one for one in every() if one.source == source]


def test_compiles_without_spills_into_shared_memory_that_exists(requests):
    asked = requests()
    assert asked
    assert {str(one): wrong for one in asked if (wrong := list(_complaints(one)))} == {}


def _complaints(asked: Request) -> Iterator[object]:
    """Yield what is wrong with a compilation."""
    _, log = compiled(asked.source, asked.arch, asked.defines)
    entries = ENTRY.findall(log)
    if asked.function not in {name for name, _ in entries} or {arch for _, arch in entries} != {asked.arch}:
        yield entries
    functions = {
        name: (int(stack), int(stores), int(loads)) for name, stack, stores, loads in PROPERTIES.findall(log)
    }
    if not {name for name, _ in entries} <= set(functions) or any(map(any, functions.values())):
        yield functions
    registers = dict(REGISTERS.findall(log))
    shares = {str(65536 // (ctas * asked.threads) // 8 * 8) for ctas in (1, 2)}
    if asked.function in REALLOCATING and registers[asked.function] not in shares:
        yield f"{registers[asked.function]} registers: a request for more than a CTA has would wait forever"
    waits = "Performance Loss" in log  # ptxas waits for wgmma where the source doesn't
    if waits or "warning" in log.lower():
        yield log
    static = max((int(size) for size in STATIC_SHARED.findall(log)), default=0)
    if static + asked.shared_bytes > LIMITS[asked.arch] * 1024:
        yield f"{static + asked.shared_bytes} bytes of shared memory"


@pytest.mark.parametrize("element", ["bf16", "s8"])
@pytest.mark.parametrize("columns", [False, True])
def test_as_many_blocks_share_a_multiprocessor_as_the_schedule_says(element, columns):
    """No more CTAs fit on an SM: those of the next launch would crowd on the first SMs with room."""
    for out_bytes, n in product([1, 2, 4], [1, 16, 32, 64, 200, 1024]):
        lines = schedules.OperandLayouts(layout_of(ElementKind(element)), out_bytes, columns, columns)
        for schedule in (*schedules.schedules_for(n), *schedules.schedules_in(4, n)):
            taken = schedule.shared_bytes(lines) + RESERVED_BYTES
            assert MULTIPROCESSOR_BYTES // taken == schedule.ctas_per_sm, (out_bytes, n, schedule)


def test_two_narrow_tiles_of_blocks_share_a_multiprocessor():
    assert MULTIPROCESSOR_BYTES // (NARROW.shared_bytes() + RESERVED_BYTES) == NARROW.ctas_per_sm == 2


def test_a_cubin_is_a_whole_elf_file():
    """CuPy hands cubins over one byte short; what is compiled here ends where its tables end."""
    for asked in every_kind()[:2]:
        cubin, _ = compiled(asked.source, asked.arch, asked.defines)
        assert cubin[:5] == b"\x7fELF\x02"
        program_at, sections_at = struct.unpack_from("<QQ", cubin, 32)
        program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
        ends = (program_at + programs * program_size, sections_at + sections * section_size)
        assert len(cubin) == max(ends)
