"""How the command line speaks: one JSON document or tables on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..errors import Sparse24Error

Json = dict[str, Any]

_WIDTH_OF_A_PIPE = 200


def console(*, stderr: bool = False) -> Console:
    """A console on today's stdout or stderr. Into a file or a pipe, tables get room for long names."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH_OF_A_PIPE)


def emit(document: Json, show: Callable[[Json], None], *, as_json: bool) -> None:
    """A command's result on stdout: as JSON, or as ``show`` shows it."""
    if as_json:
        print_json(document)
    else:
        show(document)


def print_json(document: Json) -> None:
    """One document on stdout. NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn the package's errors into one line (or document) and exit code 1."""
    try:
        yield
    except Sparse24Error as error:
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        else:
            console(stderr=True).print(Text(f"error: {one_line(str(error))}"), soft_wrap=True)
        raise typer.Exit(1) from error


@contextmanager
def progress(title: str, total: float, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar on stderr where that is a terminal, gone when done; yields what moves it."""
    quiet = quiet or not sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.advance(task, step)


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of documents: its title, and what it shows of one (a key, or a function of it)."""

    title: str
    cell: str | Callable[[Json], object]
    right: bool = False

    def of(self, row: Json) -> Text:
        value = row[self.cell] if isinstance(self.cell, str) else self.cell(row)
        return value if isinstance(value, Text) else plain(value)


def show_table(columns: Sequence[Column], rows: Iterable[Json], *, total: Sequence[object] = ()) -> None:
    """One line a row; below a rule the cells of ``total``, if any. Nothing where there are no rows."""
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(column.of(row) for column in columns))
    if not table.rows:
        return
    if total:
        table.add_section()
        table.add_row(*map(plain, total))
    console().print(table)


def show_line(text: str, style: str = "") -> None:
    """A line of any length, never folded."""
    console().print(plain(text, style), soft_wrap=True)


# Cells --------------------------------------------------------------------------------------------


def plain(value: object, style: str = "") -> Text:
    """Plain text: names from a file can hold neither markup nor control characters for the terminal."""
    text = str(value)
    return Text(text if text.isprintable() else ascii(text), style)


def one_line(text: str) -> str:
    """The text with the characters escaped that would drive a terminal or start a new line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size_text(nbytes: int) -> str:
    """Bytes in a unit that suits them."""
    amount, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def time_text(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.2f}"
