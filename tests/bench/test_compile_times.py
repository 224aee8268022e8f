"""The record of compile times: every kernel of ours, compiled once each, in a cache of its own."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import compile_times
from sparse24_plans.bench import record
from sparse24_plans.blocksparse import device_tables
from sparse24_plans.blocksparse.kernel_table import (
    ATTENTION_ENTRIES,
    CONVOLUTION_ENTRIES,
    MATMUL_ENTRIES,
    SOFTMAX_ENTRIES,
)
from sparse24_plans.device.jit import compiler
from sparse24_plans.gemm.kernel_table import ENTRIES as GEMM
from sparse24_plans.prepare.kernel_table import ENTRIES as PREPARE

from ..kernels.requests import HOPPER, device_of
from .test_record_files import ABOUT

BLOCKS = (*MATMUL_ENTRIES, *SOFTMAX_ENTRIES, *ATTENTION_ENTRIES, *CONVOLUTION_ENTRIES)
OURS = {row.name for row in (*GEMM, *PREPARE, *BLOCKS) if not row.on_host and row.kernel.sources}
OURS -= {"packed_dense"}  # inflate_cublas compiles the same


@pytest.fixture
def compilations(monkeypatch) -> list[tuple]:
    """Stands in for the compiler."""
    calls: list[tuple] = []

    def compile_cubin(source, arch, defines):
        calls.append((source, arch, tuple(sorted(defines.items()))))
        return b"cubin\0", ""

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compile_times, "machine", lambda: ABOUT)
    monkeypatch.setattr(compile_times, "cuda_properties", lambda ordinal: device_of(HOPPER))
    return calls


def test_every_kernel_is_measured_and_callers_cache_is_left_alone(compilations, tmp_path, monkeypatch):
    cache, out = tmp_path / "cache", tmp_path / "r.json"
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(cache))
    compile_times.main(str(out))
    found = json.loads(out.read_text())
    rows = found["compile"]
    assert {row["kernel"] for row in rows} == OURS
    assert {row["source"] for row in rows} == {
        path.relative_to(compiler.KERNEL_FOLDER).as_posix() for path in compiler.KERNEL_FOLDER.rglob("*.cu")
    } - {device_tables.SOURCE}  # no plan's kernel
    assert len(rows) == len(set(compilations))
    assert {row["arch"] for row in rows} == {"sm_90a"}
    for row in rows:
        assert row["seconds"] >= 0
        assert row["cached_ms"] > 0
        assert row["nbytes"] == 6
    assert not cache.exists()
    assert os.environ["SPARSE24_CACHE_DIR"] == str(cache)
    assert {name: found[name] for name in ABOUT} == ABOUT
    assert record.is_current(found)


def test_both_epilogues_and_both_numbers_of_tokens_are_compiled():
    choices = [one for one in compile_times.choices(device_of(HOPPER)) if one.entry.name == "wgmma_sp"]
    asked = {(one.descriptor.element, one.descriptor.n, one.descriptor.epilogue) for one in choices}
    assert len(asked) == 2 * 2 * 2 + 2
    assert {one.descriptor.n for one in choices if one.descriptor.x_order == "column"} == {17}
