"""``sparse24 warmup`` and ``Plan.compile``: the cache holds what select would compile; no GPU is touched."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparse24_plans import (
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PruneCompressSparse24Descriptor,
    PruneCompressSparse24Plan,
    UnsupportedError,
)
from sparse24_plans.cli.app import app
from sparse24_plans.device.jit import cache as cubins
from sparse24_plans.device.jit import compiler, launcher
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.kernel_table import choose, consider
from sparse24_plans.plan.preference import PlanPreference

from ..kernels.requests import HOPPER, device_of, recorded_loads
from ..sample_devices import AMPERE, HOST

CUBIN = b"\x7fELF and what follows\0"


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compilations(monkeypatch, folder) -> list[tuple[str, str, tuple]]:
    """Stands in for the compiler: what it was asked for."""
    calls: list = []

    def compile_cubin(source, arch, defines):
        calls.append((source, arch, tuple(sorted(defines.items()))))
        return CUBIN, ""

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return calls


def invoke(*words: str):
    return CliRunner().invoke(app, ["warmup", *words], catch_exceptions=False)


def document(*words: str) -> dict:
    return json.loads(invoke(*words, "--json").stdout)


# Plan.compile -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "preference"),
    [
        ({"element": "bf16"}, {}),
        ({"element": "bf16", "epilogue": "bias_silu", "n": 300}, {}),
        ({"element": "f16"}, {"require": {"batch_invariant": True}}),
        ({"element": "bf16"}, {"prefer_backend": "mma_sp"}),
        ({"element": "s8", "scale_w": "row"}, {}),
        ({"element": "f32", "op": "dgrad"}, {"prefer_backend": "inflate_strict"}),
        ({"element": "f32", "epilogue": "bias", "n": 0}, {"prefer_backend": "inflate_cublas"}),
    ],
    ids=str,
)
def test_what_is_compiled_is_what_the_chosen_kernel_loads(compilations, problem, preference):
    desc = GemmSparse24Descriptor(**{"n": 16, "m": 512, "k": 1024, **problem})
    wanted, device = PlanPreference(**preference), device_of(HOPPER)
    row = choose(consider(GemmSparse24Plan.table, desc, wanted, device))
    with recorded_loads(row.kernel) as loaded:
        row.kernel(Choice(desc, device, row, wanted, {}))
    found = GemmSparse24Plan.compile(desc, preference=preference, device=device)
    assert compilations == [(one.source, one.arch, one.defines) for one in loaded]
    assert [(one.source, one.arch) for one in found] == [(one.source, one.arch) for one in loaded]
    assert all(one.seconds is not None and one.nbytes == len(CUBIN) for one in found)
    assert all(one.path.is_file() for one in found)


def test_cublaslt_is_not_asked(compilations, monkeypatch):
    """cuBLASLt needs a GPU, and the kernels that run before it are the same for every n."""
    monkeypatch.setattr("sparse24_plans._vendor.cublaslt_abi.load", None)
    desc = GemmSparse24Descriptor(n=64, m=512, k=1024, element="f32", epilogue="bias")
    preference = {"prefer_backend": "inflate_cublas"}
    found = GemmSparse24Plan.compile(desc, device=device_of(HOPPER), preference=preference)
    assert {one.source for one in found} == {"weights/inflate.cu", "gemm/inflate_cublas.cu"}


def test_a_plan_that_prepares_is_compiled_too(compilations):
    desc = PruneCompressSparse24Descriptor(m=8, k=16, element="bf16")
    (found,) = PruneCompressSparse24Plan.compile(desc, device=AMPERE)
    assert (found.source, found.arch) == ("prepare/prune.cu", "sm_80")


def test_what_the_cache_has_is_not_compiled_again(compilations):
    desc = GemmSparse24Descriptor(n=16, m=512, k=1024, element="bf16")
    (first,) = GemmSparse24Plan.compile(desc, device=AMPERE)
    (second,) = GemmSparse24Plan.compile(desc, device=AMPERE)
    assert len(compilations) == 1
    assert second == first._replace(seconds=None)
    assert cubins.cubin(*compilations[0][:2], dict(compilations[0][2])) == CUBIN
    assert len(compilations) == 1


def test_the_host_and_libraries_compile_nothing(compilations):
    desc = GemmSparse24Descriptor(n=16, m=512, k=1024, element="bf16")
    assert GemmSparse24Plan.compile(desc, device=HOST) == ()
    assert GemmSparse24Plan.compile(desc, device=AMPERE, preference={"prefer_backend": "cusparselt"}) == ()
    assert compilations == []


def test_it_refuses_what_select_refuses(compilations):
    desc = GemmSparse24Descriptor(n=16, m=512, k=1024, element="fp8_e4m3")
    with pytest.raises(UnsupportedError, match="no kernel can serve"):
        GemmSparse24Plan.compile(desc, device=AMPERE)
    with pytest.raises(InvalidProblemError, match="descriptor: expected"):
        GemmSparse24Plan.compile("desc", device=AMPERE)
    assert compilations == []


def test_afterwards_kernels_are_loaded_again(compilations, monkeypatch):
    """Compiling alone ends with the block, also where that raises."""

    class LoadedError(Exception):
        pass

    def import_cupy():
        raise LoadedError

    monkeypatch.setattr(launcher, "import_cupy", import_cupy)
    inflate = partial(launcher.load, "weights/inflate.cu", "inflate", 1, AMPERE)
    with launcher.compiling_only() as found:
        inflate({"ELEMENT": 0})
        with pytest.raises(AttributeError), launcher.compiling_only():
            inflate(None)
    assert [one.source for one in found] == ["weights/inflate.cu"]
    with pytest.raises(LoadedError):
        inflate({"ELEMENT": 0})


# The command --------------------------------------------------------------------------------------


def test_every_combination_is_compiled_once(compilations, folder):
    found = document(
        *(
            "--n",
            "1,16",
            "--shape",
            "512x1024",
            "--shape",
            "1024x512",
            "--element",
            "bf16",
            "--element",
            "f16",
        ),
        *("--arch", "sm90a", "--arch", "sm80"),
    )
    problems = [(one["device"], *(one["problem"][name] for name in "nmk")) for one in found["results"]]
    assert len(problems) == 2 * 2 * 2 * 2
    assert {one["kernel"] for one in found["results"]} == {"wgmma_sp", "mma_sp"}
    assert found["folder"] == str(folder)
    assert found["kernels"] == found["compiled"] == len(set(compilations)) == len(compilations)
    assert found["nbytes"] == len(CUBIN) * found["kernels"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        {one["file"] for result in found["results"] for one in result["compiled"]}
    )
    again = document("--n", "1", "--shape", "512x1024", "--arch", "sm90a")
    assert (again["compiled"], again["seconds"]) == (0, 0)
    assert again["kernels"] == 1


def test_preparation_gradients_and_epilogues(compilations):
    found = document(
        *("--n", "1", "--shape", "512x1024", "--arch", "sm90a", "--prepare"),
        *("--op", "forward", "--op", "dgrad", "--epilogue", "identity", "--epilogue", "bias_silu"),
    )
    ops = [one["op"] for one in found["results"]]
    assert ops.count("gemm_sparse24_forward") == 2
    assert ops.count("gemm_sparse24_dgrad") == 1
    assert {"prune_sparse24", "compress_sparse24", "prune_compress_sparse24"} <= set(ops)
    assert {"decompress_sparse24", "pack_sparse24"} <= set(ops)


def test_the_table_says_what_was_compiled_and_the_total(compilations, folder):
    result = invoke("--n", "1,16", "--shape", "512x1024", "--arch", "sm80")
    assert result.exit_code == 0
    assert result.stdout.count("gemm/mma_sp.cu") == 2
    assert "2 kernels compiled in" in result.stdout
    assert str(folder) in result.stdout
    assert (
        "0 kernels compiled in 0.0 s, 2 were there"
        in invoke("--n", "1,16", "--shape", "512x1024", "--arch", "sm80").stdout
    )


def test_problem_that_nothing_serves_is_named_and_others_are_compiled(compilations):
    words = (
        "--n",
        "1",
        "--shape",
        "512x1024",
        "--arch",
        "sm80",
        "--element",
        "bf16",
        "--element",
        "fp8_e4m3",
    )
    result = invoke(*words)
    assert result.exit_code == 1
    assert "not served on" in result.stdout
    assert "fp8_e4m3 n=1 m=512 k=1024" in result.stdout
    assert [call[0] for call in compilations] == ["gemm/mma_sp.cu"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--n", "1", "--shape", "512"), "--shape"),
        (("--n", "x", "--shape", "512x512"), "--n"),
        (("--n", "1", "--shape", "512x511"), "multiple of 8"),
        (("--n", "1", "--shape", "512x512", "--arch", "sm80", "--device", "0"), "exclude"),
    ],
    ids=str,
)
def test_wrong_usage(compilations, words, message):
    result = invoke(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert compilations == []


def test_the_host_is_refused(compilations):
    result = invoke("--n", "1", "--shape", "512x512", "--device", "host", "--json")
    assert result.exit_code == 1
    assert "--arch" in json.loads(result.stdout)["error"]["message"]
