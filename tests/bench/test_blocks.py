"""The cells of the record of block-sparse matrices."""

from __future__ import annotations

import json

import pytest

from benchmarks import block_attention, block_tables, blocks, blocks24
from benchmarks.bounds import BOUNDS
from benchmarks.judging import judged
from sparse24_plans.bench import record
from sparse24_plans.bench.steady import Steady


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


def test_attention_cells_are_those_of_the_contract():
    found = block_attention.cells()
    assert len(set(found)) == len(found)
    for block in (64, 128):
        for density in (0.5, 0.2, 0.1, 0.05):
            for direction in ("forward", "backward"):
                assert block_attention.Cell(16384, 16, 128, block, density, direction) in found


def test_bitmaps_of_attention_keep_what_they_say():
    kept = block_attention.Cell(16384, 16, 128, 128, 0.1, "forward").bitmap()
    assert kept.shape == (16, 128, 128)
    assert kept.mean() == pytest.approx(0.1, rel=0.05)
    assert (kept[0] != kept[1]).any()


@pytest.mark.parametrize(
    ("direction", "density", "least"),
    [("forward", 0.5, 1.03), ("forward", 0.1, 0.93), ("backward", 0.5, 0.83), ("backward", 0.1, 0.78)],
)
def test_attention_is_held_against_the_speed_of_dense_attention(direction, density, least):
    """Time may be ``density / least`` of dense attention's."""
    cell = block_attention.Cell(16384, 16, 128, 128, density, direction)
    for share, expected in ((0.99, False), (1.01, True)):
        row = {**vars(cell), "us": share * density / least, "dense_us": 1.0, "tflops": 1e3}
        made = {**record.empty({}, blocks.LISTS), "attention": [row]}
        found = [judged(one, made) for one in BOUNDS["blocksparse"]]
        assert any(one.is_missed and "over dense's" in one.bound.about for one in found) == expected


def test_tables_are_those_of_the_masks_of_attention():
    found = block_tables.cells()
    assert block_tables.Cell(16384, 16, 128, 0.1) in found
    masks = {(one.tokens, one.heads, one.block, one.density) for one in block_attention.cells()}
    assert {tuple(vars(one).values()) for one in found} == masks


@pytest.mark.parametrize(("us", "is_missed"), [(49.0, False), (51.0, True)])
def test_tables_are_held_to_50_us(us, is_missed):
    rows = [{**vars(cell), "us": us if cell.block == 128 else 900.0} for cell in block_tables.cells()]
    made = {**record.empty({}, blocks.LISTS), "tables": rows}
    found = [judged(one, made) for one in BOUNDS["blocksparse"]]
    assert any(one.is_missed and "tables" in one.bound.about for one in found) == is_missed


def test_each_cell_is_a_step_that_its_own_row_finishes():
    steps = blocks.steps()
    parts = (blocks, blocks24, block_attention, block_tables)
    assert len(steps) == sum(len(part.cells()) for part in parts)
    rows = [(step.part, json.loads(json.dumps(dict(step.fields)))) for step in steps]
    found = {part: [row for name, row in rows if name == part] for part in blocks.LISTS}
    assert all(step.is_done(found) for step in steps)
    assert not any(step.is_done(record.empty({}, blocks.LISTS)) for step in steps)
    first = {**record.empty({}, blocks.LISTS), "products": found["products"][:1]}
    assert sum(step.is_done(first) for step in steps) == 1


def test_a_dense_peer_of_the_same_sizes_is_timed_once():
    asked = []

    def measure() -> Steady:
        asked.append(1)
        return Steady(3.0)

    key = object()
    assert {blocks.timed_once(key, measure).us for _ in range(3)} == {3.0}
    assert asked == [1]
