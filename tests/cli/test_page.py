"""docs/command-line.md shows what commands show in 80 columns; ``python -m tests.cli.page`` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import page

SHOWN = page.blocks(page.PAGE.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    page.write_models(place)
    return place


@pytest.mark.parametrize("words", SHOWN)
def test_the_page_shows_what_the_command_shows(folder, words):
    assert page.output(words, folder) == SHOWN[words], "if this is meant: python -m tests.cli.page"


@pytest.mark.parametrize("command", ["info", "verify", "explain", "compress"])
def test_the_page_shows_the_commands_that_people_meet_first(command):
    assert any(words.split()[0] == command for words in SHOWN)


@pytest.mark.parametrize(
    "words",
    [
        "compress model.safetensors -o all --all",
        "compress model.safetensors -o all4 --weights s4 --all",
        "compress model.safetensors -o b -n --all",
    ],
)
def test_all_rows_fit_the_terminal(folder, words):
    lines = page.output(words, folder).splitlines()
    assert max(map(len, lines)) <= page.COLUMNS


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
