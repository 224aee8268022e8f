"""Record files: the kernels that they name, how parts add up, what is no record."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparse24_plans import FormatError, InvalidProblemError, StorageError, __version__
from sparse24_plans.bench import record
from sparse24_plans.device.jit import compiler
from sparse24_plans.gemm.kernel_table import ENTRIES as GEMM
from sparse24_plans.prepare.kernel_table import ENTRIES as PREPARE
from sparse24_plans.tuning.process import python_command

from .records import ROOT

ABOUT = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "versions": {"cupy": "14.2.0"}}


def row(backend: str = "auto", us: float = 2.0, **change: object) -> dict:
    return {"m": 64, "k": 64, "n": 8, "element": "bf16", "backend": backend, "us": us, **change}


def made(*sources: str, **parts: object) -> dict:
    files = record.files_of(sources)
    return {
        **record.empty(ABOUT),
        "kernel_files": files,
        "kernels_sha256": record.kernels_sha256(files),
        **parts,
    }


def test_every_kernel_file_is_hashed():
    paths = (path for path in (ROOT / "kernels_cu").rglob("*") if path.is_file())
    assert record.kernel_files() == sorted(str(path.relative_to(ROOT)) for path in paths)


def test_hash_is_over_paths_in_order_and_code(monkeypatch, tmp_path):
    """The bytes are those of design: path, 0, code, 0, for each file."""
    monkeypatch.setattr(record, "KERNEL_FOLDER", tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c.cuh").write_text("int b; // one\n")
    (tmp_path / "a.cu").write_text('#include "b/c.cuh"\n/* two */\nint  a;\n')
    hashed = b'kernels_cu/a.cu\0#include "b/c.cuh" int a;\0kernels_cu/b/c.cuh\0int b;\0'
    assert record.kernels_sha256(record.kernel_files()) == hashlib.sha256(hashed).hexdigest()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("int a; // b\nint c;", "int a; int c;"),
        ("int/* b\n c */a;", "int a;"),
        ('f("http://x", "/* y */"); // z', 'f("http://x", "/* y */");'),
        (r'f("\"//"); // z', r'f("\"//");'),
        ("  a\n\n\tb  ", "a b"),
        ("/", "/"),
    ],
)
def test_code_is_text_without_comments_and_layout(text, code):
    assert record.code_of(text) == code


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A copy of the kernels that a test may change."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(compiler.KERNEL_FOLDER, folder)
    monkeypatch.setattr(compiler, "KERNEL_FOLDER", folder)
    monkeypatch.setattr(record, "KERNEL_FOLDER", folder)
    return folder


def test_comments_make_no_record_stale_and_tokens_do(kernels):
    one = made("gemm/mma_sp.cu")
    everything = record.kernels_sha256(record.kernel_files())
    for path in kernels.rglob("*.cu*"):
        path.write_text("// A comment.\n" + path.read_text() + "\n\n/* Another\n   comment. */\n")
    assert record.is_current(one)
    assert record.kernels_sha256(record.kernel_files()) == everything
    changed = kernels / "gemm" / "mma_sp.cu"
    changed.write_text(changed.read_text() + ";\n")
    assert not record.is_current(one)
    assert record.kernels_sha256(record.kernel_files()) != everything


def test_the_hash_is_the_same_wherever_the_package_works(tmp_path):
    code = "from sparse24_plans.bench.record import *; print(kernels_sha256(kernel_files()))"
    done = subprocess.run(python_command(code), capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == record.kernels_sha256(record.kernel_files())


def test_files_are_those_that_the_sources_include():
    assert record.files_of(()) == []
    found = record.files_of(["gemm/inflate_strict.cu"])
    assert {"kernels_cu/gemm/inflate_strict.cu", "kernels_cu/common/strict_math.inc"} <= set(found)
    assert "kernels_cu/gemm/mma_sp.cu" not in found
    assert found == sorted(set(found))


@pytest.mark.parametrize("row", [*GEMM, *PREPARE], ids=lambda row: row.name)
def test_a_kernel_names_the_sources_that_it_loads(row):
    text = Path(__import__(row.kernel.__module__, fromlist=["x"]).__file__).read_text()
    compiles = "load(" in text or "Inflate(" in text
    assert bool(row.kernel.sources) == compiles
    assert set(record.files_of(row.kernel.sources)) <= set(record.kernel_files())


def test_a_record_survives_its_file(tmp_path):
    one = made("gemm/mma_sp.cu", gemm=[row()])
    record.save(one, tmp_path / "r.json")
    assert record.load(tmp_path / "r.json") == one
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "gemm": 3}', json.dumps({"schema": 1, "gemm": [1]})],
)
def test_what_is_no_record(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(FormatError, match="record"):
        record.load(tmp_path / "r.json")


def test_a_record_that_is_not_there(tmp_path):
    with pytest.raises(StorageError):
        record.load(tmp_path / "r.json")


def test_parts_add_up_and_the_newer_row_counts():
    old = made("gemm/mma_sp.cu", gemm=[row(), row("mma_sp", 3.0)], host={"run_us": 7.0, "launch_us": 4.0})
    new = made(
        "prepare/pack.cu",
        gemm=[row(us=1.0), row(n=16)],
        prepare=[{"op": "pack", "m": 8, "k": 8, "element": "bf16", "us": 1.0}],
        host={"run_us": 6.0},
    )
    both = record.merged(old, new)
    assert both["gemm"] == [row(us=1.0), row("mma_sp", 3.0), row(n=16)]
    assert both["prepare"] == new["prepare"]
    assert both["host"] == {"run_us": 6.0, "launch_us": 4.0}
    assert both["kernel_files"] == record.files_of(["gemm/mma_sp.cu", "prepare/pack.cu"])
    assert record.is_current(both)


@pytest.mark.parametrize("name", ["gpu", "driver", "cuda", "versions", "seed"])
def test_records_of_two_machines_do_not_add_up(name):
    with pytest.raises(InvalidProblemError, match=f"expected one {name}"):
        record.merged(made(), {**made(), name: "another"})


def test_a_record_says_which_machine_and_which_libraries(monkeypatch):
    device = SimpleNamespace(name="NVIDIA H200", driver="580.1", cublaslt="130100", cusparselt="0.8.0")
    monkeypatch.setattr(record, "cuda_properties", lambda ordinal: device)
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13020)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __version__="14.2.0")
    monkeypatch.setattr(record, "import_cupy", lambda: cupy)
    monkeypatch.setattr(record, "nvrtc_build", lambda: "// Cuda compilation tools, release 13.0, V13.0.88")
    about = record.machine()
    assert (about["gpu"], about["driver"], about["cuda"]) == ("NVIDIA H200", "580.1", "13.2")
    versions = about["versions"]
    assert versions["sparse24_plans"] == __version__
    assert (versions["cublaslt"], versions["cusparselt"]) == ("130100", "0.8.0")
    assert (versions["nvrtc"], versions["cupy"]) == ("13.0.88", "14.2.0")
    assert platform.machine() in about["system"]
    assert about["system"].endswith(f"Python {platform.python_version()}")


def test_an_extended_record_names_the_newest_system():
    old, new = made(), {**made(), "system": "Linux, Python 3.12.1"}
    assert record.merged(old, new)["system"] == new["system"]
    assert record.merged({**old, "system": "another"}, new)["system"] == new["system"]


def test_a_record_goes_stale_with_its_own_kernels_alone():
    one = made("gemm/mma_sp.cu")
    assert record.is_current(one)
    assert not record.is_current({**one, "kernels_sha256": "0" * 64})
    assert not record.is_current({**one, "kernel_files": [*one["kernel_files"], "kernels_cu/gone.cu"]})


def test_what_a_run_adds_to(tmp_path):
    path = tmp_path / "r.json"
    assert record.to_extend(path) is None
    one = made("gemm/mma_sp.cu", gemm=[row()])
    record.save(one, path)
    assert record.to_extend(path) == one
    record.save({**one, "kernels_sha256": "0" * 64}, path)
    with pytest.raises(InvalidProblemError, match="remove it first"):
        record.to_extend(path)
    record.save({**one, "driver": "1.0"}, path)
    with pytest.raises(InvalidProblemError, match="expected one driver"):
        record.take([], ABOUT, path=path)


# Runs ---------------------------------------------------------------------------------------------


def steps_of(*tokens: int, ran: list[int], source: str = "gemm/mma_sp.cu") -> list[record.Step]:
    """A step for each n, which says that it ran."""

    def measure(n: int, sources: set[str]) -> dict:
        ran.append(n)
        sources.add(source)
        return {"gemm": [row(n=n), row("invariant", n=n)]}

    return [record.Step("gemm", {"n": n, "backend": "auto"}, partial(measure, n)) for n in tokens]


def test_a_run_measures_what_the_file_lacks(tmp_path):
    path, ran = tmp_path / "r.json", []
    record.take(steps_of(1, 8, ran=ran), ABOUT, path=path)
    heard = []
    found = record.take(
        steps_of(1, 8, 16, ran=ran, source="prepare/pack.cu"), ABOUT, path=path, on_step=heard.append
    )
    assert ran == [1, 8, 16]
    assert len(heard) == 3
    assert found == record.load(path)
    assert [one["n"] for one in found["gemm"]] == [1, 1, 8, 8, 16, 16]
    assert found["kernel_files"] == record.files_of(["gemm/mma_sp.cu", "prepare/pack.cu"])
    assert record.is_current(found)


def test_no_step_begins_late_and_next_run_goes_on(tmp_path, monkeypatch):
    path, ran, now = tmp_path / "r.json", [], iter(range(100))
    monkeypatch.setattr(record.time, "monotonic", lambda: next(now))
    found = record.take(steps_of(1, 8, 16, 32, ran=ran), ABOUT, path=path, seconds=3)
    assert ran == [1, 8]
    assert found == record.load(path)
    record.take(steps_of(1, 8, 16, 32, ran=ran), ABOUT, path=path)
    assert ran == [1, 8, 16, 32]


def test_a_step_that_raises_leaves_what_was_measured_before(tmp_path):
    path, ran = tmp_path / "r.json", []

    def interrupted(sources: set[str]) -> dict:
        raise KeyboardInterrupt

    steps = [*steps_of(1, ran=ran), record.Step("gemm", {"n": 8}, interrupted)]
    with pytest.raises(KeyboardInterrupt):
        record.take(steps, ABOUT, path=path)
    assert [one["n"] for one in record.load(path)["gemm"]] == [1, 1]


def test_the_hosts_figures_are_one_step():
    step = record.Step("host", {}, lambda sources: {"host": {"run_us": 6.0}})
    assert not step.is_done(made())
    assert record.take([step], ABOUT)["host"] == {"run_us": 6.0}
    assert step.is_done(made(host={"run_us": 6.0}))
