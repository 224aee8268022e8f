"""The committed GPU records were taken with the kernels in the tree, and say what other tools read."""

from __future__ import annotations

import json
import math

import pytest

from sparse24_plans import BackendKind
from sparse24_plans.bench.harness import ROOT, kernels_sha256
from sparse24_plans.bench.problems import PREPARE_SHAPES, SHAPES, TOKENS

RESULTS = ROOT / "benchmarks" / "results"


def record(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize("name", ["h200.json", "h200-tests.json"])
def test_a_record_belongs_to_these_kernels(name):
    found = record(name)
    assert found["kernels_sha256"] == kernels_sha256()
    assert found["gpu"] == "NVIDIA H200"
    assert found["driver"]
    assert found["cuda"]


def test_the_gpu_suite_passed():
    found = record("h200-tests.json")
    assert found["failed"] == 0
    assert found["passed"] > 700


ELEMENTS = {"bf16": 8, "f16": 8, "s8": 16, "fp8_e4m3": 16}
"""Of the record; the fewest tokens that cuSPARSELt takes, of the record's."""


def cells(found: dict, backend: str, element: str) -> set[tuple[int, int, int]]:
    return {
        (row["m"], row["k"], row["n"])
        for row in found["gemm"]
        if (row["backend"], row["element"]) == (backend, element)
    }


def test_the_benchmark_record_is_complete():
    found = record("h200.json")
    assert found["schema"] == 1
    for element, fewest in ELEMENTS.items():
        assert cells(found, "auto", element) == {(*shape, n) for shape in SHAPES for n in TOKENS}
        # What the library takes.
        served = {(*shape, n) for shape in SHAPES for n in TOKENS if n >= fewest}
        assert cells(found, "cusparselt", element) == served
    backends = {"auto", "wgmma_sp_invariant", *(kind.value for kind in BackendKind)}
    for row in found["gemm"]:
        assert row["backend"] in backends
        assert row["us"] > 0
        # PyTorch has no dense product of 8-bit elements for so few tokens.
        assert row["dense_us"] or (row["element"] in ("s8", "fp8_e4m3") and row["n"] <= 16)
        assert 0 <= row["rel_error"] < 5e-3
        assert row["cusparselt_us"] is None or math.isfinite(row["cusparselt_us"])
    assert {"run_us", "launch_us", "select_cached_us", "import_s"} <= found["host"].keys()
    assert all({"op", "m", "k", "element", "us", "copy_us"} == row.keys() for row in found["prepare"])


SHARES = {
    "prune": 0.8,
    "compress": 0.75,
    "prune_compress": 0.8,
    "decompress": 0.8,
    "pack": 0.75,
    "tile_prune": 0.6,
}
"""The least share of a device copy's speed, by op."""


@pytest.mark.parametrize("shape", PREPARE_SHAPES, ids=str)
@pytest.mark.parametrize("op", SHARES)
def test_weights_are_prepared_at_memory_speed(op, shape):
    found = record("h200.json")
    (row,) = select(found["prepare"], op, shape)
    assert row["copy_us"] / row["us"] >= SHARES[op]
    if op == "tile_prune":
        (peer,) = select(found["prepare_peers"], op, shape)
        assert peer["us"] / row["us"] >= 3


def select(rows: list[dict], op: str, shape: tuple[int, int]) -> list[dict]:
    return [row for row in rows if (row["op"], row["m"], row["k"], row["element"]) == (op, *shape, "bf16")]


def speedups(tokens: tuple[int, ...], peer: str, element: str = "bf16") -> list[float]:
    """Of the plan that select chooses, over the peer, a figure a cell that the peer serves."""
    found = record("h200.json")["gemm"]
    rows = [row for row in found if row["backend"] == "auto" and row["element"] == element]
    return [row[peer] / row["us"] for row in rows if row["n"] in tokens and row[peer]]


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


DECODE, MIDDLE, PREFILL = (1, 8, 16, 32, 64), (128, 256, 512), (1024, 2048, 4096, 8192)


@pytest.mark.parametrize(
    ("tokens", "over_dense", "worst", "over_cusparselt"),
    [(DECODE, 1.6, 1.2, 2.2), (MIDDLE, 1.35, 1.0, 1.15), (PREFILL, 1.45, 1.2, 1.0)],
    ids=["decode", "middle", "prefill"],
)
def test_bf16_is_as_fast_as_the_readme_says(tokens, over_dense, worst, over_cusparselt):
    dense, peer = speedups(tokens, "dense_us"), speedups(tokens, "cusparselt_us")
    assert len(dense) == len(SHAPES) * len(tokens)
    assert len(peer) >= len(SHAPES) * (len(tokens) - 1)  # cuSPARSELt serves no n = 1
    assert mean(dense) >= over_dense
    assert min(dense) >= worst
    assert mean(peer) >= over_cusparselt
    assert min(peer) >= 0.9


@pytest.mark.parametrize(
    ("element", "tokens", "over_dense", "over_cusparselt"),
    [
        ("f16", PREFILL, 1.45, 1.0),
        ("fp8_e4m3", (16,), 1.5, 1.0),
        ("fp8_e4m3", PREFILL, 1.3, 1.0),
        ("s8", PREFILL, 1.9, 1.0),
    ],
)
def test_other_elements_are_as_fast_as_the_readme_says(element, tokens, over_dense, over_cusparselt):
    dense, peer = (speedups(tokens, name, element) for name in ("dense_us", "cusparselt_us"))
    assert len(dense) == len(peer) == len(SHAPES) * len(tokens)
    assert mean(dense) >= over_dense
    assert mean(peer) >= over_cusparselt
    assert min(peer) >= 0.9


@pytest.mark.parametrize("element", ELEMENTS)
def test_select_is_never_slower_than_dense(element):
    assert min(speedups(TOKENS, "dense_us", element)) >= 0.97


def test_f16_decodes_as_fast_as_bf16():
    found = {
        (row["m"], row["k"], row["n"], row["element"]): row["us"]
        for row in record("h200.json")["gemm"]
        if row["backend"] == "auto" and row["n"] <= 64
    }
    ratios = [us / found[(*cell, "bf16")] for (*cell, element), us in found.items() if element == "f16"]
    assert len(ratios) >= 3 * len(SHAPES)
    assert mean(ratios) <= 1.03


def test_select_chooses_nearly_the_fastest_of_our_kernels():
    best: dict[tuple, float] = {}
    chosen: dict[tuple, float] = {}
    for row in record("h200.json")["gemm"]:
        cell = (row["m"], row["k"], row["n"], row["element"])
        if row["backend"] == "auto":
            chosen[cell] = row["us"]
        elif row["backend"] != "cusparselt":
            best[cell] = min(best.get(cell, math.inf), row["us"])
    assert all(best[cell] / us >= 0.97 for cell, us in chosen.items())


def test_host_costs_are_within_what_is_promised():
    host = record("h200.json")["host"]
    assert host["launch_us"] <= 6
    assert host["cusparselt_launch_us"] <= 6
    assert host["run_us"] <= 10
    assert host["run_new_args_us"] <= 40
    assert host["select_cached_us"] <= 50
    assert host["import_s"] <= 0.3
