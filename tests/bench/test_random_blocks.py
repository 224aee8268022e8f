"""The benchmark of random block-sparse products: what a seed draws, and the bounds on its record."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import blocks, random_blocks
from benchmarks.bounds import BOUNDS
from benchmarks.check import faults
from benchmarks.judging import judged
from benchmarks.random_blocks import LISTS, attentions, drawn, paired, steps, swept, uneven_counts
from benchmarks.random_figures import block_summary, is_aligned
from sparse24_plans.bench import record
from sparse24_plans.device.jit import launcher

from ..sample_devices import H200

SEED = 20260101


def test_a_seed_draws_the_same_problems_and_another_draws_others():
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert swept(7) != swept(8)


@pytest.mark.parametrize("seed", [1, SEED])
def test_products_are_those_of_the_contract(seed):
    found = drawn(seed)
    assert len(set(found)) == len(found) >= 400
    assert len({cell.shape.rsplit(" ", 1)[0] for cell in found}) >= 8
    assert not {(cell.m, cell.k) for cell in found} & set(blocks.SHAPES)
    assert {cell.op for cell in found} == {"sdd", "dsd", "dds"}
    assert all(cell.m % cell.block == 0 and cell.k % cell.block == 0 for cell in found)
    assert 0.02 <= min(cell.density for cell in found) <= 0.03
    assert 0.5 <= max(cell.density for cell in found) <= 0.6
    assert min(cell.n for cell in found) <= 2
    assert max(cell.n for cell in found) >= 7000
    assert sum(cell.n % 8 != 0 for cell in found) > 0.7 * len(found)
    assert sum(cell.pattern == "uneven" for cell in found) >= 0.2 * len(found)
    packable = [cell for cell in found if cell.op != "sdd"]
    assert 0.4 <= sum(cell.packed for cell in packable) / len(packable) <= 0.6
    assert not any(cell.packed for cell in found if cell.op == "sdd")
    for pattern in ("random", "uneven"):
        assert {cell.packed for cell in packable if cell.pattern == pattern} == {True, False}
    sizes = {128: "large", 64: "large", 32: "32", 16: "16"}
    classes = Counter(
        (sizes[cell.block], cell.n <= 200, cell.pattern) for cell in found if 0.05 <= cell.density <= 0.25
    )
    assert len(classes) == 12
    assert min(classes.values()) >= 8


def test_what_is_timed_is_compiled_before(monkeypatch):
    sparse = [one for one in drawn(SEED) if not one.packed and one.density < 0.1]
    cells = [one for one in sparse if one.op != "sdd" and one.n > 64][:4]
    found = []
    monkeypatch.setattr(launcher, "compiled", lambda source, arch, defines: found.append((source, arch)))
    monkeypatch.setattr(random_blocks, "drawn", lambda seed: cells)
    for name in ("swept", "paired"):
        monkeypatch.setattr(random_blocks, name, lambda seed: [])
    monkeypatch.setattr(random_blocks, "cuda_properties", lambda ordinal: H200)
    monkeypatch.setattr(random_blocks, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(2))
    random_blocks.compile_all(SEED)
    assert found.count(("blocksparse/blocks_wgmma.cu", "sm_90a")) == len(cells)


def test_a_part_of_a_record_is_a_fair_sample():
    some = drawn(SEED)[:100]
    assert {cell.block for cell in some} == {128, 64, 32, 16}
    assert 15 <= sum(cell.pattern == "uneven" for cell in some) <= 40


@pytest.mark.parametrize(("rows", "columns", "density"), [(64, 40, 0.1), (200, 30, 0.5), (16, 512, 0.02)])
def test_uneven_rows_follow_their_rank(rows, columns, density):
    counts = uneven_counts(rows, columns, density)
    assert counts.max() <= columns
    assert counts.sum() == pytest.approx(density * rows * columns, rel=0.1)
    free = counts < columns
    scaled = counts[free] * (free.nonzero()[0] + 1)
    assert scaled.max() - scaled.min() <= rows  # rounded to whole blocks


def test_bitmaps_keep_what_they_say():
    for cell in [one for one in drawn(SEED) if one.m * one.k < 1 << 26][:20]:
        kept = cell.bitmap()
        assert kept.shape == (cell.m // cell.block, cell.k // cell.block)
        assert kept.mean() == pytest.approx(cell.density, rel=0.25, abs=0.01)
        assert (kept == cell.bitmap()).all()
        if cell.pattern == "uneven":
            counts = sorted(kept.sum(1), reverse=True)
            assert counts == uneven_counts(*kept.shape, cell.density).tolist()


def test_a_sweep_is_one_problem_with_many_n():
    problems = Counter((cell.m, cell.k, cell.block, cell.seed) for cell in swept(SEED))
    assert set(problems.values()) == {40}
    assert len(problems) == 6


def test_pairs_differ_in_their_layout_alone():
    found = paired(SEED)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert (one.pattern, other.pattern) == ("random", "uneven")
        assert one == replace(other, pattern="random")
        assert one.bitmap().mean() == pytest.approx(other.bitmap().mean(), rel=0.25, abs=0.01)
    assert Counter(one.block for one in found[::2]) == dict.fromkeys((128, 64, 32, 16), 8)
    assert {one.op for one in found} == {"dsd", "dds"}


def test_attention_is_of_many_lengths():
    found = list(attentions(SEED))
    assert {cell.direction for cell in found} == {"forward", "backward"}
    assert all(1024 <= cell.tokens <= 16384 and cell.tokens % 128 == 0 for cell in found)
    assert len({cell.tokens for cell in found}) > 10


def test_each_cell_is_a_step_that_its_own_row_finishes():
    found = steps(SEED)
    rows = [(step.part, json.loads(json.dumps(dict(step.fields)))) for step in found]
    made = {part: [row for name, row in rows if name == part] for part in LISTS}
    assert all(step.is_done(made) for step in found)
    assert not any(step.is_done(record.empty({}, LISTS)) for step in found)
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(found)


# Bounds -------------------------------------------------------------------------------------------


def made_record(us: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A record in which each product takes ``us`` of dense's 4 microseconds."""
    products = [
        {**cell.fields, "us": us, "dense_us": 4.0, "torch_bsr_us": None, "backend": "x"}
        for cell in drawn(SEED)
    ]
    sweep = [{**cell.fields, "us": 1.0 + cell.n, "backend": "x"} for cell in swept(SEED)]
    pairs = [{**cell.fields, "us": us, "backend": "x"} for cell in paired(SEED)]
    attention = [{**vars(cell), "us": 1.0, "sdpa_us": 2.0, "tflops": 1.0} for cell in attentions(SEED)]
    head = {"gpu": "g", "driver": "d", "cuda": "c", "kernels_sha256": "0", "versions": {}, "schema": 1}
    lists = {"products": products, "sweep": sweep, "pairs": pairs, "attention": attention}
    return {**head, "kernel_files": [], "seed": SEED, **lists, **changes}


def missed(made: dict[str, Any]) -> list[str]:
    return [one.about for one in BOUNDS["blocksparse-random"] if judged(one, made).is_missed]


def test_a_record_is_held_against_the_bounds():
    assert faults("blocksparse-random", made_record()) == []
    assert faults("blocksparse-random", made_record(seed=None)) == ["record: seed is no number"]
    assert missed(made_record()) == []
    slow = missed(made_record(us=4.5))
    assert "packed over dense, each" in slow
    assert "not packed: share under 0.97 of dense" in slow
    assert "not packed over dense, each" not in slow
    assert sum(", N " in about for about in slow) == 12
    few = made_record(products=made_record()["products"][:300])
    assert missed(few) == ["products", "sparse products of a class"]


def test_uneven_rows_have_their_own_bound():
    found = made_record()
    for row in found["products"]:
        if row["pattern"] == "uneven":
            row["us"] = 4.0 / 2.3
    assert missed(found) == ["128, 64 uneven, N 201-8192"]


@pytest.mark.parametrize(("block", "most"), [(128, 1.6), (64, 1.6), (32, 2.2), (16, 2.2)])
@pytest.mark.parametrize("gathers", [False, True])
def test_few_tokens_are_held_against_their_bytes(block, most, gathers):
    """Half of 32 MiB is kept. Its cells gather 2 rows of X each, or reading them takes longer."""
    n, weight = (2 * block if gathers else 8), 16 << 20
    us = 2 + (2 * weight / 5.5e6 if gathers else (weight + 2 * 8 * 8192) / 4.3e6)
    about = {"op": "dds", "m": 4096, "k": 4096, "n": n, "block": block, "density": 0.5}
    made = made_record()
    row = {**made["products"][0], **about, "dense_us": 1e9}
    for factor, expected in ((0.99, 0), (1.01, 1)):
        found = {**made, "products": [*made["products"], {**row, "us": us * most * factor}]}
        assert sum("few tokens over their bytes" in bound for bound in missed(found)) == expected


def test_a_cliff_is_found():
    found = made_record()
    rows = sorted(
        (row for row in found["sweep"] if row["shape"] == found["sweep"][0]["shape"]),
        key=lambda row: row["n"],
    )
    rows[3]["us"] = 1.1 * rows[4]["us"]
    assert missed(found) == ["n over a larger n, each"]


@pytest.mark.parametrize("block", [128, 64, 32, 16])
def test_uneven_layouts_are_held_against_random_ones(block):
    found = made_record()
    row = next(one for one in found["pairs"] if (one["block"], one["pattern"]) == (block, "uneven"))
    row["us"] *= 1.24
    assert missed(found) == []
    row["us"] *= 1.02
    assert missed(found) == [f"{block}: uneven over random, each"]
    found["pairs"] = [one for one in found["pairs"] if one["pattern"] == "uneven"]
    assert missed(found) == []


@pytest.mark.parametrize(
    ("op", "transposed", "n", "expected"),
    [
        ("dsd", "", 9, False),  # B is [K, n], and C [M, n]
        ("dsd", "b", 9, False),
        ("dsd", "", 16, True),
        ("dsd", "", 1, True),
        ("dds", "", 9, True),  # A is [n, K], and C [n, M]
        ("dds", "a", 9, False),
        ("sdd", "", 9, False),  # A is [M, n]
        ("sdd", "a", 9, True),
        ("sdd", "ab", 9, False),
    ],
)
def test_cells_for_which_a_dense_product_is_fast(op, transposed, n, expected):
    about = {"m": 256, "k": 512, "block": 32, "element": "bf16"}
    assert is_aligned({"op": op, "transposed": transposed, "n": n, **about}) is expected


def test_summary_has_mean_and_worst_of_each_class():
    found = made_record()
    first = next(row for row in found["products"] if (row["block"], row["pattern"]) == (64, "uneven"))
    first["us"] = 2 * first["dense_us"]
    rows = block_summary(found)
    assert len(rows) == 16
    assert sum(row["cells"] for row in rows) == len(found["products"])
    slow = min(rows, key=lambda row: row["worst"])
    assert (slow["block"], slow["pattern"], slow["worst"]) == (64, "uneven", 0.5)
    assert slow["mean"] < max(row["mean"] for row in rows)
    assert f"{first['op']} {first['m']}x{first['k']}, N {first['n']}" in slow["at"]
