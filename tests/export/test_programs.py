"""The programs in examples/export compile without a warning and see what a kernel writes."""

from __future__ import annotations

import ctypes.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import export_times
from benchmarks.check import faults
from sparse24_plans.bench.record import is_current
from sparse24_plans.device.devices import absent_gpu
from tests.bench.records import record
from tests.export import programs
from tests.export.c_library import compiled_stub
from tests.support import HAS_GPU

COMPILERS = {"c": "cc", "cpp": "c++", "rs": "rustc"}
TOKENS = (1, 16, 300)


@pytest.fixture(scope="module", params=COMPILERS)
def language(request):
    if shutil.which(COMPILERS[request.param]) is None:
        pytest.skip(f"needs {COMPILERS[request.param]}")
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("example")
    programs.write_folder(found)
    return found


@pytest.fixture(scope="module")
def program(language, folder, tmp_path_factory):
    """The program of a language, linked with the stub of the driver, which stands beside it."""
    if ctypes.util.find_library("cuda"):
        pytest.skip("the stub takes the place of the CUDA driver, which is installed here")
    built = tmp_path_factory.mktemp(language)
    return programs.build(language, folder / "plans", built, str(compiled_stub(built, "-DPROGRAMS")))


@pytest.fixture
def on_stub(program, folder, tmp_path):
    """Run the program on the stub, whose kernels give these results."""

    def run(given):
        for content in given:
            (tmp_path / str(len(content))).write_bytes(content)
        environment = {"LD_LIBRARY_PATH": str(program.parent), "STUB_RESULTS": str(tmp_path)}
        return programs.run(program, folder, environment)

    return run


def results_of(folder):
    return [(folder / name).read_bytes() for name in ("weight.packed", *(f"y.{n}" for n in TOKENS))]


def test_programs_see_the_expected_results(on_stub, folder):
    done = on_stub(results_of(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as expected") == done.stdout.count("\n") >= len(TOKENS)


@pytest.mark.parametrize("at", range(1, 4))
def test_programs_end_with_1_for_a_wrong_bit(on_stub, folder, at):
    results = results_of(folder)
    spoiled = bytearray(results[at])
    spoiled[np.random.default_rng().integers(len(spoiled))] ^= 1
    results[at] = bytes(spoiled)
    done = on_stub(results)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{TOKENS[at - 1]} tokens" in next(line for line in done.stdout.splitlines() if "DIFF" in line)


def test_programs_end_with_1_if_kernels_write_nothing(on_stub):
    assert on_stub([]).returncode == 1


def test_programs_end_with_2_without_the_folder(on_stub, folder):
    (folder / "plans").rename(folder / "moved")
    try:
        done = on_stub(results_of(folder))
    finally:
        (folder / "moved").rename(folder / "plans")
    assert done.returncode == 2
    assert "plans.bin: No such file" in done.stderr


def test_a_record_of_times_is_well_formed(tmp_path, monkeypatch, named_cubins):
    if ctypes.util.find_library("cuda"):
        pytest.skip("the stub takes the place of the CUDA driver, which is installed here")
    driver, out = compiled_stub(tmp_path, "-DPROGRAMS"), tmp_path / "h200-export.json"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(export_times, "loaded_driver", lambda: str(driver))
    monkeypatch.setattr(export_times, "cuda_properties", lambda ordinal: absent_gpu("h200"))
    monkeypatch.setattr(export_times, "machine", lambda: {**record("h200.json")})
    monkeypatch.setattr(export_times, "MAX_TOKENS", 40)
    export_times.main([str(out), "--n", "20"])
    export_times.main([str(out), "--size"])
    found = json.loads(out.read_text())
    assert faults("export", found) == []
    assert [folder["tokens"] for folder in found["folders"]] == [20, 40]
    assert [call["n"] for call in found["calls"]] == [1, 16]
    assert is_current(found)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_programs_give_the_bits_of_the_host_on_a_gpu(language, folder, tmp_path):
    program = programs.build(language, folder / "plans", tmp_path, export_times.loaded_driver())
    done = programs.run(program, folder, {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as expected") >= len(TOKENS)
