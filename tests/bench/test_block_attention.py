"""Attention in the record of ``sparse24 bench --blocksparse``: its cells, and what the record has to show."""

from __future__ import annotations

import pytest

from sparse24_plans.bench import block_attention

from . import records


def rows(**fields: object) -> list[dict]:
    found = records.record("h200-blocksparse.json")["attention"]
    return [row for row in found if all(row[name] == value for name, value in fields.items())]


def test_cells_are_those_of_the_contract():
    found = block_attention.cells()
    assert len(set(found)) == len(found)
    for block in (64, 128):
        for density in (0.5, 0.2, 0.1, 0.05):
            for direction in ("forward", "backward"):
                assert block_attention.Cell(16384, 16, 128, block, density, direction) in found


def test_bitmaps_keep_what_they_say():
    kept = block_attention.Cell(16384, 16, 128, 128, 0.1, "forward").bitmap()
    assert kept.shape == (16, 128, 128)
    assert kept.mean() == pytest.approx(0.1, rel=0.05)
    assert (kept[0] != kept[1]).any()


def test_the_record_is_complete():
    names = ("tokens", "heads", "head_size", "block", "density", "direction")
    taken = {tuple(row[name] for name in names) for row in rows()}
    assert taken == {tuple(getattr(cell, name) for name in names) for cell in block_attention.cells()}


@pytest.mark.parametrize(("direction", "least"), [("forward", 480), ("backward", 0.6 * 480)])
def test_speed_of_attention(direction, least):
    """TFLOP/s of the kept blocks; never slower than dense attention."""
    (row,) = rows(tokens=16384, heads=16, head_size=128, block=128, density=0.1, direction=direction)
    assert row["tflops"] >= least
    assert all(row["us"] < row["dense_us"] for row in rows(direction=direction))
