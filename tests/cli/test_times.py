"""Benchmarks and searches as people see them: in 80 columns what selection chose, in a pipe everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse24_plans.bench import record
from sparse24_plans.cli.times import show_benchmark, show_tuning

from .test_tables import stdout

RECORD = record.load(Path(__file__).parents[2] / "benchmarks" / "results" / "h200.json")
_ONE_BATCH = {
    "variant": "batch",
    "m": 4096,
    "k": 4096,
    "n": 256,
    "element": "bf16",
    "us": 20.0,
    "plain_us": 20.0,
}
RECORD = {**RECORD, "variants": [_ONE_BATCH]}

TRIALS = {
    "kernel": "wgmma_sp_fp8_promoted",
    "problem": {"n": 4096, "m": 57344, "k": 28672, "element": "fp8_e4m3"},
    "right": 12,
    "refused_or_wrong": 3,
    "fatal": [{"algorithm": 4}],
    "chosen": {
        "configuration": {"algorithm": 17, "split_k": 4, "split_k_mode": 1, "split_k_buffers": 3},
        "microseconds": 12345.678,
        "default_microseconds": 23456.789,
        "promises": ["deterministic"],
    },
}
NOTHING_RIGHT = {**TRIALS, "chosen": None, "fatal": []}


@pytest.mark.parametrize("width", [80, None])
def test_a_record_is_shown_at_any_width(width):
    with stdout(width) as stream:
        show_benchmark(RECORD)
    lines = stream.getvalue().splitlines()
    products, epilogues, variants, preparing, host = (
        next(i for i, line in enumerate(lines) if line.startswith(title))
        for title in ("products", "epilogues", "variants", "preparing", "host")
    )
    shapes = {
        (row["element"], row["m"], row["k"], row["n"], row["dense_us"], row["cusparselt_us"])
        for row in RECORD["gemm"]
    }
    assert epilogues - products - 2 == len(shapes)
    assert variants - epilogues - 2 == len(RECORD["epilogues"])
    assert preparing - variants - 2 == len(RECORD["variants"])
    assert "auto" in lines[products + 1].split()
    assert len(lines) - host - 2 == len(RECORD["host"])
    if width is not None:
        assert max(map(len, lines)) <= width
    else:
        assert {row["backend"] for row in RECORD["gemm"]} <= set(lines[products + 1].split())
        assert host - preparing - 2 == len(RECORD["prepare"])


@pytest.mark.parametrize("width", [80, None])
def test_a_search_is_shown_at_any_width(width):
    with stdout(width) as stream:
        show_tuning({"results": [TRIALS, NOTHING_RIGHT]})
    text = stream.getvalue()
    for words in ("4096, 57344, 28672, fp8_e4m3", "12345.68", "23456.79", "none is right", "algorithm 17,"):
        assert words in text
    assert "left out, it ended the CUDA context: wgmma_sp_fp8_promoted fp8_e4m3" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= (width or 200)
