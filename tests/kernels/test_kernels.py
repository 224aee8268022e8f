"""Every kernel that a plan can ask for compiles, for every architecture, without spills; and the cubin cache.

NVRTC needs no GPU. What plans ask for is taken from the backends themselves, on invented devices.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from sparse24_plans import (
    DeviceProperties,
    DriverError,
    ElementKind,
    EpilogueKind,
    GemmSparse24Descriptor,
    PlanPreference,
    StorageError,
)
from sparse24_plans.device.jit import cache as cubins
from sparse24_plans.device.jit import codes, compiler
from sparse24_plans.gemm import table as registry
from sparse24_plans.gemm.backends import host, wgmma_sp
from sparse24_plans.prepare import table as prepare_registry
from sparse24_plans.vocab import GemmOp
from sparse24_plans.weights import inflate
from sparse24_plans.weights.layouts import layout_of

from ..prepare.prepare_cases import kernel_descriptors

SOURCES = sorted(
    path.relative_to(compiler.KERNEL_FOLDER).as_posix() for path in compiler.KERNEL_FOLDER.rglob("*.cu")
)
CAPABILITIES = {(8, 0): 108, (8, 6): 72, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}
HOPPER = (9, 0)

# What plans ask for -------------------------------------------------------------------------------

KINDS = (
    {"element": "bf16", "epilogue": "bias_gelu"},
    {"element": "f16", "epilogue": "bias"},
    {"element": "f32", "epilogue": "bias_relu"},
    {"element": "bf16", "epilogue": "bias_silu", "out_element": "f32", "bias_element": "f32"},
    {"element": "f16", "op": "dgrad"},
    {"element": "f32", "op": "dgrad"},
    {"element": "s8", "epilogue": "bias_gelu", "out_element": "s8", "scale_x": "row", "scale_w": "row"},
    {"element": "s8"},
    {"element": "s8", "epilogue": "bias_silu", "out_element": "f16", "bias_element": "f32"},
    {"element": "fp8_e4m3", "epilogue": "bias_gelu", "scale_x": "tensor", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_silu", "out_element": "f32"},
)
SIZES = {
    # cuBLAS itself is asked for an algorithm only where there is a result.
    "inflate_cublas": [{"n": 0}],
    "inflate_strict": [{"n": 1}],
    "mma_sp": [{"n": n, "m": 28672} for n in (1, 9)],
    "mma_sp_few": [{"n": n, "m": m} for m in (4096, 6144) for n in (1, 9)],
    "mma_sp_batch": [{"n": n, "m": m} for m in (4096, 6144, 28672) for n in (17, 33, 65)],
    "mma_sp_many": [{"n": 300}],
    "wgmma_sp": [{"n": 8}],
    "wgmma_sp_invariant": [{"n": 8}],
}
WGMMA_CUTS = {
    "wgmma_sp": {n: wgmma_sp.cuts(n) for n in (8, 64, 128, 1024)},
    "wgmma_sp_invariant": {n: wgmma_sp.one_block_cuts(n, 8) for n in (8, 64, 1024)},
    "wgmma_sp_s8": {n: wgmma_sp.cuts(n) for n in (64, 128)},
    "wgmma_sp_fp8": {n: wgmma_sp.cuts(n) for n in (8, 1024)},
    "wgmma_sp_fp8_promoted": {n: wgmma_sp.one_block_cuts(n, 1) for n in (64, 1024)},
}
ROWS = [spec for spec in registry.KERNELS if not spec.on_host and spec.backend != "cusparselt"]
"""Those of our own kernels: the library brings its own."""


class Request(NamedTuple):
    """One compilation, as a backend asks for it."""

    source: str
    function: str
    arch: str
    defines: tuple[tuple[str, int], ...]
    shared_bytes: int

    def __str__(self) -> str:
        return "-".join([self.source, self.arch, *(f"{name}{value}" for name, value in self.defines)])


def device_of(capability: tuple[int, int]) -> DeviceProperties:
    return DeviceProperties(
        kind="cuda",
        compute_capability=capability,
        multiprocessors=CAPABILITIES[capability],
        cublaslt="120900",
    )


@contextmanager
def recorded_loads(backend: ModuleType) -> Iterator[list[Request]]:
    """What the backend would compile and load in the block."""
    found: list[Request] = []

    def record(source, name, threads, device, defines, parameters, shared_bytes=0):
        macros = {**defines, "PARAMETER_BYTES": ctypes.sizeof(parameters)}
        found.append(Request(source, name, device.cuda_arch, tuple(sorted(macros.items())), shared_bytes))

    with ExitStack() as patches:
        for module in (backend, inflate):
            if hasattr(module, "load"):
                patches.enter_context(mock.patch.object(module, "load", record))
        yield found


def requests_of(spec: registry.KernelSpec, capability: tuple[int, int]) -> list[Request]:
    """Every size of one kind; on Hopper also every kind at one size."""
    sizes = SIZES.get(spec.name, [{}])
    kinds = [kind for kind in KINDS if kind["element"] in spec.elements]
    cases = [(size, kinds[0]) for size in sizes]
    if capability == HOPPER:
        cases += [(sizes[0], kind) for kind in kinds[1:]]
    device, backend = device_of(capability), import_module(f"sparse24_plans.gemm.backends.{spec.backend}")
    preference = PlanPreference(prefer_backend=spec.backend)
    with recorded_loads(backend) as found:
        for size, kind in cases:
            desc = GemmSparse24Descriptor(**{"n": 16, "m": 4096, "k": 4096, **size, **kind})
            rows = registry.consider(desc, preference, device)
            if any(row.spec is spec and row.reason is None for row in rows):
                backend.Kernel(desc, device, spec, preference)
        for n, cuts in WGMMA_CUTS.get(spec.name, {}).items() if capability == HOPPER else ():
            desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, **kinds[0])
            for cut in cuts:
                backend.Kernel(desc, device, spec, preference, cut._asdict())
    return found


def prepare_requests(spec: prepare_registry.PrepareSpec, capability: tuple[int, int]) -> list[Request]:
    """Compilations of a row of prepare_registry: every variant on Hopper, a few elsewhere."""
    backend = import_module(f"sparse24_plans.prepare.backends.{spec.name}")
    with recorded_loads(backend) as found:
        for desc in kernel_descriptors(few=capability != HOPPER):
            if desc.kind in spec.ops and desc.element in spec.elements:
                backend.Kernel(desc, device_of(capability))
    return found


PREPARE_ROWS = [spec for spec in prepare_registry.KERNELS if not spec.on_host]
REQUESTS = list(
    dict.fromkeys(
        request
        for rows, requests in ((ROWS, requests_of), (PREPARE_ROWS, prepare_requests))
        for spec in rows
        for capability in CAPABILITIES
        for request in requests(spec, capability)
    )
)
every_request = pytest.mark.parametrize("request_", REQUESTS, ids=str)
LIMITS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
"""KiB of shared memory that a block can have (CUDA programming guide, technical specifications)."""


def test_every_device_row_and_every_source_is_covered():
    assert all(requests_of(spec, HOPPER) for spec in ROWS)
    assert all(prepare_requests(spec, HOPPER) for spec in PREPARE_ROWS)
    assert {request.source for request in REQUESTS} == set(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_every_architecture_that_a_source_is_for_is_covered(source):
    rows = [spec for spec in ROWS if any(r.source == source for r in requests_of(spec, HOPPER))]
    oldest = min([spec.min_compute_capability for spec in rows], default=(8, 0))
    below = max([spec.below_compute_capability for spec in rows], default=(99, 0))
    wanted = {device_of(one).cuda_arch for one in CAPABILITIES if oldest <= one < below}
    assert {request.arch for request in REQUESTS if request.source == source} == wanted


@pytest.mark.parametrize("spec", PREPARE_ROWS, ids=lambda spec: spec.name)
def test_preparing_is_compiled_for_every_width_of_its_elements(spec):
    asked = [dict(request.defines) for request in prepare_requests(spec, HOPPER)]
    widths = {d.get("WIDTH") or {0: 4}.get(d["ELEMENT"], 2) for d in asked}
    assert widths == {element.itemsize for element in spec.elements}
    numbers = {d["NUMBER"] for d in asked if "NUMBER" in d}  # unsigned, two's complement, sign and magnitude
    assert numbers in (set(), {0, 1, 2} if ElementKind.U8 in spec.elements else {1, 2})


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_every_element_and_epilogue_is_covered_on_hopper(spec):
    asked = [dict(request.defines) for request in requests_of(spec, HOPPER)]
    assert {d["ELEMENT"] for d in asked} == {codes.ELEMENT_CODES[element] for element in spec.elements}
    if "DGRAD" in asked[0]:
        assert {d["DGRAD"] for d in asked} == {int(op is GemmOp.DGRAD) for op in spec.ops}
    heavy = {codes.EPILOGUE_CODES[kind] for kind in (EpilogueKind.BIAS_GELU, EpilogueKind.BIAS_SILU)}
    assert heavy <= {d["EPILOGUE"] for d in asked}


# Compilation --------------------------------------------------------------------------------------


@functools.cache
def compiled(source: str, arch: str, defines: tuple[tuple[str, int], ...]) -> tuple[bytes, str]:
    return compiler.compile_cubin(source, arch, dict(defines))


PROPERTIES = re.compile(
    r"Function properties for (\S+)\s+ptxas\s+\.\s+"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STATIC_SHARED = re.compile(r"(\d+) bytes smem")


@every_request
def test_compiles_without_spills_or_a_local_stack(request_):
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


@every_request
def test_a_blocks_shared_memory_exists_on_the_architecture(request_):
    _, log = compiled(request_.source, request_.arch, request_.defines)
    static = max((int(size) for size in STATIC_SHARED.findall(log)), default=0)
    assert static + request_.shared_bytes <= LIMITS[request_.arch] * 1024


MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor of compute capability 9.0, and what each block takes beside its own."""


@pytest.mark.parametrize("element", ["bf16", "s8"])
@pytest.mark.parametrize("out_bytes", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 16, 32, 64, 200, 1024])
def test_as_many_blocks_share_a_multiprocessor_as_the_cut_says(element, out_bytes, n):
    """Nor more: the next launch's would crowd where the first room is."""
    for cut in (*wgmma_sp.cuts(n), *wgmma_sp.one_block_cuts(n, 4)):
        taken = cut.shared_bytes(layout_of(ElementKind(element)), out_bytes) + RESERVED_BYTES
        assert MULTIPROCESSOR_BYTES // taken == cut.blocks_per_sm


def test_a_cubin_is_a_whole_elf_file():
    """CuPy hands cubins over one byte short; what is compiled here ends where its tables end."""
    for request in REQUESTS[:2]:
        cubin, _ = compiled(request.source, request.arch, request.defines)
        assert cubin[:5] == b"\x7fELF\x02"
        program_at, sections_at = struct.unpack_from("<QQ", cubin, 32)
        program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
        ends = (program_at + programs * program_size, sections_at + sections * section_size)
        assert len(cubin) == max(ends)


def test_codes_are_those_of_the_header():
    text = (compiler.KERNEL_FOLDER / "common/common.cuh").read_text()
    macros = {name: int(code) for name, code in re.findall(r"^#define S24_(\w+) (\d+)$", text, re.MULTILINE)}
    for kind, code in codes.ELEMENT_CODES.items():
        assert macros[kind.name] == code
    for kind, code in codes.EPILOGUE_CODES.items():
        assert macros["BIAS_ADD" if kind is EpilogueKind.BIAS else kind.name] == code
    assert all(set(codes.EPILOGUE_CODES) == set(spec.epilogues) for spec in ROWS)


def test_every_kernel_file_belongs_to_some_kernel():
    reached = {name for source in SOURCES for name in compiler.closure(source)}
    assert {path.name for path in compiler.KERNEL_FOLDER.iterdir()} == reached


def test_the_hosts_strict_constants_are_read_from_the_kernels_file(monkeypatch, tmp_path):
    v = np.linspace(-4, 4, 1000, dtype=np.float32)
    kinds = (EpilogueKind.BIAS_GELU, EpilogueKind.BIAS_SILU)
    before = {kind: host.apply_epilogue(v, 1.0, None, kind) for kind in kinds}
    text = (compiler.KERNEL_FOLDER / "common/strict_math.inc").read_text()
    # 1/3! becomes 1/4, in the exponential that both activations use.
    changed = text.replace("0x1.5555555555555p-3", "0x1.0000000000000p-2")
    assert changed != text
    (tmp_path / "common/strict_math.inc").write_text(changed)
    monkeypatch.setattr(host, "KERNEL_FOLDER", tmp_path)
    host._constants.cache_clear()
    try:
        for kind, values in before.items():
            assert (host.apply_epilogue(v, 1.0, None, kind) != values).any()
    finally:
        host._constants.cache_clear()


# Includes -----------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch, tmp_path) -> Path:
    """A copy of the kernels' folder that the test may change."""
    folder = tmp_path / "kernels"
    shutil.copytree(compiler.KERNEL_FOLDER, folder)
    monkeypatch.setattr(compiler, "KERNEL_FOLDER", folder)
    return folder


def test_closure_follows_includes(kernels):
    (kernels / "a.cu").write_text(
        '#include "b.cuh"\n  #  include   "c.inc"\n// #include "not.this"\n#include <nor.this>\n'
    )
    (kernels / "b.cuh").write_text('#pragma once\n#include "d.cuh"\n')
    (kernels / "c.inc").write_text('#include "d.cuh"\n')
    (kernels / "d.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    found = compiler.closure("a.cu")
    assert list(found) == ["a.cu", "b.cuh", "c.inc", "d.cuh"]
    assert all(found[name] == (kernels / name).read_bytes() for name in found)


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_shares_the_header_and_the_constants(source):
    assert {source, "common/common.cuh", "common/strict_math.inc"} <= set(compiler.closure(source))


# The cache ----------------------------------------------------------------------------------------

INFLATE = ("weights/inflate.cu", "sm_80", {"ELEMENT": 0, "OUT": 0, "BIAS": 0, "EPILOGUE": 0})


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / "not" / "yet" / "there"
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """Stands in for the compiler, and counts."""
    calls: list[str] = []

    def compile_cubin(source, arch, defines):
        calls.append(source)
        return b"a cubin", ""

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return calls


def test_a_kernel_is_compiled_once_and_kept(cache, compilations):
    path = cubins.cubin_path(*INFLATE)
    assert cubins.cubin(*INFLATE) == b"a cubin"
    assert cubins.cubin_path(*INFLATE) == path
    assert compilations == ["weights/inflate.cu"]
    assert list(cache.iterdir()) == [path]


def test_what_is_kept_is_what_was_compiled(cache):
    assert cubins.cubin(*INFLATE) == compiled(INFLATE[0], INFLATE[1], tuple(INFLATE[2].items()))[0]


@pytest.mark.parametrize(
    "other",
    [
        ("weights/inflate.cu", "sm_86", INFLATE[2]),
        ("weights/inflate.cu", "sm_80", {**INFLATE[2], "ELEMENT": 1}),
        ("weights/inflate.cu", "sm_80", {**INFLATE[2], "MORE": 0}),
        ("gemm/inflate_cublas.cu", "sm_80", INFLATE[2]),
    ],
)
def test_another_kernel_architecture_or_macro_is_another_file(cache, compilations, other):
    assert cubins.cubin_path(*other) != cubins.cubin_path(*INFLATE)
    assert len(compilations) == 2


def test_the_order_of_macros_does_not_matter(cache, compilations):
    backwards = dict(reversed(INFLATE[2].items()))
    assert cubins.cubin_path(INFLATE[0], INFLATE[1], backwards) == cubins.cubin_path(*INFLATE)


@pytest.mark.parametrize("name", ["weights/inflate.cu", "common/common.cuh", "common/strict_math.inc"])
def test_a_changed_source_or_header_is_another_file(cache, compilations, kernels, name):
    before = cubins.cubin_path(*INFLATE)
    with open(kernels / name, "a") as file:
        file.write("// changed\n")
    assert cubins.cubin_path(*INFLATE) != before
    assert len(compilations) == 2


def test_a_changed_file_that_is_not_included_changes_nothing(cache, compilations, kernels):
    before = cubins.cubin_path(*INFLATE)
    (kernels / "gemm/inflate_cublas.cu").write_text("")
    assert cubins.cubin_path(*INFLATE) == before


def test_another_compiler_is_another_file(cache, compilations, monkeypatch):
    from cupy.cuda import nvrtc

    before = cubins.cubin_path(*INFLATE)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (99, 0))
    assert cubins.cubin_path(*INFLATE) != before


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SPARSE24_CACHE_DIR": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/sparse24_plans"),
        ({"SPARSE24_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/sparse24_plans"),
        ({}, "/home/someone/.cache/sparse24_plans"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, folder):
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("SPARSE24_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cubins.cache_folder() == Path(folder)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="SPARSE24_CACHE_DIR") as caught:
        cubins.cubin_path(*INFLATE)
    assert caught.value.filename == str(tmp_path / "file" / "cache")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_full_disk_leaves_nothing_behind(monkeypatch, cache, compilations):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cubins.os, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        cubins.cubin_path(*INFLATE)
    assert list(cache.iterdir()) == []


def test_a_syntax_error_comes_with_the_compilers_log(cache, kernels):
    (kernels / "weights/inflate.cu").write_text('#include "common/common.cuh"\nint broken( { return 0; }\n')
    with pytest.raises(DriverError) as caught:
        cubins.cubin_path(*INFLATE)
    for word in ("weights/inflate.cu", "sm_80", "weights/inflate.cu(2): error"):
        assert word in str(caught.value)
    assert caught.value.code == 6  # NVRTC_ERROR_COMPILATION
    assert not cache.exists()


def test_an_architecture_that_the_compiler_does_not_know(cache):
    with pytest.raises(DriverError, match="sm_999"):
        cubins.cubin_path(INFLATE[0], "sm_999", INFLATE[2])


COMPILE = f"""
from sparse24_plans.device.jit.cache import cubin_path
print(cubin_path{INFLATE!r})
"""


def test_two_processes_may_compile_at_once(cache):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    path = Path(answers[0][0].strip())
    assert answers[0][0] == answers[1][0]
    assert list(cache.iterdir()) == [path]
    assert path.read_bytes()[:4] == b"\x7fELF"
