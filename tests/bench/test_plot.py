"""The plot of the record: what a reader looks for is labelled; the line of what select chooses is on top."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib", reason="the extra bench is not installed")

from benchmarks import plot
from sparse24_plans.bench.scope import TOKENS

from .records import RESULTS, ROOT, record


@pytest.fixture(scope="module")
def axes():
    (axes,) = plot.drawn(record("h200.json")).axes
    return axes


def test_each_record_has_its_axes_and_all_share_a_legend():
    first = record("h200.json")
    figure = plot.drawn(first, {**first, "gpu": "NVIDIA Other"})
    assert [axes.get_title() for axes in figure.axes] == ["NVIDIA H200", "NVIDIA Other"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert [one.get_text() for one in figure.legends[0].get_texts()].count("what select chooses") == 1


def test_the_speed_up_is_on_a_linear_axis(axes):
    assert axes.get_yscale() == "linear"
    bottom, top = axes.get_ylim()
    assert bottom == 0
    labels = {tick.get_text() for tick in axes.get_yticklabels() if bottom <= tick.get_position()[1] <= top}
    assert {"1.0", "1.5", "2.0"} <= labels


def test_every_measured_number_of_tokens_has_a_tick(axes):
    assert [int(tick.get_text()) for tick in axes.get_xticklabels()] == list(TOKENS)


def test_what_select_chooses_is_drawn_last(axes):
    *others, last = sorted(axes.get_lines(), key=lambda line: line.get_zorder())
    assert last.get_label() == "what select chooses"
    assert last.get_linewidth() > max(line.get_linewidth() for line in others)
    assert list(last.get_ydata()) == list(plot.speedups(record("h200.json"), "auto").values())


def test_dense_and_the_ratio_of_bytes_are_marked(axes):
    dense, fewer = sorted(axes.texts, key=lambda text: text.get_position()[1])
    assert dense.get_text() == "dense cuBLAS"
    assert "1.78 times fewer bytes of W" in fewer.get_text()
    assert abs(dense.get_position()[1] - 1) < 0.05
    assert abs(fewer.get_position()[1] - 16 / 9) < 0.05


def test_the_legend_hides_nothing(axes):
    axes.figure.draw_without_rendering()
    (legend,) = axes.figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_the_committed_plot_is_of_the_records(tmp_path):
    """The marks have the same places; fonts and versions of matplotlib may differ."""
    records = (str(RESULTS / name) for name in ("h200.json", "h100.json"))
    plot.main(*records, str(tmp_path / "speedups.svg"))
    made, committed = ((folder / "speedups.svg").read_text() for folder in (tmp_path, ROOT / "docs"))
    assert marks(made) == pytest.approx(marks(committed), abs=0.01), "run python -m benchmarks.plot"


def marks(svg: str) -> list[float]:
    """Heights of all marks, from 0 to 1."""
    found = [float(height) for height in re.findall(r'<use [^>]*\by="([-\d.]+)"', svg)]
    low, high = min(found), max(found)
    return [(height - low) / (high - low) for height in found]
