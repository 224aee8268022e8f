"""``sparse24 bench --blocksparse``: its cells, its command, and what the committed record has to show."""

from __future__ import annotations

import itertools
import json
import sys
from statistics import geometric_mean
from types import ModuleType

import pytest

import sparse24_plans.bench as bench
from sparse24_plans.bench import blocks, blocks24, record
from sparse24_plans.bench.record import is_current

from . import records
from .test_command import ABOUT, invoke

SPEED = {  # over dense cuBLAS at n = 4096, of random blocks: block -> density -> at least
    128: {0.5: 1.4, 0.2: 3.4, 0.1: 6.3, 0.05: 9.5},
    64: {0.2: 2.0, 0.1: 4.0, 0.05: 7.0},
    32: {0.2: 1.0, 0.1: 2.0, 0.05: 3.8},
    16: {0.1: 1.0, 0.05: 2.0},
}
NOT_REACHED = {  # (op, block, density): why
    ("dsd", 128, 0.05): "9.45 times, 9.59 on another GPU: writing C is most of it",
}

SPEED_OF_24 = 1.3  # blocks of 128 that are 2:4, over whole ones
NOT_REACHED_OF_24 = {  # (op, density): why
    ("dsd", 0.5): "1.29 times, 1.33 on another GPU",
    ("dsd", 0.1): "1.29 times: four items a cluster of 4096 x 4096, and what a launch takes",
    ("dsd", 0.05): "1.2 times: writing C and reading B from memory is most of it",
    ("dds", 0.05): "1.25 times: writing C and reading A from memory is most of it",
}


NOT_NEAR = {  # (density, block): why
    (0.2, 32): "1.47 times: two lines meet a third of all columns, and read them from L2 by themselves",
    (0.1, 32): "1.31 times, 1.25 on another GPU",
}
OPS = ("dsd", "dds")
SPEED_CASES = [(op, block, density) for block, its in SPEED.items() for density in its for op in OPS]


def row_of(**fields: object) -> dict:
    about = {"op": "dsd", "m": 4096, "k": 4096, "n": 256, "block": 64, "density": 0.1, "pattern": "random"}
    figures = {
        "element": "bf16",
        "us": 5.0,
        "dense_us": 15.0,
        "torch_bsr_us": 10.0,
        "backend": "blocks_wgmma",
    }
    return {**about, **figures, **fields}


ATTENTION = {
    "tokens": 16384,
    "heads": 16,
    "head_size": 128,
    "block": 128,
    "density": 0.1,
    "direction": "forward",
    "us": 400.0,
    "dense_us": 3200.0,
    "tflops": 545.3,
}


BLOCKS24 = {
    "op": "dds",
    "m": 4096,
    "k": 4096,
    "n": 4096,
    "block": 128,
    "density": 0.2,
    "element": "bf16",
    "us": 10.0,
    "blocks_us": 13.0,
    "dense_us": 70.0,
    "backend": "blocks_wgmma_sp",
}


# Cells --------------------------------------------------------------------------------------------


def test_cells_are_those_of_the_contract():
    found = blocks.cells()
    assert len(set(found)) == len(found)
    for block in (16, 32, 64, 128):
        for density in (0.5, 0.2, 0.1, 0.05):
            for pattern in ("random", "banded"):
                for shape in ((4096, 4096), (8192, 8192), (14336, 4096)):
                    for n in (256, 4096):
                        for op in ("dsd", "dds"):
                            assert blocks.Cell(op, *shape, n, block, density, pattern) in found
    assert {cell.block for cell in found if cell.op == "sdd"} == {16, 32, 64, 128}


@pytest.mark.parametrize("pattern", blocks.PATTERNS)
def test_bitmaps_keep_what_they_say(pattern):
    for m, k, density in ((4096, 4096, 0.2), (14336, 4096, 0.05), (8192, 8192, 0.5)):
        kept = blocks.Cell("dsd", m, k, 256, 64, density, pattern).bitmap()
        assert kept.shape == (m // 64, k // 64)
        assert kept.mean() == pytest.approx(density, rel=0.1)
        again = blocks.Cell("dds", m, k, 4096, 64, density, pattern).bitmap()
        assert (kept == again).all()
    if pattern == "banded":
        assert (kept.sum(1) == kept.sum(1)[0]).all()
        assert kept[0, 0]
        assert kept[-1, -1]


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    """Stands for what needs a GPU and PyTorch."""
    module = ModuleType("sparse24_plans.bench.blocks")

    def measure(on_step, keep):
        found = record.empty(ABOUT, record.BLOCKS_KEYS)
        found["products"].append(row_of())
        found["sparse24"].append(BLOCKS24)
        found["attention"].append(ATTENTION)
        found |= record.stamp(record.files_of(["blocksparse/blocks_wgmma.cu"]))
        keep(found)
        on_step()
        return found

    module.every_cell, module.measure = (lambda: [None]), measure
    monkeypatch.setitem(sys.modules, "sparse24_plans.bench.blocks", module)
    monkeypatch.setattr(bench, "blocks", module, raising=False)
    monkeypatch.setattr(record, "machine", lambda: ABOUT)


def test_the_command_writes_a_record_and_shows_it(played, tmp_path):
    out = tmp_path / "h200-blocksparse.json"
    result = invoke("--blocksparse", "-o", str(out))
    assert result.exit_code == 0, result.output
    assert "3.00x" in result.stdout
    assert "2.00x" in result.stdout
    found = json.loads(out.read_text())
    assert found["products"] == [row_of()]
    assert found["attention"] == [ATTENTION]
    assert found["sparse24"] == [BLOCKS24]
    assert "1.30x" in result.stdout
    assert "7.00x" in result.stdout
    assert "8.00x" in result.stdout
    assert "545" in result.stdout
    assert is_current(found)
    assert "kernels_cu/ptx/wgmma_dense.cuh" in found["kernel_files"]


def test_it_takes_a_file_alone():
    for words in (("--torch",), ("--n", "16"), ("--random", "1"), ("--element", "bf16")):
        result = invoke("--blocksparse", *words)
        assert result.exit_code == 2
        assert "--blocksparse takes --out alone" in " ".join(result.output.split())


# The record ---------------------------------------------------------------------------------------


def products(**fields: object) -> list[dict]:
    found = records.record("h200-blocksparse.json")["products"]
    return [row for row in found if all(row[name] == value for name, value in fields.items())]


def speeds(peer: str = "dense_us", **fields: object) -> list[float]:
    return [row[peer] / row["us"] for row in products(**fields) if row[peer]]


def test_the_record_is_of_these_kernels():
    assert is_current(records.record("h200-blocksparse.json"))


def test_the_record_is_complete():
    found = records.record("h200-blocksparse.json")
    assert found["gpu"] == "NVIDIA H200"
    names = ("op", "m", "k", "n", "block", "density", "pattern")
    taken = {tuple(row[name] for name in names) for row in found["products"]}
    assert taken == {tuple(getattr(cell, name) for name in names) for cell in blocks.cells()}


def test_the_record_has_every_product_of_2_4_blocks():
    names = ("op", "m", "k", "n", "block", "density")
    rows = records.record("h200-blocksparse.json")["sparse24"]
    taken = {tuple(row[name] for name in names) for row in rows}
    assert taken == {tuple(getattr(cell, name) for name in names) for cell in blocks24.cells()}
    assert {row["backend"] for row in rows} == {"blocks_wgmma_sp"}


@pytest.mark.parametrize(("op", "block", "density"), records.asked(SPEED_CASES, NOT_REACHED))
def test_speed_over_dense(op, block, density):
    """On average over the shapes."""
    found = speeds(op=op, n=4096, block=block, density=density, pattern="random")
    assert geometric_mean(found) >= SPEED[block][density]


def speeds_of_24(**fields: object) -> list[float]:
    """Over the same layout of whole blocks."""
    found = records.record("h200-blocksparse.json")["sparse24"]
    rows = [row for row in found if all(row[name] == value for name, value in fields.items())]
    return [row["blocks_us"] / row["us"] for row in rows]


@pytest.mark.parametrize(
    ("op", "density"), records.asked(itertools.product(OPS, blocks24.DENSITIES), NOT_REACHED_OF_24)
)
def test_speed_of_2_4_blocks(op, density):
    """On average over the shapes."""
    assert geometric_mean(speeds_of_24(op=op, block=128, density=density)) >= SPEED_OF_24


@pytest.mark.parametrize("block", [64, 128])
def test_2_4_blocks_are_never_slower_than_whole_ones(block):
    assert min(speeds_of_24(block=block)) >= 0.97


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_bands_are_at_least_as_fast(op, block):
    """For the blocks that they keep: a band has whole ones in every row."""
    for density in blocks.DENSITIES:
        means = {}
        for pattern in blocks.PATTERNS:
            rows = products(op=op, n=4096, block=block, density=density, pattern=pattern)
            kept = (
                blocks.Cell(op, row["m"], row["k"], 4096, block, density, pattern).bitmap() for row in rows
            )
            means[pattern] = geometric_mean(
                row["dense_us"] / row["us"] * one.mean() for row, one in zip(rows, kept, strict=True)
            )
        assert means["banded"] >= 0.97 * means["random"]


@pytest.mark.parametrize("block", [64, 128])
def test_speed_at_few_tokens(block):
    assert geometric_mean(speeds(op="dsd", n=256, block=block, density=0.2, pattern="random")) >= 2.0


def test_never_slower_than_pytorchs_bsr():
    assert min(speeds("torch_bsr_us")) >= 1.0


@pytest.mark.xfail(
    strict=True, reason="small blocks: what inflating itself takes, half of the time at n = 256"
)
def test_never_slower_than_dense():
    assert min(speeds()) >= 0.97


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("density", blocks.DENSITIES)
def test_large_blocks_are_never_slower_than_dense(block, density):
    assert min(speeds(block=block, density=density)) >= 0.97


@pytest.mark.xfail(
    strict=True, reason="0.89 times for one of 24 cells, dds of a band of half of the blocks of 32"
)
def test_where_a_dense_product_is_faster_it_is_what_runs():
    """At most a tenth is lost to inflating, and kernels of kept blocks lose no more than that."""
    assert {row["backend"] for row in products(n=4096, block=16, density=0.5)} == {"inflate_cublas"}
    assert min(speeds(n=4096)) >= 0.9


@pytest.mark.parametrize(
    ("density", "block"), records.asked(itertools.product(blocks.DENSITIES, blocks.BLOCKS), NOT_NEAR)
)
def test_sdd_is_near_dsd(density, block):
    """Within 30%, all shapes together."""
    fields = {"n": 4096, "block": block, "density": density, "pattern": "random"}
    sampled, other = ([row["us"] for row in products(op=op, **fields)] for op in ("sdd", "dsd"))
    assert len(sampled) == len(other)
    assert sum(sampled) <= 1.3 * sum(other)
