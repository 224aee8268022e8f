"""Tables and lines: names whole at any width, nothing lost but what may be left out."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager, redirect_stdout
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sparse24_plans.cli import tables
from sparse24_plans.cli.tables import Column, show_line, show_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def stdout(width: int | None):
    """A terminal of so many columns, or (None) a pipe."""
    stream = io.StringIO() if width is None else Terminal()
    columns = {} if width is None else {"COLUMNS": str(width)}
    with mock.patch.dict(os.environ, {"TERM": "dumb", **columns}), redirect_stdout(stream):
        assert sys.stdout is stream
        yield stream


def table(width: int | None, rows: list[dict], columns=None) -> list[str]:
    with stdout(width) as stream:
        show_table(columns or COLUMNS, rows)
    return stream.getvalue().splitlines()


COLUMNS = (
    Column("share", "share", right=True),
    Column("shape", "shape", optional=True),
    Column("kernel", "kernel", optional=True),
    Column("layer", "name"),
)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz._-0123456789é重\x1b\n", min_size=1, max_size=120)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"share": st.sampled_from(["1%", "99.99%"]), "shape": NAMES, "kernel": NAMES, "name": NAMES}
    ),
    min_size=1,
    max_size=5,
)


def test_a_command_to_copy_is_never_broken():
    command = "pip install 'cupy-cuda13x>=14' 'nvidia-cublas<14,>=13' 'nvidia-cuda-nvrtc<14,>=13'"
    with stdout(40) as stream:
        show_line(f"(1) CuPy is not installed; for CUDA 13: {command}; or ask for the host, by --device host")
    lines = stream.getvalue().splitlines()
    assert f"  {command};" in lines
    assert all(len(line) <= 40 for line in lines if command not in line)


@given(rows=ROWS, width=st.integers(20, 200) | st.none())
def test_a_row_is_a_line_with_its_name_whole(rows, width):
    _, *lines = table(width, rows)
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert line.split()[0] == row["share"]
        assert line.endswith(tables.printable(row["name"]).rstrip())
        assert line.isprintable()


@given(rows=ROWS, width=st.integers(20, 200))
def test_columns_are_left_out_only_for_want_of_room(rows, width):
    everything, shown = table(None, rows), table(width, rows)
    if max(map(cell_len, everything)) <= width:
        assert shown == everything
    elif shown[0].split() != ["share", "layer"]:
        assert max(map(cell_len, shown)) <= width


@given(words=st.lists(st.text("abc-/", min_size=1, max_size=30), min_size=1), width=st.integers(30, 120))
def test_lines_wrap_at_words_and_lose_none(words, width):
    with stdout(width) as stream:
        show_line(" ".join(words), indent=2)
    lines = stream.getvalue().splitlines()
    assert " ".join(lines).split() == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)


def test_a_pipe_gets_one_line_whatever_its_length():
    with stdout(None) as stream:
        show_line("word " * 200)
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("width", [None, 40])
def test_zero_columns_stand_for_an_unknown_width(monkeypatch, width):
    with stdout(width) as stream:
        monkeypatch.setenv("COLUMNS", "0")
        show_line("some words")
        show_table(COLUMNS, [{"share": "1%", "shape": "a", "kernel": "b", "name": "c"}])
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        "some words",
        "share  shape  kernel  layer",
        "1%  a      b       c",
    ]


def test_prose_in_the_last_column_wraps_beside_the_others():
    columns = (Column("size", "size", right=True), Column("why", "why", prose=True))
    rows = [{"size": "5 kB", "why": "because " * 10}, {"size": "65 kB", "why": "no"}]
    assert table(40, rows, columns) == [
        "   size  why",
        "   5 kB  because because because because",
        "         because because because because",
        "         because because",
        "  65 kB  no",
    ]


def test_without_rows_there_is_nothing():
    assert table(80, []) == []


@pytest.mark.parametrize(
    ("share", "text"), [(None, "-"), (0.0, "0.00%"), (3e-9, "<0.01%"), (0.0094, "0.94%"), (1.5, "150.00%")]
)
def test_shares_are_percentages(share, text):
    assert tables.share_text(share) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (72_039_360, "72.04 MB")]
)
def test_sizes_are_readable(nbytes, text):
    assert tables.size_text(nbytes) == text
